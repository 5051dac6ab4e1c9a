"""Figures of weight versions: changed bits, predictions, and sizes of codecs.

Each figure is drawn from plain numbers, so that it can be drawn again from what a run kept. None is a widget: each is its own
static twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from composer_nb.views import style
from composer_nb.views.style import Picture, as_share, key, title

_COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.VERMILION, style.SKY)

Floats = NDArray[np.float64]


def shares(found: Mapping[str, float], heading: str) -> Picture:
    """Draw the share of weights that changed, one bar per group of tensors."""
    picture, ax = style.one_panel(8.0, 0.9 + 0.26 * len(found))
    style.bars(ax, found, style.SKY, ".2%").set_xlim(0, 1.15 * max([*found.values(), 1e-9]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.2%}")
    title(ax, heading, "share of weights whose bits changed")
    return picture


def by_exponent(weights: Sequence[float], changed: Sequence[float], predicted: Sequence[float]) -> Picture:
    """Draw the number of weights by exponent, and the share of them that changed beside the prediction. Exponents are those of
    bfloat16, 0 to 255; empty ones are left out."""
    counts, counted, expected = (np.asarray(values, dtype=float) for values in (weights, changed, predicted))
    there = np.flatnonzero(counts > 0)
    picture = Picture(9.5, 3.1)
    left, right = picture.panels(1, 2)
    left.bar(there - 127, counts[there], 0.8, color=style.GREY)
    left.set_yscale("log")
    title(left, "weights by size", "2ⁿ ≤ |w| < 2ⁿ⁺¹, n =", "weights")
    right.plot(there - 127, counted[there] / counts[there], "o", color=style.BLUE, markersize=4, label="counted")
    right.plot(there - 127, expected[there] / counts[there], color=style.ORANGE, label="predicted")
    as_share(right, 1.05)
    title(right, "share of them that changed", "n")
    key(right)
    return picture


def predicted(rates: Sequence[float], counted: Sequence[float], expected: Sequence[float]) -> Picture:
    """Draw the changed share against the learning rate: counted, and predicted with a band of ten per cent."""
    picture, ax = style.one_panel(6.0, 3.3)
    low, high = (factor * np.asarray(expected) for factor in (0.9, 1.1))
    ax.fill_between(rates, low, high, color=style.PALE, label="predicted, ± 10 %")
    ax.plot(rates, expected, color=style.ORANGE)
    ax.plot(rates, counted, "o", color=style.BLUE, markersize=5, label="counted")
    ax.set(xscale="log", yscale="log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.2%}")
    title(ax, "weights that one step changes", "learning rate", "share")
    key(ax, loc="upper left")
    return picture


def warming(counted: Sequence[float], simulated: Floats, settled: float) -> Picture:
    """Draw the share of changed weights against the step since masters were read from bfloat16."""
    picture, ax = style.one_panel(7.0, 3.1)
    ax.plot(np.arange(1, len(simulated) + 1), simulated, color=style.ORANGE, label="simulated")
    ax.plot(np.arange(1, len(counted) + 1), counted, "o", color=style.BLUE, markersize=3.5, label="counted")
    ax.axhline(settled, color=style.GREY, linestyle=":", label="predicted, once settled")
    as_share(ax)
    title(ax, "the first deltas are too small to go by", "step since the checkpoint was loaded", "changed")
    key(ax, loc="lower right")
    return picture


def sizes(found: Mapping[str, Sequence[float]], columns: Sequence[str]) -> Picture:
    """Draw the bits per changed weight of each codec, one group of bars per column."""
    picture, ax = style.one_panel(8.5, 3.2)
    sides = [
        style.Side(name, color, values)
        for (name, values), color in zip(found.items(), itertools.cycle(_COLORS), strict=False)
    ]
    ax.set_yscale("log")
    style.grouped(ax, columns, sides, ".1f", size=7)
    title(ax, "bits per changed weight", "", "bits")
    key(ax, loc="upper right")
    return picture
