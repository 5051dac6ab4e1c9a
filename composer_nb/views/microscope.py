"""The mismatch microscope's report: the ladder of causes, and where inside the model engine and trainer part.

`read` gives HTML for a notebook, in its colours; `ladder` and `apart` are static figures of the same.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from composer_nb.trainer.evidence import Where
from composer_nb.trainer.microscope import Report
from composer_nb.trainer.rungs import UNEXPLAINED
from composer_nb.views import style
from composer_nb.views.page import Html, box
from composer_nb.views.style import Picture, title

FLOORS = {"p99": 1e-7, "k3": 1e-12}
"""Where the logarithmic axes end: less is nothing in float32."""


def headline(report: Report) -> str:
    """What was found, in one line."""
    if not report.causes:
        return f"no cause: all {report.tokens:,} tokens agree to {max(report.start.most, report.left.most):.1e} nats"
    return f"named: {', '.join(report.named)}; k3 {report.start.k3:.1e} → {report.left.k3:.1e}"


def rows(report: Report) -> Iterator[tuple[str, ...]]:
    """The ladder as a table: rung, the engine's choice, and what is left with it and all those before."""
    named = set(report.named)
    for name, change, found in (("trainer", "", report.start), *((s.rung, s.change, s.figures) for s in report.steps)):
        mark = "●" if name in named else ""
        yield (
            mark,
            name,
            change,
            *(f"{value:.1e}" for value in (found.p50, found.p99, found.most, found.k1, found.k3, found.kl)),
        )


HEAD = ("", "rung", "trainer's → engine's", "p50", "p99", "max", "k1", "k3", "KL")


def causes(report: Report) -> Iterator[tuple[str, str, str]]:
    """Rung, what was seen, and where first."""
    for cause in report.causes:
        yield cause.rung, cause.text, "" if cause.where is None else place(cause.where)


def place(where: Where) -> str:
    """As “row 3, token 17, layer 2, experts 1 6”."""
    parts = [f"row {where.row}", f"token {where.token}"]
    parts += [] if where.layer is None else [f"layer {where.layer}"]
    parts += [f"experts {' '.join(map(str, where.experts))}"] if where.experts else []
    return ", ".join(parts)


def read(report: Report) -> Html:
    """Causes, ladder and what is left by policy version, as a page's own text."""
    found = [f"<b>{html.escape(rung)}</b>: {html.escape(text)}{_at(where)}" for rung, text, where in causes(report)]
    first = (
        ""
        if report.first is None
        else f"the residual streams first differ after the {report.first_in} of {place(report.first)}"
    )
    versions = [f"version {version}: p99 {left.p99:.1e}, k3 {left.k3:.1e}" for version, left in report.versions.items()]
    return box(
        f'<div class="head">{html.escape(headline(report))}</div>',
        "".join(f"<div>{line}</div>" for line in found),
        f'<div class="quiet">{first}</div>' if first else "",
        "<details open><summary>the ladder: what is left with each rung and those before it, in nats</summary>",
        _table(HEAD, list(rows(report))),
        "</details><details><summary>what is left at the top, by policy version</summary>",
        "".join(f'<div class="quiet">{line}</div>' for line in versions),
        "</details>",
    )


def _at(where: str) -> str:
    return f' <span class="quiet">{html.escape(where)}</span>' if where else ""


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def ladder(report: Report) -> Picture:
    """What each rung takes away (blue) or adds (vermilion), p99 of |Δ log p| and k3, from the trainer at the top to the engine at
    the bottom. Named rungs have a dot; the last line is what is left."""
    picture = Picture(10.5, 0.55 + 0.3 * (len(report.steps) + 2))
    for ax, (figure, text) in zip(
        picture.panels(1, 2, sharey=True), (("p99", "p99 of |Δ log p|, nats"), ("k3", "k3, nats")), strict=True
    ):
        _waterfall(ax, report, figure, text)
    names = ["trainer", *(f"{'● ' if step.rung in report.named else ''}{step.rung}" for step in report.steps)]
    names.append(f"{'● ' if UNEXPLAINED in report.named else ''}left")
    picture.axes[0].set_yticks(range(len(names)), names)
    picture.axes[0].invert_yaxis()
    return picture


def _waterfall(ax: Axes, report: Report, figure: str, text: str) -> None:
    floor = FLOORS[figure]
    values = [getattr(report.start, figure), *(getattr(step.figures, figure) for step in report.steps)]
    shown = [floor if math.isnan(value) else max(value, floor) for value in values]
    ax.barh(0, shown[0] - floor, left=floor, color=style.GREY, height=0.7)
    for at, (before, after) in enumerate(pairwise(shown), 1):
        hue = style.BLUE if after <= before else style.VERMILION
        ax.barh(at, abs(before - after), left=min(before, after), color=hue, height=0.7)
        ax.plot([before, before], [at - 1, at + 0.35], color=style.GREY, linewidth=0.8)
    ax.barh(len(shown), shown[-1] - floor, left=floor, color=style.GREY, height=0.7)
    ax.set_xscale("log")
    ax.set_xlim(floor, max(10 * floor, 3 * max(shown)))
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color=style.PALE, linewidth=0.8)
    title(ax, text)


def apart(report: Report, row: int | None = None) -> Picture:
    """How far the residual streams of a row are apart, each half layer by token; by default the row of the first difference. A
    ring marks where they first differ."""
    found = report.streams
    if found is None:
        return style.empty("this engine does not show its residual streams: there is nothing to compare inside it")
    number = row if row is not None else report.first.row if report.first else 0
    start = sum(found.lengths[:number])
    apart_PT = found.apart_PN[:, start : start + found.lengths[number]]
    picture = Picture(10.5, 0.9 + 0.24 * len(found.places))
    [ax] = picture.panels(1, 1)
    image = ax.imshow(
        np.log10(np.maximum(apart_PT, 1e-8)), aspect="auto", cmap="cividis", vmin=-8, vmax=0, interpolation="nearest"
    )
    names = [part if layer < 0 else f"{layer} {part}" for layer, part in found.places]
    ax.set_yticks(range(len(names)), names)
    ax.grid(visible=False)
    if report.first is not None and report.first.row == number and report.first.layer is not None:
        at = found.places.index((report.first.layer, report.first_in))
        ax.plot(report.first.token, at, "o", markersize=11, fillstyle="none", color=style.VERMILION, markeredgewidth=2)
    bar = picture.colorbar(image, ax=ax, fraction=0.03)
    bar.ax.set_title("log₁₀", fontsize=8.5, color=style.INK)
    title(ax, f"row {number}: ‖trainer − engine‖ / ‖engine‖ of the residual stream", "token")
    return picture
