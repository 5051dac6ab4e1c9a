"""Optimiser steps on a stored batch: which published bits change, in which tensors, at which learning rate; and their figures."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from composer_nb.labs.lessons import learn_once, raw_streams
from composer_nb.labs.rewards.rescore import stored_batch, weights_of
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.models.checkpoint import load_pretrained, published
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One optimiser step.

    Attributes:
        after: Published weights, bfloat16, under Hugging Face's names.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @property
    def changed(self) -> float:
        """Share of the weights whose bits changed."""
        return by_group(self, lambda name: "")[""]


class Walk:
    """A learner that goes on from the weights of a run's RL step, on that step's own rollouts. Masters begin as they were
    published, in the middle of their cells."""

    def __init__(self, run: RunDir, step: int = -1, groups: int = 4) -> None:
        """`groups`: how many groups of rollouts a step learns from. Raises ValueError for a step that is not kept."""
        batch = stored_batch(run, step)
        self._model = load_pretrained(weights_of(run, batch.step)).requires_grad_()
        self._optimizer = FlatOptimizer(self._model, published=torch.bfloat16)
        self._learner = Learner(self._model, self._optimizer, LossSettings())
        everyone = raw_streams(batch.groups)
        live = [group for group in everyone if any(np.any(stream.advantage) for stream in group)]
        taken = [stream for group in (live or everyone)[:groups] for stream in group]
        self.lesson = f"learns from {min(groups, len(live))} of its {len(everyone)} groups"
        if not live:
            self.lesson = "none of its groups teaches; instead it learns from advantages of +1 and −1 by turns"
            taken = [
                replace(each, advantage=np.where(each.acted, (-1.0) ** n, 0.0).astype(np.float32))
                for n, each in enumerate(taken)
            ]
        self._streams, self._rl = taken, batch.settings.rl

    def step(self, lr: float) -> Stepped:
        """Take one step at a learning rate."""
        before = published(self._model)
        learn_once(self._learner, self._streams, self._rl, lr, 0)
        return Stepped(before=before, after=published(self._model))

    def try_step(self, lr: float) -> Stepped:
        """Take a step, then undo it."""
        state = {name: tensor.clone() for name, tensor in self._optimizer.state().items()}
        try:
            return self.step(lr)
        finally:
            self._optimizer.load(state)


def by_group(stepped: Stepped, group: Callable[[str], str]) -> dict[str, float]:
    """Return the share of changed weights by the name that `group` gives a tensor, in order of that name."""
    changed, sizes = Counter[str](), Counter[str]()
    for name, before in stepped.before.items():
        changed[group(name)] += int((before != stepped.after[name]).sum())
        sizes[group(name)] += before.numel()
    return {key: changed[key] / max(1, sizes[key]) for key in sorted(sizes)}


_COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.VERMILION, style.SKY)


def shares(found: Mapping[str, float], heading: str) -> Picture:
    """Draw the share of weights that changed, one bar per group of tensors."""
    picture, ax = style.one_panel(8.0, 0.9 + 0.26 * len(found))
    style.bars(ax, found, style.SKY, ".2%").set_xlim(0, 1.15 * max([*found.values(), 1e-9]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.2%}")
    title(ax, heading, "share of weights whose bits changed")
    return picture


def sizes(found: Mapping[str, Sequence[float]], columns: Sequence[str]) -> Picture:
    """Draw the bits per changed weight of each codec, one group of bars per column."""
    picture, ax = style.one_panel(8.5, 3.2)
    sides = [
        style.BarSeries(name, color, values)
        for (name, values), color in zip(found.items(), itertools.cycle(_COLORS), strict=False)
    ]
    ax.set_yscale("log")
    style.grouped(ax, columns, sides, ".1f", size=7)
    title(ax, "bits per changed weight", "", "bits")
    key(ax, loc="upper right")
    return picture
