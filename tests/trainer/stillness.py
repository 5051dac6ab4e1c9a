"""The test with a learning rate of 0: what does not learn must not move.

A step with lr = 0 goes through everything: scoring, loss, backward pass, clipping, AdamW, rounding to the published dtype. Every
weight and every log-probability must be to the bit what it was, and the ratio of the first step exactly 1 where engine and
trainer share one path. Where one is not, the trainer itself drifts, and no engine is to blame.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import NO_REPLAY, ReplaySettings, Stream, flatten, microbatches, score
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """What moved in steps that should move nothing."""

    steps: int
    grad_norm: float
    """Of the first step, which must have something to apply."""
    weights_rounded: int
    """Weights that publishing changed before the first step: the model was not of the published dtype."""
    weights_moved: int
    logprob_moved: float
    """Largest |Δ log p| of a written token between before the first and after the last step."""
    ratio_apart: float
    """Largest |ratio − 1|, log-probabilities of the same path on both sides."""
    ratio_learner: float
    """Mean k3 within the first step, whose microbatches may be cut otherwise: what that alone does."""
    ratio_record: float
    """Largest |ratio − 1| against the log-probabilities on record: what step 0 really begins with."""

    @property
    def holds(self) -> bool:
        return self.grad_norm > 0 and self.weights_moved == 0 and self.logprob_moved == 0 and self.ratio_apart == 0


def stand_still(
    model: Model,
    streams: Sequence[Stream],
    *,
    settings: LossSettings | None = None,
    replay: ReplaySettings = NO_REPLAY,
    published: torch.dtype | None = torch.bfloat16,
    weight_decay: float = 0.0,
    steps: int = 2,
    budget: int = 4096,
) -> Stillness:
    """Takes `steps` optimiser steps with lr = 0 on a copy of `model`. Raises ValueError for streams that give no gradient."""
    if not any((stream.advantage[1:][stream.acted[1:]] != 0).any() for stream in streams):
        raise ValueError("no stream has an advantage: without a gradient a learning rate of 0 tests nothing")
    made = copy.deepcopy(model).requires_grad_()
    optimizer = FlatOptimizer(made, weight_decay=weight_decay, published=published)
    weights = optimizer.weights.clone()
    rounded = int((weights != torch.cat([p.detach().reshape(-1) for p in model.parameters()])).sum())
    chunks = microbatches(streams, budget)
    own = [stream for chunk in chunks for stream in _with_own(made, chunk, replay)]
    before, after_again = _scores(made, chunks, replay), _scores(made, chunks, replay)
    learner = Learner(made, optimizer, settings or LossSettings(), replay=replay)
    tokens = float(sum(int(stream.acted[1:].sum()) for stream in streams))
    found = [
        learner.learn(own, Ranks(), Random(0), minibatches=1, denominator=tokens, lr=0.0, clip=1.0, budget=budget)
        for _ in range(steps)
    ]
    recorded = np.concatenate([s.logprob[1:][s.acted[1:]] for chunk in chunks for s in chunk])
    return Stillness(
        steps=steps,
        grad_norm=found[0]["grad_norm"],
        weights_rounded=rounded,
        weights_moved=int((optimizer.weights != weights).sum()),
        logprob_moved=float(np.abs(_scores(made, chunks, replay) - before).max()),
        ratio_apart=float(np.abs(np.expm1(after_again - before)).max()),
        ratio_learner=found[0]["k3"],
        ratio_record=float(np.abs(np.expm1(before - recorded)).max()),
    )


@torch.no_grad()
def _scores(model: Model, chunks: Sequence[Sequence[Stream]], replay: ReplaySettings) -> NDArray[np.float32]:
    batches = [flatten(chunk, replay) for chunk in chunks]
    return np.concatenate([score(model, batch, batch.recorded)[0].numpy() for batch in batches])


def _with_own(model: Model, chunk: Sequence[Stream], replay: ReplaySettings) -> list[Stream]:
    """The streams with the trainer's log-probabilities on record."""
    values, made, start = _scores(model, [chunk], replay), [], 0
    for stream in chunk:
        acted = stream.acted.copy()
        acted[0] = False
        logprob = np.zeros(len(acted), np.float32)
        logprob[acted] = values[start : start + int(acted.sum())]
        start += int(acted.sum())
        made.append(replace(stream, logprob=logprob))
    return made
