"""Run hidden tests in grading boxes, and decide what to believe of what comes out.

A *job* is one run of the hidden tests (`guest/runner.py`). Each job has a fresh sandbox, so no run finds what another one left.
The host believes only lines that carry the run's nonce, each test at most once, and only tests that were asked for. Every other
line is flagged as `forged_events`.

A box receives pytest's own modules and our three guest programs, compiled by the box's own interpreter, over its stdin. They
are imported from memory, and nothing else of the host's environment comes along. The modules are compiled once per kind of box
in a process. A warm box (`SandboxSpec.warm`) has pytest imported already and receives our programs alone. Projects that are
pytest, pluggy, iniconfig or packaging themselves cannot be graded this way, because the tests would import the box's copies.
"""

import itertools
import json
import marshal
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from composer_nb.harness.grading.guest import calls, runner
from composer_nb.harness.grading.guest.runner import CALLS, DECOY, DECOY_AT, FOLDER, PLUGIN
from composer_nb.harness.sandbox.contract import Backend, ExecResult, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.guest import values
from composer_nb.harness.sandbox.toolchain import pytest_modules

START_S = 2.0  # Seconds that a run may take to begin, in addition to its own time.
AT_ONCE = 4  # Sandboxes that one call keeps alive at the same time.
EVENT_BYTES = 4 << 20  # Of one run; more is cut off, and what is cut off did not pass.
OUTPUT_BYTES = 64 << 10  # Of what one run printed, its head.
INTERNAL_ERROR = 3  # pytest's exit code for an internal error.
LINE = 500  # Characters. pytest's own lines are shorter.
RUNNER = "composer_nb_grading_runner"

_START = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # `-c` puts the current directory first
import marshal, os, types
def exactly(size):
    parts = []
    while size:
        parts.append(os.read(0, min(size, 1 << 20)))
        if not parts[-1]:
            sys.exit("no frame")
        size -= len(parts[-1])
    return b"".join(parts)
table = marshal.loads(exactly(int.from_bytes(exactly(4), "big")))
"""
_COMPILE = (
    _START
    + """\
for name, (path, package, text) in table.items():
    table[name] = (path, package, marshal.dumps(compile(text, path, "exec", dont_inherit=True)))
sys.stdout.buffer.write(marshal.dumps(table, 4))
"""
)
_RUN = (
    _START
    + f"""\
