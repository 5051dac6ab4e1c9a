"""Tasks: what fits together, what is refused, and both forms on disk."""

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.harbor import WORKSPACE
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks

TESTS = render_tests("f", "f", [((1,), 2)])
MINIMAL: dict[str, Any] = {
    "id": "t",
    "instruction": "add one",
    "files": {"f.py": "def f(x):\n    return x\n", "test_f.py": TESTS},
    "tests": {"hidden.py": TESTS},
    "solution": {"f.py": "def f(x):\n    return x + 1\n"},
    "source_scope": ("f.py",),
}
ODD_TEXTS = ["", "\n\n", "a\r\nb\rc", "\u2028\u2029\x85\x1c", "\x7f\x00\x1b", '"\\\b', "😀", "é\u0301", "'''", "\ufeff"]
TEXT = st.text(max_size=20) | st.sampled_from(ODD_TEXTS)
NAME = st.text(st.characters(exclude_characters="/\0\\", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..") and not name.startswith("test_")
)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Draw any task with the tests of MINIMAL: every text in it may be anything."""
    folders = st.lists(NAME, min_size=1, max_size=3, unique=True).map(lambda parts: "/".join(["x", *parts]))
    more_files = draw(st.dictionaries(folders, TEXT, max_size=3))
    more_files = {
        path: text for path, text in more_files.items() if not any(inner.startswith(path + "/") for inner in more_files)
    }
    changed_files = draw(st.dictionaries(st.sampled_from(sorted({"f.py", *more_files})), TEXT, max_size=2))
    return Task(
        id=draw(TEXT),
        instruction=draw(TEXT),
        files=MINIMAL["files"] | {"f.py": draw(TEXT)} | more_files,
        tests=MINIMAL["tests"],
        solution=changed_files,
        source_scope=("f.py", *more_files),
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        strictness=draw(st.sampled_from(["tests", "twins", "scope", "lints"])),
        tools=draw(st.sampled_from([(), ("read_file", "finish")])),
    )


@settings(max_examples=50)
@given(several=st.lists(tasks(), min_size=1, max_size=3, unique_by=lambda task: task.id))
def test_both_forms_hold_all_of_a_task(several: list[Task]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = several[0].to_harbor(Path(folder) / "task")
        assert Task.from_harbor(path) == several[0]
        toml = tomllib.loads((path / "task.toml").read_bytes().decode())
        assert toml["schema_version"] == "1.4" and toml["environment"]["network_mode"] == "no-network"
        assert toml["verifier"]["environment_mode"] == "separate"
        lines = Path(folder) / "new" / "tasks.jsonl"
        save_tasks(several, lines)
        assert load_tasks(lines) == load_tasks(lines.parent) == several
        assert [entry.name for entry in lines.parent.iterdir()] == ["tasks.jsonl"]


PYTEST = {"tests": {"test_a.py": ""}, "solution": {}}
ANY_MESSAGE = "is not a plain relative path"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({group: {path: TESTS}}, ANY_MESSAGE)
            for group in ("files", "tests", "solution")
            for path in ("/f.py", "../f.py", "a/../f.py", "./f.py", "a//f.py", "a/", "", ".", "..", "f\0.py", "//f.py")
        ),
        ({"source_scope": ("../f.py",)}, ANY_MESSAGE),
        ({"source_scope": ()}, "source_scope is empty"),
        ({"files": {"f.py": "", "f.py/g.py": ""}}, "'f.py' is a file"),
        ({"source_scope": ("f.py", "f.py/g.py")}, "'f.py' is a file"),
        ({"files": {"f.py": "", "hidden.py": TESTS}}, r"hidden tests \['hidden.py'\] also lie in the workspace"),
        ({"solution": {"g.py": ""}}, r"the solution changes \['g.py'\], outside source_scope"),
        ({"tests": {}}, "no test function found"),
        ({"tests": {"hidden.py": "import os\n"}}, r"hidden\.py:1: only imports"),
        ({"grader": "script"}, "grader"),
        *(
            (
                {"grader": "pytest", "metadata": {"mutants": "[{}]"}, "source_scope": scope} | PYTEST,
                "has one test module as",
            )
            for scope in (("f.py",), ("test_a.py", "test_b.py"), ("*.py",))
        ),
        ({"instruction": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task(**MINIMAL | change)


@pytest.fixture
def harbor(tmp_path: Path) -> Path:
    return Task(**MINIMAL).to_harbor(tmp_path / "tasks" / "t")


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", f"{WORKSPACE}/f.py", "tests/hidden.py"])
def test_a_file_that_is_missing_or_not_utf8_is_named(harbor: Path, name: str) -> None:
    (harbor / name).write_bytes(b"ok \xff")
    with pytest.raises(ValueError, match=rf"{name}: not UTF-8 at byte 3"):
        Task.from_harbor(harbor)
    (harbor / name).unlink()
    if "/" not in name:
        with pytest.raises(ValueError, match=f"not a task directory: {name} is missing"):
            Task.from_harbor(harbor)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = \n", r"task\.toml: Invalid value"),
        pytest.param("a = " + "[" * 100_000, r"task\.toml: TOML that is nested too deeply", id="deep"),
        pytest.param("a = " + "9" * 5000, r"task\.toml: .*digits", id="long"),
        ("[metadata]\ncomposer_nb = 1\n", r"metadata\.composer_nb: .*must have named fields"),
        ("[metadata.composer_nb]\ngrader = 'functions'\n", "must name source_scope"),
        ("[metadata.composer_nb]\nsource_scope = ['../f.py']\n", "is not a plain relative path"),
        ("environment.workdir = '/a/../b'\n", r"environment\.workdir: .*leads out"),
        ("artifacts = [{source = '/a/../../b'}]\n", r"artifacts\.0.*leads out"),
        (
            "[metadata.composer_nb]\nsource_scope = ['f.py']\nstrictness = 'very'\n",
            r"composer_nb\.strictness: .* 'scope'",
        ),
        ("[[steps]]\nname = 'one'\n", "several steps are not supported"),
    ],
)
def test_an_unfit_toml_is_named(harbor: Path, text: str, message: str) -> None:
    (harbor / "task.toml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Task.from_harbor(harbor)
    assert str(harbor) in str(caught.value)


@pytest.mark.parametrize(
    "path", ["task.toml", "instruction.md", "environment", WORKSPACE, f"{WORKSPACE}/f.py", "tests", "solution/f.py"]
)
def test_links_are_refused(harbor: Path, tmp_path: Path, path: str) -> None:
    """A task from elsewhere must not make the host read files that are not the task's."""
    target = tmp_path / "elsewhere"
    (harbor / path).rename(target)
    (harbor / path).symlink_to(target)
    with pytest.raises(ValueError, match=rf"{path}: links and devices have no place in a task"):
        Task.from_harbor(harbor)
    (harbor / path).unlink()
    os.mkfifo(harbor / path)  # not opened, for that would block
    with pytest.raises(ValueError, match=rf"{path}: links and devices"):
        Task.from_harbor(harbor)


def test_where_there_is_no_task(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no task file or folder here"):
        load_tasks(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no task"):
        load_tasks(tmp_path)
    save_tasks([Task(**MINIMAL), Task(**MINIMAL | {"instruction": "other"})], tmp_path / "twice.jsonl")
    with pytest.raises(ValueError, match="several tasks are named 't'"):
        load_tasks(tmp_path / "twice.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no task"):
        load_tasks(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("", "not JSON"),
        ("[]", "must have named fields"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
        pytest.param("9" * 5000, "digits", id="long"),
        (json.dumps(MINIMAL | {"files": {"../f": ""}}), ANY_MESSAGE),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(MINIMAL) + "\n" + line + "\n" + json.dumps(MINIMAL) + "\n")
    with pytest.raises(ValueError, match=rf"tasks\.jsonl:2: .*{message}"):
        load_tasks(path)


def test_a_task_whose_settings_are_too_large_is_named() -> None:
    with pytest.raises(ValueError, match=r"^task large: its task\.toml: TOML of more than"):
        _ = Task(**MINIMAL | {"id": "large", "metadata": {"notes": "x" * (1 << 20)}}).settings
