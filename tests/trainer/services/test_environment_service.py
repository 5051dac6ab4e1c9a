"""Environment workers alone: what they report of rollouts in conversation, in the queue of the graders and in their hands."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.sandbox.errors import SandboxSlow
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.services import environments
from composer_nb.trainer.services.environments import EnvironmentService, Report
from composer_nb.trainer.services.orchestrator import Alive, Dispatch, Faulted, Finished

SAMPLED = 7


class AtOnce:
    """A driver whose conversations end at once."""

    def __init__(self, policy: Any, *_: Any) -> None:
        self.capacity, self.moved, self._alive = policy.capacity, set[int](), list[int]()

    @property
    def room(self) -> int:
        return self.capacity - len(self._alive)

    def add(self, rollout: int, job: Any) -> None:
        self._alive.append(rollout)

    def drop(self, *rollouts: int) -> None:
        self._alive = [rollout for rollout in self._alive if rollout not in rollouts]

    def wait(self, seconds: float) -> list[tuple[int, Any]]:
        ended, self._alive = self._alive, []
        rollout = SimpleNamespace(sampled=SAMPLED, versions=np.zeros(1, np.int64))
        task = SimpleNamespace(grader="functions")
        return [
            (number, SimpleNamespace(task=task, rollout=rollout, grade=SimpleNamespace(known=True))) for number in ended
        ]


class Grader:
    """Grades that wait until they are `free`."""

    def __init__(self) -> None:
        self.free, self.begun = threading.Event(), 0
        self._lock = threading.Lock()

    def __call__(self, ended: Any, env: Any) -> Any:
        with self._lock:
            self.begun += 1
        assert self.free.wait(patience(60))
        return ended


@pytest.fixture
def grader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grader]:
    grader = Grader()
    monkeypatch.setattr(environments, "graded", grader)
    yield grader
    grader.free.set()


class Sandboxes:
    """Sandboxes of which the first functions are not ready in time if `slow`."""

    slow = False

    def __init__(self, *_: Any) -> None:
        """Take what sandboxes take."""

    @property
    def functions(self) -> None:
        if Sandboxes.slow:
            Sandboxes.slow = False
            raise SandboxSlow("not ready")


@pytest.fixture
def make_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnvironmentService]:
    """`make_worker(env, slots)`: a worker with these settings of the environment."""
    agent = SimpleNamespace(backend=object(), attempt=lambda *_, **__: None, environment=lambda functions: functions)
    monkeypatch.setattr(environments, "Driver", AtOnce)
    monkeypatch.setattr(environments, "make_agent", lambda *_: agent)
    monkeypatch.setattr(environments, "load_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(environments, "Sandboxes", Sandboxes)
    monkeypatch.setattr(environments.FinishedRollouts, "save", lambda *_: None)
    (tmp_path / "weights" / "start").mkdir(parents=True)
    (tmp_path / "weights" / "start" / "config.json").touch()
    (tmp_path / "rollouts").mkdir()

    def make(env: EnvSettings, slots: int) -> EnvironmentService:
        return EnvironmentService(tmp_path, env, Limits(), RewardSettings(), 8, (None, "engine", slots), False)  # type: ignore[arg-type]

    return make


def dispatch(slot: int, *members: int) -> tuple[Dispatch, Any]:
    return Dispatch(worker="w", slot=slot, attempt=1, members=members), None


def until(worker: EnvironmentService, condition: Callable[[list[Report]], bool]) -> list[Report]:
    """Collect a worker's reports until `condition(reports)` holds."""
    reports, deadline = list[Report](), time.monotonic() + patience(60)
    while not condition(reports):
        assert time.monotonic() < deadline
        reports += worker.work([], [], 0.05)
    return reports


def test_a_rollout_that_waits_for_a_grader_is_alive(make_worker, grader: Grader):
    worker = make_worker(EnvSettings(), 1)
    worker.work([dispatch(0, 0)], [], 0.05)
    worker.work([dispatch(1, 0)], [], 0.05)
    until(worker, lambda _: grader.begun == 1 and not worker._conversations)
    for _ in range(2):
        assert worker.work([], [], 0.05) == [Alive(slot=1, attempt=1)], "not the one that is graded: it may hang"
    grader.free.set()
    until(worker, lambda reports: sum(isinstance(report, Finished) for report in reports) == 2)


def test_conversations_and_graders_share_the_sandboxes(make_worker, grader: Grader):
    """Graders of cancelled rollouts go on, and keep their sandboxes."""
    worker = make_worker(EnvSettings(tools="cursor", sandboxes=2), 2)
    worker.work([dispatch(0, 0, 1, 2)], [], 0.05)
    until(worker, lambda _: grader.begun == 2)
    given_up = worker.work([dispatch(1, 0)], [(0, 1)], 0.05)
    cancelled = [
        Faulted(slot=0, attempt=1, member=p, reason="cancelled", sampled=n)
        for p, n in ((2, 0), (0, SAMPLED), (1, SAMPLED))
    ]
    assert given_up[:3] == cancelled and not worker._grading and len(worker._waiting) == 1
    grader.free.set()
    until(worker, lambda reports: any(isinstance(report, Finished) for report in reports))


def test_a_sandbox_of_graders_that_is_not_ready_costs_a_rollout(
    make_worker, grader: Grader, monkeypatch: pytest.MonkeyPatch
):
    worker = make_worker(EnvSettings(tools="cursor"), 2)
    monkeypatch.setattr(Sandboxes, "slow", True)
    grader.free.set()
    reports = worker.work([dispatch(0, 0)], [], 0.05)
    assert Faulted(slot=0, attempt=1, member=0, reason="not ready", sampled=SAMPLED) in reports
    worker.work([dispatch(0, 1)], [], 0.0)
    until(worker, lambda _: grader.begun == 1)


def test_rollouts_of_groups_of_another_size_have_numbers_of_their_own(
    make_worker, grader: Grader, monkeypatch: pytest.MonkeyPatch
):
    """`rl.group` may change while a run is live. The first members keep the numbers, and so the draws, of the plain loop."""
    worker, numbers = make_worker(EnvSettings(), 64), list[int]()
    monkeypatch.setattr(worker._driver, "add", lambda rollout, job: numbers.append(rollout))
    worker.work([dispatch(slot, *range(20)) for slot in range(3)], [], 0.0)
    assert len({*numbers}) == 60
    assert [numbers[20 * slot + member] for slot in range(3) for member in range(8)] == [*range(24)]
