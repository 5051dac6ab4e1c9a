"""Answer function calls (`requests.py`) in sandboxes. `guest/calls.py` is the side of the sandbox.

A program ends at its CPU limit, or when it has slept too long: both are its own doing, and the same each time. A program that
wanted a CPU and got none within PATIENCE times as long says only that the machine is overloaded: it runs once more, and then the
run fails with SandboxFailure, as it does when the sandbox itself dies. After several failed runs in a row all runs are refused
for a while, so that a broken machine costs a batch a minute or two and not as much for each of its requests.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import CallEnd, Capabilities, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxSlow, SandboxUnavailable
from composer_nb.harness.sandbox.guest import calls as guest
from composer_nb.harness.sandbox.merging import run_merged
from composer_nb.harness.sandbox.requests import CallLimits, CallOutcome, CallRequest, CallStatus, Executor
from composer_nb.harness.sandbox.system.linux import patience

STARTS = 2  # Times that a run starts a sandbox, at most, to get its requests answered.
FAILURES = 3  # Runs that fail in a row until all runs are refused for REST_S.
REST_S = 60.0


IDENTITY = CallRequest(files={"f.py": "def f(x):\n    return x\n"}, module="f", function="f", arguments=("(1,)",))


class CachedExecutor:
    """Remembers answers: a request for the same files, function and arguments gets the same one.

    The key is the whole request, because code may keep state from one argument to the next and a limit may end it part of the
    way. Infrastructure failures are not remembered. Beyond `size` requests the oldest are dropped.
    """

    def __init__(self, sandboxes: Executor, size: int = 1 << 17) -> None:
        self.sandboxes, self.size = sandboxes, size
        self._lock = threading.Lock()  # of what is known and what waits
        self._running = threading.Lock()  # a thread runs at a time, for all that wait
        self._waiting: dict[bytes, CallRequest] = {}
        self._known: OrderedDict[bytes, tuple[CallOutcome, ...]] = OrderedDict()

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        keys = [_key(request) for request in requests]
        answers = self._recall(keys)
        if missing := {key: request for key, request in zip(keys, requests, strict=True) if key not in answers}:
            with self._lock:
                self._waiting |= missing
            with self._running:  # meanwhile other threads may have run these requests
                answers |= self._recall(missing)
                if not missing.keys() <= answers.keys():
                    answers |= self._run(missing)
        return [answers[key] for key in keys]

    def _run(self, requests: dict[bytes, CallRequest]) -> dict[bytes, tuple[CallOutcome, ...]]:
        """Run requests by key, and those that other threads wait for. Return the answers."""
        with self._lock:
            together, self._waiting = self._waiting | requests, {}
            together = {key: request for key, request in together.items() if key not in self._known}
        try:
            outcomes = run_merged(list(together.values()), self.sandboxes)
        except SandboxFailure:
            if together.keys() <= requests.keys():
                raise
            together = requests  # another thread's may have failed
            outcomes = run_merged(list(together.values()), self.sandboxes)
        answers = dict(zip(together, outcomes, strict=True))
        with self._lock:
            self._store(answers)
        return answers

    def _recall(self, keys: Iterable[bytes]) -> dict[bytes, tuple[CallOutcome, ...]]:
        with self._lock:
            return {key: self._known[key] for key in keys if key in self._known}

    def _store(self, outcomes: dict[bytes, tuple[CallOutcome, ...]]) -> None:
        self._known.update(outcomes)
        while len(self._known) > self.size:
            self._known.popitem(last=False)


def _key(request: CallRequest) -> bytes:
    limits = request.limits and asdict(request.limits)
    parts = [request.module, request.function, sorted(request.files.items()), request.arguments, limits]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


class SandboxExecutor:
    """Answers function calls, each request in a fresh process of its own. A context manager; `run` may be called from threads.

    One sandbox serves all requests with the same limits. Raises SandboxUnavailable when no sandbox can be made here, SandboxSlow
    when none is ready in time.
    """

    def __init__(
        self, limits: CallLimits | None = None, run_id: str | None = None, journal: Path | None = None
    ) -> None:
        """`journal`: folder of the run's journal (`reap.py`)."""
        self.limits = limits or CallLimits()
        self._lock = threading.Lock()
        self._closed, self._failures, self._rest_until, self._refusal = False, 0, 0.0, ""
        self._sandboxes: dict[CallLimits, Sandbox] = {}
        self.backend = BwrapBackend(run_id, journal)
        try:
            self._attempt([IDENTITY], [None])
        except SandboxSlow:
            self.close()
            raise
        except (SandboxFailure, SandboxDied) as error:
            self.close()
            raise SandboxUnavailable(f"no function can be called in a sandbox here: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill whatever runs. May be called again."""
        with self._lock:
            self._closed = True
            self._sandboxes = {}
            self.backend.close()

    def capabilities(self) -> Capabilities:
        return self.backend.capabilities()

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Return a tuple of outcomes for each request, one outcome for each argument, in order.

        Raises SandboxFailure when the machinery fails twice, or has done so in the last runs; then nothing is known about the
        code.
        """
        answers: list[tuple[CallOutcome, ...] | None] = [None] * len(requests)
        with self._lock:
            if self._closed:
                raise SandboxFailure("these sandboxes are closed")
            if time.monotonic() < self._rest_until:
                raise SandboxFailure(self._refusal)
            for left in reversed(range(STARTS)):
                try:
                    self._attempt(requests, answers)
                    break
                except (SandboxFailure, SandboxDied) as error:
                    if not left:
                        self._count_failure(error)
                        raise SandboxFailure(f"the sandbox failed twice: {error}") from error
            self._failures = 0
        return [answer for answer in answers if answer is not None]

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._rest_until = time.monotonic() + REST_S
            self._refusal = (
                f"the sandboxes are out of order: {self._failures} runs in a row failed, the last because {error}; "
                f"they are tried again after {REST_S:g} s (`composer-nb doctor` tells whether they work)"
            )

    def _attempt(self, requests: Sequence[CallRequest], answers: list[tuple[CallOutcome, ...] | None]) -> None:
        """Answer what is unanswered, in place. Raises SandboxFailure and SandboxDied; the next attempt has a new sandbox."""
        groups: dict[CallLimits, list[int]] = {}
        for index, request in enumerate(requests):
            limits = request.limits or self.limits
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in request.files.values())
            if size > limits.disk_bytes:  # the same as writing it in a sandbox, without the traffic
                answers[index] = (CallOutcome(status="raised", text="OSError"),) * len(request.arguments)
            if answers[index] is None:
                groups.setdefault(limits, []).append(index)
        for limits, todo in groups.items():
            try:
                sandbox = self._sandboxes.get(limits) or self.backend.create(_spec(limits))
                self._sandboxes[limits] = sandbox
                within_s = patience(guest.SETUP_S) + guest.PATIENCE * limits.wall_s
                texts = [_encoded(requests[index]) for index in todo]
                called = sandbox.call(texts, within_s=within_s, most=limits.answer_bytes)
                with contextlib.closing(called):
                    for index, (end, report) in zip(todo, called, strict=True):
                        answers[index] = _outcomes(end, report, len(requests[index].arguments), limits)
            except BaseException:
                if gone := self._sandboxes.pop(limits, None):
                    gone.destroy()
                raise


def _spec(limits: CallLimits) -> SandboxSpec:
    # Second locks: a worker reaches its own limits first, and must not wait for CPUs that the resident uses beside it.
    memory = 2 * (limits.memory_bytes + limits.disk_bytes) + (64 << 20)
    return SandboxSpec(memory_bytes=memory, disk_bytes=limits.disk_bytes, cpus=64.0, calls=limits)


def _encoded(request: CallRequest) -> bytes:
    facts = {"files": dict(request.files), "module": request.module, "function": request.function}
    return json.dumps({**facts, "arguments": list(request.arguments)}).encode()


def _outcomes(end: CallEnd, report: bytes, count: int, limits: CallLimits) -> tuple[CallOutcome, ...]:
    """Return the outcomes of `count` arguments. `end` comes from the resident, the report from the hostile worker.

    Raises SandboxFailure when the worker was not made, or when the machine gave it too little time to tell anything about it.
    """
    first, _, report = report.partition(b"\n")
    if not first.startswith(b"ready "):
        kind = SandboxSlow if end == "slow start" else SandboxFailure
        raise kind(f"{end}: {first[:300].decode('utf-8', 'replace')}")
    if end == "starved":
        raise SandboxFailure(
            f"a program waited for this machine for {guest.PATIENCE * limits.wall_s:g} s and got less than the "
            f"{limits.cpu_s:g} s of CPU it may use: run less beside it, or raise CallLimits.wall_s"
        )
    nonce = first[len(b"ready ") :] + b" "
    outcomes: list[CallOutcome] = []
    for line in report.split(b"\n")[:-1]:  # the last has no newline: it is empty or was cut off
        outcome = _outcome(line, nonce, limits) if len(outcomes) < count else None
        if outcome is None:  # forged or garbled: nothing from here on is believed
            return _padded([*outcomes[: count - 1], CallOutcome(status="unreadable")], count)
        outcomes.append(outcome)
    if len(outcomes) < count:
        outcomes.append(CallOutcome(status=_ENDINGS.get(end, "died")))
    return _padded(outcomes, count)


_ENDINGS: dict[str, CallStatus] = {"cpu": "timeout", "asleep": "timeout", "flood": "unreadable"}


def _padded(outcomes: list[CallOutcome], count: int) -> tuple[CallOutcome, ...]:
    return tuple(outcomes + [CallOutcome(status="not_run")] * (count - len(outcomes)))


def _outcome(line: bytes, nonce: bytes, limits: CallLimits) -> CallOutcome | None:
    """Return one reported line, or None if it is not exactly what an honest worker writes."""
    if not line.startswith(nonce):
        return None
    try:
        fields = json.loads(line[len(nonce) :])
    except (ValueError, RecursionError):
        return None
    if type(fields) is not list or len(fields) != 2 or not all(type(f) is str for f in fields):
        return None
    status, text = fields
    honest = {"returned": text.isprintable() and text, "raised": text.isidentifier(), "unreadable": not text}
    if len(text) > limits.output_bytes or not honest.get(status, False):
        return None
    return CallOutcome(status=status, text=text)
