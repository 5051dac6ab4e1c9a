"""A grading box from outside: what goes in, what is believed of what comes out.

A *job* is one run of the hidden tests (`runner.py`). Each has a fresh sandbox of its own, so that no run finds what another left.
Of what a run says only lines that carry its nonce are believed, a test at most once, and only for tests that were asked for.
Everything else is `forged`.
"""

from __future__ import annotations

import itertools
import json
import marshal
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from composer_nb.harness.calls import SandboxFailure
from composer_nb.harness.grading.kit import block, command, framed
from composer_nb.harness.sandboxes.contract import Backend, SandboxSpec

GRACE_S = 15.0
"""How much longer than a run's own deadline its sandbox waits."""
AT_ONCE = 4
"""Sandboxes of one call that live at the same time."""
OUTPUT_BYTES = 32 << 20
INTERNAL_ERROR = 3
"""pytest's exit code for a run that it gave up itself."""
LINE = 500
"""Characters. pytest's own lines are shorter."""


class RunnerEnded(RuntimeError):
    """The runner was ended before it could report: by what it ran, for nothing else runs in its sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of tests."""

    files: Mapping[str, bytes]
    """The workspace, and data files of the tests."""
    hidden: Mapping[str, str]
    """Modules that lie on no disk: path -> text."""
    tests: tuple[str, ...]
    """Those of `hidden` that are test modules."""
    keys: frozenset[str] | None = None
    """Which tests to run (see `plugin.py`); None: all."""
    reach: bool = False
    """Whether to note which functions of the workspace each test calls, which takes longer."""
    explain: bool = False
    """Whether to note where and with which words tests failed."""
    hash_seed: int = 0
    """Of Python's hashes: what depends on the order of a set comes out differently under another."""
    test_s: float = 0.0
    """After so many seconds an alarm fails a test with `Endless`, and the others follow; 0: no alarm. For what is known to be
    honest: what runs can turn it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one test ended, as its process said."""

    outcome: str
    """passed, failed or skipped (which an expected failure is too)."""
    why: str = ""
    """Name of the exception."""
    id: str = ""
    """pytest's node id."""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


Place = tuple[str, int]
"""A function: its module's path, and its first line, which is that of its first decorator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a test called, as its process said."""

    seconds: float
    """While calls were noted: more than it takes otherwise."""
    depths: Mapping[Place, int]
    """Functions of the workspace -> how many of them were under way at the first call; 1: the test called it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a test failed, as its process said."""

    line: int
    """Of the test's own module as `plan.normal` writes it; 0 if it failed elsewhere."""
    message: str
    """The exception's first line, cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of one job."""

    results: Mapping[str, Result] = field(default_factory=dict)
    """By key, in the order in which they ran. What is missing did not pass."""
    flags: frozenset[str] = frozenset()
    """forged_events, forged_report, read_tests, printed_results, ended_early, timeout."""
    output: str = ""
    """What was printed, for people; agents must never see it, for it may quote hidden tests."""
    seconds: float = 0.0
    reached: Mapping[str, Reach] = field(default_factory=dict)
    """By key, where it was asked for; the same for `failures`, of tests that failed."""
    failures: Mapping[str, Failure] = field(default_factory=dict)


def run_jobs(
    backend: Backend,
    jobs: Sequence[Job],
    *,
    timeout_s: float = 60.0,
    spec: SandboxSpec | None = None,
) -> list[Ran]:
    """Runs every job for at most `timeout_s` seconds, several at a time.

    Raises SandboxFailure when the machinery failed, SandboxDied or RunnerEnded when what ran ended it.
    """
    kit = framed(block(backend, spec))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda job: _run(backend, kit, job, timeout_s, spec), jobs))


