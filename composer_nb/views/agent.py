"""An agent at work with the product's tools: its conversation, its diff with a verdict, what calls took, and the bench's arms."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_nb.harness.product.show import call_line
from composer_nb.harness.product.work import Work
from composer_nb.harness.rollout import Turn
from composer_nb.views.page import Html, box
from composer_nb.views.style import BLUE, GREEN, GREY, SKY, VERMILION, Picture, as_share, key, title

if TYPE_CHECKING:
    import ipywidgets

_LINES = {"+": "background:#00996622", "-": "background:#d55e0022", "@": "opacity:.6"}


def conversation(turns: Sequence[Turn]) -> Html:
    """What was said, and every call with its answer folded under it. Failed calls are red."""
    parts: list[str] = []
    for turn in turns:
        if turn.said:
            parts.append(f"<p>{html.escape(turn.said)}</p>")
        if turn.call or turn.error:
            colour = f";color:{VERMILION}" if turn.error else ""
            head = f'<code style="background:none{colour}">{html.escape(call_line(turn))}</code>'
            took = f'<span class="quiet"> {turn.seconds * 1e3:.0f} ms</span>'
            parts.append(
                f"<details><summary>{head}{took}</summary><pre>{html.escape(turn.observation)}</pre></details>"
            )
    return box(*parts)


def diff(text: str) -> Html:
    """A unified diff in colours."""
    lines = [
        f'<span style="{_LINES.get(line[:1], "")}">{html.escape(line)}</span>' for line in text.rstrip("\n").split("\n")
    ]
    return box(f"<pre>{chr(10).join(lines)}</pre>")


def verdict(work: Work) -> ipywidgets.VBox:
    """Buttons that accept or reject what an agent did. Nothing in a notebook waits for them; what was said last counts, and an
    accepted change can not be rejected any more."""
    import ipywidgets

    yes = ipywidgets.Button(description="Accept", icon="check", tooltip=f"write the changes into {work.source.root}")
    no = ipywidgets.Button(description="Reject", icon="times", tooltip="keep the repository as it is")
    said = ipywidgets.HTML()

    def decide(action: Callable[[], None], text: str) -> None:
        try:
            action()
        except (ValueError, OSError) as error:
            said.value = html.escape(str(error))
            return
        said.value = text
        yes.disabled = no.disabled = True

    yes.on_click(lambda _: decide(work.accept, f"accepted: {len(work.changes)} files changed"))
    no.on_click(lambda _: decide(work.reject, "rejected: nothing was changed"))
    return ipywidgets.VBox([ipywidgets.HTML(diff(work.diff).text), ipywidgets.HBox([yes, no, said])])


def times(turns: Sequence[Turn]) -> Picture:
    """A bar a call, in the order of calls; those of one turn have one shade, failed ones another colour."""
    calls = [turn for turn in turns if turn.call or turn.error]
    picture = Picture(8.0, 0.32 * len(calls) + 1.0)
    [ax] = picture.panels(1, 1)
    turn_number = 0
    for place, turn in enumerate(calls):
        turn_number += not turn.beside
        colour = VERMILION if turn.error else (BLUE, SKY)[turn_number % 2]
        ax.barh(place, turn.seconds * 1e3, color=colour, height=0.7)
        ax.text(turn.seconds * 1e3, place, f"  {call_line(turn)[:60]}", va="center", fontsize=8, color=GREY)
    ax.invert_yaxis()
    ax.set_yticks([])
    ax.set_xlim(0, 1e3 * max([0.001, *(turn.seconds for turn in calls)]) * 2.2)
    title(ax, "what each call took, in the order of calls (one shade a turn)", "milliseconds")
    return picture


def arms(report: Mapping[str, Any]) -> Picture:
    """Solved tasks by arm with their intervals, and calls a task."""
    names = list(report["arms"])
    rows = [report["arms"][name] for name in names]
    picture = Picture(8.5, 2.8)
    solved, calls = picture.panels(1, 2)
    for place, row in enumerate(rows):
        low, high = row["ci95"]
        solved.bar(place, row["pass_at_1"], color=BLUE, width=0.6)
        solved.plot([place, place], [low, high], color=GREY, linewidth=2)
        valid = row["tool_calls_per_task"] * (1 - row["invalid_call_rate"])
        calls.bar(place, valid, color=GREEN, width=0.6, label="answered" if not place else None)
        invalid = row["tool_calls_per_task"] - valid
        calls.bar(place, invalid, bottom=valid, color=VERMILION, width=0.6, label="invalid" if not place else None)
    for ax in (solved, calls):
        ax.set_xticks(range(len(names)), names)
    title(as_share(solved, 1.05), "solved (pass@1, 95 % over tasks)")
    title(calls, "calls a task")
    calls.set_ylim(0, calls.get_ylim()[1] * 1.2)
    key(calls, loc="upper center", ncols=2)
    return picture
