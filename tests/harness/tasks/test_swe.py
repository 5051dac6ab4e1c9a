"""Rows of SWE-bench and SWE-smith become tasks: with the repository graded by pytest, without it by a script in an image."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
OLD_TEST = "from lib.sums import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
NEW_TEST = OLD_TEST + "\n\ndef test_two():\n    assert add(1, 1) == 2\n"
FIX = (
    "diff --git a/lib/sums.py b/lib/sums.py\n--- a/lib/sums.py\n+++ b/lib/sums.py\n"
    "@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
)
TEST_PATCH = (
    "diff --git a/tests/test_sums.py b/tests/test_sums.py\n--- a/tests/test_sums.py\n+++ b/tests/test_sums.py\n"
    "@@ -3,3 +3,7 @@\n \n def test_zero():\n     assert add(0, 0) == 0\n+\n+\n+def test_two():\n+    assert add(1, 1) == 2\n"
)
BENCH: dict[str, Any] = {
    **{"instance_id": "Org__lib-1", "repo": "org/lib", "base_commit": "abc", "problem_statement": "add subtracts"},
    **{"patch": FIX, "test_patch": TEST_PATCH, "FAIL_TO_PASS": '["tests/test_sums.py::test_two"]'},
    "PASS_TO_PASS": ["tests/test_sums.py::test_zero"],
}
FILES = {"lib/__init__.py": "", "lib/sums.py": WRONG, "tests/test_sums.py": OLD_TEST}
BUG = FIX.replace("-    return a - b\n+    return a + b", "-    return a + b\n+    return a - b")
SMITH = BENCH | {"patch": BUG, "image_name": "images/org__lib:1"}
WHOLE = {"lib/__init__.py": "", "lib/sums.py": RIGHT, "tests/test_sums.py": NEW_TEST}


def test_a_row_with_its_repository_is_graded_by_pytest() -> None:
    task = Task.from_swebench(BENCH, FILES)
    assert task.grader == "pytest" and task.files == FILES and task.solution == {"lib/sums.py": RIGHT}
    assert task.tests == {"tests/test_sums.py": NEW_TEST} and task.instruction == "add subtracts"
    assert json.loads(task.metadata["pytest.ids"]) == ["tests/test_sums.py::test_two", "tests/test_sums.py::test_zero"]
    assert task.metadata["base_commit"] == "abc"
    smith = Task.from_swesmith(SMITH, WHOLE)  # its patch introduces the bug
    assert smith.files == {"lib/__init__.py": "", "lib/sums.py": WRONG}
    assert smith.solution == {"lib/sums.py": RIGHT} and smith.tests == {"tests/test_sums.py": NEW_TEST}


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [Task.from_swebench(BENCH, FILES), Task.from_swesmith(SMITH, WHOLE)], ids=["bench", "smith"]
)
def test_such_tasks_are_valid(task: Task, backend: Backend) -> None:
    validation = validate_task(task, backend)
    assert validation.valid and validation.fail_to_pass == ("tests/test_sums.py::test_two",)
    assert validation.plan is not None and len(validation.plan.tests) == 2


@pytest.mark.parametrize("make", [Task.from_swebench, Task.from_swesmith])
def test_a_row_alone_is_a_script_in_its_image(make: Any, tmp_path: Path) -> None:
    task = make(SMITH)
    assert task.grader == "script" and task.image and task.files == {}
    reread = Task.from_harbor(task.to_harbor(tmp_path / task.id))
    assert reread.model_copy(update={"kept": None}) == task.model_copy(update={"kept": None})
    dockerfile = (tmp_path / task.id / "environment/Dockerfile").read_text()
    smith = make == Task.from_swesmith
    image = "images/org__lib:1" if smith else "swebench/sweb.eval.x86_64.org_1776_lib-1:latest"
    assert dockerfile.startswith(f"FROM {image}\n")
    assert "rm -rf .git" in dockerfile and ("git apply /tmp/bug.patch" in dockerfile) == smith
    assert ("-R" in task.solution["solve.sh"]) == smith
    assert task.tests["ids.txt"] == "tests/test_sums.py::test_two\ntests/test_sums.py::test_zero\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": ""}, "Org__lib-1: patch is missing"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "FAIL_TO_PASS is no list"),
        ({"FAIL_TO_PASS": ["test_x (tests.Case)"]}, "FAIL_TO_PASS: 'test_x .* is no node id of pytest"),
        ({"PASS_TO_PASS": ["-pevil.py"]}, "PASS_TO_PASS: '-pevil.py' is no node id"),
        ({"PASS_TO_PASS": ["../x.py::t"]}, r"tests name '\.\./x\.py'"),
        ({"patch": FIX.replace("a - b", "a * b")}, "the patch cannot be applied: error: patch failed: lib/sums.py"),
        (
            {"patch": "diff --git a/lib/__init__.py b/lib/__init__.py\ndeleted file mode 100644\n" + FIX},
            "its solution deletes 'lib/__init__.py'",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task.from_swebench(BENCH | change, FILES)
