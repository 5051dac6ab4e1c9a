"""Sandboxes for function calls: hostile Python code, each request in a fresh bubblewrap sandbox of its own.

Host side. One bubblewrap process a `BwrapSandboxes` holds a zygote (`box.py`), which makes new namespaces for
each request. Where a machine forbids nested namespaces every request gets a bubblewrap process of its own
(mode "one-shot"): the same code, slower. Nothing ever runs with less isolation: what is missing is an error.

Covers Linux (x86_64, aarch64) with user namespaces, as root or as an ordinary user. Does not cover shell
commands and test suites. Values come back as texts (`value_text`); expected values never enter a box, because
code in a box can claim any result it likes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from select import POLLERR, POLLHUP, POLLIN, POLLOUT, poll
from types import TracebackType
from typing import Any, Literal, Self, get_args

from composer_nb.harness import box

Status = Literal["returned", "raised", "timeout", "died", "unreadable", "not_run"]
Mode = Literal["forked", "one-shot"]

BOX_UID = 47_811  # who starts bubblewrap when the harness is root: a number no account uses
HOST_GRACE_S = 5.0  # how much longer than the box's own deadlines the host waits
STARTS_AT_ONCE = 1  # a dead zygote is started again so many times a run
MIN_PYTHON = (3, 9)


class SandboxUnavailable(RuntimeError):
    """Bubblewrap is missing or cannot start here; the message says what to install or change."""


class SandboxFailure(RuntimeError):
    """The machinery failed: the result says nothing about the code that was to run."""


class _ZygoteDied(Exception):
    """The box ended, stalled or sent something that is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may use; all of its arguments together, but for `output_bytes`."""

    cpu_s: float = 0.1  # CPU seconds from the import of the module on
    wall_s: float = 2.0  # seconds from the import on
    memory_bytes: int = 256 << 20  # address space
    disk_bytes: int = 4 << 20  # the workspace, a tmpfs
    inodes: int = 256
    files: int = 32  # open at once
    threads: int = 16  # new processes are never allowed
    output_bytes: int = 16 << 10  # characters of one value's text
    answer_bytes: int = 1 << 20  # everything a request may report

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} must be above 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Call `function` of `module` once for each text of an argument tuple, in one sandbox.

    files: workspace path -> text; module: dotted name; arguments: literals such as "([3, 1], 4)".
    Raises ValueError for paths that leave the workspace, for bad names and for texts that are no tuple.
    """

    files: Mapping[str, str]
    module: str
    function: str
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
                raise ValueError(f"CallRequest.files: {name!r} is not a path inside the workspace")
        if not all(part.isidentifier() for part in self.module.split(".")):
            raise ValueError(f"CallRequest.module: {self.module!r} is not a module name")
        if not self.function.isidentifier():
            raise ValueError(f"CallRequest.function: {self.function!r} is not a function name")
        for text in self.arguments:
            _check_argument(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """What became of one argument. text: the value's text, the exception's type name, or "".

    returned: a readable value. raised: the call or the import raised. timeout: the CPU or wall limit ended
    it. died: its process ended otherwise. unreadable: a value, or a report, that is not plain data of a fair
    size. not_run: an earlier argument ended the process.
    """

    status: Status
    text: str = ""


@functools.lru_cache(maxsize=8192)
def _check_argument(text: str) -> None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"CallRequest.arguments: {text[:80]!r} is not a literal") from error
    if type(value) is not tuple:
        raise ValueError(f"CallRequest.arguments: {text[:80]!r} is not a tuple (one argument is written (x,))")


def value_text(value: object, limit: int = Limits().output_bytes) -> str:
    """The text a box reports for `value`: repr, with set elements sorted by their texts.

    Raises ValueError for values a box calls unreadable.
    """
    try:
        return str(box.value_text(value, limit))
    except box.Unreadable:
        raise ValueError(f"a {type(value).__name__} that is not plain data of at most {limit} characters") from None


