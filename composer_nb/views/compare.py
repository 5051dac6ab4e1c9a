"""Two runs side by side: figures, tables for a terminal and an HTML page of what `trainer.recipe.report.compare` found.

The first run is blue in every figure, the second orange. Two runs are two samples: a difference in settings need not be the
cause of a difference in scores.
"""

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
from composer_nb.views.charts import WINDOW, Figure, bars, scored
from composer_nb.views.curves import overlaid
from composer_nb.views.page import document, figure, html_table, shown, text_table
from composer_nb.views.scores import differences

LABELS = ("first", "second")


def figures(comparison: Mapping[str, Any], first: RunDir, second: RunDir) -> dict[str, tuple[str, Figure]]:
    """Return (caption, figure) by name of every figure that both runs have data for. `comparison` is the result of `compare`."""
    drawings: dict[str, tuple[str, Figure]] = {}
    if any("difference" in part for part in comparison["eval"].values()):
        sides = "Left: pass@1 with 95 % intervals over tasks. Right: second − first, in points. An interval over 0 shows no "
        paired = "difference; paired by task it is narrower than the bars suggest."
        drawings["scores"] = (sides + paired, scores(comparison))
    if first.steps("rl") and second.steps("rl"):
        drawings["curves"] = (f"RL. Bold: mean of the last {WINDOW} steps.", curves(comparison, first, second))
    if comparison["wall_s"]:
        drawings["time"] = ("Where the time went.", times(comparison))
    return drawings


def scores(comparison: Mapping[str, Any]) -> Figure:
    """Draw pass@1 of every policy that both runs scored, and the differences."""
    shared = {name: part for name, part in comparison["eval"].items() if "difference" in part}
    if not shared:
        return Figure([], note="there is no policy yet that both runs have scored")
    rows = [
        scored(name, s["pass_at_1"], s["ci95"], series=label)
        for name, part in shared.items()
        for label, s in zip(LABELS, part["scores"], strict=True)
    ]
    gaps = {name: part["difference"] for name, part in shared.items()}
    how = "paired by task" if all(gap["paired"] for gap in gaps.values()) else "not paired"
    spans = [scored(name, gap["pass_at_1"], gap["ci95"]) for name, gap in gaps.items()]
    bar_chart = bars("solved, held-out tasks, pass@1", rows, unit="share", form=".2f")
    return Figure([bar_chart, differences(f"second − first, {how}", spans)])


def curves(comparison: Mapping[str, Any], first: RunDir, second: RunDir) -> Figure:
    """Draw curves of RL in both runs."""
    steps = {label: [run.steps("rl")] for label, run in zip(LABELS, (first, second), strict=True)}
    return Figure(overlaid(steps), note="RL has not reached its first checkpoint yet in either run")


def times(comparison: Mapping[str, Any]) -> Figure:
    """Draw seconds by part of the recipe."""
    names = [name for name in comparison["wall_s"] if name != "total"] + ["total"]
    rows = [
        {"name": name, "series": label, "value": comparison["wall_s"].get(name, (0, 0))[side] or 0.0}
        for name in names
        for side, label in enumerate(LABELS)
    ]
    return Figure([bars("seconds by part of the recipe", rows, form=",.0f")], width=700)


# As text

_PARTS = {
    "settings": "settings that differ",
    "provenance": "code and machine",
    "train": "reinforcement learning",
    "wall_s": "seconds",
}
_HEAD = ("tools", *LABELS, "difference", "95 %", "tasks")
Section = tuple[str, Sequence[str], list[tuple[str, ...]]]


def table(comparison: Mapping[str, Any]) -> Group:
    """Return a comparison of runs, or of evaluations, for a terminal."""
    first, second = map(escape, _names(comparison))
    parts: list[Table | str] = [f"first: {first}   second: {second}"]
    for heading, head, rows in _sections(comparison):
        parts.append(text_table(rows, head, heading) if rows else f"[bold]{heading}[/]: none")
    return Group(*parts, *map(escape, _notes(comparison)))


