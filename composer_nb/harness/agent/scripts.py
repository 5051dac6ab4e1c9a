"""Scripted agents, which need no model: an expert that knows the solution, an idle agent, and scripts from files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from composer_nb.harness.agent.chat import Message, Said, Written
from composer_nb.harness.agent.turns import Script
from composer_nb.harness.tasks.history import GIT_REPORT
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall, call
from composer_nb.harness.untrusted import opcodes


def play(turns: Sequence[Said]) -> Script:
    """Return a script that takes these turns in order, whatever the results, and then repeats the last one."""

    def script(talk: Sequence[Message]) -> Said:
        spoken = sum(isinstance(message, Said) for message in talk)
        return turns[min(spoken, len(turns) - 1)]

    return script


# Maximum lines of a file that the expert reads whole; in a longer file it searches for the function to change.
SHORT = 120


TEST, LINT = "python -m pytest -q -x --tb=no", "ruff check -q --no-cache --output-format=concise"


def expert(task: Task) -> Script:
    """Return a script that finds, reads, edits and compiles the code that the solution changes. At a task of the grader
    `functions`, whose tests are quick, it runs them after its edits, and at the start if the request does not name the function;
    where lints count, it runs ruff before and after. Before it adds a test it reads the function too.

    Raises ValueError for a task without a solution."""
    if not task.solution or task.grader == "script":
        raise ValueError(f"task {task.id}: has no files as a solution for a scripted expert to write")
    paths = sorted({*task.solution} - {GIT_REPORT})
    edits = [edit for path in paths for edit in _edits(path, task.files.get(path, ""), task.solution[path])]
    looks = [_look(path, task.files[path], task.solution[path]) for path in paths if path in task.files]
    searches, reads = [search for search, _ in looks if search], [read for _, read in looks]
    python = " ".join(f"'{path}'" for path in paths if path.endswith(".py"))
    tries = [_run(f"python -m py_compile {python}")] if python else []
    if task.grader == "functions":
        lints, name = task.strictness == "lints", task.metadata.get("function", "")
        checks = [_run(LINT), _run(TEST)] if lints else [_run(TEST)]
        if name and not lints:
            searches.append(call("grep", pattern=f"def {name}"))
            homes = [path for path, text in task.files.items() if f"def {name}(" in text and path not in paths]
            reads = [call("read_file", target_file=path) for path in homes] + reads
        steps = [[] if f" {name}: " in task.instruction else checks[:1], searches, reads, [*edits, *checks]]
    else:
        tries += [_run("git add -A && git commit -q -m 'As asked'")] if GIT_REPORT in task.solution else []
        steps = [searches, reads, edits, tries]
    return play([*(turn(step) for step in steps if step), Said(text=f"I changed {', '.join(paths)}.")])


def _run(command: str) -> ToolCall:
    return call("run_terminal_cmd", command=command, is_background=False)


def lazy(task: Task) -> Script:
    """Return a script that does nothing."""
    return play([Said(text="Done.")])


SCRIPTS = {"expert": expert, "lazy": lazy}


def turn(calls: Sequence[ToolCall], text: str = "") -> Said:
    return Said(text=text, calls=tuple(Written(id=f"call_{n}", call=call) for n, call in enumerate(calls)))


def _look(path: str, before: str, after: str) -> tuple[ToolCall | None, ToolCall]:
    """Return a search for the function or class around the first difference, if the file is long, and a call that reads it."""
    old, new = before.splitlines(), after.splitlines()
    if len(old) <= SHORT:
        return None, call("read_file", target_file=path)
    differs_at = next((n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(old) - 1)
    head_lines = [n for n in range(differs_at + 1) if re.match(r"\s*(async def|def|class) \w", old[n])]
    head = head_lines[-1] if head_lines else 0
    pattern = re.sub(r"\W", ".", re.split(r"[(:]", old[head].strip())[0]) or "."
    read = call("read_file", target_file=path, offset=head + 1, limit=min(max(40, differs_at - head + 20), SHORT))
    return call("grep", pattern=pattern, path=path), read


def _edits(path: str, before: str, after: str) -> Iterator[ToolCall]:
    """Yield a call for each block of different lines, the last block first, so that line numbers above stay valid."""
    if not before:
        yield call("write", file_path=path, contents=after)
        return
    lines, new_lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    blocks = opcodes(lines, new_lines)
    for _, old_start, old_end, new_start, new_end in [block for block in reversed(blocks) if block[0] != "equal"]:
        first, last = old_start, old_end
        while not (old := "".join(lines[first:last])) or (text := "".join(lines)).find(old) != text.rfind(old):
            first, last = max(0, first - 1), min(len(lines), last + 1)
        lines[first:last] = [*lines[first:old_start], *new_lines[new_start:new_end], *lines[old_end:last]]
        replaced = "".join(lines[first : last + new_end - new_start - (old_end - old_start)])
        yield call("search_replace", file_path=path, old_string=old, new_string=replaced)


class _ScriptedCall(BaseModel):
    name: str
    arguments: dict[str, Any]


class _ScriptedTurn(BaseModel):
    text: str = ""
    calls: list[_ScriptedCall] = []


_SCRIPT = TypeAdapter(list[_ScriptedTurn])


def read_script(path: Path) -> Script:
    """Read a script from a JSON file, one entry per turn: `[{"text": "…", "calls": [{"name": "…", "arguments": {…}}]}, …]`.

    Raises ValueError, which names the fault, or FileNotFoundError.
    """
    try:
        entries = _SCRIPT.validate_json(path.read_bytes())
    except ValueError as error:
        form = '{"text": "…", "calls": [{"name": "…", "arguments": {…}}]}'
        raise ValueError(f"{path}: not a script ({error!r:.200}): give a list of turns, each {form}") from None
    turns = [turn([call(step.name, **step.arguments) for step in entry.calls], entry.text) for entry in entries]
    if not turns or turns[-1].calls:
        raise ValueError(f"{path}: the last turn of a script must have no calls, to end the conversation")
    return play(turns)
