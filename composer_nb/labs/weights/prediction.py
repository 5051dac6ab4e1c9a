"""Prediction of the size of weight deltas from the learning rate, the optimiser's directions and the weights, before training.

A step moves a float32 master weight by lr · u. Its bfloat16 cast, which is what is published, lies on a grid whose spacing is
2^(e − 7) for a weight of exponent e, and the master lies anywhere in its cell. So the cast changes with probability
min(1, lr · |u| / spacing): linear in the learning rate, halved with every binade that a weight is larger by. What is needed to
know is how often which |u| meets which exponent: a `Profile`.

In the first steps after a checkpoint was loaded less changes than that. Masters that were read from bfloat16 lie in the middle
of their cells and have half a cell to go (`warm_up`): deltas measured in the first tens of steps are no measure of a run's.

PULSE (arXiv 2602.03839) bounds |u| of Adam and explains the sparsity; the formula is checked against exact counts in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

_MANTISSA, _BIAS = 7, 127
_OCTAVES, _BINS = 32, 8
"""|u| from 2^−24 to 2^8, eight bins an octave; one more bin before them holds what does not move."""
_LOWEST = -24
_SIZES = np.concatenate([[0.0], 2.0 ** (_LOWEST + (np.arange(_OCTAVES * _BINS) + 0.5) / _BINS)])
_SPACING = 2.0 ** (np.maximum(np.arange(256), 1) - _BIAS - _MANTISSA)
_MOST = 64
"""Steps of the grid beyond which the entropy of their number is not followed further."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Counts of weights by exponent and |u|: float64 [256 exponents, bins of |u|]. Profiles of tensors add up."""

    counts_EB: Floats

    def __add__(self, other: Profile) -> Profile:
        return Profile(self.counts_EB + other.counts_EB)

    @property
    def weights(self) -> float:
        """Number of weights."""
        return float(self.counts_EB.sum())


def profile(weights: Tensor, directions: Tensor) -> Profile:
    """Return the profile of a tensor and the optimiser's directions u, both of any float dtype. Raises ValueError when the shapes
    differ or a direction is not a finite number."""
    if weights.shape != directions.shape:
        raise ValueError(f"weights are {tuple(weights.shape)}, directions {tuple(directions.shape)}")
    size = directions.detach().reshape(-1).double().abs().numpy()
    if not np.isfinite(size).all():
        raise ValueError("directions must be finite numbers")
    with np.errstate(divide="ignore"):
        place = np.floor((np.log2(size) - _LOWEST) * _BINS) + 1
    bins = np.where(size > 0, np.clip(place, 0, _OCTAVES * _BINS), 0).astype(np.int64)
    joint = np.bincount(exponents(weights) * len(_SIZES) + bins, minlength=256 * len(_SIZES))
    return Profile(joint.reshape(256, -1).astype(np.float64))


def exponents(weights: Tensor) -> NDArray[np.int64]:
    """Return the eight exponent bits of each weight's bfloat16 cast, flat."""
    return ((weights.detach().reshape(-1).bfloat16().view(torch.int16).numpy() >> _MANTISSA) & 255).astype(np.int64)


def adamw_direction(
    mean: Tensor,
    square: Tensor,
    steps: int,
    *,
    betas: tuple[float, float],
    decay: Tensor | float = 0.0,
) -> Tensor:
    """Return u of AdamW's update w ← w − lr · u, from its moments after `steps` steps (arXiv 1711.05101, bias corrected);
    `decay` is weight decay times the weights. Raises ValueError before the first step."""
    if steps < 1:
        raise ValueError("AdamW has no direction before its first step")
    first, second = (moment.double() / (1 - beta**steps) for moment, beta in zip((mean, square), betas, strict=True))
    return first / (second.sqrt() + 1e-8) + decay


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction for one step. `bytes` is what an ideal code conditioned on the base's exponent needs for places, signs and
    sizes; codecs and containers come on top."""

    changed_fraction: float
    bytes: float


def predict(found: Profile, lr: float) -> Prediction:
    """Predict the changes of a step at this learning rate, once masters lie anywhere in their cells. Raises ValueError for a rate
    below 0."""
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr={lr} must be 0 or more")
    steps_EB = lr * _SIZES[None] / _SPACING[:, None]
    changed = float(expected_changes(found, lr).sum())
    bits = sum(_bits(counts, steps) for counts, steps in zip(found.counts_EB, steps_EB, strict=True) if counts.any())
    return Prediction(changed_fraction=changed / max(found.weights, 1.0), bytes=bits / 8)


def expected_changes(found: Profile, lr: float) -> Floats:
    """Return [256] the expected number of changed weights by exponent."""
    return (found.counts_EB * np.minimum(lr * _SIZES[None] / _SPACING[:, None], 1.0)).sum(1)


def _bits(counts_B: Floats, steps_B: Floats) -> float:
    """Return the bits that it takes to say how many grid steps the weights of one exponent move, at most 16 a weight. A move of r
    steps is ⌊r⌋ or ⌈r⌉ of them, up or down."""
    steps = np.minimum(steps_B, _MOST)
    low = np.floor(steps).astype(np.int64)
    odds = np.zeros(_MOST + 2)
    np.add.at(odds, low, counts_B * (1 - steps + low))
    np.add.at(odds, low + 1, counts_B * (steps - low))
    odds /= odds.sum()
    some = odds[odds > 0]
    each = -float((some * np.log2(some)).sum()) + (1 - odds[0])
    return float(counts_B.sum()) * min(each, 16.0)


def warm_up(
    found: Profile, lr: float, steps: int, *, momentum: float = 0.9, samples: int = 50_000, seed: int = 0
) -> Floats:
    """Simulate the share of weights that changes in each of the first `steps` steps, float64 [steps], when masters begin in the
    middle of their cells. Directions are normal, with the profile's sizes, and turn as slowly as Adam's first moment does."""
    random = np.random.default_rng(seed)
    flat = found.counts_EB.ravel() / found.weights
    drawn = random.choice(flat.size, samples, p=flat)
    move = lr * _SIZES[drawn % len(_SIZES)] / _SPACING[drawn // len(_SIZES)] * math.sqrt(math.pi / 2)
    direction = random.standard_normal(samples)
    place, changed = np.zeros(samples), np.empty(steps)
    for step in range(steps):
        moved = place + move * direction
        changed[step] = np.mean(np.rint(moved) != np.rint(place))
        place = moved
        direction = momentum * direction + math.sqrt(1 - momentum**2) * random.standard_normal(samples)
    return changed


def exact(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return the share of weights whose bfloat16 bits differ between two sets of float32 masters, or of published weights."""
    changed = sum(int((_cast(before[name]) != _cast(after[name])).sum()) for name in before)
    return changed / max(sum(tensor.numel() for tensor in before.values()), 1)


def _cast(weights: Tensor) -> Tensor:
    return weights.detach().bfloat16().view(torch.int16)
