"""How every figure looks: one set of colours that all eyes can tell apart, thin axes, no global state.

A `Picture` is a matplotlib Figure that shows itself in a notebook and is drawn without a display.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette (Color Universal Design, 2008).
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, INK = "#8a8a8a", "#e6e6e6", "#333333"
POLICY = {"base": GREY, "midtrained": SKY, "start": ORANGE, "final": BLUE, "control": PURPLE}
DPI = 110


class Picture(Figure):
    """A figure of `width` × `height` inches that notebooks show as PNG."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return self.png()

    def png(self) -> bytes:
        """The figure as a PNG file."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def panels(self, rows: int, columns: int, **options: Any) -> list[Axes]:
        """Axes in the house style, row by row."""
        grid = self.subplots(rows, columns, squeeze=False, **options)
        return [plain(ax) for ax in grid.flat]


def plain(ax: Axes) -> Axes:
    """Takes away what carries no information."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=8.5, width=0.7)
    ax.grid(axis="y", color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def title(ax: Axes, text: str, x: str = "", y: str = "") -> Axes:
    """Heading at the left, names of the axes."""
    ax.set_title(text, loc="left", fontsize=10, color=INK)
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    return ax


def key(ax: Axes, **options: Any) -> None:
    """A legend without a box, if there is more than one thing to tell apart."""
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, **options)


def as_share(ax: Axes, top: float | None = None) -> Axes:
    """A y axis in per cent, from 0."""
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(0, top)
    return ax


def whole_steps(ax: Axes) -> Axes:
    """An x axis of step numbers, which have no halves."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    return ax


def from_zero(ax: Axes) -> Axes:
    """A y axis from 0, with room above what is drawn."""
    ax.set_ylim(0, ax.get_ylim()[1] * 1.05)
    return ax


def absent(ax: Axes, text: str) -> Axes:
    """Says in an empty panel why it is empty."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", fontsize=9, color=GREY)
    ax.set_yticks([])
    return ax


def empty(text: str, width: float = 7.0) -> Picture:
    """What stands where there is nothing to draw yet, with the reason."""
    picture = Picture(width, 0.8)
    ax = picture.add_subplot()
    ax.axis("off")
    ax.text(0.0, 0.5, text, fontsize=10, color=INK, va="center")
    return picture


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of each value and up to `window` − 1 before it: no value is used before it is known."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(0, end - window)
    return (sums[end] - sums[begin]) / (end - begin)
