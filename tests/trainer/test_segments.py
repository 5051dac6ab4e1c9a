"""A rollout of three segments, everywhere that a rollout of one goes: streams, gradient, replay, studies, store, viewer."""

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.summary import SummarySettings
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import Reward
from composer_nb.harness.rollout import Kind
from composer_nb.harness.store import load_attempts, pack_attempt, save_attempts
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL, Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.rl import Scored, streams_of, to_streams
from tests.harness.conftest import Boxes, returns


def test_a_tiny_model_over_a_trigger_trains_on_all_segments_and_replays_bit_for_bit(
    make_model, task: Task, tokenizer, tmp_path: Path
) -> None:
    renderer, sizes = CompactRenderer(tokenizer), {"vocab_size": 420, "max_position_embeddings": 200}
    limits = Limits(turns=8, turn_tokens=6, tokens=200)
    agent = Agent(renderer, limits=limits, summary=SummarySettings(trigger=40, tokens=9))

    def attempts() -> list[Attempt]:
        engine = Engine(make_model(3, **sizes), stop=renderer.stop, slots=4, max_length=200, seed=5)
        by_number = dict(drive((agent.attempt(task, n) for n in range(4)), engine, Boxes(returns("2"))))
        return [by_number[n] for n in range(4)]

    sampled = attempts()
    assert [pack_attempt(attempt) for attempt in sampled] == [pack_attempt(attempt) for attempt in attempts()], (
        "one seed, one result"
    )
    assert all(sum(bool((s.kind == Kind.SUMMARY).any()) for s in attempt.rollout.segments) >= 2 for attempt in sampled)
    first_messages = {
        tuple(s.token_ids[s.messages[0]].tolist()) for attempt in sampled for s in attempt.rollout.segments
    }
    assert len(first_messages) > len(sampled), "segments draw random numbers of their own"
    save_attempts(tmp_path / "step.parquet", sampled)

    def learnt(batch: list[Attempt]) -> torch.Tensor:
        model = make_model(3, **sizes)
        group = [
            Scored(attempt=attempt, reward=Reward(total=0.0), advantage=(-1.0) ** n) for n, attempt in enumerate(batch)
        ]
        streams = streams_of([group], LossSettings())
        segments = [(scored.advantage, segment) for scored in group for segment in scored.attempt.rollout.segments]
        assert len(streams) == len(segments) >= 12
        for stream, (advantage, segment) in zip(streams, segments, strict=True):  # also of what sums up
            assert (stream.advantage == np.where(segment.acted, advantage, 0)).all() and not stream.route_fault()
        learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=FULL)
        figures = learner.learn(
            streams, Ranks(), Random(0), minibatches=2, denominator=50.0, lr=1e-2, clip=1.0, microbatch_tokens=256
        )
        assert figures["replay_overlap"] > 0.99 and figures["grad_norm"] > 0 and figures["k3"] < 1e-6
        return torch.cat([weight.flatten() for weight in model.parameters()])

    weights = learnt(sampled)
    assert torch.equal(weights, learnt(load_attempts(tmp_path / "step.parquet", {task.id: task})))
    assert not torch.equal(weights, learnt(sampled[::-1]))


def split_in_three(model: Model, converse) -> tuple[list[Stream], list[Stream]]:
    """Return the streams of two rollouts, each as one segment, and as three segments that read what earlier ones wrote."""
    attempts = converse(Engine(model, stop=frozenset({7, 8, 9}), slots=2, max_length=96), 2)
    whole, parts = list[Stream](), list[Stream]()
    for attempt, advantage in zip(attempts, (0.7, -0.4), strict=True):
        [segment] = attempt.rollout.segments
        noise = 0.3 * np.random.default_rng(len(whole)).standard_normal(len(segment.logprob)).astype(np.float32)
        segment = replace(segment, logprob=np.where(segment.acted, segment.logprob + noise, 0).astype(np.float32))
        cuts = [0, *(int(message[-1]) + 1 for message in segment.messages[:2]), len(segment.token_ids)]
        assert len(segment.messages) >= 3
        chain = []
        for start, stop in pairwise(cuts):
            kind = np.where(np.arange(stop) < start, Kind.PROMPT, segment.kind[:stop]).astype(np.uint8)
            streams = {name: getattr(segment, name)[:stop] for name in ("token_ids", "logprob", "policy_version")}
            chain.append(replace(segment, kind=kind, trace=segment.trace.head(stop), **streams))
        for segments, collected in (((segment,), whole), (tuple(chain), parts)):
            cut = replace(attempt, rollout=replace(attempt.rollout, segments=segments))
            collected += to_streams(cut, advantage)
    return whole, parts


LOSSES = {
    "gspo, length norm": {"ratio": "gspo", "clip_low": 0.9, "clip_high": 9.0, "length_norm": True},
    "gspo, clipped": {"ratio": "gspo", "clip_low": 1e-4, "clip_high": 1e-4},
    "length norm": {"ratio": "none", "length_norm": True},
    "k3, length norm": {"ratio": "none", "length_norm": True, "beta": 0.1, "kl": "k3"},
}


@pytest.mark.parametrize("budget", [16, 4096])
@pytest.mark.parametrize("name", LOSSES)
def test_a_rollout_in_three_segments_is_learnt_as_the_same_tokens_in_one(make_model, converse, name: str, budget: int):
    model, settings = make_model(3), LossSettings(**LOSSES[name])
    whole, parts = split_in_three(model, converse)
    model = model.double()

    def gradient(streams: list[Stream]) -> torch.Tensor:
        optimizer = FlatOptimizer(model)
        learner = Learner(model, optimizer, settings, copy.deepcopy(model) if settings.beta else None)
        learner.learn(
            streams, Ranks(), Random(0), minibatches=1, denominator=2.0, lr=0.0, clip=1e9, microbatch_tokens=budget
        )
        return optimizer.gradients.clone()

    whole_gradient, parts_gradient = gradient(whole), gradient(parts)
    assert whole_gradient.dtype == torch.float64 and (whole_gradient.norm() > 1e-4) == (name != "gspo, clipped")
    torch.testing.assert_close(parts_gradient, whole_gradient, rtol=1e-10, atol=1e-12)
