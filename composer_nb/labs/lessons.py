"""Stored batches as lessons: their streams, and optimiser steps on them."""

import copy
from collections.abc import Sequence
from random import Random

import torch

from composer_nb.labs.rewards.rescore import StoredBatch
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings, advantages
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.rl import Scored, to_streams
from composer_nb.trainer.settings import RlSettings

Groups = list[list[Stream]]


def raw_streams(groups: Sequence[Sequence[Scored]]) -> Groups:
    """Return streams with A = R − mean(R), whatever the run subtracted or divided by."""
    groups_of_streams = []
    for group in groups:
        values = torch.tensor([scored.reward.total for scored in group], dtype=torch.float32)
        shares = advantages(values).tolist()
        pairs = zip(group, shares, strict=True)
        groups_of_streams.append([stream for scored, share in pairs for stream in to_streams(scored.attempt, share)])
    return groups_of_streams


def later(model: Model, lessons: Sequence[Groups], batch: StoredBatch, versions: int) -> Model:
    """Return the weights after so many optimiser steps, each on the next of `lessons`, with the run's settings and the learning
    rates of its first steps (the optimiser's averages are new, as they were then)."""
    policy = copy.deepcopy(model).requires_grad_()
    rl = batch.settings.rl
    learner = Learner(policy, FlatOptimizer(policy, published=torch.bfloat16), LossSettings())
    for step in range(versions):
        streams = [stream for group in lessons[step % len(lessons)] for stream in group]
        learn_once(learner, streams, rl, rl.rate(step), step)
    return policy


def learn_once(learner: Learner, streams: Sequence[Stream], rl: RlSettings, lr: float, seed: int) -> None:
    """Take one optimiser step on a whole batch, with the run's settings."""
    learner.learn(
        streams,
        Ranks(),
        Random(seed),
        minibatches=1,
        denominator=rl.denominator(LossSettings()),
        lr=lr,
        clip=rl.clip,
        microbatch_tokens=rl.microbatch_tokens,
    )
