"""Which published bits optimiser steps change: on a stored batch by tensor and learning rate, as predicted, and in the versions
of a store; and their figures."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_nb.kernels.delta.codec import bits
from composer_nb.labs.lessons import learn_once, raw_streams
from composer_nb.labs.rewards.rescore import stored_batch, weights_of
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import BETAS, FlatOptimizer
from composer_nb.trainer.models.checkpoint import load_pretrained, published
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.versions.manifest import WeightState
from composer_nb.trainer.versions.receiver import read_version
from composer_nb.trainer.versions.store import VersionStore
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One optimiser step.

    Attributes:
        before, after: Published weights, bfloat16, under Hugging Face's names.
        masters: Flat masters, before and after.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    masters: tuple[Tensor, Tensor]

    @property
    def changed(self) -> float:
        """Share of the weights whose bits changed."""
        return self.density(torch.bfloat16)

    def density(self, dtype: torch.dtype) -> float:
        """Return the share of the weights that would differ if they were published in `dtype`."""
        old, new = (master.to(dtype).to(master.dtype) for master in self.masters)
        return float((old != new).double().mean())


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
        streams = [stream for group in (live or everyone)[:groups] for stream in group]
        self.lesson = f"learns from {min(groups, len(live))} of its {len(everyone)} groups"
        if not live:
            self.lesson = "none of its groups teaches; instead it learns from advantages of +1 and −1 by turns"
            streams = [
                replace(rollout, advantage=np.where(rollout.acted, (-1.0) ** n, 0.0).astype(np.float32))
                for n, rollout in enumerate(streams)
            ]
        self._streams, self._rl = streams, batch.settings.rl

    def step(self, lr: float) -> Stepped:
        """Take one step at a learning rate."""
        before, master = published(self._model), self._optimizer.master.clone()
        learn_once(self._learner, self._streams, self._rl, lr, 0)
        masters = master, self._optimizer.master.clone()
        return Stepped(before=before, after=published(self._model), masters=masters)

    def predicted(self, lr: float, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the density of the next step at `lr`, as `expected_density` predicts it from AdamW's moments. Raises ValueError
        before the first step, when there are none."""
        state = self._optimizer.state()
        if "exp_avg" not in state:
            raise ValueError("AdamW has no moments before its first step, so nothing can be predicted from them")
        mean, square = (
            state[name] / (1 - beta ** float(state["step"]))
            for name, beta in zip(("exp_avg", "exp_avg_sq"), BETAS, strict=True)
        )
        return expected_density(state["master"], mean / (square.sqrt() + 1e-8), lr, dtype)

    def try_step(self, lr: float) -> Stepped:
        """Take a step, then undo it."""
        state = {name: tensor.clone() for name, tensor in self._optimizer.state().items()}
        try:
            return self.step(lr)
        finally:
            self._optimizer.load(state)