values = sys.modules[{values.__name__!r}] = types.ModuleType({values.__name__!r})
exec(marshal.loads(table.pop({values.__name__!r})[2]), values.__dict__)
module = types.ModuleType({RUNNER!r})
exec(marshal.loads(table.pop({RUNNER!r})[2]), module.__dict__)
module.main(table)
"""
)

_kits: dict[tuple[str, str, bool], bytes] = {}
_lock = threading.Lock()


class RunnerEnded(RuntimeError):
    """The runner ended before it began: what it was to run does not fit into its sandbox."""


# A call as it goes into a box: module, qualified name, and JSON of the positional and the keyword arguments
# (`guest.calls.encode`); nothing of the expected result.
Call = tuple[str, str, str]
# A function: the path of its module and its first line, which is the line of its first decorator.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestJob:
    """One run of tests, or of recorded calls.

    Attributes:
        files: The workspace, and the data files of the tests.
        hidden: Modules that are on no disk: path -> text.
        tests: Paths in `hidden` that are test modules.
        keys: Tests to run (`guest/plugin.py` defines keys); None runs all.
        reach: Record the workspace functions that each test calls. Slower.
        explain: Record where, with which message and on which values tests failed.
        packages: Installed packages that the tests need, by path.
        ini: Lines of the `[pytest]` section.
        select: pytest arguments that choose tests. Ignored when `keys` is given.
        hash_seed: PYTHONHASHSEED. Results that depend on set order differ between seeds.
        record: Changed files. If there are any, calls are recorded (`guest.calls.Recorder`).
        calls: Batches of calls to answer, each in its own process. If there are any, no test runs.
        batch_cpu_s: CPU seconds of one batch.
        watch: Answer `unsteady` to calls that use the clock or random numbers.
        zone: POSIX time zone; empty means the box's own.
        test_s: Seconds after which an alarm fails a test with `Endless`; 0 sets no alarm. Only for trusted code, which leaves
            it on.
    """

    files: Mapping[str, bytes]
    hidden: Mapping[str, str]
    tests: tuple[str, ...]
    keys: frozenset[str] | None = None
    reach: bool = False
    explain: bool = False
    packages: Mapping[str, bytes] = field(default_factory=dict)
    ini: str = ""
    select: tuple[str, ...] = ()
    hash_seed: int = 0
    record: tuple[str, ...] = ()
    calls: tuple[tuple[Call, ...], ...] = ()
    batch_cpu_s: int = 10
    watch: bool = False
    zone: str = ""
    test_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """The end of one test, as its process reported it.

    Attributes:
        outcome: `passed`, `failed` or `skipped`. An expected failure counts as skipped.
        why: Name of the exception.
        id: pytest's node id.
    """

    outcome: str
    why: str = ""
    id: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


MISSING = TestResult(outcome="missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The functions that a test called, as its process reported them.

    Attributes:
        seconds: Duration with tracing on, which is longer than without.
        depths: Workspace functions -> workspace frames on the stack at the first call; 1 means that the test called it
            directly.
    """

    seconds: float
    depths: Mapping[Place, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of a test, as its process reported it.

    Attributes:
        line: Line in the test's own module as `plan.normal` writes it; 0 if the test failed elsewhere.
        message: First line of the exception, shortened.
        values: `repr` of the test's variables of plain types at the failure.
        compared: Operator and `repr` of both sides of the comparison that failed, shortened.
    """

    line: int
    message: str
    values: Mapping[str, str] = field(default_factory=dict)
    compared: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class JobResult:
    """The result of one job.

    Attributes:
        results: By key, in the order in which they ran. A missing test did not pass.
        flags: `forged_events`, `forged_report`, `read_tests`, `printed_results`, `ended_early` and `timeout`.
        output: Captured output, for people. Agents must never see it, because it may quote hidden tests.
        reached: By key, if the job asked for it.
        failures: By key, of failed tests, if the job asked for it.
        noted: Calls that tests made, each with whether a changed file defines the function, and its possible outcomes: `returned`
            with the value, `raised` with the name of the exception's type, or both, as a tracer cannot tell whether None was
            returned or an exception went on.
        answers: JSON (`guest.calls.answer`) by the call's index among all calls of the job. A missing call has no answer.
    """

    results: dict[str, TestResult] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    output: str = ""
    seconds: float = 0.0
    reached: dict[str, Reach] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    noted: dict[Call, tuple[bool, dict[str, Any]]] = field(default_factory=dict)
    answers: dict[int, str] = field(default_factory=dict)

    def result(self, key: str) -> TestResult:
        return self.results.get(key, MISSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """The boxes of one grade: their backend, their limits, and the time of each run in seconds."""

    backend: Backend
    spec: SandboxSpec | None = None
    timeout_s: float = 60.0

    def run(self, jobs: Sequence[TestJob]) -> list[JobResult]:
        """Run jobs in parallel, each in a fresh box, and return their results in order.

        Raises:
            SandboxFailure: the infrastructure failed.
            SandboxDied, RunnerEnded: the code under test ended its sandbox, or its files do not fit into it.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._run, jobs))

    def _run(self, job: TestJob) -> JobResult:
        """Run one job in a new sandbox. Raises SandboxFailure, and RunnerEnded if the run ends before it begins."""
        nonce = secrets.token_hex(16)
        spec = self.spec or SandboxSpec()
        with self.backend.create(replace(spec, warm=not job.calls, basic=True)) as box:
            whole = not (job.calls or (box.warm and job.hash_seed == 0))
            kit = framed(compiled_kit(self.backend, self.spec, whole))
            ran = box.exec(
                COMMAND,
                timeout_s=self.timeout_s + START_S,
                env={"PYTHONHASHSEED": str(job.hash_seed)} | ({"TZ": job.zone} if job.zone else {}),
                stdin=kit + _frame(job, nonce, site=bool(self.spec and self.spec.image)),
                output_bytes=2 * EVENT_BYTES,  # a head and a tail
                warm=True,
                granted=True,
            )
            ready, began, *events = ran.stdout[:EVENT_BYTES].split(b"\n", 2) + 2 * [b""]
            if ready != b"ready":
                raise SandboxFailure(f"the runner did not start: exit code {ran.exit_code}, {_last_line(ran.stderr)}")
            if began.startswith(b"failed: "):
                raise SandboxFailure(f"a run could not begin: {began.decode('utf-8', 'replace')[8:]}")
            if began != b"began":
                memory = ", out of memory" if ran.oom else ""
                raise RunnerEnded(f"it ended before it began: exit code {ran.exit_code}{memory}")
            read = any(_read_since(box, f"{FOLDER}/{path}") for path in job.hidden)
            return _read(job, nonce, events[0].decode("utf-8", "replace"), ran, read=read, changed=_changed(box))


