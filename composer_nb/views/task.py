"""A task as a card (instruction, workspace with the wrong line, visible tests), and an attempt as a table of calls."""

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.terms.registry import called
from composer_nb.harness.untrusted import as_html
from composer_nb.views import style
from composer_nb.views.page import Html, box
from composer_nb.views.rollout import Tint

# Background of a wrong line.
MARK = Tint(style.ORANGE, 0.6).over_page


def card(task: Task) -> Html:
    """Return the instruction and all files of the workspace; lines that the solution changes are marked and followed by the
    solution."""
    parts = [f'<div class="head">{as_html(task.instruction)}</div>']
    for path, text in sorted(task.files.items()):
        if path in task.visible_tests:
            text = text.replace("\n\n\n", "\n")
        lines = text.rstrip("\n").split("\n")
        solution_lines = task.solution.get(path, text).rstrip("\n").split("\n")
        if len(lines) != len(solution_lines):
            solution_lines = lines
        rows = [_line(old, new) for old, new in zip(lines, solution_lines, strict=True)]
        parts.append(f'<div class="quiet">{as_html(path)}</div>')
        parts.append(f"<pre>{chr(10).join(rows)}</pre>")
    return box(*parts)


def turns(attempt: Attempt) -> Html:
    """Return one row per call (or text, if it was no call) with its observation; the first one of a turn has its number."""
    rows, number = [], 0
    for turn in attempt.rollout.turns:
        number += not turn.beside
        color = f' style="color:{style.VERMILION}"' if turn.error else ""
        call = f"<td{color}>{as_html(_call(turn))}</td>"
        answer = f'<td class="quiet">{as_html(turn.observation)}</td>'
        rows.append(f'<tr><td class="quiet">{"" if turn.beside else number}</td>{call}{answer}</tr>')
    return box(f'<table class="mono">{"".join(rows)}</table>')


def _call(turn: Turn) -> str:
    name, arguments = called(turn)
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" if name else turn.call


def _line(old: str, new: str) -> str:
    if old == new:
        return as_html(old)
    return f'<span style="background:{MARK}">{as_html(old)}</span><span class="quiet">  ← {as_html(new.strip())}</span>'