def spacing(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between the numbers of `dtype` around each weight: 2^e times its epsilon, for 2^e ≤ |w| < 2^(e + 1)."""
    limits = torch.finfo(dtype)
    return (limits.eps * torch.exp2(torch.frexp(weights).exponent - 1.0)).clamp_min(limits.tiny * limits.eps)


def expected_density(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """Return the share of weights that a step of lr · direction is expected to change in `dtype`: the mean of
    min(1, lr · |u| / spacing), for masters that lie anywhere in their cells. See PULSE, arXiv 2602.03839."""
    return float((lr * directions.abs() / spacing(masters, dtype)).clamp_max(1.0).double().mean())


def version_densities(store: str | Path) -> dict[int, float]:
    """Return the share of weights whose bits each version of a store changes, by number, against the version before it there.
    Raises WeightFault for a version that cannot be read."""
    versions, before, shares = VersionStore(store), dict[int, WeightState](), dict[int, float]()
    for number in versions.folders():
        state = read_version(versions, number, before).state
        for old in before.values():
            pairs = [(bits(old.tensors[name]), bits(tensor)) for name, tensor in state.tensors.items()]
            shares[number] = sum(int((a != b).sum()) for a, b in pairs) / sum(b.size for _, b in pairs)
        before = {number: state}
    return shares


def by_group(stepped: Stepped, group: Callable[[str], str]) -> dict[str, float]:
    """Return the share of changed weights by the name that `group` gives a tensor, in order of that name."""
    changed, sizes = Counter[str](), Counter[str]()
    for name, before in stepped.before.items():
        changed[group(name)] += int((before != stepped.after[name]).sum())
        sizes[group(name)] += before.numel()
    return {key: changed[key] / max(1, sizes[key]) for key in sorted(sizes)}


def shares(share_by_group: Mapping[str, float], heading: str) -> Picture:
    """Draw the share of weights that changed, one bar per group of tensors. Groups named "a, b" have a panel for each a."""
    panels: dict[str, dict[str, float]] = {}
    for name, share in share_by_group.items():
        panel, _, row = name.rpartition(", ")
        panels.setdefault(panel, {})[row] = share
    most = max(map(len, panels.values()))
    picture = Picture(max(8.0, 2.2 * len(panels)), 1.2 + 0.26 * most)
    for ax, (panel, rows) in zip(picture.panels(1, len(panels), sharex=True), panels.items(), strict=True):
        style.bars(ax, rows, style.SKY, ".2%").set_xlim(0, 1.4 * max([*share_by_group.values(), 1e-9]))
        ax.set_ylim(most - 0.5, -0.5)
        ax.locator_params(axis="x", nbins=3)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
        title(ax, panel)
    picture.suptitle(f"share of weights whose bits changed, {heading}", fontsize=10, x=0.01, ha="left")
    return picture


def sizes(bits_by_codec: Mapping[str, Sequence[float]], columns: Sequence[str]) -> Picture:
    """Draw the bits per changed weight of each codec, one group of bars per column."""
    picture, ax = style.one_panel(8.5, 3.2)
    sides = [style.BarSeries(*row) for row in zip(bits_by_codec, style.COLORS, bits_by_codec.values(), strict=False)]
    ax.set_yscale("log")
    style.grouped(ax, columns, sides, ".1f", size=7)
    title(ax, "bits per changed weight", "", "bits")
    key(ax)
    return picture


def densities(
    rates: Sequence[float], measured: Mapping[str, Sequence[float]], predicted: Sequence[Sequence[float]]
) -> Picture:
    """Draw the share of weights that a step changes by learning rate: points as measured, lines as predicted, by dtype."""
    picture, ax = style.one_panel(7.0, 3.4)
    for (name, shares), expected, color in zip(measured.items(), predicted, style.COLORS, strict=False):
        ax.plot(rates, expected, color=color, linewidth=1.2)
        ax.plot(rates, shares, "o", color=color, markersize=5, label=name)
    ax.set(xscale="log", yscale="log")
    style.log_axis(ax.xaxis)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.2%}")
    title(ax, "weights that one step changes: measured (points), predicted (lines)", "learning rate", "share")
    key(ax)
    return picture


def chain(log: Sequence[Mapping[str, Any]], shares: Mapping[int, float]) -> Picture:
    """Draw the versions of a store's log with arrows from base to delta (squares are full, hollow marks have been pruned), their
    bytes (grey: the full copy beside a delta), and the share of weights that changed (`version_densities`)."""
    rows = [row for row in log if "bytes" in row]
    picture = Picture(9.5, 4.6)
    links, sizes, changed = picture.panels(3, 1, sharex=True, height_ratios=(2, 3, 3))
    for row in rows:
        number, base = row["version"], row["base"]
        color = style.ORANGE if base is None else style.BLUE
        face = color if row["there"] else "none"
        links.plot(number, 0, "s" if base is None else "o", color=color, markerfacecolor=face, markersize=8)
        if base is not None:
            curve = {"arrowstyle": "->", "color": style.INK, "connectionstyle": "arc3,rad=-0.35"}
            links.annotate("", (number, 0), (base, 0), arrowprops=curve | {"shrinkA": 5, "shrinkB": 5})
        sizes.bar(number, row["anchor_bytes"], 0.9, color=style.PALE)
        sizes.bar(number, row["bytes"], 0.6, color=color)
    links.set(yticks=[], ylim=(-0.5, 1))
    sizes.set_yscale("log")
    changed.plot([*shares], [*shares.values()], "o-", color=style.GREEN, markersize=4)
    style.as_share(changed).yaxis.set_major_formatter(lambda value, _: f"{value:.2%}")
    style.whole_steps(changed)
    title(links, "the chain: full versions (squares) and deltas (points) on their bases")
    title(sizes, "bytes", "", "bytes")
    title(changed, "weights that changed since the version before", "version", "share")
    return picture
