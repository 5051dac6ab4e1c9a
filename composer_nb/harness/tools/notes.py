"""Tools that tell an agent how it stands: what a linter says of its files, and its list of things to do."""

from __future__ import annotations

import re

from composer_nb.harness.tools.arguments import ReadLints, TodoWrite
from composer_nb.harness.tools.session import Session, below, clean
from composer_nb.harness.tools.tool_call import ToolError

PYTHON = (".py", ".pyi", ".ipynb")
MARKS = {"pending": "[ ]", "in_progress": "[>]", "completed": "[x]", "cancelled": "[-]"}


def read_lints(session: Session, arguments: ReadLints) -> str:
    paths: list[str] = []
    others: list[str] = []
    for text in arguments.paths or ["."]:
        path = session.place(text)
        is_file = path != "." and _is_file(session, path)
        (others if is_file and not path.endswith(PYTHON) else paths).append(path)
    found = f"(no linter for {', '.join(others)})\n" if others else ""
    if paths:
        command = ["ruff", "check", "--no-cache", "--quiet", "--output-format=concise", "--"]
        done = session.program([*command, *(below(path) for path in paths)])
        if done.exit_code not in (0, 1):
            told = " ".join(clean(done.stderr).split())[:500]
            raise ToolError("UnexpectedEnvironment", f"ruff: {told or f'ended with {done.exit_code}'}")
        lines = [line for line in clean(done.stdout).splitlines() if re.match(r".+:\d+:\d+: ", line)]
        found += "\n".join(line.removeprefix("./") for line in lines) or "(no problems)"
    return session.fit(found, "read_lints")


def _is_file(session: Session, path: str) -> bool:
    try:
        return session.exists(path)
    except IsADirectoryError:
        return False


def todo_write(session: Session, arguments: TodoWrite) -> str:
    ids = [todo.id for todo in arguments.todos]
    if len(set(ids)) < len(ids):
        raise ToolError("InvalidArguments", "todos: two have the same id")
    todos = (session.todos if arguments.merge else {}) | {todo.id: todo for todo in arguments.todos}
    if sum(todo.status == "in_progress" for todo in todos.values()) > 1:
        raise ToolError("InvalidArguments", "todos: only one can be in_progress")
    if len(todos) > 100:
        raise ToolError("InvalidArguments", "todos: at most 100")
    session.todos = todos
    return "\n".join(f"{MARKS[todo.status]} {todo.id}: {todo.content}" for todo in todos.values()) or "(nothing to do)"
