"""Views of an agent with the product's tools: its conversation, its diff with a verdict, the arms of the bench, their
score against cost, what a plan is worth, the quality of changes, verdicts on candidates for tasks, sizes of tasks, what a bench
can show, the gate of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from composer_nb.harness.bench import detectable as smallest
from composer_nb.harness.quality import solution_lines
from composer_nb.harness.rollout import Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import as_html
from composer_nb.production.show import call_line
from composer_nb.production.work import Work
from composer_nb.views import style
from composer_nb.views.page import Html, box, shown, text_table
from composer_nb.views.style import Picture, as_share, key, one_panel, title

if TYPE_CHECKING:
    import ipywidgets

_POINTS = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION, style.PURPLE, style.SKY)
_LINES = {"+": "background:#00996622", "-": "background:#d55e0022", "@": "opacity:.6"}


# Verdicts on a change of a repository (`NoTask` in making/trial.py), and what they mean.
VERDICTS = {
    "kept": "tests notice it, each time",
    "unseen": "no test notices it",
    "too much": "too many tests fail",
    "silent": "no symptom to report",
    "flaky": "no test fails each time",
    "endless": "the tests do not end",
    "ends early": "the tests are cut short",
    "copied": "the answer stands elsewhere",
    "ungraded": "the grader errs on it",
    "unfit": "it is no valid task",
}


def verdicts(kinds: Sequence[Mapping[str, Any]]) -> Picture:
    """Draw the changes that were tried as tasks (`kinds` of the summary of `make`): a bar for each verdict, whose parts are kinds
    of change. A part has its name where there is room."""
    counts = {name: {row["kind"]: row["verdicts"].get(name, 0) for row in kinds} for name in VERDICTS}
    counts = {name: by_kind for name, by_kind in counts.items() if any(by_kind.values())}
    most = max(sum(by_kind.values()) for by_kind in counts.values())
    picture, ax = one_panel(9.5, 0.6 + 0.45 * len(counts))
    for row, (name, by_kind) in enumerate(counts.items()):
        left, color = 0, style.SKY if name == "kept" else style.ORANGE
        for kind, count in by_kind.items():
            ax.barh(row, count, left=left, color=color, edgecolor="white", height=0.7)
            if 6.5 * count / most > 0.07 * len(kind):  # inches
                style.note(ax, left + count / 2, row, kind, ha="center", color=style.DARK)
            left += count
    style.rows(ax, [f"{name} ({sum(by_kind.values())}): {VERDICTS[name]}" for name, by_kind in counts.items()])
    style.whole_steps(title(ax, "changes that were tried, by verdict"))
    return picture


def conversation(turns: Sequence[Turn]) -> Html:
    """Return the messages and calls as HTML, each observation folded under its call. Failed calls are red."""
    parts: list[str] = []
    for turn in turns:
        if turn.said:
            parts.append(f"<p>{as_html(turn.said)}</p>")
        if turn.observation and not turn.call and not turn.error:
            parts.append(f"<p><b>user</b> {as_html(turn.observation)}</p>")
        if turn.call or turn.error:
            colour = f";color:{style.VERMILION}" if turn.error else ""
            head = f'<code style="background:none{colour}">{as_html(call_line(turn))}</code>'
            took = f'<span class="quiet"> {turn.seconds * 1e3:.0f} ms</span>'
            parts.append(f"<details><summary>{head}{took}</summary><pre>{as_html(turn.observation)}</pre></details>")
    return box(*parts)


def diff(text: str) -> Html:
    """Return a unified diff in colours."""
    plain = text.rstrip("\n").split("\n")
    lines = [f'<span style="{_LINES.get(line[:1], "")}">{as_html(line)}</span>' for line in plain]
    return box(f"<pre>{chr(10).join(lines)}</pre>")


def verdict(work: Work) -> ipywidgets.VBox:
    """Return buttons that accept or reject the result of an agent. No cell waits for them; the last click counts, and an accepted
    change cannot be rejected later."""
    import ipywidgets

    yes = ipywidgets.Button(description="Accept", icon="check", tooltip=f"write the changes into {work.source.root}")
    no = ipywidgets.Button(description="Reject", icon="times", tooltip="keep the repository as it is")
    note = ipywidgets.HTML()

    def decide(action: Callable[[], None], text: str) -> None:
        try:
            action()
        except (ValueError, OSError) as error:
            note.value = as_html(str(error))
            return
        note.value = text
        yes.disabled = no.disabled = True

    yes.on_click(lambda _: decide(work.accept, f"accepted: {len(work.changes)} files changed"))
    no.on_click(lambda _: decide(work.reject, "rejected: nothing was changed"))
    return ipywidgets.VBox([ipywidgets.HTML(diff(work.diff).text), ipywidgets.HBox([yes, no, note])])


def arms(report: Mapping[str, Any]) -> Picture:
    """Draw solved tasks with intervals, and calls per task, by arm."""
    names, rows = list(report["arms"]), list(report["arms"].values())
    picture = Picture(8.5, 2.8)
    solved, calls = picture.panels(1, 2)
    scores = [row.get("pass_at_1") for row in rows]  # none where every attempt was lost
    style.grouped(solved, names, [style.BarSeries("", style.BLUE, scores, [row.get("ci95") for row in rows])], ".0%")
    counts = [row.get("tool_calls_per_task") or 0.0 for row in rows]
    rates = [row.get("invalid_call_rate") or 0.0 for row in rows]  # without calls there is no rate
    invalid = [count * rate for count, rate in zip(counts, rates, strict=True)]
    valid = [count - wrong for count, wrong in zip(counts, invalid, strict=True)]
    calls.bar(names, valid, color=style.GREEN, width=0.6, label="answered")
    calls.bar(names, invalid, bottom=valid, color=style.VERMILION, width=0.6, label="invalid")
    title(as_share(solved, 1.15), "solved (pass@1, 95 % over tasks)")
    title(calls, "calls a task")
    calls.set_ylim(0, calls.get_ylim()[1] * 1.2)
    key(calls)
    return picture


def plan_worth(report: Mapping[str, Any]) -> Picture:
    """Draw pass@1, with its interval, against the tokens and dollars of a task, without a plan and with one; the gain stands
    above."""
    rows = {"without a plan": next(iter(report["arms"].values())), "with a plan": report["arms"]["planned"]}
    if "gain" not in rows["with a plan"]:
        return style.empty("no task has graded attempts both with and without a plan")
    costs = {"tokens_per_task": "tokens a task", "dollars_per_task": "dollars a task"}
    priced = [name for name in costs if None not in [row[name] for row in rows.values()]]
    gain, low, high = (100 * value for value in rows["with a plan"]["gain"])
    headings = [f"what a plan is worth: {gain:+.1f} points ({low:+.1f} to {high:+.1f})", ""]
    picture = Picture(4.6 * len(priced), 3.0)
    for ax, cost, heading in zip(picture.panels(1, len(priced)), priced, headings, strict=False):
        for color, (name, row) in zip((style.ORANGE, style.BLUE), rows.items(), strict=True):
            style.interval(ax, [row[cost]] * 2, row["ci95"])
            ax.plot(row[cost], row["pass_at_1"], "o", color=color, markersize=9, label=name)
        ax.set_xlim(0, 1.15 * max(row[cost] for row in rows.values()))
        ax.locator_params(axis="x", nbins=5)
        title(as_share(ax, 1.05), heading, costs[cost], "solved (pass@1, 95 % over tasks)")
        key(ax)
    return picture


def detectable(tasks: Sequence[int], samples: Sequence[int]) -> Picture:
    """Draw the smallest difference that a bench shows, by its number of tasks, one line for each number of attempts a task."""
    picture, ax = one_panel(7.0, 2.8)
    for count, color in zip(samples, (style.BLUE, style.GREEN, style.VERMILION, style.PURPLE), strict=False):
        differences = [100 * smallest(number, count) for number in tasks]
        ax.plot(tasks, differences, "o-", color=color, label=f"{count} attempt{'s' * (count > 1)} a task")
    ax.set(xscale="log", yscale="log")
    style.log_axis(ax.yaxis)
    ax.set_xticks(tasks, [str(number) for number in tasks])
    title(ax, "smallest difference in pass@1 that shows", "tasks", "points")
    key(ax)
    return picture


def gates(judgements: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Draw what the gate compares (`improve.judge`) for updates of one policy, by name: pass@1 and the share of attempts that
    edit, and the change of pass@1 with its interval."""
    picture = Picture(8.5, 2.8)
    ax, change = picture.panels(1, 2)
    names = {"pass_at_1": "pass@1", "edits": "attempts that edit"}
    sides = {"before": next(iter(judgements.values()))["before"]} | {n: j["after"] for n, j in judgements.items()}
    values = [[side[name] for name in names] for side in sides.values()]
    style.grouped(ax, [*names.values()], [*map(style.BarSeries, sides, (style.GREY, *style.COLORS), values)], ".0%")
    title(as_share(ax, 1.15), "before and after an update")
    change.axhline(0, color=style.GREY, linewidth=0.8)
    for position, judgement in enumerate(judgements.values()):
        gain, low, high = (100 * value for value in (judgement["gain"], *judgement["ci95"]))
        style.interval(change, [position, position], [low, high])
        change.plot(position, gain, "o", color=style.COLORS[position], markersize=8)
        style.note(change, position + 0.08, gain, f"{gain:+.0f} ({low:+.0f} to {high:+.0f})", va="bottom")
    change.set(xticks=range(len(judgements)), xticklabels=list(judgements), xlim=(-0.5, len(judgements)), ymargin=0.15)
    title(change, "change of pass@1, 95 % over tasks", y="points")
    key(ax)
    return picture


