"""Figures of weight versions: changed bits, and sizes of codecs.

Each figure is drawn from plain numbers, so that it can be drawn again from what a run kept. None is a widget: each is its own
static twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

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
