"""Tasks from commits and releases: what is asked, what is hidden, what is left out and why, and that nothing of history runs."""

import json
import shutil
import subprocess
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from dulwich import porcelain

from composer_nb.cli import main
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import gold_files, plan_of
from composer_nb.harness.grading.pytest_grader import limit_of
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.making.mine import Candidate, current, draft, history, mine, releases, request_of
from composer_nb.harness.tasks.making.options import RunOptions
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.making.trial import NoTask
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.task import load_tasks
from tests.folders import write

SUMS = "def total(values):\n    return sum(values)\n\n\ndef mean(values):\n    return total(values) / len(values)\n"
MEAN = SUMS.replace("    return total(values) /", "    if not values:\n        return 0.0\n    return total(values) /")
RANGE = "\n\ndef spread(values):\n    return max(values) - min(values)\n"
TESTS = """\
from sums import mean, total


def test_total():
    assert total([1, 2]) == 3


def test_mean():
    assert mean([1, 3]) == 2
"""
EMPTY = "\n\ndef test_mean_of_nothing():\n    assert mean([]) == 0.0\n"
SPREAD = "\n\ndef test_spread():\n    from sums import spread\n\n    assert spread([4, 1]) == 3\n"
OTHERWISE = MEAN.replace("sum(values)", "sum(list(values))") + RANGE
MESSAGE = "Let the mean of nothing be 0.0 (#12)\n\nIt raised ZeroDivisionError.\n\nSigned-off-by: A <a@b.c>\n"
COMMITS: list[tuple[str, dict[str, str]]] = [
    ("Begin with sums", {"sums.py": SUMS, "tests/test_sums.py": TESTS, "README.md": "Sums.\n"}),
    (MESSAGE, {"sums.py": MEAN, "tests/test_sums.py": TESTS + EMPTY}),
    ("Say more about what sums are", {"README.md": "Sums of numbers.\n"}),
    ("Bump version to 2.0 now", {"sums.py": MEAN + "VERSION = 2\n", "tests/test_sums.py": TESTS + EMPTY + "\n"}),
    ("A way to see how far values lie apart", {"sums.py": MEAN + RANGE, "tests/test_sums.py": TESTS + EMPTY + SPREAD}),
    ("Tests of sums in another order of lines", {"tests/test_sums.py": SPREAD + TESTS + EMPTY}),
    ("Write sums in another way, as before", {"sums.py": OTHERWISE, "tests/test_sums.py": TESTS + EMPTY + SPREAD}),
]


def commit(root: Path, message: str, files: Mapping[str, str | bytes]) -> None:
    write(root, files)
    porcelain.add(root, [str(root / path) for path in files])
    porcelain.commit(root, message.encode(), author=b"A <a@b.c>", committer=b"A <a@b.c>", sign=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("history") / "sums"
    root.mkdir()
    porcelain.init(root)
    for message, files in COMMITS:
        commit(root, message, files)
    marker = root.parent / "ran"
    for name in ("pre-commit", "post-checkout", "post-index-change"):
        (root / ".git/hooks" / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (root / ".git/hooks" / name).chmod(0o755)
    with (root / ".git/config").open("a") as config:
        config.write(
            f'[core]\n\tfsmonitor = "touch {marker}"\n\tpager = "touch {marker}"\n[diff]\n\texternal = "touch {marker}"\n'
        )
    return root


def test_commits_become_tasks(checkout: Path, tmp_path: Path, backend: Backend) -> None:
    out = tmp_path / "out"
    summary = mine([checkout], out, backend)
    assert summary["verdicts"] == Counter({"kept": 2, "no source": 2, "no request": 1, "unseen": 1, "first": 1})
    tasks = {task.instruction.split()[0]: task for task in load_tasks(out)}
    mean, spread = tasks["Let"], tasks["A"]
    assert mean.instruction == "Let the mean of nothing be 0.0\n\nIt raised ZeroDivisionError."
    assert spread.instruction.endswith("It has to provide: spread.")
    assert mean.files["sums.py"] == SUMS and mean.solution == {"sums.py": MEAN}
    assert mean.files["tests/test_sums.py"] == TESTS and mean.tests == {"tests/test_sums.py": TESTS + EMPTY}
    for task in tasks.values():
        right, wrong = (grade(task, files, backend) for files in (gold_files(task), workspace(task)))
        assert right.passed and len(wrong.failed) == 1
    assert not (checkout.parent / "ran").exists()


def test_changes_that_are_too_large_or_have_no_suite(checkout: Path) -> None:
    for candidate, verdict in zip(history(checkout, 3), ["too much", "no source", "too much"], strict=True):
        with pytest.raises(NoTask, match=verdict):
            draft(candidate, 0, RunOptions())


def test_what_is_left_out_of_a_history_stays_in_no_memory(tmp_path: Path) -> None:
    porcelain.init(tmp_path)
    for number in range(20):
        files = {"sums.py": SUMS, "test_sums.py": TESTS, "data": bytes((4 << 20) + number)}
        commit(tmp_path, "new data for the sums", files)
    tracemalloc.start()
    try:
        assert sum(candidate.before is not None for candidate in history(tmp_path, 20)) == 19
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_modules_that_were_not_python_end_nothing() -> None:
    """As before a commit that ports its tests from Python 2."""
    later = Repository(name="sums", files={"sums.py": MEAN, "test_sums.py": TESTS})
    with_module, with_conftest = (
        Candidate(id="sums-1", before=Repository(name="sums", files=files), after=later, request="port the tests")
        for files in ({"sums.py": SUMS, path: "print 0\n"} for path in ("test_sums.py", "conftest.py"))
    )
    assert current(draft(with_module, 400, RunOptions()), with_module, cast(Any, None)) == {}
    with pytest.raises(NoTask, match=r"unfit.*conftest\.py:1: not Python"):
        draft(with_conftest, 400, RunOptions())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Fix the parser of dates with one digit", "Fix the parser of dates with one digit"),
        ("Fix dates", ""),
        ("bump the version of everything to 3", ""),
        ("Merge branch 'a' into the branch b", ""),
        ("Let it fail early (GH-3)\n\nFixes #4. Closes #5\nReviewed-by: B\nhttps://a.b/c\n", "Let it fail early\n\n"),
        ("Versioned files are read as they were\n\nCo-authored-by: X <x@y>", "Versioned files are read as they were"),
    ],
)  # fmt: skip
def test_requests(message: str, expected: str) -> None:
    assert request_of(message) == expected.strip()


