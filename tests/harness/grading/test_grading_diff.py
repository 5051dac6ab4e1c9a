"""What is graded: changes inside the scope, and nothing else of a workspace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading import diff
from composer_nb.harness.grading.diff import changes
from composer_nb.harness.tasks.scope import in_scope
from composer_nb.harness.tasks.task import Task

TASK = Task(
    id="t",
    instruction="",
    grader="pytest",
    files={"f.py": "one\n", "src/a.py": "two\n", "setup.py": "three\n", "lib/x/conftest.py": "four\n"},
    tests={"tests/test_f.py": "def test_f():\n    assert True\n"},
    source_scope=("f.py", "src/**", "lib/**/*.py", "pyproject.toml"),
)
PRISTINE = {path: text.encode() for path, text in TASK.files.items()}


def test_scope() -> None:
    matching = [("a.py", "a.py"), ("*/*.py", "x/a.py"), ("x/**", "x/y/z/a.py"), ("x/**/a.py", "x/a.py")]
    matching += [("**", "deep/a.py"), ("x[1].py", "x[1].py")]
    assert all(in_scope(path, [pattern]) for pattern, path in matching)
    assert not in_scope("x/a.py", ["*.py"]) and not in_scope("xa.py", ["x/**"])


DROPPED = {
    "outside_scope": ["tests/test_f.py", ".git/hooks/pre-commit"],
    "test_setup": ["src/.git/HEAD", "src/conftest.py", "src/site-packages/f.py"],
    "cache": ["src/__pycache__/a.cpython-311.pyc"],
    "unsafe_path": ["/etc/passwd", "src/../../x.py", "src/" + "d/" * 600 + "x.py", "src/\ud800.py", "src/" + "é" * 128],
    "conflict": ["src/a.py/b.py"],
}
"""Among them a name of 256 bytes, which no disk takes."""


@pytest.mark.parametrize("reason", DROPPED)
def test_what_is_dropped(reason: str) -> None:
    for path in DROPPED[reason]:
        filtered = changes(TASK, PRISTINE | {path: b"evil\n"})
        assert filtered.files == PRISTINE and filtered.dropped == {path: reason}
        assert filtered.flags == (() if reason == "cache" else (reason,))


@pytest.mark.parametrize("path", ["tests", "tests/test_f.py/x.py"])
def test_a_hidden_tests_place_cannot_be_taken(path: str) -> None:
    """Or else the box could not be filled, which would look like a fault of the box."""
    wide = TASK.model_copy(update={"source_scope": ("**",)})
    filtered = changes(wide, PRISTINE | {path: b"", "tests/more.py": b"", "tests/test_f.py": b"mine"})
    assert filtered.dropped == {path: "conflict"} and filtered.files["tests/test_f.py"] == b"mine"


def test_what_is_too_large_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "MAX_FILE_BYTES", 10)
    monkeypatch.setattr(diff, "MAX_CHANGED_BYTES", 15)
    files = {"src/b.py": b"x" * 11, "src/c.py": b"y" * 9, "src/d.py": b"z" * 7, "src/e.py": b"e"}
    filtered = changes(TASK, PRISTINE | files)
    assert filtered.dropped == {"src/b.py": "too_large", "src/d.py": "too_large"} and filtered.flags == ("too_large",)
    assert set(filtered.files) - set(PRISTINE) == {"src/c.py", "src/e.py"}


def test_too_many_files_or_folders_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "MAX_CHANGED_FILES", 12)
    extra_files = {f"src/{n:02}.py": b"" for n in range(50)}
    filtered = changes(TASK, PRISTINE | extra_files)
    assert set(filtered.files) - set(PRISTINE) == {f"src/{n:02}.py" for n in range(10)}  # `src` and `.` are two more
    deep = {f"src/{n:02}/a/b/c/d.py": b"" for n in range(50)}
    assert len(changes(TASK, PRISTINE | deep).files) == len(PRISTINE) + 2


NAMES = ["src", "lib", "f.py", "a.py", "conftest.py", "tests", "..", "", "__pycache__", ".git", "x.pyc"]
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(PATHS, st.binary(max_size=4), max_size=6), st.sets(st.sampled_from(sorted(PRISTINE))))
def test_outside_the_scope_all_is_as_the_task_has_it(changed_files: dict[str, bytes], deleted: set[str]) -> None:
    files = {path: data for path, data in PRISTINE.items() if path not in deleted} | changed_files
    filtered = changes(TASK, files)
    for path in {*filtered.files, *PRISTINE}:
        if filtered.files.get(path) != PRISTINE.get(path):
            assert in_scope(path, TASK.source_scope) and filtered.files.get(path) == files.get(path)
    folders = {path.rsplit("/", depth)[0] for path in filtered.files for depth in range(1, path.count("/") + 1)}
    assert not folders & set(filtered.files)
    assert changes(TASK, filtered.files).files == filtered.files and changes(TASK, filtered.files).dropped == {}