def page(comparison: Mapping[str, Any], figures: Mapping[str, tuple[str, Any]] = MappingProxyType({})) -> str:
    """Return a comparison of runs, or of evaluations, as one HTML page; `figures` are (caption, figure) by name."""
    names = "{} (first) and {} (second)".format(*_names(comparison))
    body = [f"<h1>{html.escape(names)}</h1>"]
    body += [f"<p class=note>{html.escape(line)}</p>" for line in _notes(comparison)]
    body += [figure(name, caption, drawing) for name, (caption, drawing) in figures.items()]
    for heading, head, rows in _sections(comparison):
        body += [f"<h2>{heading.capitalize()}</h2>", html_table(rows, head) if rows else "<p>None.</p>"]
    return document(names, body)


ARMS_NOTE = (
    "Means over seeds. In brackets: what the arm adds to the first, in points, ± half the 95 % interval over the seeds of both. "
    "Chance explains a gain that is smaller than that half."
)


def arms_table(comparison: Mapping[str, Any]) -> Group:
    """Return the comparison of `recipe.arms.compare_arms` for a terminal."""
    return Group(text_table(_arms_rows(comparison), _arms_head(comparison)), ARMS_NOTE)


def arms_page(comparison: Mapping[str, Any]) -> str:
    """Return the comparison of `recipe.arms.compare_arms` as one HTML page, with a figure of what each arm adds."""
    first, *others = comparison["arms"]
    rows = []
    for arm in others:
        for name, score in comparison["arms"][arm]["scores"].items():
            gain, half = score["gain"], score["half"]
            if gain is not None:
                rows.append(scored(f"{arm}: {name}", gain, None if half is None else [gain - half, gain + half]))
    parts = [f"<h1>{len(others) + 1} arms</h1>", html_table(_arms_rows(comparison), _arms_head(comparison))]
    drawing = Figure([differences(f"over {first}", rows)] if rows else [], note="there is one arm only", width=560)
    return document("arms", [*parts, figure("arms", ARMS_NOTE, drawing)])


def _arms_head(comparison: Mapping[str, Any]) -> tuple[str, ...]:
    return ("arm", "seeds", *next(iter(comparison["arms"].values()))["scores"])


def _arms_rows(comparison: Mapping[str, Any]) -> list[tuple[str, ...]]:
    first = next(iter(comparison["arms"]))
    rows = []
    for arm, row in comparison["arms"].items():
        cells = [f"{score['mean']:.3f}" for score in row["scores"].values()]
        for number, score in enumerate(row["scores"].values() if arm != first else ()):
            half = shown(score["half"] and 100 * score["half"], ".1f")
            cells[number] += "" if score["gain"] is None else f" ({100 * score['gain']:+.1f} ± {half})"
        rows.append((visible(arm), str(len(row["seeds"])), *cells))
    return rows


def _names(comparison: Mapping[str, Any]) -> list[str]:
    return [visible(name) for name in comparison.get("evals", ())] or [run["run"] for run in comparison["runs"]]


def _notes(comparison: Mapping[str, Any]) -> Iterator[str]:
    for run in comparison.get("runs", ()):
        if not run["complete"]:
            yield f"{run['run']} is not complete."
    if comparison.get("same_final"):
        yield "Both runs end with the same final weights: what differs between them had no effect."
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
    yield ("policy", "pass@1, first", "second", "difference", "95 %", "difference in 12 calls", "tasks")
    for name, part in comparison["eval"].items():
        scores, gap, quick = part["scores"], part.get("difference"), part.get("within_12", {})
        how = "" if gap is None else "paired by task: {}" if gap["paired"] else "other tasks: {}, {}, not paired"
        yield (
            name,
            *("–" if s is None else "{:.3f} ({:.3f}–{:.3f})".format(s["pass_at_1"], *s["ci95"]) for s in scores),
            "" if gap is None else f"{gap['pass_at_1']:+.3f}",
            "" if gap is None else "{:+.3f} to {:+.3f}".format(*gap["ci95"]),
            "" if gap is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(quick["pass_at_1"], *quick["ci95"]),
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