BROKEN = """

import pytest, time

def test_of_a_file_that_is_not_shipped():
    open('data.bin')

def test_that_takes_long():
    time.sleep(1000)

@pytest.mark.slow
def test_that_its_project_leaves_out():
    pass
"""
RAISES = "\n\ndef test_nothing():\n    import pytest\n\n    with pytest.raises(ZeroDivisionError):\n        mean([])\n"


def test_releases(tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests that fail afterwards too, are slow or deselected do not count, and visible ones that the change contradicts go."""
    states = [
        (SUMS, TESTS + RAISES, "2.0\n---\n- all of it\n"),
        (MEAN, TESTS + EMPTY + BROKEN, "2.1\n---\n- The mean of nothing is 0.0 (#3)\n\n2.0\n---\n- all of it\n"),
    ]
    for number, (code, tests, log) in enumerate(states):
        files = {"sums.py": code, "test_sums.py": tests, "CHANGES.rst": log}
        files["pytest.ini"] = "[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n"
        write(tmp_path / f"sums-{number}", files)
    (tmp_path / "sums-2").mkdir()
    paths = [tmp_path / f"sums-{number}" for number in range(3)]
    first, second = releases(paths)
    assert first.request == "2.1\n---\n- The mean of nothing is 0.0" and second.unfit == "no suite"
    words = ["tasks", "mine", *map(str, paths), "--out", str(tmp_path / "out"), "--suite-seconds", "30", "--json"]
    for _ in range(2):  # the second call knows what the first found out
        assert main(words) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["verdicts"] == {"kept": 1, "no suite": 1}
        assert summary["slow"] == 1 and [row["slow"] for row in summary["candidates"]] == [1, 0]
    [task] = load_tasks(tmp_path / "out")
    assert task.id == "sums-1" and limit_of(task) == 30.0 and grade(task, gold_files(task), backend).passed
    assert task.files["test_sums.py"].rstrip() == TESTS.rstrip()
    names = [f"test_sums.py::test_{name}" for name in ("mean", "mean_of_nothing", "total")]
    assert sorted(plan_of(task).tests.values()) == names


def test_what_holds_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(path: Path) -> str:
        assert main(["tasks", "mine", str(path), "--out", str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    assert "no git checkout; for releases give two folders or more" in refusal(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    porcelain.init(broken)
    (broken / ".git/HEAD").write_text("ref: refs/heads/master\n")
    (broken / ".git/refs/heads/master").write_text("0" * 39 + "1\n")
    assert "its history cannot be read" in refusal(broken)


@pytest.mark.parametrize(
    ("options", "usable", "remedy"),
    [
        (["--depth=3"], 2, "git fetch --unshallow"),
        (["--filter=tree:0", "--no-checkout"], 0, "git fetch --refetch --no-filter"),
    ],
)
def test_what_a_shallow_or_partial_clone_lacks_is_named_and_taken_once_it_is_there(
    options: list[str], usable: int, remedy: str, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commits with all objects are candidates; the others say what to fetch, and are not remembered as unfit."""
    clone, full_history = tmp_path / "sums", {c.id: c.unfit for c in history(checkout, 20)}
    origin = shutil.copytree(checkout, tmp_path / "origin")
    (origin / ".git/config").write_text("[core]\n\trepositoryformatversion = 0\n[uploadpack]\n\tallowFilter = true\n")
    run = partial(subprocess.run, check=True, capture_output=True)
    run(["git", "clone", "-q", *options, f"file://{origin}", str(clone)])
    reasons = {c.id: c.unfit for c in history(clone, 20)}
    missing = {name for name, why in reasons.items() if why.startswith("not fetched: object ") and f"`{remedy}`" in why}
    assert missing and sum(c.before is not None for c in history(clone, 20)) == usable
    assert all(full_history[name] == why for name, why in reasons.items() if name not in missing)
    out = str(tmp_path / "out")
    assert main(["tasks", "mine", str(clone), "--out", out, "--limit=1", "--commits=3", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["verdicts"].get("not fetched", 0) == 3 - usable
    run(["git", "-C", str(clone), *remedy.split()[1:]])
    assert {c.id: c.unfit for c in history(clone, 20)} == full_history
    assert main(["tasks", "mine", str(clone), "--out", out, "--commits=3", "--json"]) in (0, 1)
    assert "not fetched" not in json.loads(capsys.readouterr().out)["verdicts"]
