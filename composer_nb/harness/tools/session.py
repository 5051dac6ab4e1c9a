"""What the calls of one agent share: its sandbox, what it has read, its list of things to do, its terminal."""

from __future__ import annotations

import errno
import posixpath
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from composer_nb.harness.sandbox.contract import ExecResult, Sandbox
from composer_nb.harness.tools.arguments import CONTROLS, Todo
from composer_nb.harness.tools.tool_call import ToolError

if TYPE_CHECKING:
    from composer_nb.harness.search.index import Hit

FOLDER = ".composer_nb"
"""Where long outputs are kept in a workspace. Git and ripgrep pass over it, and no grade is made of it."""
SHOWN = 16_000
"""Characters of an observation."""
EDIT_BYTES = 2 << 20
"""Of a file that is changed by replacing or patching."""
QUICK_S = 30.0
"""How long a tool's own program may take."""
DOING = {errno.EXDEV, errno.ENAMETOOLONG, errno.EINVAL}
"""Errors of a file system that no workspace would have spared a call: others, a missing file too, are about what was there."""
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class Search(Protocol):
    """Looks in one workspace for what answers a question, best first, in these folders or (none given) everywhere.

    Raises OSError when it does not work now.
    """

    def __call__(self, query: str, directories: Sequence[str], limit: int) -> Sequence[Hit]: ...


@dataclass(slots=True, kw_only=True)
class Session:
    """Made by `CursorTools.open`. One turn at a time uses it; the tools of a turn may from several threads."""

    sandbox: Sandbox
    root: str
    """The workspace, as an absolute path in the sandbox."""
    strict: bool
    seen: set[str] = field(default_factory=set)
    """Files that the agent has read or written."""
    todos: dict[str, Todo] = field(default_factory=dict)
    cwd: str = ""
    """Of the terminal, absolute."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the terminal."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(tool, "ok" or kind of error) -> calls."""
    touched: set[str] = field(default_factory=set)
    """Files that tools have changed since somebody looked (`search/workspace.py`), and cleared it."""
    restless: bool = False
    """Whether anything else may have changed since then, as a command may."""
    background: bool = False
    """Whether a background command was started, which may change files at any time."""
    search: Search | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    numbers: count[int] = field(default_factory=lambda: count(1))
    """Of files in FOLDER."""

    def abort(self) -> None:
        """From another thread: what runs ends, and what still waits of this turn, or else of the next, is not begun."""
        self.stop.set()

    def path(self, text: str) -> str:
        """A path relative to the workspace. Raises ToolError (InvalidArguments) for one that leads out of it."""
        whole = posixpath.normpath(posixpath.join(self.root, text))
        if whole != self.root and not whole.startswith(self.root + "/"):
            raise ToolError("InvalidArguments", f"{text[:200]}: leads out of the workspace {self.root}")
        return posixpath.relpath(whole, self.root)

    def exists(self, path: str) -> bool:
        """Whether there is a file. Raises OSError for a folder, and for what leads out of the workspace by a link."""
        try:
            self.sandbox.read(path, max_bytes=0)
        except FileNotFoundError:
            return False
        return True

    def place(self, text: str | None) -> str:
        """The path of a file or folder that there is. Raises ToolError and OSError like `path` and `exists`."""
        path = self.path(text or ".")
        try:
            self.sandbox.read(path, max_bytes=0)
        except IsADirectoryError:
            pass
        return path

    def text(self, path: str) -> str:
        """A file that is to be changed; bytes that are not UTF-8 as lone surrogates. Raises ToolError for a large one."""
        data = self.sandbox.read(path, max_bytes=EDIT_BYTES + 1)
        if len(data) > EDIT_BYTES:
            text = f"{path}: larger than {EDIT_BYTES} bytes; change it with a program"
            raise ToolError("UnexpectedEnvironment", text)
        return data.decode("utf-8", "surrogateescape")

    def store(self, path: str, text: str) -> None:
        """Writes what `text` gave, with changes."""
        self.sandbox.write(path, text.encode("utf-8", "surrogateescape"))
        self.seen.add(path)
        self.touched.add(path)

    def remove(self, path: str) -> None:
        """Removes a file or link. Raises OSError."""
        self.sandbox.remove(path)
        self.seen.discard(path)
        self.touched.add(path)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = QUICK_S,
        output_bytes: int = 1 << 20,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """A command in the workspace. Raises ToolError (UserAborted) when it was stopped; a time limit is a result."""
        done = self.sandbox.exec(command, timeout_s=timeout_s, output_bytes=output_bytes, env=env, stop=self.stop)
        if done.stopped:
            raise ToolError("UserAborted", f"stopped\n{self.fit(clean(done.stdout), 'stopped')}".rstrip())
        return done

    def program(self, command: Sequence[str]) -> ExecResult:
        """A tool's own program, ended in time. Raises ToolError (Timeout, UserAborted)."""
        done = self.run(command)
        if done.timed_out:
            raise ToolError("Timeout", f"this took more than {QUICK_S:g} s: look in fewer files")
        return done

    def fit(self, text: str, name: str) -> str:
        """An observation of at most about SHOWN characters: a longer one goes to a file, and its head and tail remain."""
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

    def keep(self, path: str, text: str) -> None:
        """Writes a file of ours in FOLDER. Raises OSError."""
        self.sandbox.write(f"{FOLDER}/.gitignore", b"*\n")
        self.sandbox.write(path, text.encode())


def below(path: str) -> str:
    """A path as a program is given it, which can not be taken for an option."""
    return "./" if path == "." else f"./{path}"


def clean(data: bytes) -> str:
    """What a program wrote, as a text that shows: no colours, no other control characters than tabs and newlines."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return ESCAPES.sub("", text).translate(CONTROLS)


def shown(name: str) -> str:
    """A name of a file as text, whatever bytes it has."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace").translate(CONTROLS)
