"""The loss bench in pictures: angles between gradients, what is masked and how weights spread, noise against signal.

Each figure is drawn from `loss_bench.Bench`es, of one stage or of several by name. Numbers stand in the cells of the maps, so
that no colour has to be read off a scale.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from composer_nb.trainer.loss_bench import Bench, Row
from composer_nb.views import style
from composer_nb.views.style import Picture, title

_MAP = "cividis"
"""Even in lightness, and the same to eyes that tell no red from green."""
FAR = 1e3
"""A ratio of noise to signal beyond which an axis tells no more apart; an arrow says that it goes on."""


def pictures(found: Mapping[str, Bench]) -> dict[str, Picture]:
    """Every figure by a name for its file."""
    made = {"masks": masks(found), "exact": against_the_exact(found)}
    for stage, bench in found.items():
        file = stage.replace(",", "").replace(" ", "-")
        made |= {f"cosines-{file}": cosines(bench, f"cosine between gradients: {stage}")}
        made |= {f"noise-{file}": noise(bench, f"{stage}: noise over signal")}
    return made


def cosines(found: Bench, heading: str = "") -> Picture:
    """Of the angles between the gradients of all losses, and the exact on-policy one; grey where one of them is 0."""
    names = [row.loss for row in found.rows]
    picture = Picture(1.8 + 0.58 * len(names), 1.0 + 0.44 * len(names))
    [ax] = picture.panels(1, 1)
    _map(ax, found.cosines, names, names, low=min(0.0, _least(found.cosines)), high=1.0)
    title(ax, heading or "cosine between gradients")
    return picture


def masks(found: Mapping[str, Bench]) -> Picture:
    """By loss and stage: the share of all sampled tokens that is masked, and the effective sample size of the weights."""
    names = _losses(found)
    picture = Picture(2.6 + 1.25 * len(found), 1.6 + 0.56 * len(names))
    panels = picture.panels(2, 1, sharex=True)
    stages = [textwrap.fill(name, 12) for name in found]
    for ax, (text, of) in zip(
        panels,
        (
            ("masked, of all sampled tokens (%)", lambda row: 100 * row.masked),
            ("effective sample size, of tokens with an advantage (%)", lambda row: 100 * row.ess),
        ),
        strict=True,
    ):
        values = np.array([[of(bench.row(name)) for bench in found.values()] for name in names])
        _map(ax, values, names, stages, low=0.0, high=max(1.0, float(np.nanmax(values, initial=0.0))), digits=1)
        title(ax, text)
    return picture


def against_the_exact(found: Mapping[str, Bench]) -> Picture:
    """By loss and stage: the cosine to the exact on-policy gradient."""
    names = _losses(found)
    picture = Picture(2.6 + 1.25 * len(found), 1.2 + 0.3 * len(names))
    [ax] = picture.panels(1, 1)
    values = np.array([[bench.row(name).cosine_exact for bench in found.values()] for name in names])
    _map(ax, values, names, [textwrap.fill(name, 12) for name in found], low=min(0.0, _least(values)), high=1.0)
    title(ax, "cosine to the exact on-policy gradient")
    return picture


def noise(found: Bench, heading: str = "") -> Picture:
    """Noise over signal of each loss's gradient, resampling groups; beside it by how much the noise's share is above the first
    loss's, on the same resamples."""
    picture = Picture(9.5, 1.1 + 0.3 * len(found.rows))
    ratio, excess = picture.panels(1, 2, sharey=True, width_ratios=(1.2, 1.0))
    drawn = [row for row in found.rows if not math.isnan(row.noise)]
    for ax in (ratio, excess):
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", color=style.PALE)
    for place, row in enumerate(drawn):
        low, high = row.noise_interval
        ratio.barh(place, min(row.noise, FAR), 0.7, color=style.GREY if place == 0 else style.SKY)
        ratio.plot([min(low, FAR), min(high, FAR)], [place, place], color=style.INK, linewidth=1.2)
        if high > FAR:
            ratio.plot(FAR, place, ">", color=style.INK, markersize=5)
        _told(ratio, place, row)
        apart = row.excess_interval[0] > 0 or row.excess_interval[1] < 0
        excess.plot(row.excess_interval, [place, place], color=style.INK, linewidth=1.2)
        excess.plot(
            row.excess, place, "D" if apart else "o", color=style.VERMILION if apart else style.BLUE, markersize=5
        )
    excess.axvline(0, color=style.GREY, linewidth=0.8)
    ratio.set_xscale("log")
    ratio.set_xlim(right=FAR * 12)
    ratio.set_yticks(range(len(drawn)), [row.loss for row in drawn])
    ratio.set_ylim(len(drawn) - 0.5, -0.5)
    title(ratio, heading or f"noise over signal, {found.groups} groups ({found.live} teach)", "with 95 % of resamples")
    title(excess, f"share of noise, less that of {found.rows[0].loss}", "diamond: 95 % lie on one side of 0")
    return picture


def _told(ax: Axes, place: int, row: Row) -> None:
    text = "no signal left" if math.isinf(row.noise) else f"{row.noise:.2g}"
    ax.text(FAR * 1.6, place, text, va="center", fontsize=8.5, color=style.INK)


def _losses(found: Mapping[str, Bench]) -> list[str]:
    """Names of losses, in order; all stages have the same."""
    return [row.loss for row in next(iter(found.values())).rows]


def _least(values: NDArray[np.float64]) -> float:
    return float(np.nanmin(values, initial=0.0))


def _map(
    ax: Axes,
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    low: float,
    high: float,
    digits: int = 2,
) -> None:
    """A heat map with its numbers written in."""
    ax.set_facecolor(style.PALE)
    ax.imshow(np.ma.masked_invalid(values), cmap=_MAP, vmin=low, vmax=high, aspect="auto")
    ax.grid(visible=False)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns, fontsize=8, rotation=45 if len(columns) == len(rows) else 0)
    for (row, column), value in np.ndenumerate(values):
        dark = math.isnan(value) or value > (low + high) / 2  # cividis ends in a light yellow
        text = "–" if math.isnan(value) else f"{value:.{digits}f}"
        ax.text(column, row, text, ha="center", va="center", fontsize=7.5, color=style.INK if dark else "white")
