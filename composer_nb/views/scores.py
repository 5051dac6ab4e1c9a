"""Scores of policies on held-out tasks, by family and behaviour, and the mismatch of engine and trainer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from composer_nb.harness.bench import wilson
from composer_nb.views import style
from composer_nb.views.charts import Chart, Figure, bars, scored
from composer_nb.views.page import shown
from composer_nb.views.style import POLICY

# Lower end of a mismatch axis, below float32's resolution.
LEAST = 1e-13
_NOT_YET = "no policy has been scored yet"


def policies(report: Mapping[str, Any]) -> Figure:
    """Draw pass@1, greedy, best of k and what is solved in 12 calls, of every policy, with 95 % intervals over tasks (in 12 calls
    at most this wide: as if each task had one attempt); RL's gains in 12 calls stand beside them, paired by task, for each kind
    of tasks over the policy before it that solves more of them."""
    scores: Mapping[str, Any] = report.get("eval", {})
    if not scores:
        return Figure([], note=_NOT_YET)
    k, tasks = (max(score[name] for score in scores.values()) for name in ("k", "n_tasks"))
    rows = []
    for policy, score in scores.items():
        parts = {"in 12 calls": score, "new structures, in 12 calls": score.get("structures")}
        values = [("pass@1", score.get("pass_at_1"), score.get("ci95"))]
        values += [("greedy", score.get("pass_greedy"), score.get("ci95_greedy"))]
        shares = [(f"best of {k}", score.get("best_of_k"), score["n_tasks"])]
        shares += [(name, p.get("pass_within", {}).get("12"), p["n_tasks"]) for name, p in parts.items() if p]
        values += [(name, share, None if share is None else wilson(share, count)) for name, share, count in shares]
        rows += [scored(name, value, span, series=policy) for name, value, span in values]
    fewer = [f"{name} {score['n_tasks']}" for name, score in scores.items() if score["n_tasks"] < tasks]
    title = f"solved, of {tasks} held-out tasks" + (f" ({', '.join(fewer)})" if fewer else "")
    within_12 = report.get("gain", {}).get("within_12", {})
    gains = [scored(f"{part} over {gain['over']}", gain["gain"], gain["ci95"]) for part, gain in within_12.items()]
    panels = [bars(title, rows, POLICY, unit="share", form=".2f")]
    return Figure([*panels, *([differences("RL's gain in 12 calls", gains)] if gains else [])], width=420)


def table(report: Mapping[str, Any], figures: Sequence[str]) -> pd.DataFrame:
    """Return figures of every policy as text, one row per policy; “–” for missing values."""
    rows = {name: [shown(score.get(figure), ".3f") for figure in figures] for name, score in report["eval"].items()}
    return pd.DataFrame.from_dict(rows, "index", columns=list(figures))


def families(report: Mapping[str, Any]) -> Figure:
    """Draw pass@1 by program family, one line per family."""
    scores = {name: s for name, s in report.get("eval", {}).items() if name != "base"}
    names = sorted({family for score in scores.values() for family in score["by_family"]})
    rows = [
        {"name": family, "series": policy, "value": score["by_family"][family]}
        for family in names
        for policy, score in scores.items()
        if family in score["by_family"]
    ]
    chart = bars("pass@1 by family of program", rows, POLICY, unit="share", form=".0%", mark="point")
    return Figure([chart] if rows else [], note=_NOT_YET, width=560)


_FIGURES = {
    **{"greedy": ("pass_greedy", ".3f"), "best of k": ("best_of_k", ".3f"), "k": ("k", ""), "tasks": ("n_tasks", "")},
    **{"recovery": ("recovery", ".3f"), "runs tests": ("runs_tests", ".0%")},
    **{"calls a task": ("tool_calls_per_task", ".1f"), "calls a turn": ("calls_per_turn", ".2f")},
    **{"invalid calls": ("invalid_call_rate", ".1%"), "tries": ("tries", ".1f")},
    "reads before edit": ("reads_before_edit", ".1f"),
}
_BY_COUNT = {
    "solved in {} calls": "pass_within",
    "solved at try {}": "solved_at_try",
    "filtered best of {}": "filtered_best_of",
}
_BEHAVIOUR = {
    "tool_calls_per_task": ("tool calls a task", ".1f"),
    "calls_per_turn": ("calls a turn", ".1f"),
    "invalid_call_rate": ("invalid calls", ".1%"),
    "tests_after_wrong_edit": ("tests a wrong first edit", ".0%"),
    "retries_after_failed_test": ("edits again after a failed test", ".0%"),
    "recovery": ("solves the task then (recovery)", ".0%"),
    "tries": ("tries, parted by test runs", ".1f"),
    "reads_before_edit": ("looks before the first edit", ".1f"),
}


def by_policy(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of a table with one column per policy: its scores, what it solves by calls, tries and attempts,
    and how it works."""
    yield "", *scores
    yield "pass@1 (95 %)", *("{:.3f} ({:.3f}–{:.3f})".format(s["pass_at_1"], *s["ci95"]) for s in scores.values())
    rows = [(heading, form, [s.get(name) for s in scores.values()]) for heading, (name, form) in _FIGURES.items()]
    rows += [
        (heading.format(count), ".3f", [score.get(name, {}).get(count) for score in scores.values()])
        for heading, name in _BY_COUNT.items()
        for count in dict.fromkeys(count for score in scores.values() for count in score.get(name, {}))
    ]
    for heading, form, values in rows:
        if any(value is not None for value in values):
            yield heading, *(shown(value, form) for value in values)


def behaviour(report: Mapping[str, Any]) -> Figure:
    """Draw the behaviour of policies, one panel per figure."""
    scores = report.get("eval", {})
    charts = []
    for name, (heading, form) in _BEHAVIOUR.items():
        rows = [{"name": policy, "value": score.get(name)} for policy, score in scores.items()]
        if any(row["value"] is not None for row in rows):  # a run of an earlier version measured fewer
            charts.append(bars(heading, rows, POLICY, unit="share" if form.endswith("%") else "", form=form))
    return Figure(charts, columns=4, width=190, note=_NOT_YET)


def mismatch(report: Mapping[str, Any]) -> Figure:
    """Draw |Δ log p| between the trainer and an engine with other numerics, with the trainer's own routes and with the
    engine's."""
    if not (replay := report.get("replay")):
        return Figure([], note="the mismatch has not been measured yet")
    kinds = {"logprob_gap_p50": "median of |Δ log p|", "logprob_gap_p99": "99th percentile of |Δ log p|", "k3": "k3"}
    sides = {"off": "own routes", "on": "engine's routes replayed"}
    rows = [
        {"name": kinds[kind], "series": label, "value": replay[side][kind]}
        for kind in kinds
        for side, label in sides.items()
    ]
    title = f"engine against trainer: {replay.get('pair', 'bf16')}, {replay['tokens']:,} tokens, nats"
    colors = dict(zip(sides.values(), (style.VERMILION, style.BLUE), strict=True))
    return Figure([bars(title, rows, colors, form=".1e", least=LEAST)], width=560)


def differences(title: str, rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return differences of shares, in points, with their intervals: one over 0 shows none."""
    colors = dict.fromkeys((row["name"] for row in rows), style.INK)
    rows = [{**row, **{end: row[end] and 100 * row[end] for end in ("value", "low", "high")}} for row in rows]
    return bars(f"{title}, percentage points", rows, colors, form="+.1f", mark="point")