def install_hint(program: str = "bubblewrap") -> str:
    """The line that installs `program` with the package manager found here."""
    managers = {
        "apt-get": "install -y",
        "dnf": "install -y",
        "pacman": "-S",
        "apk": "add",
        "zypper": "install",
    }
    found = next((name for name in managers if shutil.which(name)), None)
    return f"{found} {managers[found]} {program}" if found else f"install {program} with your package manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python of the host and what it needs to run elsewhere."""

    path: str  # the real file
    directories: tuple[str, ...]  # standard library and shared libraries
    loader: str | None  # the dynamic loader, under the name programs ask for

    @classmethod
    def find(cls) -> Interpreter:
        """The system's python3, else the base of the running one. Raises SandboxUnavailable."""
        for candidate in ("/usr/bin/python3", *_base_interpreters()):
            if os.path.exists(candidate):
                found = cls._inspect(os.path.realpath(candidate))
                if found is not None:
                    return found
        raise SandboxUnavailable(f"no Python >= 3.9 for the box: {install_hint('python3')}")

    @classmethod
    def _inspect(cls, path: str) -> Interpreter | None:
        command = [path, "-I", "-S", "-c", _INSPECT]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={}, check=False)
        if done.returncode:
            return None
        facts = json.loads(done.stdout)
        if tuple(facts["version"]) < MIN_PYTHON:
            return None
        kept: list[str] = []
        for directory in sorted({*facts["stdlib"], *facts["libraries"]}, key=len):
            if not any(directory == k or directory.startswith(k + "/") for k in kept):
                kept.append(directory)
        loaders = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/lib/ld-musl-x86_64.so.1")
        loader = next((name for name in loaders if os.path.exists(name)), None)
        return cls(path=path, directories=tuple(kept), loader=loader)

    def binds(self) -> list[str]:
        """Bubblewrap arguments that put it, read-only, where it was."""
        arguments: list[str] = []
        for link in ("/lib", "/lib64"):
            if os.path.islink(link):
                arguments += ["--symlink", os.readlink(link), link]
        for directory in self.directories:
            arguments += ["--ro-bind", directory, directory]
            packages = os.path.join(directory, "site-packages")
            if os.path.isdir(packages):  # installed packages are no part of the task's runtime
                arguments += ["--tmpfs", packages, "--remount-ro", packages]
        files = [self.path]
        if self.loader is not None:
            directory, name = os.path.split(self.loader)
            files.append(os.path.join(os.path.realpath(directory), name))
        for name in files:
            arguments += ["--ro-bind", os.path.realpath(name), name]
        return arguments


_INSPECT = """
import sys, os, json, sysconfig, ctypes, zlib, hashlib
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
libraries = {os.path.dirname(name) for name in mapped if ".so" in name}
stdlib = {os.path.realpath(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")}
print(json.dumps({"version": sys.version_info[:2], "stdlib": sorted(stdlib), "libraries": sorted(libraries)}))
"""


def _base_interpreters() -> tuple[str, ...]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return tuple(os.path.join(sys.base_prefix, "bin", name) for name in (version, "python3"))


