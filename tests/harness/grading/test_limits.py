"""Grades run under the task's own limits, and only work that is slow itself times out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.grading.plan import GradePlan, digest, with_plan
from composer_nb.harness.grading.pytest_grader import grade_pytest, limit_of
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox import contract
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec, Snapshot
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.harbor import ForeignFiles
from composer_nb.harness.tasks.task import Task
from composer_nb.production.bench import figures
from tests.harness.starving import hogs, starve

TEST = "from f import f\n\n\ndef test_one():\n    assert f(1) == 2\n\n\ndef test_two():\n    assert f(2) == 3\n"
LIMITS = "[environment]\nmemory_mb = 2048\nstorage_mb = 128\ncpus = 2\n\n[verifier]\ntimeout_sec = 90.0\n\n"
LARGE = "def f(x):\n    held = bytearray(700 << 20)\n    return x + 1\n"
BUSY = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end:\n    pass\n\n\n"
RUNTIME = 'runtime = "host-python"\n'
RIGHT = "def f(x):\n    return x + 1\n"


@dataclass
class Recording:
    """A backend that keeps the specs of its sandboxes, and starves them if it has a share."""

    backend: Backend
    share: float = 0.0

    def __post_init__(self) -> None:
        self.name, self.specs = self.backend.name, list[SandboxSpec]()

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        sandbox = self.backend.create(spec, snapshot)
        self.specs.append(sandbox.spec)
        if self.share and sandbox.spec.warm:
            starve(sandbox, self.share)
        return sandbox


@pytest.fixture
def stated(make_task: Callable[..., Task], tmp_path: Path) -> Task:
    """Return a task of the grader `pytest` whose task.toml states limits."""
    path = make_task({"test_f.py": TEST}).to_harbor(tmp_path / "t")
    toml = (path / "task.toml").read_text()
    table = toml[toml.index("[metadata.composer_nb]") :]
    (path / "task.toml").write_text(LIMITS + table)
    return Task.from_harbor(path)


def with_fresh_plan(task: Task) -> Task:
    names = [f"test_f.py::{name}" for name in ("test_one", "test_two")]
    return with_plan(task, GradePlan(digest=digest(task), tests={f"{name}#0": name for name in names}))


def test_a_grade_has_the_memory_that_the_agent_had(stated: Task, backend: Backend) -> None:
    """700 MiB fit into `memory_mb = 2048`, and not into the usual 512 MiB."""
    record = Recording(backend)
    result = grade_pytest(with_fresh_plan(stated), {"f.py": LARGE.encode()}, record)
    assert result.passed, (result.status, result.flags, result.failed)
    expected = {(2048 << 20, 128 << 20, 2.0)}
    graded = [spec for spec in record.specs if spec.warm]
    assert {(spec.memory_bytes, spec.disk_bytes, spec.cpus) for spec in graded} == expected
    assert all(spec.basic for spec in graded), "what a grade runs sees the basic programs alone"
    assert limit_of(stated) == 90.0


def scripted(seconds: float) -> Task:
    test = "#!/bin/sh\npython3 -c 'from f import f; print(int(f(1) == 2))' > /logs/verifier/reward.txt\n"
    toml = f"[verifier]\ntimeout_sec = {seconds}\n\n[metadata.composer_nb]\n{RUNTIME}"
    foreign = ForeignFiles(name="t", toml=toml, executable=("tests/test.sh",))
    return Task(
        id="t", instruction="", files={}, tests={"test.sh": test}, source_scope=("**",), grader="script", kept=foreign
    )


def test_a_machine_that_grants_no_time_gives_no_grade(
    make_task: Callable[..., Task], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PATIENCE", 1.5)
    task = with_fresh_plan(make_task({"test_f.py": TEST}, metadata={"pytest.seconds": "0.2"}))
    with hogs():
        result = grade(task, {"f.py": (BUSY.format(2.0) + RIGHT).encode()}, Recording(backend, 0.1))
    assert result.status == "infra_error" and not result.known and "waited for a CPU" in result.output


@pytest.mark.parametrize("grader", ["pytest", "script"])
def test_slow_work_fails_and_is_counted_apart(grader: str, make_task: Callable[..., Task], backend: Backend) -> None:
    task = with_fresh_plan(make_task({"test_f.py": TEST}, metadata={"pytest.seconds": "0.5"}))
    task = task if grader == "pytest" else scripted(1.0)
    result = grade(task, {"f.py": b"import time\ntime.sleep(60)\n"}, backend)
    assert result.status == "graded" and not result.passed and "timeout" in result.flags and result.timeouts == 1
    rollout = Rollout(task_id="t", segments=(), turns=(), files={}, stop="finished")
    attempts = [Attempt(task=task, rollout=rollout, grade=outcome) for outcome in (result, Grade(status="infra_error"))]
    figures_ = figures(attempts)
    assert (figures_["timeouts"], figures_["infra_errors"]) == (1, 1)
    assert unpack_attempt(pack_attempt(attempts[0]), task).grade.timeouts == 1


def test_calls_that_time_out_are_counted(task: Task, sandboxes: Executor) -> None:
    result = grade(task, task.files | {"f.py": "def f(xs, k):\n    while True:\n        pass\n"}, sandboxes)
    assert result.status == "graded" and not result.passed and result.timeouts == 1


def test_calls_have_the_limits_that_a_task_states(task: Task, sandboxes: Executor, tmp_path: Path) -> None:
    """Half a second of CPU time and 400 MiB: more than the usual limits of calls."""
    path = task.to_harbor(tmp_path / "t")
    heavy = BUSY.format(0.5) + f"held = bytearray(400 << 20)\n{task.solution['f.py']}"
    toml = (path / "task.toml").read_text()
    plain = Task.from_harbor(path)
    assert plain.call_limits is None and not grade(plain, plain.files | {"f.py": heavy}, sandboxes).passed
    toml = toml.replace("timeout_sec = 60.0", "timeout_sec = 5.0")
    (path / "task.toml").write_text(toml.replace("[environment]\n", "[environment]\nmemory_mb = 2048\n"))
    stated = Task.from_harbor(path)
    result = grade(stated, stated.files | {"f.py": heavy}, sandboxes)
    assert result.passed and not result.timeouts
