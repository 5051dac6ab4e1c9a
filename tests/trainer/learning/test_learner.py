"""The learner takes as many steps as there are minibatches of tasks, at the rates that it was given."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from composer_nb.harness.rewards import Reward
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.rl import Scored, to_streams


class Noted(FlatOptimizer):
    """Notes the rate of each step."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.rates: list[float] = []

    def step(self, lr: float, clip: float) -> float:
        self.rates.append(lr)
        return super().step(lr, clip)


@pytest.mark.parametrize(
    ("minibatches", "fall", "wanted"),
    [(1, 0.1, [0.4]), (3, 1.0, [0.4, 0.4, 0.4]), (3, 0.0, [0.4, 0.2, 0.0]), (4, 0.25, [0.4, 0.3, 0.2, 0.1])],
)
def test_tasks_in_the_same_words_are_learnt_in_several_steps_at_a_falling_rate(
    make_model, converse, minibatches: int, fall: float, wanted
) -> None:
    model = make_model(3)
    [done] = converse(Engine(model, stop=frozenset({7, 8, 9}), slots=4, max_length=96), 1)
    tasks = [done.task.model_copy(update={"id": f"request {number}"}) for number in range(4)]  # in the same words
    scored = [Scored(attempt=replace(done, task=task), reward=Reward(total=0.0), advantage=1.0) for task in tasks]
    streams = [stream for each in scored for stream in to_streams(each)]
    optimizer = Noted(model)
    Learner(model, optimizer, LossSettings(), None, FULL).learn(
        streams, Ranks(), Random(0), minibatches=minibatches, denominator=50.0, lr=0.4, fall=fall, clip=1.0, budget=64
    )
    assert optimizer.rates == pytest.approx(wanted)