@dataclass(slots=True)
class _Box:
    """One running bubblewrap process."""

    process: subprocess.Popen[bytes]
    errors: Any  # an unnamed file that takes its stderr
    pending: bytearray = field(default_factory=bytearray)

    def complaint(self) -> str:
        self.errors.seek(0)
        text = self.errors.read(2000).decode("utf-8", "replace").strip()
        return text.splitlines()[-1] if text else f"exit status {self.process.poll()}"

    def stop(self) -> None:
        """End it and everything in it, and wait until all is gone."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # the zygote ends, and with it, being pid 1, its whole namespace
        if not self._gone(within_s=1.0):
            self.process.kill()  # bubblewrap's death takes the zygote along, a moment later
            self._gone(within_s=HOST_GRACE_S)
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def _gone(self, *, within_s: float) -> bool:
        """Whether the zygote ends in time: nobody else holds the other end of stdout."""
        assert self.process.stdout is not None
        deadline, poller = time.monotonic() + within_s, poll()
        poller.register(self.process.stdout, POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poller.poll(left * 1000) and not os.read(self.process.stdout.fileno(), 1 << 16):
                return True
        return False


class BwrapSandboxes:
    """Runs requests, each in a fresh sandbox. A context manager; `run` may be called from several threads.

    Make it in a thread that lives as long as it does: the kernel ends the box with the thread that started it
    (`run` starts it again, once a call).

    Raises SandboxUnavailable when no sandbox can be made here.
    """

    def __init__(self, limits: Limits | None = None, run_id: str | None = None, journal: Path | None = None) -> None:
        self.limits = limits or Limits()
        self.run_id = run_id or uuid.uuid4().hex
        self.journal = journal
        self._lock = threading.Lock()
        self._closed = False
        self._box: _Box | None = None
        bwrap = shutil.which("bwrap")
        if sys.platform != "linux":
            raise SandboxUnavailable("bubblewrap runs on Linux alone: it cannot be used here")
        if bwrap is None:
            raise SandboxUnavailable(f"bubblewrap (bwrap) is not installed: {install_hint()}")
        self._bwrap = bwrap
        self._interpreter = Interpreter.find()
        self._uid: int | None = BOX_UID if os.getuid() == 0 else None
        self._source = Path(box.__file__).read_text(encoding="utf-8")
        self._mode: Mode = self._probe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        running = getattr(self, "_box", None)
        if running is not None:
            running.stop()

    def close(self) -> None:
        """Kill whatever runs. May be called again."""
        with self._lock:
            self._closed = True
            self._stop()

    @property
    def pid(self) -> int | None:
        """The bubblewrap process, if one runs."""
        return None if self._box is None else self._box.process.pid

    @property
    def capabilities(self) -> dict[str, Any]:
        """backend, mode, limits (name -> enforced), interpreter, uid of the box's processes."""
        forked = self._mode == "forked"
        enforced = {name: True for name in asdict(self.limits)} | {"inodes": forked}
        enforced |= {"processes": True, "network": True, "system_calls": True}
        uid = self._uid if self._uid is not None else os.getuid()
        return {
            "backend": "bwrap",
            "mode": self._mode,
            "limits": enforced,
            "interpreter": self._interpreter.path,
            "uid": uid,
        }

    def _stop(self) -> None:
        if self._box is not None:
            running, self._box = self._box, None
            running.stop()
            self._note("stopped", running.process.pid)

    def _note(self, event: str, pid: int | None) -> None:
        """One line in the journal, which lets a later process find what a killed one left."""
        if self.journal is None:
            return
        entry = {"event": event, "run_id": self.run_id, "owner": os.getpid(), "pid": pid, "time": time.time()}
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _command(self, mode: Mode) -> list[str]:
        forked = mode == "forked"
        command = [
            self._bwrap,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--as-pid-1",
            "--clearenv",
        ]
        # The environment is ours alone. Hashes are fixed so that a set's order, and with it a reward, can
        # be reproduced; that rules out -I, which ignores the setting: -s -S and box.py's first lines serve.
        command += ["--setenv", "PYTHONHASHSEED", "0", "--cap-drop", "ALL", *self._interpreter.binds()]
        command += ["--dev-bind", "/dev/null", "/dev/null", "--symlink", box.WORKSPACE.lstrip("/"), "/tmp"]
        if forked:
            command += ["--proc", "/proc", "--dir", box.WORKSPACE]
        else:
            command += ["--size", str(self.limits.disk_bytes), "--tmpfs", box.WORKSPACE]
        command += [
            "--chdir",
            "/",
            "--remount-ro",
            "/",
            "--",
            self._interpreter.path,
            "-s",
            "-S",
            "-c",
            self._source,
        ]
        return [*command, "nested" if forked else "single", json.dumps(asdict(self.limits))]

    def _start(self, mode: Mode) -> _Box:
        """Raises SandboxFailure when the process cannot be started at all."""
        self._note("starting", None)
        errors = tempfile.TemporaryFile()
        who: dict[str, Any] = {}
        if self._uid is not None:
            who = {"user": self._uid, "group": self._uid, "extra_groups": []}
        try:
            process = subprocess.Popen(
                self._command(mode),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                close_fds=True,
                cwd="/",
                env={},
                bufsize=0,
                **who,
            )
        except OSError as error:
            errors.close()
            raise SandboxFailure(f"cannot start {self._bwrap}: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._note("started", process.pid)
        return _Box(process, errors)

    def _probe(self) -> Mode:
        """Which mode works here, found by running one call. Raises SandboxUnavailable when none does."""
        files = {"f.py": "def f(x):\n    return x\n"}
        request = CallRequest(files=files, module="f", function="f", arguments=("(1,)",))
        complaints = []
        modes: tuple[Mode, ...] = get_args(Mode)
        for mode in modes:
            self._mode = mode
            try:
                self._attempt([request], [None])
                return mode
            except (SandboxFailure, _ZygoteDied) as error:
                complaints.append(f"{mode}: {error}")
            self._stop()
        who = "this user" if self._uid is None else f"user {self._uid}"
        raise SandboxUnavailable(
            "bubblewrap cannot make a sandbox here (are unprivileged user namespaces allowed, and can "
            f"{who} read {self._interpreter.path}?): " + "; ".join(complaints)
        )

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """One tuple of outcomes a request, one outcome an argument, both in order.

        Raises SandboxFailure when the machinery fails twice; then nothing is known about the code.
        """
        answers: list[tuple[CallOutcome, ...] | None] = [None] * len(requests)
        with self._lock:
            if self._closed:
                raise SandboxFailure("these sandboxes are closed")
            for left in reversed(range(STARTS_AT_ONCE + 1)):
                try:
                    self._attempt(requests, answers)
                    break
                except _ZygoteDied as error:
                    self._stop()
                    if not left:
                        raise SandboxFailure(f"the sandbox failed twice: {error}") from error
        assert all(answer is not None for answer in answers)
        return [answer for answer in answers if answer is not None]

    def _attempt(self, requests: Sequence[CallRequest], answers: list[tuple[CallOutcome, ...] | None]) -> None:
        """Answer what is unanswered, in place. Raises _ZygoteDied."""
        for index, request in enumerate(requests):
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in request.files.values())
            if size > self.limits.disk_bytes:  # what writing it in the box would come to, without the traffic
                answers[index] = (CallOutcome(status="raised", text="OSError"),) * len(request.arguments)
        todo = [index for index, answer in enumerate(answers) if answer is None]
        batches = [todo] if self._mode == "forked" else [[index] for index in todo]
        for batch in batches:
            if self._box is None:
                self._box = self._start(self._mode)
            self._exchange(self._box, requests, batch, answers)
            if self._mode == "one-shot":
                self._stop()

    def _exchange(
        self,
        running: _Box,
        requests: Sequence[CallRequest],
        batch: Sequence[int],
        answers: list[tuple[CallOutcome, ...] | None],
    ) -> None:
        """Write the requests and read their answers at the same time: neither pipe can fill for good."""
        stdin, stdout = running.process.stdin, running.process.stdout
        assert stdin is not None and stdout is not None
        to_send = memoryview(b"".join(_encode(requests[index]) for index in batch))
        patience = box.SETUP_S + self.limits.wall_s + HOST_GRACE_S
        deadline = time.monotonic() + patience
        poller = poll()
        poller.register(stdout, POLLIN)
        if batch:
            poller.register(stdin, POLLOUT)
        waiting = list(batch)
        while waiting:
            events = dict(poller.poll(max(deadline - time.monotonic(), 0) * 1000))
            if not events:
                raise _ZygoteDied("no answer in time")
            if events.get(stdin.fileno(), 0) & (POLLERR | POLLHUP):
                poller.unregister(stdin)
            elif stdin.fileno() in events:
                to_send = to_send[_write_some(stdin.fileno(), to_send) :]
                if not to_send:
                    poller.unregister(stdin)
            if stdout.fileno() in events:
                chunk = os.read(stdout.fileno(), 1 << 16)
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.process.wait(timeout=HOST_GRACE_S)
                    raise _ZygoteDied(running.complaint())
                running.pending += chunk
                while waiting and (body := _take_frame(running.pending, self.limits.answer_bytes)) is not None:
                    index = waiting.pop(0)
                    answers[index] = _decode(body, len(requests[index].arguments), self.limits)
                    deadline = time.monotonic() + patience
        if running.pending:
            raise _ZygoteDied("more answers than requests")