# Starts the runner. Its stdin is the framed kit, then the run's frame up to the end.
COMMAND = ["python3", "-s", "-S", "-c", _RUN]


def _read_since(box: Sandbox, path: str) -> bool:
    """Return whether bait was read, which is laid as if last read in 1970, or made unreadable."""
    try:
        return box.last_read(path) > 0
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)


def _changed(box: Sandbox) -> bool:
    """Return whether the report that nobody reads says something else now."""
    try:
        return box.read(DECOY_AT) != DECOY
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def compiled_kit(backend: Backend, spec: SandboxSpec | None = None, whole: bool = True) -> bytes:
    """Return the modules that every run needs, compiled for the boxes that `backend` makes of `spec`.

    `whole`: with pytest's, which neither a warm box nor a run without tests needs.

    Raises SandboxUnavailable if pytest is not installed here or does not fit the box's Python, and SandboxFailure.
    """
    kind = (backend.name, spec.image if spec else "", whole)
    with _lock:
        if kind not in _kits:
            _kits[kind] = _compiled(backend, spec, whole)
        return _kits[kind]


def _compiled(backend: Backend, spec: SandboxSpec | None, whole: bool) -> bytes:
    with backend.create(spec) as box:
        stdin = framed(marshal.dumps(sources(whole), 4))
        result = box.exec(["python3", "-s", "-S", "-c", _COMPILE], stdin=stdin, output_bytes=64 << 20)
        if result.exit_code == 0 and not result.truncated:
            tried = box.exec(COMMAND, stdin=framed(result.stdout))
            if tried.stdout.startswith(b"ready\n"):
                return result.stdout
            result = tried
    last = _last_line(result.stderr)
    if b"SyntaxError" in result.stderr or b"ModuleNotFoundError" in result.stderr:
        raise SandboxUnavailable(f"the pytest installed here is not for the Python of the sandbox: {last}")
    raise SandboxFailure(f"pytest could not be prepared in a sandbox: exit code {result.exit_code}, {last}")


def sources(whole: bool = True) -> dict[str, tuple[str, bool, str]]:
    """Return module name -> (path to show, whether it is a package, text). Raises SandboxUnavailable without pytest."""
    modules = pytest_modules() if whole else {}
    guests = {RUNNER: runner, CALLS: calls, PLUGIN: None, values.__name__: values}
    for name, module in guests.items():  # the plugin imports pytest
        path = Path(str(module.__file__)) if module else Path(__file__).parent / "guest/plugin.py"
        modules[name] = (f"/kit/{name}.py", False, path.read_text(encoding="utf-8"))
    return modules


def _last_line(stderr: bytes) -> str:
    return "".join(stderr.decode("utf-8", "replace").strip().splitlines()[-1:])


