"""Tasks from real bugs, with a made-up tests4py, a wheel and pip without an index: what a task holds, and what ends the work."""

import hashlib
import json
import re
import shutil
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, cast

import pytest

from composer_nb.cli import main
from composer_nb.harness.files import write_json
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import gold_files
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.making import bugs
from composer_nb.harness.tasks.making.bugs import Bug, Project, make_bugs, read_recipe, request_for
from composer_nb.harness.tasks.patch import apply_patch
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.task import load_tasks, save_tasks
from tests.folders import write

RIGHT = """\
from spare import one


def mean(values):
    if not values:
        return 0.0
    return one * sum(values) / len(values)
"""
WRONG = RIGHT.replace("    if not values:\n        return 0.0\n", "")
FIX = """\
diff --git a/sums/core.py b/sums/core.py
--- a/sums/core.py
+++ b/sums/core.py
@@ -3,3 +3,5 @@
 
 def mean(values):
+    if not values:
+        return 0.0
     return one * sum(values) / len(values)
diff --git a/tests/test_sums.py b/tests/test_sums.py
--- a/tests/test_sums.py
+++ b/tests/test_sums.py
@@ -1,1 +1,2 @@
 pass
+mean
"""
TESTS = """\
import unittest
from sums.core import mean


class TestsFailing(unittest.TestCase):
    def test_1(self):
        # return 0.0 if there are none
        self.assertEqual(0.0, mean([]))

    def test_2(self):
        self.assertEqual(0.0, mean(()))


class TestsPassing(unittest.TestCase):
    def test_1(self):
        self.assertEqual(2.0, mean([1, 3]))

    def test_2(self):
        self.assertEqual(5.0, mean([5]))
"""


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write a wheel of version 1.0 and return its digest."""
    info = f"{name}-1.0.dist-info"
    meta = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "RECORD": ""}
    meta["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, **{f"{info}/{file}": text for file, text in meta.items()}}.items():
            archive.writestr(file, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def package(folder: Path, version: str) -> None:
    """Write the metadata of an installed tests4py, in place of another one's."""
    for info in folder.glob("tests4py-*.dist-info"):
        shutil.rmtree(info)
    metadata = f"Metadata-Version: 2.1\nName: tests4py\nVersion: {version}\n"
    write(folder / f"tests4py-{version}.dist-info", {"METADATA": metadata})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Project]:
    """Return the recipe of a made-up tests4py: one project of three bugs, of which one is refused and one has no effect."""
    data = tmp_path / "tests4py"
    fixes = [FIX, FIX, FIX.replace("values", "numbers")]
    for number, fix in enumerate(fixes, 1):
        write(data / "projects/resources/sums" / f"bug_{number}", {"fix.patch": fix, "unittests.py": TESTS})
    texts = [text for fix in fixes for text in (fix, TESTS)]
    monkeypatch.setattr(bugs, "SHA256", hashlib.sha256("".join(texts).encode()).hexdigest())
    index = tmp_path / "index"
    index.mkdir()
    digest = wheel(index, "sums", {"sums/__init__.py": "", "sums/core.py": RIGHT, "sums/table.bin": "\0"})
    wheel(index, "spare", {"spare.py": "one = 1\n"})
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "1.0.0")
    rows = {1: Bug(release="1.0", sha256=digest), 2: Bug(refused="it needs the network")}
    rows[3] = Bug(release="1.0", sha256=digest)
    return {"sums": Project(distribution="sums", packages=("spare==1.0",), bugs=rows)}


