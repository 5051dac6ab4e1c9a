"""The style of all figures: colours for any colour vision (Okabe and Ito), thin axes, no global state.

A `Picture` is a matplotlib Figure that shows itself in a notebook without a display. Its background is transparent, so its text
is of a grey that is readable on light and dark pages.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# Okabe and Ito's palette (Color Universal Design, 2008).
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#8a8a8a", "#8a8a8a33"
# Of series whose names do not decide their colours.
COLORS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GREY)
# Text on the page, with a contrast above 4 on white and on JupyterLab's dark #111; text on a coloured field.
INK, DARK = "#777777", "#222222"
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


class BarSeries(NamedTuple):
    """The bars of one colour in a grouped bar chart, and the interval of each value (`spans`)."""

    label: str
    color: str
    values: Sequence[float | None]
    spans: Sequence[Sequence[float] | None] = ()


def grouped(ax: Axes, names: Sequence[str], sides: Sequence[BarSeries], form: str = "", size: float = 8) -> Axes:
    """Draw a group of bars per name, one bar per side, with their numbers if `form` is given and “–” for a missing one."""
    width = 0.8 / max(1, len(sides))
    for index, side in enumerate(sides):
        at = np.arange(len(names)) + (index - (len(sides) - 1) / 2) * width
        values = [math.nan if value is None else value for value in side.values]
        ax.bar(at, values, 0.92 * width, color=side.color, label=side.label)
        spans = [*side.spans] or [None] * len(values)
        for x, value, span in zip(at, values, spans, strict=True):
            present = not math.isnan(value)
            if span is not None and present:
                interval(ax, [x, x], span)
            if form:
                top = max(0.0, value, max(span or [value])) if present else 0.0
                text = f"{value:{form}}" if present else "–"
                ax.annotate(text, (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=size, color=INK)
    ax.set_xticks(range(len(names)), list(names))
    return ax


def log_axis(axis: Axis) -> None:
    """Put a few plain numbers on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def key(ax: Axes) -> None:
    """Add a legend below the figure, where it covers nothing, if there is more than one label."""
    handles, labels = ax.get_legend_handles_labels()
    root = ax.get_figure(root=True)
    if len(labels) < 2 or root is None or ax.figure.legends:
        return
    for columns in range(len(labels), 0, -1):
        widest = (max(map(len, column)) for column in np.array_split(labels, columns))
        if sum(0.42 + 0.058 * letters for letters in widest) <= 0.95 * root.get_figwidth():
            break
    look: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 1.4}
    ax.figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)


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


def stacked(ax: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> Axes:
    """Draw one horizontal bar per name, made of `parts` one after another."""
    left = np.zeros(len(names))
    for label, sizes in parts.items():
        ax.barh(range(len(names)), sizes, left=left, color=colors[label], label=label, height=0.7)
        left = left + np.array(sizes)
    return rows(ax, names, fontsize=7.5)


def note(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Write a small text into a panel."""
    ax.text(x, y, text, **{"fontsize": 8.5, "color": INK, "va": "center", **options})


def bars(ax: Axes, values: Mapping[str, float], color: Any, form: str = "") -> Axes:
    """Draw one horizontal bar per name, with its number behind it if `form` is given."""
    ax.barh(range(len(values)), list(values.values()), color=color, height=0.65)
    for row, value in enumerate(values.values() if form else ()):
        note(ax, value, row, f" {value:{form}}")
    return rows(ax, list(values))


def empty(text: str, width: float = 7.0) -> Picture:
    """Return a picture that says why there is nothing to draw yet."""
    picture = Picture(width, 0.8)
    ax = picture.add_subplot()
    ax.axis("off")
    ax.text(0.0, 0.5, text, fontsize=10, color=INK, va="center")
    return picture