def _frame(job: TestJob, nonce: str, site: bool) -> bytes:
    """Return a job as its box reads it."""
    frame = {item.name: getattr(job, item.name) for item in fields(job) if item.name not in ("hash_seed", "zone")}
    return marshal.dumps(
        frame
        | {
            "files": dict(job.files),
            "hidden": dict(job.hidden),
            "packages": dict(job.packages),
            "keys": None if job.keys is None else sorted(job.keys),
            "select": job.select if job.keys is None else (),
            "nonce": nonce,
            "site": site,
        },
        4,
    )


def _read(job: TestJob, nonce: str, events: str, exec_result: ExecResult, *, read: bool, changed: bool) -> JobResult:
    """Return what is believed of a run. `read`: its bait was read; `changed`: the report that nobody reads has changed."""
    output = exec_result.stderr[:OUTPUT_BYTES].decode("utf-8", "replace")
    ran = JobResult(output=output, seconds=exec_result.duration_s)
    places: list[Place] = []
    call_count = sum(map(len, job.calls))
    complete = False
    for line in events.split("\n")[:-1]:
        match None if complete else _event(line, nonce):
            case ["done", int(code)]:
                complete = True
                ran.flags |= {"ended_early"} if code == INTERNAL_ERROR else set()
            case [str(key), "passed" | "failed" | "skipped" as outcome, str(why), str(name)] if (
                key not in ran.results and (job.keys is None or key in job.keys)
            ):
                ran.results[key] = TestResult(outcome=outcome, why=why, id=name)
            case ["place", str(path), int(number)] if job.reach:
                places.append((path, number))
            case ["reached", str(key), int() | float() as seconds, list(called)] if (
                job.reach
                and key not in ran.reached
                and all(_fits(called_function, places) for called_function in called)
            ):
                ran.reached[key] = Reach(seconds=seconds, depths={places[number]: depth for number, depth in called})
            case ["at", str(key), int(number), str(message), dict(values), list(compared)] if (
                job.explain and key not in ran.failures
            ):
                texts = {name: text for name, text in values.items() if isinstance(text, str)}
                sides = tuple(map(str, compared))
                ran.failures[key] = Failure(line=number, message=message, values=texts, compared=sides)
            case ["call", str(module), str(name), str(given), bool(inside), list(ends)] if job.record:
                ran.noted.setdefault((module, name, given), (inside, dict(ends)))
            case ["answer", int(place), [str(), _, _] as said] if 0 <= place < call_count and place not in ran.answers:
                ran.answers[place] = json.dumps(said)
            case _:
                ran.flags.add("forged_events")
    for flag, is_raised in (
        ("forged_report", changed),
        ("read_tests", read),
        ("printed_results", _looks_like_pytest(output)),
        ("timeout", exec_result.timed_out),
        ("ended_early", not complete and not exec_result.timed_out),
    ):
        ran.flags |= {flag} if is_raised else set()
    return ran


def _fits(called: Any, places: Sequence[Place]) -> bool:
    """Return whether the plugin could have written this: the number of a place, and a depth."""
    match called:
        case [int(number), int()]:
            return 0 <= number < len(places)
    return False


def _looks_like_pytest(output: str) -> bool:
    """Return whether output has a line in the form of pytest's reports, whose own are turned off: something else printed it."""
    for words in [line.split() for line in output.split("\n") if len(line) <= LINE and "passed" in line.lower()]:
        first, second, last = words[0], "".join(words[1:2]), words[-1]
        if ("::" in first and second == "PASSED") or (first == "PASSED" and "::" in second):
            return True
        counted = any(a.isdigit() and b.rstrip(",") == "passed" for a, b in itertools.pairwise(words))
        if counted and first.strip("=") == last.strip("=") == "":
            return True
    return False


def _event(line: str, nonce: str) -> Any:
    prefix, _, text = line.partition(" ")
    if not secrets.compare_digest(prefix.encode(), nonce.encode()):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
