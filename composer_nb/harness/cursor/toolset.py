"""`ToolSet.cursor`: which tools an environment offers, under which names and how strictly, and the carrying out of a turn."""

from __future__ import annotations

import errno
import functools
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_nb.harness.calls import SandboxUnavailable
from composer_nb.harness.cursor import arguments as models
from composer_nb.harness.cursor import files, notes, terminal
from composer_nb.harness.cursor.arguments import check, parameters, printable
from composer_nb.harness.cursor.search import codebase_search, glob_file_search, grep
from composer_nb.harness.cursor.session import DOING, Search, Session
from composer_nb.harness.interpreter import install_hint
from composer_nb.harness.sandboxes.contract import Sandbox, SandboxDied, SandboxFailure
from composer_nb.harness.sandboxes.programs import PACKAGES, TESTING
from composer_nb.harness.tool_call import ErrorKind, ToolCall, ToolError

SEARCH = "codebase_search"
FAN_OUT = 16
"""Calls that are under way at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A schema with its implementation."""

    name: str
    description: str
    arguments: type[models.Arguments]
    run: Callable[[Session, Any], str]
    mutates: bool = False
    needs: str | None = None
    """A program that must be in the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a call was answered."""

    call: ToolCall
    text: str
    error: ErrorKind | Literal["Bug"] | None = None
    """Of the fixed taxonomy, and "Bug" for anything else: a fault of ours, of which the agent's work says nothing."""
    seconds: float = 0.0
    trace: str = ""
    """Of a bug."""


