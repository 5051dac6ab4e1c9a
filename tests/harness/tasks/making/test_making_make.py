"""Tasks from a repository, end to end: who gives the right answer solves them, who does nothing or edits tests does not."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from composer_nb.harness.grading.plan import plan_of
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.tasks.making import make as making
from composer_nb.harness.tasks.making.baseline import Baseline, measure
from composer_nb.harness.tasks.making.make import RECORD, TASKS, make, writing
from composer_nb.harness.tasks.making.repository import Repository, read_repository
from composer_nb.harness.tasks.task import Task, load_tasks
from tests.harness.tasks.making.conftest import LEAKS
from tests.harness.tasks.test_task import MINIMAL

LIMIT = 7
TOTAL = """\
def total(numbers, start=3):
    found = start
    for number in numbers:
        if number > 0:
            found = found + number * 2
    return found


class Box:
    def __init__(self, x):
        self.x = x

    def half(self):
        found = self.x // 2
        return found
"""


@pytest.fixture(scope="module")
def out_folder(checkout: Path, backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    summary = make(checkout, out, backend, limit=LIMIT)
    assert summary["tasks"] >= 6 and sum(kind["kept"] for kind in summary["kinds"]) >= summary["tasks"]
    return out


@pytest.fixture(scope="module")
def tasks(out_folder: Path) -> list[Task]:
    return load_tasks(out_folder / TASKS)


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
    assert why == {"test_skipped": "skipped", "test_slow": "slow", "test_reads_itself": "reads its source"}
    uncovered = {name.rpartition("::")[2] for name in baseline.plan.tests.keys() - baseline.plan.covered}
    assert len(baseline.plan.tests) == 11
    assert uncovered == {"test_chunks_refuses#0", "test_empty#0"}, "pytest.raises: no twin"
    text = baseline.to_json()
    assert Baseline.from_json(text) == baseline
    largest = ("shapes/core.py", files["shapes/core.py"].split("\n").index("def _largest(pairs):") + 1)
    assert baseline.reach["tests/test_core.py::test_most_common#0"].depths[largest] == 2
    assert baseline.nearest([largest]) == ["tests/test_core.py::test_most_common#0"]


@pytest.mark.parametrize(
    ("module", "tests", "message"),
    [
        ("a", "f() == 1\ndef test_g(): __import__('os')._exit(0)", r"ends its suite early, after test_a\.py::test_"),
        ("a", "1 + 1 == 2", "no test calls a function in which a bug can be planted"),
        pytest.param("textwrap", "True", "a copy of it lies in the sandbox", marks=pytest.mark.slow),
    ],
    ids=["ends early", "calls nothing", "copied"],
)
def test_an_unfit_suite_is_refused(tmp_path: Path, backend: Backend, module: str, tests: str, message: str) -> None:
    (tmp_path / f"{module}.py").write_text("def f(): return 1\n")
    imports = "from a import f\n" if "f()" in tests else ""
    (tmp_path / "test_a.py").write_text(f"{imports}def test_f(): assert {tests}\n")
    with pytest.raises(ValueError, match=message):
        make(tmp_path, tmp_path.with_name(f"{tmp_path.name}-out"), backend)


def test_a_call_that_is_cut_off_leaves_no_fewer_tasks(tmp_path: Path) -> None:
    several = [Task(**MINIMAL | {"id": f"{number}"}) for number in range(3)]
    with writing(lambda: several, file := tmp_path / TASKS):
        pass
    with pytest.raises(KeyboardInterrupt), writing(lambda: several[:1], file):
        raise KeyboardInterrupt
    assert load_tasks(file) == several
    with writing(lambda: several[:1], file):
        pass
    assert load_tasks(file) == several[:1]


def test_a_conftest_that_is_no_python_is_named() -> None:
    files = {"a.py": "def f(): return 1\n", "conftest.py": "\nprint 1\n", "test_a.py": "def test_f(): pass\n"}
    nothing: Any = None
    with pytest.raises(ValueError, match=r"^conftest\.py:2: not Python"):
        measure(Repository(name="r", files=files), nothing, nothing, print)


@pytest.mark.slow
def test_an_expert_solves_every_task_and_the_lazy_solve_none(
    tasks: list[Task], backend: Backend, files: dict[str, str]
) -> None:
    """Each works in a sandbox, and what it leaves there is graded. A task gives its answer away nowhere."""
    assert {"feature", "combined"} < {task.metadata["kind"] for task in tasks}
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
        assert not set(task.files) & set(LEAKS) and task.solution == {"shapes/core.py": files["shapes/core.py"]}
        assert files["shapes/core.py"] not in task.files.values()
        plan = plan_of(task)
        assert plan.twins and failed <= set(plan.tests.values())
        for name in failed:  # what fails is to be found out
            assert f"def {name.rpartition('::')[2].partition('[')[0]}(" not in task.files["tests/test_core.py"]
        assert task.metadata["kind"] not in task.instruction or task.metadata["kind"] == "call"
        assert "_largest" not in task.instruction and 10 < len(task.instruction) < 1200


@pytest.mark.slow
def test_a_guard_can_be_required(tmp_path: Path, backend: Backend) -> None:
    """Of two functions one is tested with plain values. Both yield tasks (each has three lines, the fewest that get a bug), but
    only its tasks have recorded calls."""
    (tmp_path / "a.py").write_text(TOTAL)
    sums = {(7, 30): 77, (41, -2): 85, (56,): 115, (19, 0, 4): 49}
    calls = "".join(f"    assert total({numbers}) == {expected}\n" for numbers, expected in sums.items())
    test = f"from a import Box, total\ndef test_total():\n{calls}def test_half():\n    assert Box(9).half() == 4\n"
    (tmp_path / "test_a.py").write_text(test)
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    free = make(tmp_path, out, backend, limit=3)
    assert {"calls", "none"} == {guard["by"] for guard in free["guards"].values()}
    strict = make(tmp_path, out, backend, limit=3, require="calls")
    assert strict["tasks"] == len(strict["guards"]) > 0
    assert {guard["by"] for guard in strict["guards"].values()} == {"calls"}
    assert {task.id for task in load_tasks(out / TASKS)} == set(strict["guards"])
    assert all('"a.py::total"' in task.metadata["places"] for task in load_tasks(out / TASKS))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_tasks(checkout, out_folder, tmp_path, backend: Backend, monkeypatch):
    """What an earlier run found out is not found out again, and tasks are written whatever ends a run."""

    def interrupt(doing: str, counts: str) -> None:
        if counts.startswith("3 of"):
            raise KeyboardInterrupt

    task_ids = [task.id for task in load_tasks(out_folder / TASKS)]
    shutil.copyfile(out_folder / RECORD, tmp_path / RECORD)
    with pytest.raises(KeyboardInterrupt):
        make(checkout, tmp_path, backend, limit=LIMIT, report=interrupt)
    assert [task.id for task in load_tasks(tmp_path / TASKS)] == task_ids[:3]
    settled: list[str] = []
    real = making.settle
    monkeypatch.setattr(making, "settle", lambda *args: settled.append(args[1].key) or real(*args))
    last_key = task_ids[-1].rpartition("-")[2]
    with sqlite3.connect(tmp_path / RECORD) as record:
        record.execute("delete from outcomes where key = ?", (last_key,))
    make(checkout, tmp_path, backend, limit=LIMIT)
    assert settled == [last_key] and [task.id for task in load_tasks(tmp_path / TASKS)] == task_ids
    settled.clear()
    summary = make(checkout, tmp_path, backend, limit=LIMIT)
    assert not settled and summary["tasks"] == len(load_tasks(out_folder / TASKS))
    with pytest.raises(ValueError, match="tasks of another repository"):
        make(checkout, tmp_path, backend, limit=LIMIT, seed="1")
