"""The general tool contract, `ToolSet.tiny`, the four tools of tiny models, and `ToolSet.cursor`, the tools of a product.

A tool is a schema (OpenAI's form) and a generator that maps a workspace and arguments to an observation. A tool that needs
to execute code yields a CallRequest and is sent the outcomes; everything else is pure, so one driver can serve hundreds of
rollouts in batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_nb.harness.calls import CallOutcome, CallRequest
from composer_nb.harness.functions import FunctionTest, is_test, parse_test_files
from composer_nb.harness.tool_call import ErrorKind, ToolCall, ToolError

if TYPE_CHECKING:
    from composer_nb.harness.cursor.session import Search, Session
    from composer_nb.harness.cursor.toolset import CursorTools

__all__ = ["ErrorKind", "Observation", "Tool", "ToolCall", "ToolError", "ToolSet", "Workspace"]

Execution = Generator[CallRequest, tuple[CallOutcome, ...], "Observation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a tool answered."""

    text: str
    tests_passed: int | None = None
    """Visible tests passed, if the tool ran them."""
    tests_run: int | None = None


@dataclass(slots=True, kw_only=True)
class Workspace:
    """The files of one rollout. Code runs on copies of it in fresh sandboxes, so only tools change it."""

    files: dict[str, str]
    visible_tests: Mapping[str, str]
    """As they were at the start: edits of them do not change what `run_tests` runs."""

    def text(self, path: str) -> str:
        if path not in self.files:
            raise ToolError("InvalidArguments", f"no file {path}")
        return self.files[path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A schema with its implementation."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, str]]
    """JSON Schema properties; all are required."""
    run: Callable[[Workspace, Mapping[str, Any]], Execution]
    mutates: bool = False
    ends: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's function schema, strict."""
        properties = {
            "type": "object",
            "properties": dict(self.parameters),
            "required": list(self.parameters),
        }
        function = {"name": self.name, "description": self.description, "strict": True}
        return {
            "type": "function",
            "function": {**function, "parameters": {**properties, "additionalProperties": False}},
        }


_JSON_TYPES = {"string": str, "integer": int}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of an environment by name."""

    tools: Mapping[str, Tool] = field(default_factory=dict)

    def get(self, call: ToolCall) -> Tool:
        """The tool that `call` names, its arguments checked. Raises ToolError (InvalidArguments)."""
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError("InvalidArguments", f"no tool {call.name}")
        if set(call.arguments) != set(tool.parameters):
            raise ToolError("InvalidArguments", f"{call.name} takes {', '.join(tool.parameters) or 'no arguments'}")
        for name, value in call.arguments.items():
            wanted = _JSON_TYPES[tool.parameters[name]["type"]]
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ToolError("InvalidArguments", f"{name} must be of type {tool.parameters[name]['type']}")
        return tool

    @classmethod
    def tiny(cls) -> ToolSet:
        """Read, line edit, run tests, finish."""
        path, string = {"type": "string", "description": "relative path"}, {"type": "string"}
        tools = [
            Tool(name="read_file", description="Read a file.", parameters={"path": path}, run=_read_file),
            Tool(
                name="edit_line",
                description="Replace one line of a file by another; its indentation is kept.",
                parameters={"path": path, "line": {"type": "integer"}, "text": string},
                run=_edit_line,
                mutates=True,
            ),
            Tool(name="run_tests", description="Run the visible tests.", parameters={}, run=_run_tests),
            Tool(
                name="finish",
                description="Finish; the files are graded.",
                parameters={},
                run=_finish,
                ends=True,
            ),
        ]
        return cls({tool.name: tool for tool in tools})

    @staticmethod
    def cursor(
        *,
        strict: bool = True,
        search: Callable[[Session], Search] | None = None,
        offer: Collection[str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> CursorTools:
        """The tools of a product, which work in a sandbox. `strict`: take only what a schema says (`cursor/arguments.py`).
        `search`: makes what looks for code by meaning in a session's workspace (`search/workspace.py`); without it that tool is
        not offered. `offer`: only these tools. `names`: what a model was trained to call some of them. Raises ValueError for a
        tool that there is not."""
        from composer_nb.harness.cursor.toolset import NAMES, make

        return make(strict=strict, search=search, offer=NAMES if offer is None else offer, names=names or {})


def _read_file(workspace: Workspace, arguments: Mapping[str, Any]) -> Execution:
    lines = _lines(workspace.text(arguments["path"]))
    return Observation(text="\n".join(f"{number}{line}" for number, line in enumerate(lines, 1)))
    yield  # a tool is a generator, also when it executes nothing


def _edit_line(workspace: Workspace, arguments: Mapping[str, Any]) -> Execution:
    before = workspace.text(arguments["path"])
    lines, text = _lines(before), arguments["text"].strip()
    place = arguments["line"] - 1
    if not 0 <= place < len(lines):
        raise ToolError("InvalidArguments", "no line")
    if "\n" in text or "\r" in text:
        raise ToolError("InvalidArguments", "one line")
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    if lines[place] == indent + text:
        return Observation(text="same")  # tells the agent at once that this edit changed nothing
    lines[place] = indent + text
    workspace.files[arguments["path"]] = "\n".join(lines) + "\n" * before.endswith("\n")
    return Observation(text="ok")
    yield


def _lines(text: str) -> list[str]:
    """Lines of a file; the newline that ends the last one begins no other."""
    return text.removesuffix("\n").split("\n") if text else []


def _run_tests(workspace: Workspace, arguments: Mapping[str, Any]) -> Execution:
    if not workspace.visible_tests:
        raise ToolError("UnexpectedEnvironment", "no tests here")
    tests = parse_test_files(workspace.visible_tests)
    outcomes = yield request_tests(workspace.files, tests)
    passed = [passes(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    if all(passed):
        return Observation(text=f"pass {len(tests)}", tests_passed=len(tests), tests_run=len(tests))
    place = passed.index(False)
    text = f"fail {passed.count(False)}/{len(tests)}: {describe(tests[place], outcomes[place])}"
    return Observation(text=text[:110], tests_passed=sum(passed), tests_run=len(tests))


def _finish(workspace: Workspace, arguments: Mapping[str, Any]) -> Execution:
    return Observation(text="")
    yield


def request_tests(files: Mapping[str, str], tests: Sequence[FunctionTest]) -> CallRequest:
    """One fresh sandbox that calls what `tests` (of one `parse_test_files`) call: the code under test and the arguments, no
    expected values."""
    [(module, function)] = {(test.module, test.function) for test in tests}
    sources = {path: text for path, text in files.items() if not is_test(path)}
    return CallRequest(files=sources, module=module, function=function, arguments=tuple(t.arguments for t in tests))


def passes(test: FunctionTest, outcome: CallOutcome) -> bool:
    """Whether the call returned the wanted value, type and all."""
    return outcome.status == "returned" and outcome.text == test.expected


def describe(test: FunctionTest, outcome: CallOutcome) -> str:
    """One line for the agent: the call, what came, what was wanted."""
    call = f"{test.function}({_compact(test.arguments[1:-1].removesuffix(','))})"
    got = _compact(outcome.text)[:24] if outcome.status in ("returned", "raised") else outcome.status
    return f"{call} = {got} want {_compact(test.expected)[:24]}"


_STRING_OR_SPACE = re.compile(r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?| """)


def _compact(text: str) -> str:
    """`text` without the spaces between its parts; those inside strings stay."""
    return _STRING_OR_SPACE.sub(lambda part: "" if part[0] == " " else part[0], text)
