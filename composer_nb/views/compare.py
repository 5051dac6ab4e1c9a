"""Two runs side by side: figures, tables for a terminal and an HTML page of what `trainer.recipe.report.compare` found.

The first run is blue in every figure, the second orange. Two runs are two samples: a difference in settings need not be the
cause of a difference in scores.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
    drawn: dict[str, tuple[Picture, str]] = {}
    if any("difference" in part for part in comparison["eval"].values()):
        drawn["scores"] = (
            scores(comparison),
            "Left: pass@1 with 95 % intervals over tasks. Right: second − first. An interval over 0 shows no difference; "
            "paired by task it is narrower than the bars suggest.",
        )
    if first.steps("rl") and second.steps("rl"):
        drawn["curves"] = (curves(comparison, first, second), f"RL. Bold: mean of the last {WINDOW} steps.")
    if comparison["wall_s"]:
        drawn["time"] = (times(comparison), "Where the time went.")
    return {name: (caption, picture.png()) for name, (picture, caption) in drawn.items()}


def scores(comparison: Mapping[str, Any]) -> Picture:
    """Draw pass@1 of every policy that both runs scored, and the differences."""
    both = {name: part for name, part in comparison["eval"].items() if "difference" in part}
    if not both:
        return style.empty("there is no policy yet that both runs have scored")
    picture = Picture(9.5, 3.2)
    bars, gaps = picture.panels(1, 2, width_ratios=(3, 2))
    scored = zip(*(part["scores"] for part in both.values()), strict=True)
    sides = [
        style.BarSeries(label, color, [s["pass_at_1"] for s in own], [s["ci95"] for s in own])
        for color, label, own in zip(COLORS, labels(comparison), scored, strict=True)
    ]
    style.grouped(bars, list(both), sides)
    as_share(bars, min(1.3, 1.3 * max(0.1, *(s["ci95"][1] for part in both.values() for s in part["scores"]))))
    title(bars, "solved, held-out tasks, pass@1")
    key(bars, loc="upper left", ncols=2)
    for place, part in enumerate(both.values()):
        gap = part["difference"]
        gaps.plot(gap["ci95"], [place, place], color=style.INK, linewidth=1.4)
        gaps.plot(gap["pass_at_1"], place, "o" if gap["paired"] else "s", color=style.INK, markersize=6)
    gaps.axvline(0, color=style.GREY, linestyle=":")
    style.rows(gaps, list(both)).xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    paired = all(part["difference"]["paired"] for part in both.values())
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
    for place, (color, label) in enumerate(zip(COLORS, labels(comparison), strict=True)):
        spent = [comparison["wall_s"].get(name, (0, 0))[place] or 0.0 for name in names]
        at = [number + (place - 0.5) * 0.4 for number in range(len(names))]
        ax.barh(at, spent, 0.37, color=color, label=label)
        for y, seconds in zip(at, spent, strict=True):
            style.note(ax, seconds, y, f" {seconds:.0f}")
    title(style.rows(ax, names), "seconds by part of the recipe", "seconds")
    key(ax, loc="best")
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


def table(comparison: Mapping[str, Any]) -> Group:
    """Return the comparison for a terminal."""
    names = [run["run"] for run in comparison["runs"]]
    parts: list[Table | str] = [f"first: {escape(names[0])}   second: {escape(names[1])}"]
    for part, heading in _PARTS.items():
        rows = list(pair_rows(comparison[part]))
        parts.append(text_table(rows, ("", "first", "second"), heading) if rows else f"[bold]{heading}[/]: none")
        if part == "provenance" and comparison["eval"]:
            for rows_of, heading in (
                (score_rows, "held-out tasks"),
                (other_rows, "all tasks of each run, first → second"),
            ):
                head, *rest = rows_of(comparison)
                parts.append(text_table(rest, head, heading))
    return Group(*parts)


def page(comparison: Mapping[str, Any], figures: Mapping[str, tuple[str, bytes]]) -> str:
    """Return one HTML page; `figures` are (caption, PNG) by name."""
    names = [run["run"] for run in comparison["runs"]]
    body = [f"<h1>{html.escape(names[0])} and {html.escape(names[1])}</h1>"]
    for run in comparison["runs"]:
        if not run["complete"]:
            body.append(f"<p class=note>{html.escape(run['run'])} is not complete.</p>")
    if comparison["eval"]:
        for heading, (head, *rows) in (
            ("Held-out tasks", score_rows(comparison)),
            ("All tasks of each run, first → second", other_rows(comparison)),
        ):
            body += [f"<h2>{heading}</h2>", html_table(rows, head)]
    body += [figure(name, caption, png) for name, (caption, png) in figures.items()]
    for part, heading in _PARTS.items():
        rows = list(pair_rows(comparison[part]))
        body.append(f"<h2>{heading.capitalize()}</h2>")
        body.append(html_table(rows, ("", *names)) if rows else "<p>None.</p>")
    return document(" and ".join(names), body)


def eval_table(comparison: Mapping[str, Any]) -> Group:
    """Return the comparison of two evaluations for a terminal."""
    head, *rows = eval_rows(comparison)
    names = "   ".join(
        f"{position}: {escape(visible(name))}"
        for position, name in zip(("first", "second"), comparison["evals"], strict=True)
    )
    return Group(names, text_table(rows, head, "pass@1 at the tasks of both"), *map(escape, _left_out(comparison)))


def eval_page(comparison: Mapping[str, Any]) -> str:
    """Return the comparison of two evaluations as an HTML page."""
    head, *rows = eval_rows(comparison)
    lines = [f"<p class=note>{html.escape(line)}</p>" for line in _left_out(comparison)]
    names = " and ".join(map(visible, comparison["evals"]))
    return document(names, [f"<h1>{html.escape(names)}</h1>", html_table(rows, head), *lines])


def eval_rows(comparison: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the table of two evaluations."""
    yield ("tools", "first", "second", "difference", "95 %", "tasks")
    for arm, row in comparison["arms"].items():
        if not row["n_tasks"]:
            yield (arm, "–", "–", "–", "", "0")
            continue
        scores = ("{:.3f} ({:.3f}–{:.3f})".format(score["pass_at_1"], *score["ci95"]) for score in row["scores"])
        gap = row["difference"]
        interval = "{:+.3f} to {:+.3f}".format(*gap["ci95"])
        yield (arm, *scores, f"{gap['pass_at_1']:+.3f}", interval, str(row["n_tasks"]))


def _left_out(comparison: Mapping[str, Any]) -> Iterator[str]:
    for arm, row in comparison["arms"].items():
        for which, names in zip(("first", "second"), row["left_out"], strict=True):
            if names:
                more = f" and {len(names) - 20} more" if len(names) > 20 else ""
                yield f"{arm}: left out, without a grade in the other: of the {which} {visible(', '.join(names[:20]))}{more}"


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
        both = [score or {} for score in part["scores"]]
        values = [[(score.get("pass_within") or {}).get("12") for score in both]]
        values += [[score.get(key) for score in both] for key in ("recovery", "pass_greedy", "best_of_k")]
        yield (name, *(" → ".join(shown(value, ".3f") for value in pair) for pair in values))


def pair_rows(pairs: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield name and both values as text."""
    for name, (old, new) in pairs.items():
        yield name, _spoken(old), _spoken(new)


def _spoken(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else value if isinstance(value, str) else json.dumps(value)
