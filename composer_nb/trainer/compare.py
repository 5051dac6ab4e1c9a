"""Two runs side by side: what was different in what they were asked, what they scored, what it cost.

    found = compare(open_run(a), open_run(b))       b is measured against a
    console.print(table(found))
    page(found, figures)                            one HTML page; the figures come from `views.compare`

Leaves out: whether a difference in settings caused a difference in scores. Two runs are two draws.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from composer_nb.harness.task import Task, load_tasks
from composer_nb.trainer.report import build_report, document, figure, html_table, solved_by_task
from composer_nb.trainer.rundir import RunDir

DRAWS = 2000
"""Of the bootstrap."""
SCORES = ("pass_at_1", "ci95", "pass_greedy", "ci95_greedy", "best_of_k", "k", "n_tasks", "tool_calls_per_task")
TRAINING = (
    *("steps", "samples", "sampled", "tokens_accounted", "staleness_bound", "staleness_mean", "staleness_max"),
    *("trainer_idle", "seconds_per_step", "solved_first", "solved_last"),
)


def compare(first: RunDir, second: RunDir) -> dict[str, Any]:
    """What differs between two runs; every pair is [first, second], None where one of them has nothing.

    `runs`        name, path and completeness of each
    `settings`    settings with other values, by dotted name
    `provenance`  commit, package digest, machine, versions that differ, by dotted name
    `eval`        of every policy that either scored: `scores`, and `difference` where both did (see `difference`)
    `train`       RL in figures; `wall_s` seconds by part of the recipe
    """
    reports = build_report(first), build_report(second)
    scored = [report.get("eval", {}) for report in reports]
    both = set(scored[0]) & set(scored[1])
    same = shared_tasks(first, second) if both else set[str]()
    return {
        "runs": [
            {"run": report["run"], "path": str(run.path), "complete": report["complete"]}
            for report, run in zip(reports, (first, second), strict=True)
        ],
        "settings": differing(*(report["settings"] for report in reports)),
        "provenance": differing(*(report["provenance"] for report in reports)),
        "eval": {
            name: {
                "scores": [{key: s[name].get(key) for key in SCORES} if name in s else None for s in scored],
                **({"difference": difference(first, second, name, same)} if name in both else {}),
            }
            for name in [*scored[0], *(name for name in scored[1] if name not in scored[0])]
        },
        "train": {name: pair for name in TRAINING if (pair := _pair(reports, "train", name)) != [None, None]},
        "wall_s": {name: _pair(reports, "wall_s", name) for name in {**reports[0]["wall_s"], **reports[1]["wall_s"]}},
    }


def _pair(reports: Sequence[Mapping[str, Any]], part: str, name: str) -> list[Any]:
    return [report.get(part, {}).get(name) for report in reports]


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted name -> [first, second] of every leaf that is not the same in two trees; None where one has none."""
    leaves = _leaves(first), _leaves(second)
    names = [*leaves[0], *(name for name in leaves[1] if name not in leaves[0])]
    pairs = {name: [leaf.get(name) for leaf in leaves] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def shared_tasks(first: RunDir, second: RunDir) -> set[str]:
    """Held-out tasks of both runs, if one run's are all among the other's; else none. Tasks are the same when all of them
    is, not the name alone."""
    tasks: list[dict[str, Task]] = [
        {task.id: task for task in load_tasks(run.path / "data" / "heldout.jsonl")} for run in (first, second)
    ]
    fewer, more = sorted(tasks, key=len)
    same = {name for name, task in fewer.items() if more.get(name) == task}
    return same if len(same) == len(fewer) else set()


def difference(first: RunDir, second: RunDir, policy: str, shared: set[str]) -> dict[str, Any]:
    """pass@1 of `second` − `first` with a 95 % bootstrap interval over tasks.

    With `shared` tasks the difference is taken task by task on those, and the two scores of a task stay together
    (`paired`): how hard tasks are then drops out. Without, both runs' tasks are drawn anew, each on its own.
    """
    old, new = (solved_by_task(run, policy) for run in (first, second))
    both = sorted(old.keys() & new.keys() & shared)
    if both:
        values = np.array([new[task] - old[task] for task in both])
        means = _resampled(values, 0)
    else:
        values_old, values_new = (np.array([solved[task] for task in sorted(solved)]) for solved in (old, new))
        means = _resampled(values_new, 0) - _resampled(values_old, 1)
        values = np.array([values_new.mean() - values_old.mean()])
    low, high = (float(x) for x in np.quantile(means, [0.025, 0.975]))
    counts = [len(both)] * 2 if both else [len(old), len(new)]
    return {"pass_at_1": float(values.mean()), "ci95": [low, high], "paired": bool(both), "n_tasks": counts}


def _resampled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Means of DRAWS resamples."""
    return np.asarray(np.random.default_rng(seed).choice(values, (DRAWS, len(values))).mean(1))


# As text


def score_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Head and rows of the table of scores."""
    yield ("policy", "pass@1, first", "second", "difference", "95 %", "", "greedy", "best of k")
    for name, part in found["eval"].items():
        scores, gap = part["scores"], part.get("difference")
        how = "" if gap is None else "paired by task" if gap["paired"] else "other tasks, not paired"
        yield (
            name,
            *("–" if s is None else "{:.3f} ({:.3f}–{:.3f})".format(s["pass_at_1"], *s["ci95"]) for s in scores),
            "" if gap is None else f"{gap['pass_at_1']:+.3f}",
            "" if gap is None else "{:+.3f} to {:+.3f}".format(*gap["ci95"]),
            how,
            *(
                " → ".join("–" if s is None else f"{s[key]:.3f}" for s in scores)
                for key in ("pass_greedy", "best_of_k")
            ),
        )


def pair_rows(pairs: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str, str]]:
    """A row a name with both values."""
    for name, (old, new) in pairs.items():
        yield name, _spoken(old), _spoken(new)


