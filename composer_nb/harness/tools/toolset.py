"""The registry of tools, and the sets of them that environments offer: `ToolSet.cursor` and `ToolSet.tiny`."""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from pydantic import BaseModel

from composer_nb.harness.blocking import CallTimeout, GivenUp, TooManyBlocked, within
from composer_nb.harness.sandbox.contract import Sandbox
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxSlow, SandboxUnavailable
from composer_nb.harness.sandbox.toolchain import PACKAGES, TESTING, install_hint
from composer_nb.harness.tasks.runtime import PACKAGES_AT
from composer_nb.harness.tools import files, notes, search, terminal
from composer_nb.harness.tools.arguments import check, parameters, printable
from composer_nb.harness.tools.session import DOING, SHOWN, Search, Session
from composer_nb.harness.tools.terminal import tested
from composer_nb.harness.tools.tiny import TINY
from composer_nb.harness.tools.tool_call import ErrorKind, Reply, Tool, ToolCall, ToolError, invalid
from composer_nb.harness.tools.web import WebPages, web_search

# Makes the code search of a session's workspace.
Finder = Callable[[Session], Search]
SEARCH = "codebase_search"
# Calls that run at a time. Their programs share the processes of one sandbox.
FAN_OUT = 8
log = logging.getLogger(__name__)