def test_a_reversed_fix_is_a_task_with_the_fix_as_its_solution(
    recipe: dict[str, Project], tmp_path: Path, backend: Backend
) -> None:
    out, steps = tmp_path / "out", list[str]()
    summary = make_bugs(out, backend, recipe, lambda doing, counts: steps.append(doing))
    assert steps == ["downloading"] * 3 + ["sums-1", "sums-2", "sums-3"]
    reasons = {row["id"]: row["why"] for row in summary["projects"]["sums"]["candidates"]}
    assert summary["tasks"] == 1 and reasons["sums-1"] == "" and reasons["sums-2"] == "it needs the network"
    assert "patch failed" in reasons["sums-3"]
    [task] = load_tasks(out)
    assert task.files == {"sums/__init__.py": "", "sums/core.py": WRONG} and task.solution == {"sums/core.py": RIGHT}
    assert apply_patch(task.files, FIX.partition("diff --git a/tests")[0]) == task.solution
    assert task.tests == {"test_bug.py": TESTS} and task.metadata["repository"] == "sums"
    calls = re.findall(r"mean\(.*?\)", task.instruction)
    assert calls == ["mean([])"] and "return" not in task.instruction, task.instruction
    right, wrong = (grade(task, files, backend) for files in (gold_files(task), workspace(task)))
    assert right.passed and sorted(wrong.failed) == [f"test_bug.py::TestsFailing::test_{n}" for n in (1, 2)]

    for path in (tmp_path / "index").iterdir():
        path.unlink()  # nothing is downloaded or tried again
    second_summary = make_bugs(out, cast(Backend, None), recipe, lambda doing, counts: None)
    assert second_summary["tasks"] == 1 and load_tasks(out) == [task]
    other_task = task.model_copy(update={"id": "other-1"})
    save_tasks([other_task], out / "other" / "tasks.jsonl")
    make_bugs(out, cast(Backend, None), recipe, lambda doing, counts: None)
    assert load_tasks(out) == [other_task, task], "what was made of another project stays"


def test_what_is_missing_or_changed_is_named_before_anything_runs(
    recipe: dict[str, Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "recipe.json", tmp_path / "out"
    monkeypatch.setattr("composer_nb.harness.tasks.making.mine.try_candidate", None)
    monkeypatch.setattr(bugs, "RECIPE", path)

    def error(*changes: tuple[str, Any]) -> str:
        rows = {name: project.model_dump() for name, project in recipe.items()}
        for key, value in changes:
            rows["sums"][key] = value
        write_json(path, rows)
        assert main(["tasks", "bugs", "--out", str(out)]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()[-1:]
        return line

    assert "sums==2.0" in error(("bugs", {1: {"release": "2.0", "sha256": "0"}}))
    assert "spare==2.0" in error(("packages", ["spare==2.0"]))
    assert "SHA-256" in error(("bugs", {1: {"release": "1.0", "sha256": "0"}}))
    assert "recipe.json" in error(("bug", {}))
    assert main(["tasks", "bugs", "other", "--out", str(out)]) == 2
    package(tmp_path, "0.9")
    (tmp_path / "tests4py/projects/resources/sums/bug_1/fix.patch").write_text(FIX.replace("0.0", "1.0"))
    assert "of tests4py 0.9, or changed; reinstall tests4py==1.0.0" in error()
    monkeypatch.setattr(bugs, "distribution", lambda name: distribution("no-such-package"))
    assert "-e '.[bugs]'" in error()


def test_the_recipe_has_a_release_or_a_reason_for_each_bug() -> None:
    recipe = read_recipe()
    rows = [bug for project in recipe.values() for bug in project.bugs.values()]
    usable = [bug for bug in rows if not bug.refused]
    assert all(bug.release and re.fullmatch("[0-9a-f]{64}", bug.sha256) for bug in usable)
    assert not any(bug.release or bug.sha256 for bug in rows if bug.refused)
    assert len(usable) >= 60 and sum(any(not bug.refused for bug in row.bugs.values()) for row in recipe.values()) >= 6
    dumped = {name: row.model_dump(mode="json", exclude_defaults=True) for name, row in recipe.items()}
    assert json.loads(bugs.RECIPE.read_text()) == dumped


@pytest.mark.parametrize(
    "tests", ["", TESTS.replace("TestsFailing", "Others"), TESTS.replace("mean([])", f"mean([{'1, ' * 2000}])")]
)
def test_a_bug_without_a_failing_test_to_show_is_refused(tests: str) -> None:
    with pytest.raises(ValueError, match="no failing test"):
        request_for(tests)