TOOLS = (
    Tool(
        name="read_file",
        description="Read a text file, as LINE|CONTENT. A long one comes in parts: go on with offset.",
        arguments=models.ReadFile,
        run=files.read_file,
    ),
    Tool(
        name="search_replace",
        description="Replace a text in a file. It must be there exactly once, unless replace_all is set.",
        arguments=models.SearchReplace,
        run=files.search_replace,
        mutates=True,
    ),
    Tool(
        name="write",
        description="Write a whole file. One that exists must have been read before; to change it, prefer search_replace.",
        arguments=models.Write,
        run=files.write,
        mutates=True,
    ),
    Tool(
        name="delete_file",
        description="Delete a file.",
        arguments=models.DeleteFile,
        run=files.delete_file,
        mutates=True,
    ),
    Tool(
        name="list_dir",
        description="List a folder, without names that begin with a dot. Folders end with /, links with @.",
        arguments=models.ListDir,
        run=files.list_dir,
    ),
    Tool(
        name="glob_file_search",
        description="Find files by their names, the newest first. Files that git ignores are left out.",
        arguments=models.GlobFileSearch,
        run=glob_file_search,
        needs="rg",
    ),
    Tool(
        name="grep",
        description="Search the contents of files with ripgrep. Files that git ignores are left out.",
        arguments=models.Grep,
        run=grep,
        needs="rg",
    ),
    Tool(
        name="run_terminal_cmd",
        description="Run a command in bash. Its folder and exported variables stay for the next one. It has no input, "
        "and is ended at its time limit; what shall run longer goes to the background.",
        arguments=models.RunTerminalCmd,
        run=terminal.run_terminal_cmd,
        mutates=True,
        needs="bash",
    ),
    Tool(
        name="read_lints",
        description="Show what the linter (ruff) finds in Python files or folders.",
        arguments=models.ReadLints,
        run=notes.read_lints,
        needs="ruff",
    ),
    Tool(
        name="todo_write",
        description="Keep a list of what is to be done, for work of several steps. One thing at a time is in_progress.",
        arguments=models.TodoWrite,
        run=notes.todo_write,
        mutates=True,
    ),
    Tool(
        name="apply_patch",
        description="Change several files at once by a patch; if a part of it does not fit, nothing is changed.",
        arguments=models.ApplyPatch,
        run=files.apply_patch,
        mutates=True,
    ),
    Tool(
        name=SEARCH,
        description="Find code by what it does or means: ask a question in plain words.",
        arguments=models.CodebaseSearch,
        run=codebase_search,
    ),
)
NAMES = tuple(tool.name for tool in TOOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorTools:
    """The tools that an environment offers. Made by `ToolSet.cursor`."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    """By the name that the agent knows."""
    strict: bool = True
    search: Callable[[Session], Search] | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI's form."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": parameters(tool.arguments)},
            }
            for name, tool in self.tools.items()
        ]

    def open(self, sandbox: Sandbox) -> Session:
        """A session in a sandbox. Raises SandboxUnavailable when a program that a tool needs is not in it."""
        needed = sorted({tool.needs for tool in self.tools.values() if tool.needs})
        script = 'pwd -P; command -v "$1" || echo; echo "${PYTHONPATH-}"; shift; '
        script += 'for name; do command -v "$name" >/dev/null || echo "$name"; done'
        done = sandbox.exec(["sh", "-c", script, "sh", TESTING, *needed], timeout_s=20)
        if done.exit_code:
            told = done.stderr.decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"a sandbox for agents needs sh: {told}")
        root, testing, modules, *missing = done.stdout.decode("utf-8", "surrogateescape").splitlines()
        if missing:
            packages = " ".join(PACKAGES.get(name, name) for name in missing)
            image = sandbox.spec.image
            advice = (
                f"add {packages} to the image {image}"
                if image
                else f"pip install 'composer_nb[agent]', or {install_hint(packages)}"
            )
            raise SandboxUnavailable(f"no {' and no '.join(missing)} in the sandbox, which tools need: {advice}")
        session = Session(sandbox=sandbox, root=root, strict=self.strict, cwd=root)
        session.environment = {"PYTHONPATH": ":".join(filter(None, (modules, testing)))} if testing else {}
        session.search = self.search and self.search(session)
        return session

    def run(self, session: Session, calls: Sequence[ToolCall]) -> list[Reply]:
        """Carries out the calls of one turn; a reply to each, in their order.

        Calls that only read are under way together, FAN_OUT at a time; one that may change something begins when all before it
        have ended, and ends before any after it begins. One that fails leaves the others alone. Requests to one sandbox are
        served one after the other all the same. Raises SandboxFailure.
        """
        groups = itertools.groupby(enumerate(calls), lambda item: item[0] if self._mutates(item[1]) else -1)
        replies: list[Reply] = []
        try:
            with ThreadPoolExecutor(FAN_OUT) as pool:
                try:
                    for _, group in groups:
                        replies += pool.map(functools.partial(self._answer, session), [call for _, call in group])
                except BaseException:  # Ctrl-C: what runs is stopped, the sandbox lives
                    session.stop.set()
                    raise
        finally:
            session.stop.clear()
            session.counts.update((self._known(reply.call), reply.error or "ok") for reply in replies)
        return replies

    def _mutates(self, call: ToolCall) -> bool:
        return call.name in self.tools and self.tools[call.name].mutates

    def _known(self, call: ToolCall) -> str:
        return self.tools[call.name].name if call.name in self.tools else "unknown"

    def _answer(self, session: Session, call: ToolCall) -> Reply:
        began = time.monotonic()
        error: ErrorKind | Literal["Bug"] | None = None
        trace = ""
        try:
            text = self._carry_out(session, call)
        except ToolError as told:
            error, text = told.kind, printable(str(told)) if told.kind == "InvalidArguments" else str(told)
        except SandboxFailure:
            raise
        except (
            Exception
        ) as bug:  # the boundary between tools and an agent: the other calls go on, and the record has it
            error, text, trace = "Bug", f"a fault of the tool itself ({type(bug).__name__})", traceback.format_exc()
        return Reply(call=call, text=text, error=error, seconds=time.monotonic() - began, trace=trace)

    def _carry_out(self, session: Session, call: ToolCall) -> str:
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError(
                "InvalidArguments", printable(f"no tool {call.name[:100]}; there are {', '.join(self.tools)}")
            )
        checked = check(tool.arguments, call.arguments, self.strict)
        if session.stop.is_set():
            raise ToolError("UserAborted", "not begun")
        try:
            return tool.run(session, checked)
        except SandboxDied as error:
            raise ToolError("UnexpectedEnvironment", str(error)) from error
        except OSError as error:
            if error.errno == errno.EIO:  # what the resident program did not expect
                raise
            kind: ErrorKind = "InvalidArguments" if error.errno in DOING else "UnexpectedEnvironment"
            raise ToolError(kind, printable(error.strerror or str(error))) from error


def make(
    *, strict: bool, search: Callable[[Session], Search] | None, offer: Collection[str], names: Mapping[str, str]
) -> CursorTools:
    """See `ToolSet.cursor`."""
    if strange := sorted({*offer, *names} - {*NAMES}):
        raise ValueError(f"there is no tool {', '.join(strange)}; there are {', '.join(NAMES)}")
    tools = [tool for tool in TOOLS if tool.name in offer and (tool.name != SEARCH or search is not None)]
    called = {names.get(tool.name, tool.name): tool for tool in tools}
    if len(called) < len(tools):
        raise ValueError(f"names={dict(names)}: two tools would have the same name")
    return CursorTools(tools=called, strict=strict, search=search)


def rates(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, float]]:
    """For each tool how many calls there were, and which part of them ended how. Counts of several sessions may be added."""
    calls: Counter[str] = Counter()
    for (tool, _), number in counts.items():
        calls[tool] += number
    table: dict[str, dict[str, float]] = {tool: {"calls": number} for tool, number in sorted(calls.items())}
    for (tool, outcome), number in sorted(counts.items()):
        table[tool][outcome] = number / calls[tool]
    return table
