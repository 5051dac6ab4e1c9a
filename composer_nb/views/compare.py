"""Two runs side by side: figures, tables for a terminal and an HTML page of what `trainer.recipe.report.compare` found.

The first run is blue in every figure, the second orange. Two runs are two samples: a difference in settings need not be the
cause of a difference in scores.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from composer_nb.harness.untrusted import visible
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import style
from composer_nb.views.curves import WINDOW, line, scaled
from composer_nb.views.page import document, figure, html_table, shown, text_table
from composer_nb.views.style import Picture, as_share, key, title

COLORS = (style.BLUE, style.ORANGE)
_CURVES = ("solved", "reward", "entropy", "turns", "staleness", "live_groups")


def figures(comparison: Mapping[str, Any], first: RunDir, second: RunDir) -> dict[str, tuple[str, bytes]]:
    """Return (caption, PNG) by name of every figure that both runs have data for. `comparison` is the result of `compare`."""
    pictures: dict[str, tuple[str, Picture]] = {}
    if any("difference" in part for part in comparison["eval"].values()):
        sides = "Left: pass@1 with 95 % intervals over tasks. Right: second − first. An interval over 0 shows no difference; "
        pictures["scores"] = (f"{sides}paired by task it is narrower than the bars suggest.", scores(comparison))
    if first.steps("rl") and second.steps("rl"):
        pictures["curves"] = (f"RL. Bold: mean of the last {WINDOW} steps.", curves(comparison, first, second))
    if comparison["wall_s"]:
        pictures["time"] = ("Where the time went.", times(comparison))
    return {name: (caption, picture.png()) for name, (caption, picture) in pictures.items()}


def scores(comparison: Mapping[str, Any]) -> Picture:
    """Draw pass@1 of every policy that both runs scored, and the differences."""
    shared = {name: part for name, part in comparison["eval"].items() if "difference" in part}
    if not shared:
        return style.empty("there is no policy yet that both runs have scored")
    picture = Picture(9.5, 3.2)
    bars, gaps = picture.panels(1, 2, width_ratios=(3, 2))
    scored = zip(*(part["scores"] for part in shared.values()), strict=True)
    sides = [
        style.BarSeries(label, color, [s["pass_at_1"] for s in policies], [s["ci95"] for s in policies])
        for color, label, policies in zip(COLORS, labels(comparison), scored, strict=True)
    ]
    style.grouped(bars, list(shared), sides)
    as_share(bars, min(1.3, 1.3 * max(0.1, *(s["ci95"][1] for part in shared.values() for s in part["scores"]))))
    title(bars, "solved, held-out tasks, pass@1")
    key(bars)
    for row, part in enumerate(shared.values()):
        gap = part["difference"]
        gaps.plot(gap["ci95"], [row, row], color=style.INK, linewidth=1.4)
        gaps.plot(gap["pass_at_1"], row, "o" if gap["paired"] else "s", color=style.INK, markersize=6)
    gaps.axvline(0, color=style.GREY, linestyle=":")
    style.rows(gaps, list(shared)).xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    paired = all(part["difference"]["paired"] for part in shared.values())
    title(gaps, f"second − first, {'paired by task' if paired else 'not paired'}", "pass@1")
    return picture


def curves(comparison: Mapping[str, Any], first: RunDir, second: RunDir) -> Picture:
    """Draw curves of RL in both runs."""
    steps = first.steps("rl"), second.steps("rl")
    if not any(steps):
        return style.empty("RL has not reached its first checkpoint yet in either run")
    picture = Picture(9.5, 5.4)
    for ax, name in zip(picture.panels(2, 3), _CURVES, strict=True):
        for points, color, label in zip(steps, COLORS, labels(comparison), strict=True):
            line(ax, points, name, color, label)
        scaled(ax, name)
    return picture


def times(comparison: Mapping[str, Any]) -> Picture:
    """Draw seconds by part of the recipe."""
    names = [name for name in comparison["wall_s"] if name != "total"] + ["total"]
    picture, ax = style.one_panel(9.5, 0.9 + 0.42 * len(names))
    for side, (color, label) in enumerate(zip(COLORS, labels(comparison), strict=True)):
        seconds_by_part = [comparison["wall_s"].get(name, (0, 0))[side] or 0.0 for name in names]
        positions = [number + (side - 0.5) * 0.4 for number in range(len(names))]
        ax.barh(positions, seconds_by_part, 0.37, color=color, label=label)
        for y, seconds in zip(positions, seconds_by_part, strict=True):
            style.note(ax, seconds, y, f" {seconds:.0f}")
    title(style.rows(ax, names), "seconds by part of the recipe", "seconds")
    key(ax)
    return picture


def labels(comparison: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the runs; a run compared with itself gets two."""
    names = [run["run"] for run in comparison["runs"]]
    return names if names[0] != names[1] else [f"{names[0]}, first", f"{names[1]}, second"]


