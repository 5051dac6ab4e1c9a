"""Tools that report: the linter's findings, and the agent's to-do list."""

import re
from contextlib import suppress
from typing import Annotated

from pydantic import Field

from composer_nb.harness.tools.arguments import Path, Todo, tool
from composer_nb.harness.tools.session import Observation, Session, below, clean
from composer_nb.harness.tools.tool_call import ToolError, invalid

PYTHON = (".py", ".pyi", ".ipynb")
MARKS = {"pending": "[ ]", "in_progress": "[>]", "completed": "[x]", "cancelled": "[-]"}


@tool(needs="ruff")
def read_lints(session: Session, paths: Annotated[list[Path] | None, Field(max_length=100)] = None) -> Observation:
    """Show what the linter ruff finds in Python files or folders.

    paths: Files or folders (default: all).
    """
    linted: list[str] = []
    others: list[str] = []
    for text in paths or ["."]:
        path = session.place(text)
        is_file = False
        with suppress(IsADirectoryError):
            is_file = session.exists(path)
        (others if is_file and not path.endswith(PYTHON) else linted).append(path)
    findings = f"(no linter for {', '.join(others)})\n" if others else ""
    if linted:
        command = ["ruff", "check", "--no-cache", "--quiet", "--output-format=concise", "--"]
        result = session.program([*command, *(below(path) for path in linted)])
        if result.exit_code not in (0, 1):
            message = " ".join(clean(result.stderr).split())[:500]
            raise ToolError("UnexpectedEnvironment", f"ruff: {message or f'ended with {result.exit_code}'}")
        lines = [line for line in clean(result.stdout).splitlines() if re.match(r".+:\d+:\d+: ", line)]
        findings += "\n".join(line.removeprefix("./") for line in lines) or "(no problems)"
    return Observation(text=findings)


@tool(mutates=True)
def todo_write(session: Session, merge: bool, todos: Annotated[list[Todo], Field(max_length=100)]) -> str:
    """Keep a to-do list for work of several steps. One item at a time is in_progress.

    merge: Update the list by id instead of replacing it.
    todos: At most one may be in_progress.
    """
    if len({todo.id for todo in todos}) < len(todos):
        raise invalid("todos: two have the same id")
    items = (session.todos if merge else {}) | {todo.id: todo for todo in todos}
    if sum(todo.status == "in_progress" for todo in items.values()) > 1:
        raise invalid("todos: only one can be in_progress")
    if len(items) > 100:
        raise invalid("todos: at most 100")
    session.todos = items
    return "\n".join(f"{MARKS[todo.status]} {todo.id}: {todo.content}" for todo in items.values()) or "(nothing to do)"