def _spoken(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else value if isinstance(value, str) else json.dumps(value)


_PARTS = {
    "settings": "settings that differ",
    "provenance": "code and machine",
    "train": "reinforcement learning",
    "wall_s": "seconds",
}


def table(found: Mapping[str, Any]) -> Group:
    """The comparison for a terminal."""
    names = [run["run"] for run in found["runs"]]
    shown: list[Table | str] = [f"first: {escape(names[0])}   second: {escape(names[1])}"]
    for part, title in _PARTS.items():
        rows = list(pair_rows(found[part]))
        shown.append(_rich(title, ("", "first", "second"), rows) if rows else f"[bold]{title}[/]: none")
        if part == "provenance" and found["eval"]:
            head, *scores = score_rows(found)
            shown.append(_rich("held-out tasks", head, scores))
    return Group(*shown)


def _rich(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(*head, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def page(found: Mapping[str, Any], figures: Mapping[str, tuple[str, bytes]]) -> str:
    """One HTML page with everything in it; `figures` are name -> (caption, PNG)."""
    names = [run["run"] for run in found["runs"]]
    body = [f"<h1>{html.escape(names[0])} and {html.escape(names[1])}</h1>"]
    for run in found["runs"]:
        if not run["complete"]:
            body.append(f"<p class=note>{html.escape(run['run'])} is not complete.</p>")
    if found["eval"]:
        head, *rows = score_rows(found)
        body += ["<h2>Held-out tasks</h2>", html_table(rows, head)]
    body += [figure(name, caption, png) for name, (caption, png) in figures.items()]
    for part, title in _PARTS.items():
        rows = list(pair_rows(found[part]))
        body.append(f"<h2>{title.capitalize()}</h2>")
        body.append(html_table(rows, ("", *names)) if rows else "<p>None.</p>")
    return document(" and ".join(names), body)