# As text

_PARTS = {
    "settings": "settings that differ",
    "provenance": "code and machine",
    "train": "reinforcement learning",
    "wall_s": "seconds",
}
_HEAD = ("tools", "first", "second", "difference", "95 %", "tasks")
Section = tuple[str, Sequence[str], list[tuple[str, ...]]]


def table(comparison: Mapping[str, Any]) -> Group:
    """Return a comparison of runs, or of evaluations, for a terminal."""
    first, second = map(escape, _names(comparison))
    parts: list[Table | str] = [f"first: {first}   second: {second}"]
    for heading, head, rows in _sections(comparison):
        parts.append(text_table(rows, head, heading) if rows else f"[bold]{heading}[/]: none")
    return Group(*parts, *map(escape, _notes(comparison)))


def page(comparison: Mapping[str, Any], figures: Mapping[str, tuple[str, bytes]] = MappingProxyType({})) -> str:
    """Return a comparison of runs, or of evaluations, as one HTML page; `figures` are (caption, PNG) by name."""
    names = " and ".join(_names(comparison))
    body = [f"<h1>{html.escape(names)}</h1>"]
    body += [f"<p class=note>{html.escape(line)}</p>" for line in _notes(comparison)]
    body += [figure(name, caption, png) for name, (caption, png) in figures.items()]
    for heading, head, rows in _sections(comparison):
        body += [f"<h2>{heading.capitalize()}</h2>", html_table(rows, head) if rows else "<p>None.</p>"]
    return document(names, body)


def _names(comparison: Mapping[str, Any]) -> list[str]:
    return [visible(name) for name in comparison.get("evals", ())] or [run["run"] for run in comparison["runs"]]


def _notes(comparison: Mapping[str, Any]) -> Iterator[str]:
    for run in comparison.get("runs", ()):
        if not run["complete"]:
            yield f"{run['run']} is not complete."
    for arm, row in comparison.get("arms", {}).items():
        for side, names in zip(("first", "second"), row["left_out"], strict=True):
            if names:
                more = f" and {len(names) - 20} more" if len(names) > 20 else ""
                yield f"{arm}: left out, without a grade in the other: of the {side} {visible(', '.join(names[:20]))}{more}"


def _sections(comparison: Mapping[str, Any]) -> Iterator[Section]:
    """Yield heading, head and rows of every table."""
    if "arms" in comparison:
        yield "pass@1 at the tasks of both", _HEAD, [_arm_row(*arm) for arm in comparison["arms"].items()]
        return
    if comparison["eval"]:
        head, *rows = score_rows(comparison)
        yield "held-out tasks", head, rows
        head, *rows = other_rows(comparison)
        yield "all tasks of each run, first → second", head, rows
    for part, heading in _PARTS.items():
        pairs = comparison[part].items()
        yield heading, ("", "first", "second"), [(name, *map(_spoken, pair)) for name, pair in pairs]


def _arm_row(arm: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if not row["n_tasks"]:
        return (arm, "–", "–", "–", "", "0")
    scores = ("{:.3f} ({:.3f}–{:.3f})".format(score["pass_at_1"], *score["ci95"]) for score in row["scores"])
    gap = row["difference"]
    interval = "{:+.3f} to {:+.3f}".format(*gap["ci95"])
    return (arm, *scores, f"{gap['pass_at_1']:+.3f}", interval, str(row["n_tasks"]))


def score_rows(comparison: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the table of scores."""
    yield ("policy", "pass@1, first", "second", "difference", "95 %", "")
    for name, part in comparison["eval"].items():
        scores, gap = part["scores"], part.get("difference")
        how = "" if gap is None else "paired by task: {}" if gap["paired"] else "other tasks: {}, {}, not paired"
        yield (
            name,
            *("–" if s is None else "{:.3f} ({:.3f}–{:.3f})".format(s["pass_at_1"], *s["ci95"]) for s in scores),
            "" if gap is None else f"{gap['pass_at_1']:+.3f}",
            "" if gap is None else "{:+.3f} to {:+.3f}".format(*gap["ci95"]),
            how.format(*(gap or {}).get("n_tasks", ())),
        )


def other_rows(comparison: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the table of other figures, each first → second."""
    yield ("policy", "in 12 calls", "recovery", "greedy", "best of k")
    for name, part in comparison["eval"].items():
        scores = [score or {} for score in part["scores"]]
        values = [[(score.get("pass_within") or {}).get("12") for score in scores]]
        values += [[score.get(key) for score in scores] for key in ("recovery", "pass_greedy", "best_of_k")]
        yield (name, *(" → ".join(shown(value, ".3f") for value in pair) for pair in values))


def _spoken(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else value if isinstance(value, str) else json.dumps(value)
