"""A task as a card (what is asked, the workspace with the line that is wrong, the tests that the agent may see), and an
attempt at it as a table of calls and observations."""

from __future__ import annotations

import html
import json

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.task import Task
from composer_nb.views.page import Html

_BOX = "background:#fff;color:#222;padding:.6em;border:1px solid #e3e3e3;border-radius:4px;overflow-x:auto"
_PRE = "font:12.5px/1.5 ui-monospace,monospace;background:none;color:#222;margin:.3em 0 .8em;white-space:pre-wrap"


def card(task: Task) -> Html:
    """The instruction and every file of the workspace; lines that the solution changes are marked and followed by what
    they should be."""
    parts = [f'<div style="font:600 13px system-ui,sans-serif">{html.escape(task.instruction)}</div>']
    for path, text in sorted(task.files.items()):
        if path in task.visible_tests:
            text = text.replace("\n\n\n", "\n")
        lines = text.rstrip("\n").split("\n")
        wanted = task.solution.get(path, text).rstrip("\n").split("\n")
        shown = (
            [_line(old, new) for old, new in zip(lines, wanted, strict=True)] if len(lines) == len(wanted) else lines
        )
        parts.append(f'<div style="font:12px system-ui,sans-serif;color:#777">{html.escape(path)}</div>')
        parts.append(f'<pre style="{_PRE}">{chr(10).join(shown)}</pre>')
    return Html(f'<div style="{_BOX}">{"".join(parts)}</div>')


def turns(attempt: Attempt) -> Html:
    """One row a turn: the call as a function call, or as written where it was none, and what was answered."""
    cell = "text-align:left;vertical-align:top;padding:.15em 1.5em .15em 0"
    rows = []
    for number, turn in enumerate(attempt.rollout.turns, 1):
        color = "#D55E00" if turn.error else "#222"
        call = f'<td style="{cell};color:{color}">{html.escape(_call(turn.call))}</td>'
        answer = f'<td style="{cell};color:#777;white-space:pre-wrap">{html.escape(turn.observation)}</td>'
        rows.append(f'<tr style="background:none"><td style="{cell};color:#777">{number}</td>{call}{answer}</tr>')
    table = f'<table style="font:12.5px/1.5 ui-monospace,monospace;border:0">{"".join(rows)}</table>'
    return Html(f'<div style="{_BOX}">{table}</div>')


def _call(text: str) -> str:
    try:
        call = json.loads(text)
        given = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
        return f"{call['name']}({given})"
    except (json.JSONDecodeError, TypeError, KeyError):  # what the agent wrote was no call
        return text


def _line(old: str, new: str) -> str:
    if old == new:
        return html.escape(old)
    return (
        f'<span style="background:#fde3b0">{html.escape(old)}</span>'
        f'<span style="color:#0072B2">  ← {html.escape(new.strip())}</span>'
    )
