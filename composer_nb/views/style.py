"""The style of all figures: colours for any colour vision (Okabe and Ito), thin axes, no global state.

A `Picture` is a matplotlib Figure that shows itself in a notebook without a display. Its background is transparent, so its text
is of a grey that is readable on light and dark pages.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette (Color Universal Design, 2008).
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#8a8a8a", "#8a8a8a33"
INK, DARK = "#777777", "#222222"
"""Text on the page, with a contrast above 4 on white and on JupyterLab's dark #111; text on a coloured field."""
POLICY = {"base": GREY, "midtrained": SKY, "start": ORANGE, "final": BLUE, "control": PURPLE}
DPI = 110


class Picture(Figure):
    """A figure of `width` × `height` inches that notebooks show as PNG."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return self.png()

    def png(self) -> bytes:
        """Return the figure as a PNG file."""
        for ax in self.axes:
            ax.tick_params(which="both", colors=INK)
        for text in self.findobj(Text):
            if str(text.get_color()) == "black":  # matplotlib's own choice
                text.set_color(INK)
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, transparent=True)
        return buffer.getvalue()

    def panels(self, rows: int, columns: int, **options: Any) -> list[Axes]:
        """Return axes in the house style, row by row."""
        grid = self.subplots(rows, columns, squeeze=False, **options)
        return [plain(ax) for ax in grid.flat]


def plain(ax: Axes) -> Axes:
    """Remove spines and ticks that carry no information."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=8.5, width=0.7)
    ax.grid(axis="y", color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def title(ax: Axes, text: str, x: str = "", y: str = "") -> Axes:
    """Set the heading, at the left, and the names of the axes."""
    ax.set_title(text, loc="left", fontsize=10, color=INK)
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    return ax


def interval(ax: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw a line that stands out from any bar and any page."""
    ax.plot(x, y, color=INK, linewidth=1.2, path_effects=[Stroke(linewidth=3, foreground="white"), Normal()])


def log_bars(ax: Axes, sides: Sequence[tuple[str, str, Sequence[float | None]]], least: float) -> None:
    """Draw two bars a place on a logarithmic axis, with their numbers; a “–” in place of a bar that has none. A side is its
    label, colour and values. Less than `least` is nothing."""
    values_SP = np.array([[math.nan if value is None else value for value in values] for _, _, values in sides], float)
    high = max([least * 10, *values_SP[np.isfinite(values_SP)].tolist()])
    low = min([high / 10, *values_SP[values_SP > least].tolist()])
    ax.set_yscale("log")
    ax.set_ylim(low / 3, high * 6)
    for place, ((label, color, _), values_P) in enumerate(zip(sides, values_SP, strict=True)):
        at_P = np.arange(len(values_P)) + (place - 0.5) * 0.38
        ax.bar(at_P, values_P, 0.36, color=color, label=label)
        for x, value in zip(at_P, values_P, strict=True):
            text, foot = ("–", low / 3) if math.isnan(value) else (f"{value:.1e}", max(value, low / 3))
            ax.annotate(text, (x, foot), (0, 2), textcoords="offset points", ha="center", fontsize=8, color=INK)


def key(ax: Axes, **options: Any) -> None:
    """Add a legend without a box if there is more than one label."""
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, **options)


def as_share(ax: Axes, top: float | None = None) -> Axes:
    """Make the y axis a percentage from 0."""
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(0, top)
    return ax


def whole_steps(ax: Axes) -> Axes:
    """Make the x axis one of whole steps."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    return ax


def from_zero(ax: Axes) -> Axes:
    """Make the y axis start at 0, with a margin above the data."""
    ax.set_ylim(0, ax.get_ylim()[1] * 1.05)
    return ax


def one_panel(width: float, height: float) -> tuple[Picture, Axes]:
    """Return a picture with one panel."""
    picture = Picture(width, height)
    [ax] = picture.panels(1, 1)
    return picture, ax


def rows(ax: Axes, names: Sequence[str], **options: Any) -> Axes:
    """Name the rows of a panel, the first on top, with grid lines along x alone."""
    ax.set_yticks(range(len(names)), list(names), **options)
    ax.set_ylim(max(1, len(names)) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color=PALE)
    return ax


def note(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Write a small text into a panel."""
    ax.text(x, y, text, **{"fontsize": 8.5, "color": INK, "va": "center", **options})


def bars(ax: Axes, values: Mapping[str, float], color: Any, form: str = "") -> Axes:
    """Draw one horizontal bar per name, with its number behind it if `form` is given."""
    ax.barh(range(len(values)), list(values.values()), color=color, height=0.65)
    for place, value in enumerate(values.values() if form else ()):
        note(ax, value, place, f" {value:{form}}")
    return rows(ax, list(values))


def paired(ax: Axes, place: int, values: Sequence[float], draw: Any, **options: Any) -> list[float]:
    """Draw the first (`place` 0) or second (1) bars of pairs with `ax.bar` or `ax.barh`, and return their positions."""
    at = [number + (place - 0.5) * 0.4 for number in range(len(values))]
    draw(at, values, 0.37, **options)
    return at


def absent(ax: Axes, text: str) -> Axes:
    """Write into an empty panel why it is empty."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", fontsize=9, color=GREY)
    ax.set_yticks([])
    return ax


def empty(text: str, width: float = 7.0) -> Picture:
    """Return a picture that says why there is nothing to draw yet."""
    picture = Picture(width, 0.8)
    ax = picture.add_subplot()
    ax.axis("off")
    ax.text(0.0, 0.5, text, fontsize=10, color=INK, va="center")
    return picture


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Return the mean of each value and up to `window` − 1 values before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(0, end - window)
    return (sums[end] - sums[begin]) / (end - begin)