# Columns of the table of quality, and the statistic in each.
QUALITY = {
    "lines": ("lines", "median"),
    "human's": ("human_lines", "median"),
    "ratio": ("lines_ratio", "median"),
    "more": ("lines_more", "mean"),
    "files more": ("extra_files", "mean"),
    "new names": ("new_names", "mean"),
    "needless": ("needless_names", "mean"),
}


def quality_table(report: Mapping[str, Any]) -> Table:
    """Return a table of the changes that passed, beside the humans', with a row for each arm, and with the levels of a judge."""
    rows = []
    for arm, row in report["arms"].items():
        quality, judge = row["quality"], row.get("judge", {})
        cells = [f"{quality[name][statistic]:.3g}" if quality else "–" for name, statistic in QUALITY.values()]
        rows.append([arm, str(quality["n"] if quality else 0), *cells, shown(judge.get("mean"), ".2f")])
        rows[-1].append(f"{judge['failed']} of {judge['n'] + judge['failed']}" if judge else "–")
    return text_table(rows, ("changes", "passed", *QUALITY, "judge", "no verdict"), numbers=True)


COSTS = {
    "tokens_per_task": "tokens a task",
    "seconds_p50": "seconds a task, median",
    "dollars_per_task": "dollars a task",
}


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the positions of the points (cost, score) that no other beats: none scores as much for less, or more for as much.
    In order of cost."""
    best, positions = -math.inf, list[int]()
    for position in sorted(range(len(points)), key=lambda n: (points[n][0], -points[n][1])):
        if points[position][1] > best:
            best = points[position][1]
            positions.append(position)
    return positions


def pareto(reports: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Draw score against each cost that all arms report, a point with its 95 % interval for each arm of each evaluation. A line
    joins the points that no other beats."""
    rows = {
        f"{name}, {arm}".replace("$", r"\$"): row
        for name, report in reports.items()
        for arm, row in report["arms"].items()
        if row["n_tasks"]
    }
    costs = [name for name in COSTS if rows and all(row.get(name) for row in rows.values())]
    if not costs:
        return style.empty("there is no score yet whose tokens, seconds or dollars were counted")
    picture = Picture(1.0 + 3.6 * len(costs), 3.2 + 0.16 * len(rows))
    for ax, name in zip(picture.panels(1, len(costs), sharey=True), costs, strict=True):
        points = [(float(row[name]), float(row["pass_at_1"])) for row in rows.values()]
        ax.plot(*zip(*(points[n] for n in front(points)), strict=True), color=style.GREY, linewidth=1, zorder=1)
        for (x, y), (label, row), (marker, color) in zip(points, rows.items(), cycle(product("osD^v", _POINTS))):
            style.interval(ax, [x, x], row["ci95"])
            ax.plot(x, y, marker, color=color, markersize=8, label=label)
        if max(points)[0] > 8 * min(points)[0]:
            ax.set_xscale("log")
            style.log_axis(ax.xaxis)
        else:
            ax.set_xlim(0, 1.1 * max(points)[0])
        title(as_share(ax, 1.05), "" if ax is not picture.axes[0] else "pass@1, 95 % over tasks", COSTS[name])
    key(ax)
    return picture


