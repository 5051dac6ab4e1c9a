"""The mismatch microscope's report as tables and as figures (`waterfall`, `apart`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from composer_nb.labs.microscope.microscope import UNEXPLAINED, Examination, Where, toggled
from composer_nb.labs.microscope.numerics import CAUSES, FrozenBatch, ProgramChoices, change
from composer_nb.views import style
from composer_nb.views.style import Picture, title

if TYPE_CHECKING:
    import ipywidgets

HEAD = ("", "cause", "trainer's → engine's", "p50", "p99", "max", "k1", "k3", "KL")


def headline(report: Examination) -> str:
    """Summarise the report in one line."""
    if not report.findings:
        return f"no cause: all {report.tokens:,} tokens agree to {max(report.start.most, report.left.most):.1e} nats"
    return f"named: {', '.join(report.named)}; k3 {report.start.k3:.1e} → {report.left.k3:.1e}"


def rows(report: Examination) -> Iterator[tuple[str, ...]]:
    """Yield the table of `HEAD`: each cause, the engine's choice, and what is left with it and all those before."""
    steps = [("trainer", "", report.start), *((step.cause, step.change, step.figures) for step in report.steps)]
    for name, choices, f in steps:
        values = (f"{value:.1e}" for value in (f.p50, f.p99, f.most, f.k1, f.k3, f.kl))
        yield "●" if name in report.named else "", name, choices, *values


def findings(report: Examination) -> Iterator[tuple[str, str, str]]:
    """Yield each finding's cause, text, and first place."""
    for finding in report.findings:
        yield finding.cause, finding.text, "" if finding.where is None else place(finding.where)


def place(where: Where) -> str:
    """Format a place as “row 3, token 17, layer 2, experts 1 6”."""
    parts = [f"row {where.row}", f"token {where.token}"]
    parts += [] if where.layer is None else [f"layer {where.layer}"]
    parts += [f"experts {' '.join(map(str, where.experts))}"] if where.experts else []
    return ", ".join(parts)


def waterfall(report: Examination) -> Picture:
    """Draw what each cause takes off (blue) or adds to (vermilion) p99 of |Δ log p| and k3, also as a share of the trainer's gap,
    from the trainer at the top to the engine at the bottom. Named causes have a dot; the last line is what is left."""
    picture = Picture(10.5, 0.55 + 0.3 * (len(report.steps) + 2))
    headings = {"p99": "p99 of |Δ log p|, nats", "k3": "k3, nats"}
    marks = {name: "● " for name in report.named}
    names = ["trainer", *(marks.get(step.cause, "") + step.cause for step in report.steps)]
    names.append(marks.get(UNEXPLAINED, "") + "left")
    for ax, (figure, heading) in zip(picture.panels(1, 2, sharey=True), headings.items(), strict=True):
        _bars(ax, report, figure, heading)
        style.rows(ax, names)
    return picture


def toggles(trainer: ProgramChoices, engine: ProgramChoices, batch: FrozenBatch) -> ipywidgets.VBox:
    """Return a switch for each cause in which trainer and engine differ, and the figures with those that are on. `waterfall` is
    the same on paper, `toggled` for one choice."""
    import ipywidgets

    names = [cause.name for cause in CAUSES if change(trainer, engine, cause)]
    boxes, text = [ipywidgets.Checkbox(description=name, indent=False) for name in names], ipywidgets.HTML()

    def show(*_: object) -> None:
        text.value = "computing …"
        f = toggled(trainer, engine, batch, [box.description for box in boxes if box.value])
        text.value = f"p99 {f.p99:.1e}, max {f.most:.1e}, k3 {f.k3:.1e}, KL {f.kl:.1e} nats; {f.missing:.1%} missing"

    for box in boxes:
        box.observe(show, "value")
    show()
    return ipywidgets.VBox([*boxes, text])


def _bars(ax: Axes, report: Examination, figure: str, text: str) -> None:
    ends = [float(np.nan_to_num(getattr(f, figure))) for f in (report.start, *(step.figures for step in report.steps))]
    for at, (before, after) in enumerate(pairwise(ends), 1):
        ax.barh(at, after - before, left=before, color=style.BLUE if after <= before else style.VERMILION, height=0.7)
        ax.plot([before, before], [at - 1, at + 0.35], color=style.GREY, linewidth=0.8)
        if ends[0] and (change := round((after - before) / ends[0], 2)):
            style.note(ax, max(before, after), at, f" {change:+.0%}")
    ax.barh([0, len(ends)], [ends[0], ends[-1]], color=style.GREY, height=0.7)
    ax.ticklabel_format(axis="x", scilimits=(-2, 3))
    ax.set_xlim(0, 1.12 * max(ends) or 1.0)
    title(ax, text)


def apart(report: Examination) -> Picture:
    """Draw the distance of residual streams, each half layer by token, in the row of the first difference, which has a ring."""
    number = report.first.row if report.first else 0
    start = sum(report.lengths[:number])
    apart_PT = report.apart_PN[:, start : start + report.lengths[number]]
    picture, ax = style.one_panel(10.5, 0.9 + 0.24 * len(report.places))
    size_PT = np.log10(np.maximum(apart_PT, 1e-8))
    least = math.floor(np.min(size_PT, where=size_PT > -8, initial=-1.0))
    image = ax.imshow(size_PT, aspect="auto", cmap="cividis", vmin=least, vmax=0, interpolation="nearest")
    names = [part if layer < 0 else f"{layer} {part}" for layer, part in report.places]
    ax.set_yticks(range(len(names)), names)
    ax.grid(visible=False)
    if report.first is not None and report.first.layer is not None:
        at = report.places.index((report.first.layer, report.first_in))
        ax.plot(report.first.token, at, "o", color=style.VERMILION, ms=11, fillstyle="none", mew=2, clip_on=False)
    picture.colorbar(image, ax=ax, fraction=0.03).ax.set_title("log₁₀", fontsize=8.5, color=style.INK)
    title(ax, f"row {number}: ‖trainer − engine‖ / ‖engine‖ of the residual stream", "token")
    return picture
