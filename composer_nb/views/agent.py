"""Views of an agent with the product's tools: its conversation, its diff with a verdict, call times, the arms of the bench, what
a plan is worth, what a bench can show, and the gate of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_nb.harness.rollout import Turn
from composer_nb.harness.untrusted import as_html
from composer_nb.production.bench import detectable as smallest
from composer_nb.production.show import call_line
from composer_nb.production.work import Work
from composer_nb.views import style
from composer_nb.views.page import Html, box
from composer_nb.views.style import Picture, as_share, key, one_panel, title

if TYPE_CHECKING:
    import ipywidgets

_LINES = {"+": "background:#00996622", "-": "background:#d55e0022", "@": "opacity:.6"}


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


def times(turns: Sequence[Turn]) -> Picture:
    """Draw one bar per call, in order. Calls of one turn share a shade; failed calls have another colour."""
    calls = [turn for turn in turns if turn.call or turn.error]
    picture, ax = one_panel(8.0, 0.32 * len(calls) + 1.0)
    turn_number = 0
    for row, turn in enumerate(calls):
        turn_number += not turn.beside
        colour = style.VERMILION if turn.error else (style.BLUE, style.SKY)[turn_number % 2]
        ax.barh(row, turn.seconds * 1e3, color=colour, height=0.7)
        ax.text(turn.seconds * 1e3, row, f"  {call_line(turn)[:60]}", va="center", fontsize=8, color=style.INK)
    ax.invert_yaxis()
    ax.set(yticks=[], xlim=(0, 1e3 * max([0.001, *(turn.seconds for turn in calls)]) * 2.2))
    title(ax, "what each call took, in the order of calls (one shade a turn)", "milliseconds")
    return picture


def arms(report: Mapping[str, Any]) -> Picture:
    """Draw solved tasks with intervals, and calls per task, by arm."""
    names, rows = list(report["arms"]), list(report["arms"].values())
    picture = Picture(8.5, 2.8)
    solved, calls = picture.panels(1, 2)
    graded = ["pass_at_1" in row for row in rows]  # otherwise every attempt was lost
    scores = [row.get("pass_at_1") for row in rows]
    style.grouped(solved, names, [style.BarSeries("", style.BLUE, scores, [row.get("ci95") for row in rows])])
    for column in range(len(rows)):
        if not graded[column]:
            solved.text(column, 0.0, "–", ha="center", va="bottom")
    counts = [row.get("tool_calls_per_task") or 0.0 for row in rows]
    rates = [row.get("invalid_call_rate") or 0.0 for row in rows]  # without calls there is no rate
    invalid = [count * rate for count, rate in zip(counts, rates, strict=True)]
    valid = [count - wrong for count, wrong in zip(counts, invalid, strict=True)]
    calls.bar(names, valid, color=style.GREEN, width=0.6, label="answered")
    calls.bar(names, invalid, bottom=valid, color=style.VERMILION, width=0.6, label="invalid")
    title(as_share(solved, 1.05), "solved (pass@1, 95 % over tasks)")
    title(calls, "calls a task")
    calls.set_ylim(0, calls.get_ylim()[1] * 1.2)
    key(calls, loc="upper center", ncols=2)
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
        key(ax, loc="upper left")
    return picture


def detectable(tasks: Sequence[int], samples: Sequence[int]) -> Picture:
    """Draw the smallest difference that a bench shows, by its number of tasks, one line for each number of attempts a task."""
    picture, ax = one_panel(7.0, 2.8)
    for count, color in zip(samples, (style.BLUE, style.GREEN, style.VERMILION, style.PURPLE), strict=False):
        differences = [smallest(number, count) for number in tasks]
        ax.plot(tasks, differences, "o-", color=color, label=f"{count} attempts a task")
    ax.set_xscale("log")
    ax.set_xticks(tasks, [str(number) for number in tasks])
    title(as_share(ax, 0.3), "smallest difference in pass@1 that shows, by attempts", "tasks")
    key(ax)
    return picture


def gate(judgement: Mapping[str, Any]) -> Picture:
    """Draw what the gate of an update compares (`improve.judge`): pass@1 and the share of attempts that edit."""
    picture, ax = one_panel(6.0, 2.6)
    names = {"pass_at_1": "pass@1", "edits": "attempts that edit"}
    colors = {"before": style.SKY, "after": style.BLUE}
    sides = [style.BarSeries(when, color, [judgement[when][name] for name in names]) for when, color in colors.items()]
    style.grouped(ax, list(names.values()), sides, ".2f")
    low, high = judgement["ci95"]
    title(as_share(ax, 1.2), f"change of pass@1 {judgement['gain']:+.3f} ({low:+.3f} to {high:+.3f})")
    key(ax, ncols=2)
    return picture