def _run(backend: Backend, kit: bytes, job: Job, timeout_s: float, spec: SandboxSpec | None) -> Ran:
    nonce = secrets.token_hex(16)
    box = backend.create(spec)
    try:
        done = box.exec(
            command(timeout_s),
            timeout_s=timeout_s + GRACE_S,
            env={"PYTHONHASHSEED": str(job.hash_seed)},
            stdin=kit + _frame(job, nonce),
            output_bytes=OUTPUT_BYTES,
        )
    finally:
        box.destroy()
    ready, _, rest = done.stdout.partition(b"\n")
    if ready != b"ready":
        told = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise SandboxFailure(f"the runner did not start: exit code {done.exit_code}, {''.join(told)}")
    try:
        report = json.loads(rest)
        failed = report["failed"]
        ran = _read(job, nonce, report)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        memory = ", out of memory" if done.oom else ""
        raise RunnerEnded(f"no report: exit code {done.exit_code}{memory} ({error})") from None
    if failed:
        raise SandboxFailure(f"a run could not begin: {failed}")
    return ran


def _frame(job: Job, nonce: str) -> bytes:
    frame = {
        "nonce": nonce,
        "files": dict(job.files),
        "hidden": dict(job.hidden),
        "tests": list(job.tests),
        "keys": None if job.keys is None else sorted(job.keys),
        "reach": job.reach,
        "explain": job.explain,
        "test_s": job.test_s,
    }
    return marshal.dumps(frame, 4)


def _read(job: Job, nonce: str, report: Mapping[str, Any]) -> Ran:
    results: dict[str, Result] = {}
    reached: dict[str, Reach] = {}
    failures: dict[str, Failure] = {}
    places: list[Place] = []
    flags, done = set(), False
    for line in report["events"].split("\n")[:-1]:
        event = _event(line, nonce)
        match event:
            case ["done", int(code)] if not done:
                done = True
                flags |= {"ended_early"} if code == INTERNAL_ERROR else set()
            case [str(key), "passed" | "failed" | "skipped" as outcome, str(why), str(name)] if (
                not done and key not in results and (job.keys is None or key in job.keys)
            ):
                results[key] = Result(outcome=outcome, why=why, id=name)
            case ["place", str(path), int(line)] if job.reach and not done:
                places.append((path, line))
            case ["reached", str(key), int() | float() as seconds, list(called)] if (
                job.reach and not done and key not in reached and (depths := _depths(called, places)) is not None
            ):
                reached[key] = Reach(seconds=seconds, depths=depths)
            case ["at", str(key), int(line), str(message)] if job.explain and not done and key not in failures:
                failures[key] = Failure(line=line, message=message)
            case _:
                flags.add("forged_events")
    for flag, seen in (
        ("forged_report", report["decoy_changed"]),
        ("read_tests", report["bait_read"]),
        ("printed_results", _looks_like_pytest(report["output"])),
        ("timeout", report["timed_out"]),
        ("ended_early", not done and not report["timed_out"]),
    ):
        if seen:
            flags.add(flag)
    return Ran(
        results=results,
        flags=frozenset(flags),
        output=report["output"],
        seconds=report["seconds"],
        reached=reached,
        failures=failures,
    )


def _depths(called: list[Any], places: Sequence[Place]) -> dict[Place, int] | None:
    """None for what the plugin does not write."""
    depths = {}
    for each in called:
        match each:
            case [int(number), int(depth)] if 0 <= number < len(places):
                depths[places[number]] = depth
            case _:
                return None
    return depths


def _looks_like_pytest(output: str) -> bool:
    """What pytest itself prints is turned off, so a line of its form is somebody else's."""
    for words in [line.split() for line in output.split("\n") if len(line) <= LINE and "passed" in line.lower()]:
        first, second, last = words[0], "".join(words[1:2]), words[-1]
        if ("::" in first and second == "PASSED") or (first == "PASSED" and "::" in second):
            return True
        counted = any(a.isdigit() and b.rstrip(",") == "passed" for a, b in itertools.pairwise(words))
        if counted and first.strip("=") == last.strip("=") == "":
            return True
    return False


def _event(line: str, nonce: str) -> Any:
    given, _, text = line.partition(" ")
    if not secrets.compare_digest(given.encode(), nonce.encode()):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
