"""Tasks from a repository, end to end: who gives the right answer solves them, who does nothing or edits tests does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from composer_nb.harness.grading.plan import plan_of
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.making import make as making
from composer_nb.harness.making.baseline import Baseline, measure
from composer_nb.harness.making.make import RECORD, TASKS, State, make
from composer_nb.harness.making.repository import read_repository
from composer_nb.harness.sandboxes.contract import Backend, SandboxSpec
from composer_nb.harness.task import Task, load_tasks

LIMIT = 7


@pytest.fixture(scope="module")
def made(checkout: Path, backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    found = make(checkout, out, backend, limit=LIMIT)
    assert found.tasks >= 6 and sum(kind.kept for kind in found.kinds) >= found.tasks
    return out


@pytest.fixture(scope="module")
def tasks(made: Path) -> list[Task]:
    return load_tasks(made / TASKS)


@pytest.fixture(scope="module")
def baseline(checkout: Path, backend: Backend) -> Iterator[Baseline]:
    yield measure(read_repository(checkout), backend, SandboxSpec(), lambda doing: None)


def test_answers_do_not_get_into_the_repository(checkout: Path) -> None:
    with pytest.raises(ValueError, match="lies in the repository"):
        make(checkout, checkout / "tasks" / "made", cast(Backend, None))
    assert not (checkout / "tasks").exists()


@pytest.mark.slow
def test_what_counts_before_anything_is_changed(baseline: Baseline, files: dict[str, str]) -> None:
    why = {name.partition("::")[2]: why for name, why in baseline.left_out.items()}
    assert why.pop("test_flaky") in {"flaky", "failing"}, "it fails at some hash seeds, perhaps at the first"
    assert why == {
        "test_skipped": "skipped", "test_slow": "slow", "test_reads_itself": "reads its source"
    }  # fmt: skip
    assert len(baseline.plan.tests) == 11 and baseline.plan.coverage == 1.0
    text = baseline.to_json()
    assert Baseline.from_json(text) == baseline
    largest = ("shapes/core.py", files["shapes/core.py"].split("\n").index("def _largest(pairs):") + 1)
    assert baseline.reach["tests/test_core.py::test_most_common#0"].depths[largest] == 2
    assert baseline.nearest([largest]) == ["tests/test_core.py::test_most_common#0"]


@pytest.mark.slow
def test_a_repository_that_fails_already_is_refused(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "a.py").write_text("def f(): return 1\n")
    (tmp_path / "test_a.py").write_text(
        "from a import f\ndef test_f(): assert f() == 2\ndef test_g(): assert f() == 1\n"
    )
    with pytest.raises(ValueError, match="only 1 of 2 tests pass before anything is changed"):
        make(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), backend)


def test_a_suite_that_ends_itself_early_is_refused(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "a.py").write_text("def f(): return 1\n")
    (tmp_path / "test_a.py").write_text(
        "from a import f\ndef test_f(): assert f() == 1\ndef test_g(): __import__('os')._exit(0)\ndef test_h(): assert f() == 1\n"
    )
    with pytest.raises(ValueError, match=r"something ends its suite early, after test_a\.py::test_"):
        make(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), backend)


@pytest.mark.slow
def test_a_copy_in_the_sandbox_is_an_answer(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "textwrap.py").write_text("def f(): return 1\n")
    (tmp_path / "test_a.py").write_text("def test_f(): pass\n")
    with pytest.raises(ValueError, match="a copy of it lies in the sandbox"):
        make(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), backend)


@pytest.mark.slow
def test_an_expert_solves_every_task_and_the_lazy_solve_none(tasks: list[Task], backend: Backend) -> None:
    """Each works in a sandbox, and what it leaves there is graded."""
    for task in tasks:
        with backend.create() as box:
            box.upload({path: text.encode() for path, text in task.files.items()})
            idle = box.download()
            with box.fork() as lazy:
                for path in task.tests:
                    lazy.write(path, b"def test_all(): pass\n")
                lazy.write("conftest.py", b"import os\nos._exit(0)\n")
                edited = lazy.download()
            box.upload({path: text.encode() for path, text in task.solution.items()})
            expert = box.download()
        grades = [grade_pytest(task, files, backend) for files in (expert, idle, edited)]
        assert [grade.passed for grade in grades] == [True, False, False], task.id
        assert not grades[0].flags and grades[0].known
        failed = {name for name, passed in grades[1].tests.items() if not passed}
        assert failed == set(json.loads(task.metadata["fail_to_pass"])) and failed
        assert grades[2].tests == grades[1].tests


@pytest.mark.slow
def test_what_a_task_holds(tasks: list[Task], files: dict[str, str], leaks: dict[str, str]) -> None:
    assert {"feature", "combined"} < {task.metadata["kind"] for task in tasks}
    for task in tasks:
        assert not set(task.files) & set(leaks) and task.solution == {"shapes/core.py": files["shapes/core.py"]}
        assert files["shapes/core.py"] not in task.files.values()
        plan = plan_of(task)
        assert plan.twins and set(json.loads(task.metadata["fail_to_pass"])) <= set(plan.tests.values())
        for name in json.loads(task.metadata["fail_to_pass"]):  # what fails is to be found out
            assert f"def {name.rpartition('::')[2].partition('[')[0]}(" not in task.files["tests/test_core.py"]
        assert task.metadata["kind"] not in task.instruction or task.metadata["kind"] == "call"
        assert "_largest" not in task.instruction and 10 < len(task.instruction) < 1200
        assert 0 <= float(task.metadata["difficulty"]) <= 1


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_tasks(
    checkout: Path, made: Path, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(state: State) -> None:
        if state.kept == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(checkout, tmp_path, backend, limit=LIMIT, told=interrupt)
    settled: list[str] = []
    real = making.settle
    monkeypatch.setattr(making, "settle", lambda *given: settled.append(given[1].key) or real(*given))
    with making.Store(tmp_path / RECORD) as store:
        before = {outcome.key for outcome in store.outcomes()}
    make(checkout, tmp_path, backend, limit=LIMIT)
    assert len(before) >= 3 and before.isdisjoint(settled)
    assert [task.id for task in load_tasks(tmp_path / TASKS)] == [task.id for task in load_tasks(made / TASKS)]
    settled.clear()
    again = make(checkout, tmp_path, backend, limit=LIMIT)
    assert not settled and again.tasks == len(load_tasks(made / TASKS))
    with pytest.raises(ValueError, match="tasks of another repository"):
        make(checkout, tmp_path, backend, limit=LIMIT, seed="1")
