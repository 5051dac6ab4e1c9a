"""The state that the calls of one agent share: its sandbox, the files it has read, its to-do list, its terminal."""

from __future__ import annotations

import errno
import logging
import math
import posixpath
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from composer_nb.harness.sandbox.contract import ExecResult, Sandbox
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxSlow
from composer_nb.harness.tools.arguments import CONTROLS, Todo, printable
from composer_nb.harness.tools.tool_call import ToolError, invalid

if TYPE_CHECKING:
    from composer_nb.harness.search.index import Hit
    from composer_nb.harness.tools.web import WebPages

# File of a workspace with the whole conversation before the last summary. Grading ignores it.
HISTORY = ".composer_nb/history.txt"
# Folder of a workspace for long outputs and the history. Git, ripgrep and grading ignore it.
FOLDER = posixpath.dirname(HISTORY)
# Maximum characters of an observation.
SHOWN = 16_000
# Maximum size of a file that is changed by replacing or patching.
EDIT_BYTES = 2 << 20
# Time limit of a tool's own program, and its threads, of which ruff would start one for each CPU.
QUICK_S = 30.0
THREADS = {"RAYON_NUM_THREADS": "2"}
# Time limit of a run of all visible tests.
TESTS_S = 120.0
_SUMMARY = re.compile(r"=* ?((?:\d{1,9} (?:subtests )?[a-z]+,? )+)in [\d.]+s.*")
_ERROR = re.compile(r"^E   (\S.*)$", re.M)
# File system errors that the call itself causes; all others, such as a missing file, depend on the workspace.
DOING = {errno.EXDEV, errno.ENAMETOOLONG, errno.EINVAL}
log = logging.getLogger(__name__)
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class Search(Protocol):
    """Search one workspace for code that answers a question, best first, in these folders or (none given) everywhere.

    Raises OSError when it does not work now.
    """

    def __call__(self, query: str, directories: Sequence[str], limit: int) -> Sequence[Hit]: ...

    def left_out(self, directories: Sequence[str]) -> Mapping[str, str]:
        """Return the files in these folders that the last search left out, with why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The answer of a tool.

    Attributes:
        tests_passed: Visible tests passed, if the tool ran them.
        ends: This call ends the rollout.
    """

    text: str
    tests_passed: int | None = None
    tests_run: int | None = None
    ends: bool = False