def _write_some(fd: int, data: memoryview) -> int:
    try:
        return os.write(fd, data[: 1 << 16])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)  # the reading side notices that the box is gone, and why


def _encode(request: CallRequest) -> bytes:
    body = json.dumps(
        {
            "files": dict(request.files),
            "module": request.module,
            "function": request.function,
            "arguments": list(request.arguments),
        }
    ).encode()
    return len(body).to_bytes(4, "big") + body


def _take_frame(pending: bytearray, answer_bytes: int) -> bytes | None:
    """Remove one whole frame from `pending`. Raises _ZygoteDied for an impossible length."""
    if len(pending) < 4:
        return None
    size = int.from_bytes(pending[:4], "big")
    if size > answer_bytes + 1000:
        raise _ZygoteDied("an answer of impossible length")
    if len(pending) < 4 + size:
        return None
    body = bytes(pending[4 : 4 + size])
    del pending[: 4 + size]
    return body


def _decode(body: bytes, count: int, limits: Limits) -> tuple[CallOutcome, ...]:
    """Outcomes of `count` arguments. The header is the zygote's, all after it is the hostile worker's.

    Raises _ZygoteDied when the sandbox was not made.
    """
    head, _, report = body.partition(b"\n")
    try:
        end = json.loads(head)["end"]
    except (ValueError, KeyError, TypeError) as error:
        raise _ZygoteDied("an answer without a header") from error
    first, _, report = report.partition(b"\n")
    if not first.startswith(b"ready "):
        raise _ZygoteDied(f"{end}: {first[:300].decode('utf-8', 'replace')}")
    nonce = first[len(b"ready ") :] + b" "
    lines = report.split(b"\n")
    outcomes: list[CallOutcome] = []
    for line in lines[:-1]:  # the last has no newline: it is empty or was cut off
        outcome = _outcome(line, nonce, limits) if len(outcomes) < count else None
        if outcome is None:  # forged or garbled: from here on nothing it says is believed
            outcomes = [*outcomes[: count - 1], CallOutcome(status="unreadable")]
            return _pad(outcomes, count)
        outcomes.append(outcome)
    if len(outcomes) < count:
        outcomes.append(CallOutcome(status=_ENDINGS.get(end, "died")))
    return _pad(outcomes, count)


_ENDINGS: dict[str, Status] = {"cpu": "timeout", "wall": "timeout", "flood": "unreadable"}


def _pad(outcomes: list[CallOutcome], count: int) -> tuple[CallOutcome, ...]:
    return tuple(outcomes + [CallOutcome(status="not_run")] * (count - len(outcomes)))


def _outcome(line: bytes, nonce: bytes, limits: Limits) -> CallOutcome | None:
    """One reported line, or None if it is not exactly what an honest worker writes."""
    if not line.startswith(nonce):
        return None
    try:
        fields = json.loads(line[len(nonce) :])
    except (ValueError, RecursionError):
        return None
    if type(fields) is not list or len(fields) != 2 or not all(type(f) is str for f in fields):
        return None
    status, text = fields
    honest = {"returned": text.isprintable() and text != "", "raised": text.isidentifier()}
    honest["unreadable"] = text == ""
    if len(text) > limits.output_bytes or not honest.get(status, False):
        return None
    return CallOutcome(status=status, text=text)