TOOLS = (
    *(files.read_file, files.search_replace, files.write, files.delete_file, files.list_dir),
    *(search.glob_file_search, search.grep, terminal.run_terminal_cmd, notes.read_lints, notes.todo_write),
    *(files.apply_patch, search.codebase_search),
)
NAMES, TINY_NAMES = (tuple(tool.name for tool in tools) for tools in (TOOLS, TINY))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSet:
    """The tools that an environment offers.

    Attributes:
        tools: By the name that the agent knows.
        terse: Leave the kind of an error out of the observation.
        described: Describe tools and parameters in the schemas; without, for a model that was trained with these tools.
        brief: Show required parameters alone, with no more than their types, in the schemas.
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)
    search: Finder | None = None
    web: WebPages | None = None
    terse: bool = False
    described: bool = True
    brief: bool = False

    @classmethod
    def tiny(cls, offer: Collection[str] = TINY_NAMES) -> ToolSet:
        """Search, read, edit, undo, run tests, finish: for tiny models, in a sandbox or without one of their own.

        `offer`: only these tools."""
        return cls(tools={tool.name: tool for tool in TINY if tool.name in offer}, terse=True)

    @classmethod
    def cursor(cls, *, search: Finder | None = None, offer: Collection[str] = NAMES, described: bool = True) -> ToolSet:
        """The product's tools, which work in a sandbox.

        `search` makes the code search of a session's workspace (`workspace.py`); without it `codebase_search` is not offered.
        `offer`: only these tools. Raises ValueError for an unknown one.
        """
        if strange := sorted({*offer} - {*NAMES}):
            raise ValueError(f"there is no tool {', '.join(strange)}; there are {', '.join(NAMES)}")
        tools = [tool for tool in TOOLS if tool.name in offer and (tool.name != SEARCH or search is not None)]
        return cls(tools={tool.name: tool for tool in tools}, search=search, described=described)

    @classmethod
    def named(cls, name: str, search: Finder | None = None) -> ToolSet:
        """Return `tiny`, `cursor`, or the tools in a comma-separated list: those of `tiny` if `finish` is among them, else the
        product's. A list of the product's has `brief`, undescribed schemas, for a model that is trained with them. Raises
        ValueError for an unknown tool."""
        offer = {"tiny": TINY_NAMES, "cursor": NAMES}.get(name) or tuple(name.split(","))
        if "finish" in offer and {*offer} <= {*TINY_NAMES}:
            return cls.tiny(offer)
        tools = cls.cursor(search=search if SEARCH in offer else None, offer=offer, described=name == "cursor")
        return replace(tools, brief=name != "cursor")

    def with_web(self, pages: WebPages | None) -> ToolSet:
        """Return these tools, with `web_search` on recorded pages if there are any."""
        return replace(self, tools={**self.tools, web_search.name: web_search}, web=pages) if pages else self

    @property
    def needs_sandbox(self) -> bool:
        """Whether these tools work only in a sandbox, as the product's do. Tiny and custom tools also work in plain files."""
        return any(tool in TOOLS for tool in self.tools.values())

    def only(self, names: Collection[str]) -> ToolSet:
        """Return the named tools, or all if none is named. Raises ValueError for a tool that is not offered."""
        if strange := sorted({*names} - {*self.tools}):
            raise ValueError(f"there is no tool {', '.join(strange)}; there are {', '.join(self.tools)}")
        return replace(self, tools={name: self.tools[name] for name in self.tools if name in names}) if names else self

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form."""
        schemas = []
        for name, tool in self.tools.items():
            description = {"description": tool.description} if self.described else {}
            schema = parameters(tool.arguments, self.described)
            if self.brief:
                kinds = {key: {"type": schema["properties"][key]["type"]} for key in schema["required"]}
                schema = {"type": "object", "properties": kinds}
            schemas.append({"type": "function", "function": {"name": name, **description, "parameters": schema}})
        return schemas

    def find(self, call: ToolCall) -> tuple[Tool, BaseModel]:
        """Return the tool that `call` names, and its checked arguments. Raises ToolError (InvalidArguments)."""
        tool = self.tools.get(call.name)
        if tool is None:
            raise invalid(printable(f"no tool {call.name[:100]}; there are {', '.join(self.tools)}"))
        return tool, check(tool.arguments, call.arguments)

    def observation(self, reply: Reply) -> str:
        """Return what the agent reads of a reply."""
        if reply.error is None:
            return reply.text
        return f"error: {reply.text}" if self.terse else f"error ({reply.error}): {reply.text}"

    def open(self, sandbox: Sandbox) -> Session:
        """Open a session in a sandbox. Raises SandboxUnavailable if it lacks a program that a tool needs, and SandboxSlow."""
        needed = sorted({tool.needs for tool in self.tools.values() if tool.needs})
        script = 'pwd -P; command -v "$1" || echo; echo "${PYTHONPATH-}"; shift; '
        script += 'for name; do command -v "$name" >/dev/null || echo "$name"; done'
        result = sandbox.exec(["sh", "-c", script, "sh", TESTING, *needed], timeout_s=20, granted=True)
        if result.timed_out:
            raise SandboxSlow("the programs of a sandbox could not be looked up in time: the machine is busy")
        if result.exit_code:
            reason = result.stderr.decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"a sandbox for agents needs sh: {reason}")
        root, testing, modules, *missing = result.stdout.decode("utf-8", "surrogateescape").splitlines()
        if missing:
            packages = " ".join(PACKAGES.get(name, name) for name in missing)
            advice = f"pip install -e '.[agent]', or {install_hint(packages)}"
            if sandbox.spec.image:
                advice = f"add {packages} to the image {sandbox.spec.image}"
            raise SandboxUnavailable(f"no {' and no '.join(missing)} in the sandbox, which tools need: {advice}")
        session = Session(sandbox=sandbox, root=root, cwd=root)
        session.environment = {"PYTHONPATH": ":".join(filter(None, (modules, testing, PACKAGES_AT)))} if testing else {}
        session.search, session.web = self.search and self.search(session), self.web
        return session

    def run(self, session: Session, calls: Sequence[ToolCall | ToolError]) -> list[Reply]:
        """Carry out the calls of one turn, and return a reply to each, in their order, up to one that ends the rollout. A call
        that could not be read is answered with the reason.

        Calls that only read run side by side, FAN_OUT at a time. A call that may change something begins when all before it have
        ended, and ends before any after it begins. A call that fails leaves the others alone. Raises SandboxFailure.
        """
        alone = {name for name, tool in self.tools.items() if tool.mutates or tool.ends or not session.concurrent}
        groups = groupby(enumerate(calls), lambda item: item[0] if getattr(item[1], "name", "") in alone else -1)
        replies: list[Reply] = []
        try:
            with ThreadPoolExecutor(FAN_OUT) as pool:
                try:
                    for _, numbered in groups:
                        group = [call for _, call in numbered]
                        session.beside = min(len(group), FAN_OUT)
                        futures: list[Future[Reply]] = []
                        for call in group:
                            if session.concurrent:
                                futures.append(pool.submit(self._answer, session, call, [*futures]))
                            else:
                                replies.append(self._answer(session, call))
                        replies += [future.result() for future in futures]
                        if replies[-1].ends:
                            break
                except BaseException:  # Ctrl-C: what runs is stopped, the sandbox lives
                    session.stop.set()
                    raise
        finally:
            session.stop = threading.Event()  # a call that was given up may not have looked at the old one yet
        return replies

    def _answer(self, session: Session, call: ToolCall | ToolError, before: Sequence[Future[Reply]] = ()) -> Reply:
        """Run one call and return its reply; the error of a call that cannot be run or fails is part of the conversation.

        `before`: the calls before it, which may still run: files of long outputs are numbered in their order.
        Raises SandboxFailure and TooManyBlocked."""
        if isinstance(call, ToolError):
            return Reply(call=ToolCall(name="", arguments={}), text=str(call), error=call.kind)
        began = time.monotonic()
        try:
            tool, arguments = self.find(call)
            if session.stop.is_set():
                raise ToolError("UserAborted", "not begun")
            observation = _called(tool, session, arguments)
            counts, ends = dict[str, Any](), tool.ends
            if isinstance(observation, str):
                text, counts = observation, tested(observation) if tool.needs == "bash" else {}
            else:
                if len(observation.text) > SHOWN:
                    wait(before)
                text = session.fit(observation.text, tool.name)
                counts = {"tests_passed": observation.tests_passed, "tests_run": observation.tests_run}
                ends = ends or observation.ends
            reply = Reply(call=call, text=text, ends=ends, **counts)
        except (SandboxFailure, TooManyBlocked):
            raise
        except Exception as failed:  # the boundary between tools and an agent: the other calls go on
            error, text = _failure(failed)
            text = printable(text) if error == "InvalidArguments" and not self.terse else text
            reply = Reply(call=call, text=text, error=error)
        text = reply.text.encode("utf-8", "replace").decode()  # names of files may hold bytes that are not UTF-8
        return replace(reply, text=text, seconds=time.monotonic() - began if session.concurrent else 0.0)


def _called(tool: Tool, session: Session, arguments: BaseModel) -> Any:
    """Return what a tool answers. A tool of the user's own has until the end of the rollout's time, since it may block for ever;
    ours set limits themselves. Raises ToolError (Timeout, UserAborted), and what the tool raises."""
    if tool in (*TOOLS, *TINY, web_search):
        return tool(session, arguments)
    try:
        return within(session.left, f"the tool {tool.name}", functools.partial(tool, session, arguments), session.stop)
    except CallTimeout as late:
        log.warning("%s; its thread is left behind", late)
        raise ToolError("Timeout", str(late)) from None
    except GivenUp:
        raise ToolError("UserAborted", "not ended") from None


def _failure(error: Exception) -> tuple[ErrorKind | Literal["Bug"], str]:
    """Return the kind of a failure, and what the agent reads of it."""
    match error:
        case ToolError():
            return error.kind, str(error)
        case SandboxDied():
            return "UnexpectedEnvironment", str(error)
        case OSError() if error.errno != errno.EIO:  # EIO: what the resident program did not expect
            kind: ErrorKind = "InvalidArguments" if error.errno in DOING else "UnexpectedEnvironment"
            return kind, printable(error.strerror or str(error))
    log.error("a fault of a tool itself", exc_info=error)
    return "Bug", f"a fault of the tool itself ({type(error).__name__})"