@dataclass(slots=True)
class Edits:
    """The line edits of an agent: what `undo` restores, and what the tests have refused.

    Attributes:
        before: Texts of the edited files at the start.
        refused: Edited texts that failed the visible tests.
    """

    before: dict[str, str] = field(default_factory=dict)
    now: dict[str, str] = field(default_factory=dict)
    refused: set[frozenset[tuple[str, str]]] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Session:
    """Made by `ToolSet.open`. One turn at a time uses it; the tools of one turn may use it from several threads.

    Attributes:
        concurrent: Whether calls that only read run together, and are timed.
        root: The workspace, as an absolute path in the sandbox.
        known_paths: Files that the agent has read or written.
        cwd: Absolute path of the terminal's folder.
        environment: Exported variables of the terminal.
        touched: Files that tools have changed since the last search, which clears it (`workspace.py`).
        restless: Other files may have changed since then, as by a command.
        background: A background command was started, which may change files at any time.
        history: The conversation before the last summary, as the file HISTORY was written.
        left: Seconds that are left of the rollout's time, after which a call of a tool of the user's own is given up.
        numbers: Numbers for the names of files in FOLDER.
        beside: Calls that run side by side now, and share the sandbox's CPUs.
        custom: Values that tools of the user's own keep between calls. Those with a `close` are closed at the end.
    """

    concurrent: ClassVar[bool] = True

    sandbox: Sandbox
    root: str
    known_paths: set[str] = field(default_factory=set)
    todos: dict[str, Todo] = field(default_factory=dict)
    cwd: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    edits: Edits = field(default_factory=Edits)
    restless: bool = False
    background: bool = False
    search: Search | None = None
    web: WebPages | None = None
    history: str = ""
    left: Callable[[], float] = lambda: math.inf
    stop: threading.Event = field(default_factory=threading.Event)
    numbers: count[int] = field(default_factory=lambda: count(1))
    beside: int = 1
    custom: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """Close what custom tools keep. A failure is logged, and takes nothing from the rollout."""
        for name, value in self.custom.items():
            try:
                getattr(value, "close", lambda: None)()
            except Exception as error:  # the code of others
                log.warning("%s of a custom tool cannot be closed: %r", name, error)

    def abort(self) -> None:
        """End running calls and do not begin waiting ones of this turn, or else of the next. For another thread."""
        self.stop.set()

    def path(self, text: str) -> str:
        """Return a path relative to the workspace. Raises ToolError (InvalidArguments) for one that leads out of it."""
        whole = posixpath.normpath(posixpath.join(self.root, text))
        if whole != self.root and not whole.startswith(self.root + "/"):
            raise invalid(f"{text[:200]}: leads out of the workspace {self.root}")
        return posixpath.relpath(whole, self.root)

    def exists(self, path: str) -> bool:
        """Return whether a file exists. Raises OSError for a folder, and for a link that leads out of the workspace."""
        with suppress(FileNotFoundError):
            self.sandbox.read(path, max_bytes=0)
            return True
        return False

    def place(self, text: str | None) -> str:
        """Return the path of an existing file or folder. Raises ToolError and OSError like `path` and `exists`."""
        path = self.path(text or ".")
        with suppress(IsADirectoryError):
            self.sandbox.read(path, max_bytes=0)
        return path

    def text(self, path: str) -> str:
        """Read a file to change it; bytes that are not UTF-8 become lone surrogates. Raises ToolError for a large file."""
        data = self.sandbox.read(self.path(path), max_bytes=EDIT_BYTES + 1)
        if len(data) > EDIT_BYTES:
            text = f"{path}: larger than {EDIT_BYTES} bytes; change it with a program"
            raise ToolError("UnexpectedEnvironment", text)
        return data.decode("utf-8", "surrogateescape")

    def store(self, path: str, text: str) -> None:
        """Write the changed text of a file."""
        path = self.path(path)
        self.sandbox.write(path, text.encode("utf-8", "surrogateescape"))
        self.known_paths.add(path)
        self.touched.add(path)

    def remove(self, path: str) -> None:
        """Remove a file or link. Raises OSError."""
        self.sandbox.remove(path)
        self.known_paths.discard(path)
        self.touched.add(path)

    def run(self, command: Sequence[str], *, timeout_s: float = QUICK_S, **options: Any) -> ExecResult:
        """Run a command in the workspace, with a time limit that an overloaded machine does not use up. `options`: as for
        `Sandbox.exec`. Raises ToolError (UserAborted) if it was stopped; a timeout is part of the result."""
        try:
            result = self.sandbox.exec(command, timeout_s=timeout_s, stop=self.stop, granted=True, **options)
        except SandboxSlow as error:
            raise ToolError("Timeout", str(error)) from None
        if result.stopped:
            raise ToolError("UserAborted", f"stopped\n{self.fit(clean(result.stdout), 'stopped')}".rstrip())
        return result

    def program(self, command: Sequence[str]) -> ExecResult:
        """Run a tool's own program with the time limit that it has alone. Raises ToolError (Timeout, UserAborted)."""
        limit_s = QUICK_S * self.beside
        result = self.run(command, timeout_s=limit_s, env=THREADS)
        if result.timed_out:
            raise ToolError("Timeout", f"this took more than {limit_s:g} s: look in fewer files")
        return result

    def find(self, text: str) -> list[tuple[str, int, str]]:
        """Return path, number and text of each line that holds `text` in the Python files that are no tests.

        Raises ToolError where they cannot be searched."""
        command = ("grep", "-rnFZ", "--include=*.py", "--exclude=test_*", "--exclude-dir=.?*", "-e", text, ".")
        result = self.run(command, timeout_s=TESTS_S)
        if result.truncated or (result.exit_code > 1 and not result.stdout):
            reason = "more than 1 MiB of lines match" if result.truncated else clean(result.stderr).strip()
            raise ToolError("UnexpectedEnvironment", printable(reason)[:110])
        rows = re.findall(rb"^([^\0\n]*)\0(\d+):(.*)$", result.stdout, re.M)
        matches = [(clean(path).removeprefix("./"), int(number), clean(code)) for path, number, code in rows]
        return sorted(matches) + remembered(self.history, text)

    def run_visible_tests(self) -> Observation:
        """Run the tests that pytest finds in the workspace. What they say is what the workspace's own code wants it to say.

        Raises ToolError for a workspace without tests, one in which pytest does not run, and after TESTS_S.
        """
        self.restless = True  # tests may write files
        command = ("python", "-Bm", "pytest", "--tb=short", "--no-header", "--color=no", "-p", "no:cacheprovider")
        result = self.run(command, timeout_s=TESTS_S, env=self.environment, warm=True)
        if result.timed_out:
            raise ToolError("Timeout", f"the tests took more than {TESTS_S:g} s")
        output = clean(result.stdout)
        if not (counts := next(filter(None, map(summary_counts, reversed(output.split("\n")))), {})):
            reason = clean(result.stderr).strip() or output.strip() or f"exit code {result.exit_code}"
            message = "no tests here" if result.exit_code == 5 else printable(reason.rpartition("\n")[2])[:110]
            raise ToolError("UnexpectedEnvironment", message)
        passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
        return tested(passed, passed + failed, _first_failure(output))

    def fit(self, text: str, name: str) -> str:
        """Return an observation of about SHOWN characters or less. A longer one goes to a file, and its head and tail remain."""
        if len(text) <= SHOWN:
            return text
        path, half = f"{FOLDER}/outputs/{next(self.numbers)}-{name}.txt", SHOWN // 2
        head, tail = text[:half], text[-half:]
        head, tail = head[: head.rfind("\n") + 1] or head, tail[tail.find("\n") + 1 :] or tail
        try:
            self.keep(path, text)
            where = f"all of it is in {path}"
        except OSError as error:
            where = f"it could not be kept: {error.strerror}"
        left = len(text) - len(head) - len(tail)
        return f"{head.rstrip(chr(10))}\n[… {left} of {len(text)} characters left out; {where} …]\n{tail}"

    def remember(self, text: str) -> str:
        """Keep the conversation as a file, which tools find. Returns its path; nothing if it could not be written."""
        try:
            self.keep(HISTORY, text)
        except (OSError, SandboxDied):
            return ""
        self.history = text
        return HISTORY

    def keep(self, path: str, text: str) -> None:
        """Write a file in FOLDER. Raises OSError."""
        self.sandbox.write(f"{FOLDER}/.gitignore", b"*\n")
        self.sandbox.write(path, text.encode("utf-8", "replace"))


