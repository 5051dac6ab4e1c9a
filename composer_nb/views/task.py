"""A task as a card: what is asked, the workspace with the line that is wrong, the tests that the agent may see."""

from __future__ import annotations

import html

from composer_nb.harness.task import Task
from composer_nb.views.rollout import Html

_PRE = "font:12.5px/1.5 ui-monospace,monospace;background:none;color:#222;margin:.3em 0 .8em;white-space:pre-wrap"


def card(task: Task) -> Html:
    """The instruction and every file of the workspace; lines that the solution changes are marked and followed by what
    they should be."""
    parts = [f'<div style="font:600 13px system-ui,sans-serif">{html.escape(task.instruction)}</div>']
    for path, text in sorted(task.files.items()):
        lines = text.rstrip("\n").split("\n")
        wanted = task.solution.get(path, text).rstrip("\n").split("\n")
        shown = (
            [_line(old, new) for old, new in zip(lines, wanted, strict=True)] if len(lines) == len(wanted) else lines
        )
        parts.append(f'<div style="font:12px system-ui,sans-serif;color:#777">{html.escape(path)}</div>')
        parts.append(f'<pre style="{_PRE}">{chr(10).join(shown)}</pre>')
    look = "background:#fff;color:#222;padding:.6em;border:1px solid #e3e3e3;border-radius:4px"
    return Html(f'<div style="{look}">{"".join(parts)}</div>')


def _line(old: str, new: str) -> str:
    if old == new:
        return html.escape(old)
    return (
        f'<span style="background:#fde3b0">{html.escape(old)}</span>'
        f'<span style="color:#0072B2">  ← {html.escape(new.strip())}</span>'
    )