def sizes(tasks: Sequence[Task]) -> Picture:
    """Draw boxplots of the lines that solutions change, and of the lengths of requests, with median and quartiles in words."""
    parts = {
        "lines that solutions change": [solution_lines(t) for t in tasks if t.solution and t.grader != "script"],
        "characters of requests": [len(task.instruction) for task in tasks],
    }
    picture = Picture(8.5, 3.2)
    for ax, (name, values) in zip(picture.panels(1, 2), parts.items(), strict=True):
        title(ax, f"{name}, {len(values)} tasks")
        if not values:
            style.note(ax, 0.5, 0.5, "no task has a solution", ha="center", transform=ax.transAxes)
            continue
        inks: dict[str, Any] = {f"{part}props": {"color": style.INK} for part in ("box", "whisker", "cap")}
        inks |= {"flierprops": {"markeredgecolor": style.INK}, "medianprops": {"color": style.BLUE}}
        ax.boxplot([values], widths=0.5, whis=(5, 95), **inks)
        if max(values) > 8 * max(1, min(values)):
            ax.set_yscale("symlog", linthresh=1)
            style.log_axis(ax.yaxis)
        else:
            style.from_zero(ax)
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        ax.set_xticks([1], [f"median {middle:g}, quartiles {low:g} and {high:g}, whiskers 5 and 95 %"])
    return picture