def summary_counts(line: str) -> dict[str, int]:
    """Return the numbers of tests by outcome in a line that is pytest's summary; none in any other. Subtests are left out: their
    test fails with them."""
    match = _SUMMARY.fullmatch(line)
    pairs = re.findall(r"(\d+) (?!subtests )([a-z]+)", match[1]) if match else ()
    return {outcome.rstrip("s"): int(count) for count, outcome in pairs}


def _first_failure(output: str) -> str:
    """Return one line about the first failure that pytest describes: `f(1) = 2 want 3` if it was a plain comparison."""
    error = next(_ERROR.finditer(f"{output}\nE   no reason given"))
    comparison = re.fullmatch(r"(?:AssertionError: )?assert (.*?) == (.*)", error[1])
    call = re.search(r"\bassert (.*) == .*\n(?:[ ^~]*\n)?\Z", output[: error.start()][-1000:])
    return printable(mismatch(call[1], comparison[1], comparison[2]) if call and comparison else error[1])


def below(path: str) -> str:
    """Return a path that a program cannot take for an option."""
    return "./" if path == "." else f"./{path}"


def clean(data: bytes) -> str:
    """Return the output of a program as text without colours or control characters, except tabs and newlines."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return ESCAPES.sub("", text).translate(CONTROLS)


def shown(name: str) -> str:
    """Return the name of a file as printable text, whatever bytes it has."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").translate(CONTROLS)


def file_lines(text: str) -> list[str]:
    """Return the lines of a file; the newline that ends the last one begins no other."""
    return text.removesuffix("\n").split("\n") if text else []


def remembered(history: str, text: str) -> list[tuple[str, int, str]]:
    """Return the lines of the history that hold `text`, as `find` does."""
    return [(HISTORY, number, line) for number, line in enumerate(file_lines(history), 1) if text in line]


def tested(passed: int, run: int, first: str) -> Observation:
    """Return what the agent sees of its tests. `first`: one line about the first that failed."""
    text = f"pass {run}" if passed == run else f"fail {run - passed}/{run}: {first}"[:110]
    return Observation(text=text, tests_passed=passed, tests_run=run)


def mismatch(call: str, got: str, want: str) -> str:
    return f"{_compact(call)} = {_compact(got)[:24]} want {_compact(want)[:24]}"


_STRING_OR_SPACE = re.compile(r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?| """)


def _compact(text: str) -> str:
    """`text` without the spaces between its parts; those inside strings stay."""
    return _STRING_OR_SPACE.sub(lambda part: "" if part[0] == " " else part[0], text)
