"""Sandboxes for function calls: hostile Python code, each request in a fresh bubblewrap sandbox of its own.

Host side. One bubblewrap process a `BwrapSandboxes` holds a zygote (`box.py`), which makes new namespaces for
each request. Where a machine forbids nested namespaces every request gets a bubblewrap process of its own
(mode "one-shot"): the same code, slower. Nothing ever runs with less isolation: what is missing is an error.

A program ends at its CPU limit, or when it has slept too long: both are its own doing, and the same each time. One that
wanted a CPU and got none within PATIENCE times as long tells nothing but that the machine is overloaded: it is run once
more, and then the run fails with SandboxFailure, as it does when the box itself dies. Runs that fail in a row make the
sandboxes rest, so that a broken machine costs a batch a minute or two and not as much for each of its requests.

Covers Linux (x86_64, aarch64) with user namespaces, as root or as an ordinary user. Does not cover shell
commands and test suites.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from select import POLLERR, POLLHUP, POLLIN, POLLOUT, poll
from types import TracebackType
from typing import Any, Literal, Self, get_args

from composer_nb.harness import box
from composer_nb.harness.bundle import bundle
from composer_nb.harness.calls import CallOutcome, CallRequest, Limits, SandboxFailure, SandboxUnavailable
from composer_nb.harness.interpreter import Interpreter, install_hint
from composer_nb.harness.journal import Journal, Resource
from composer_nb.harness.linux import machine
from composer_nb.harness.seccomp import function_filter
from composer_nb.harness.wire import NoAnswer, decode, encode, take_frame

Mode = Literal["forked", "one-shot"]

BOX_UID = 47_811  # who starts bubblewrap when the harness is root: a number no account uses
HOST_GRACE_S = 5.0  # how much longer than the box's own deadlines the host waits
STARTS_AT_ONCE = 1  # a dead zygote is started again so many times a run
FAILURES_IN_A_ROW = 3  # so many failed runs, one after the other, and the sandboxes rest
REST_S = 60.0  # how long they refuse every run then


@dataclass(slots=True)
class _Box:
    """One running bubblewrap process."""

    process: subprocess.Popen[bytes]
    errors: Any  # an unnamed file that takes its stderr
    noted: Resource | None  # in the journal
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


@contextlib.contextmanager
def _host_proc() -> Iterator[int]:
    """A descriptor of this machine's /proc. A zygote without one of its own sees in it whether its worker wants a CPU."""
    fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class BwrapSandboxes:
    """Runs requests, each in a fresh sandbox. A context manager; `run` may be called from several threads.

    Make it in a thread that lives as long as it does: the kernel ends the box with the thread that started it
    (`run` starts it again, once a call).

    Raises SandboxUnavailable when no sandbox can be made here.
    """

    def __init__(self, limits: Limits | None = None, run_id: str | None = None, journal: Path | None = None) -> None:
        """`journal`: a folder in which what runs is noted while it does (`reap.py`)."""
        self.limits = limits or Limits()
        self.run_id = run_id or uuid.uuid4().hex
        self._journal = None if journal is None else Journal(journal, self.run_id)
        self._lock = threading.Lock()
        self._closed = False
        self._failures = 0  # in a row
        self._rest_until, self._refusal = 0.0, ""
        self._box: _Box | None = None
        bwrap = shutil.which("bwrap")
        if sys.platform != "linux":
            raise SandboxUnavailable("bubblewrap runs on Linux alone: it cannot be used here")
        if bwrap is None:
            raise SandboxUnavailable(f"bubblewrap (bwrap) is not installed: {install_hint()}")
        self._bwrap = bwrap
        self._interpreter = Interpreter.find()
        self._uid: int | None = BOX_UID if os.getuid() == 0 else None
        self._source = bundle(box)
        self._filter = base64.b64encode(function_filter(machine())).decode()
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
            if self._journal is not None:
                self._journal.gone(running.noted)

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
        # be reproduced; that rules out -I, which ignores the setting: -s -S and the bundle's first lines serve.
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
        return [*command, "nested" if forked else "single", json.dumps(asdict(self.limits)), self._filter]

    def _start(self, mode: Mode) -> _Box:
        """Raises SandboxFailure when the process cannot be started at all."""
        who: dict[str, Any] = {}
        if self._uid is not None:
            who = {"user": self._uid, "group": self._uid, "extra_groups": []}
        errors, command = tempfile.TemporaryFile(), self._command(mode)
        try:
            with _host_proc() as proc:
                process = subprocess.Popen(
                    [*command, str(proc)] if mode == "one-shot" else command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    pass_fds=(proc,) if mode == "one-shot" else (),
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
        noted = None if self._journal is None else self._journal.made("process", process.pid)
        return _Box(process, errors, noted)

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
            except (SandboxFailure, NoAnswer) as error:
                complaints.append(f"{mode}: {error}")
            self._stop()
        who = "this user" if self._uid is None else f"user {self._uid}"
        raise SandboxUnavailable(
            "bubblewrap cannot make a sandbox here (are unprivileged user namespaces allowed, and can "
            f"{who} read {self._interpreter.path}?): " + "; ".join(complaints)
        )

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """One tuple of outcomes a request, one outcome an argument, both in order.

        Raises SandboxFailure when the machinery fails twice, or has done so in the last runs; then nothing is known
        about the code.
        """
        answers: list[tuple[CallOutcome, ...] | None] = [None] * len(requests)
        with self._lock:
            if self._closed:
                raise SandboxFailure("these sandboxes are closed")
            if time.monotonic() < self._rest_until:
                raise SandboxFailure(self._refusal)
            for left in reversed(range(STARTS_AT_ONCE + 1)):
                try:
                    self._attempt(requests, answers)
                    break
                except NoAnswer as error:
                    self._stop()
                    if not left:
                        self._count_failure(error)
                        raise SandboxFailure(f"the sandbox failed twice: {error}") from error
            self._failures = 0
        assert all(answer is not None for answer in answers)
        return [answer for answer in answers if answer is not None]

    def _count_failure(self, error: NoAnswer) -> None:
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self._rest_until = time.monotonic() + REST_S
            self._refusal = (
                f"the sandboxes are out of order: {self._failures} runs in a row failed, the last because {error}; "
                f"they are tried again after {REST_S:g} s (`composer-nb doctor` tells whether they work)"
            )

    def _attempt(self, requests: Sequence[CallRequest], answers: list[tuple[CallOutcome, ...] | None]) -> None:
        """Answer what is unanswered, in place. Raises NoAnswer."""
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
        to_send = memoryview(b"".join(encode(requests[index]) for index in batch))
        patience = box.SETUP_S + box.PATIENCE * self.limits.wall_s + HOST_GRACE_S
        deadline = time.monotonic() + patience
        poller = poll()
        poller.register(stdout, POLLIN)
        if batch:
            poller.register(stdin, POLLOUT)
        waiting = list(batch)
        while waiting:
            events = dict(poller.poll(max(deadline - time.monotonic(), 0) * 1000))
            if not events:
                raise NoAnswer("no answer in time")
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
                    raise NoAnswer(running.complaint())
                running.pending += chunk
                while waiting and (body := take_frame(running.pending, self.limits.answer_bytes)) is not None:
                    index = waiting.pop(0)
                    answers[index] = decode(body, len(requests[index].arguments), self.limits)
                    deadline = time.monotonic() + patience
        if running.pending:
            raise NoAnswer("more answers than requests")


def _write_some(fd: int, data: memoryview) -> int:
    try:
        return os.write(fd, data[: 1 << 16])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)  # the reading side notices that the box is gone, and why
