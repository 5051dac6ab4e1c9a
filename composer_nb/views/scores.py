"""Scores of policies on held-out tasks, by family and behaviour, and the mismatch of engine and trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, zip_longest
from typing import Any

import pandas as pd

from composer_nb.views import style
from composer_nb.views.page import shown
from composer_nb.views.style import POLICY, Picture, as_share, key, title

# Lower end of a mismatch axis, below float32's resolution.
LEAST = 1e-13
_NOT_YET = "no policy has been scored yet"


def policies(report: Mapping[str, Any]) -> Picture:
    """Draw pass@1 and greedy with 95 % intervals over tasks, best of k, and what is solved in 12 calls, of every policy. RL's
    gain stands below, with its interval."""
    scores: Mapping[str, Any] = report.get("eval", {})
    if not scores:
        return style.empty(_NOT_YET)
    picture, ax = style.one_panel(11.5, 3.4)
    two_sets = any("structures" in score for score in scores.values())
    sides = []
    for name, score in scores.items():
        parts = [score, score.get("structures", {})] if two_sets else [score]
        values = [score.get(figure) for figure in ("pass_at_1", "pass_greedy", "best_of_k")]
        values += [part.get("pass_within", {}).get("12") for part in parts]
        intervals = [score.get("ci95"), score.get("ci95_greedy"), None, *(None for _ in parts)]
        sides.append(style.BarSeries(name, POLICY.get(name, style.PURPLE), values, intervals))
    k, tasks = (max(score[name] for score in scores.values()) for name in ("k", "n_tasks"))
    names = ["pass@1", "greedy", f"best of {k}", "in 12 calls", *["new structures,\nin 12 calls"] * two_sets]
    for n, part in zip(range(3, len(names)), ("heldout", "structures"), strict=False):
        if gain := report.get("gain", {}).get("within_12", {}).get(part):
            low, high = gain["ci95"]
            names[n] += f"\nfinal − {gain['over']}: {100 * gain['gain']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    style.grouped(ax, names, sides, ".2f")
    as_share(ax, min(1.12, max(0.2, 1.25 * max(s["best_of_k"] for s in scores.values()) + 0.1)))
    fewer = [f"{name} {score['n_tasks']}" for name, score in scores.items() if score["n_tasks"] < tasks]
    title(ax, f"solved, of {tasks} held-out tasks" + (f" ({', '.join(fewer)})" if fewer else ""), "", "share of tasks")
    key(ax)
    return picture


def table(report: Mapping[str, Any], figures: Sequence[str]) -> pd.DataFrame:
    """Return figures of every policy as text, one row per policy; “–” for missing values."""
    rows = {name: [shown(score.get(figure), ".3f") for figure in figures] for name, score in report["eval"].items()}
    return pd.DataFrame.from_dict(rows, "index", columns=list(figures))


def families(report: Mapping[str, Any]) -> Picture:
    """Draw pass@1 by program family, one line per family."""
    scores = {name: s for name, s in report.get("eval", {}).items() if name != "base"}
    if not scores:
        return style.empty(_NOT_YET)
    names = sorted({family for score in scores.values() for family in score["by_family"]})
    picture, ax = style.one_panel(7.5, 0.9 + 0.42 * len(names))
    style.rows(ax, names)
    for row, family in enumerate(names):
        shares = [score["by_family"][family] for score in scores.values() if family in score["by_family"]]
        ax.plot([min(shares), max(shares)], [row, row], color=style.PALE, linewidth=3, zorder=1)
    for (name, score), marker in zip(scores.items(), cycle("sDo^v")):
        points = [(score["by_family"][family], row) for row, family in enumerate(names) if family in score["by_family"]]
        color = POLICY.get(name, style.PURPLE)
        ax.plot(*zip(*points, strict=True), marker, color=color, markersize=7.5, label=name, alpha=0.9)
    ax.set_xlim(-0.03, 1.03)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    title(ax, "pass@1 by family of program", "share of attempts solved")
    key(ax)
    return picture


_FIGURES = {
    "greedy": ("pass_greedy", ".3f"),
    "best of k": ("best_of_k", ".3f"),
    "k": ("k", ""),
    "tasks": ("n_tasks", ""),
    "recovery": ("recovery", ".3f"),
    "runs tests": ("runs_tests", ".0%"),
    "calls a task": ("tool_calls_per_task", ".1f"),
    "calls a turn": ("calls_per_turn", ".2f"),
    "invalid calls": ("invalid_call_rate", ".1%"),
    "tries": ("tries", ".1f"),
    "reads before edit": ("reads_before_edit", ".1f"),
}
_BY_COUNT = {
    "solved in {} calls": "pass_within",
    "solved at try {}": "solved_at_try",
    "filtered best of {}": "filtered_best_of",
}
_BEHAVIOUR = {
    "tool_calls_per_task": ("tool calls a task", "{:.1f}"),
    "calls_per_turn": ("calls a turn", "{:.1f}"),
    "invalid_call_rate": ("invalid calls", "{:.1%}"),
    "tests_after_wrong_edit": ("tests a wrong first edit", "{:.0%}"),
    "retries_after_failed_test": ("edits again after a failed test", "{:.0%}"),
    "recovery": ("solves the task then (recovery)", "{:.0%}"),
    "tries": ("tries, parted by test runs", "{:.1f}"),
    "reads_before_edit": ("looks before the first edit", "{:.1f}"),
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


def behaviour(report: Mapping[str, Any]) -> Picture:
    """Draw the behaviour of policies, one panel per figure."""
    scores = report.get("eval", {})
    if not scores:
        return style.empty(_NOT_YET)
    picture = Picture(11.5, 4.2)
    measured = [name for name in _BEHAVIOUR if any(name in score for score in scores.values())]
    for ax, name in zip_longest(picture.panels(2, 4), measured):
        if name is None:  # a run of an earlier version measured fewer
            ax.set_axis_off()
            continue
        heading, form = _BEHAVIOUR[name]
        values = {x: score[name] for x, score in enumerate(scores.values()) if score.get(name) is not None}
        names = list(scores)
        ax.bar(list(values), list(values.values()), 0.7, color=[POLICY.get(names[x], style.PURPLE) for x in values])
        for x in range(len(names)):
            text = form.format(values[x]) if x in values else "–"
            ax.text(x, values.get(x, 0.0), text, ha="center", va="bottom", fontsize=8.5, color=style.INK)
        ax.set_xticks(range(len(names)), names, fontsize=8)
        ax.set_xlim(-0.6, len(names) - 0.4)
        ax.set_ylim(0, max([*values.values(), 1e-9]) * 1.2 if "%" not in form else 1.15)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        title(ax, heading)
    return picture


def mismatch(report: Mapping[str, Any]) -> Picture:
    """Draw |Δ log p| between the trainer and an engine with other numerics, with the trainer's own routes and with the
    engine's."""
    replay = report.get("replay")
    if not replay:
        return style.empty("the mismatch has not been measured yet")
    picture, ax = style.one_panel(7.0, 2.9)
    kinds = {"logprob_gap_p50": "median of |Δ log p|", "logprob_gap_p99": "99th percentile of |Δ log p|", "k3": "k3"}
    sides = (("off", style.VERMILION, "own routes"), ("on", style.BLUE, "engine's routes replayed"))
    both = [style.BarSeries(label, color, [replay[name][kind] for kind in kinds]) for name, color, label in sides]
    style.log_bars(ax, list(kinds.values()), both, LEAST)
    title(ax, f"engine against trainer: {replay.get('pair', 'bf16')}, {replay['tokens']:,} tokens", "", "nats")
    key(ax)
    return picture
