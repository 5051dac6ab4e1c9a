"""Harbor directories: what others wrote comes out as it went in, and the package `harbor` reads what is written here."""

import tempfile
import tomllib
from pathlib import Path

import pytest
import tomlkit
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_nb.harness.tasks import harbor
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from tests.folders import write
from tests.harness.foreign import FOREIGN, lay
from tests.harness.tasks.test_task import MINIMAL

OURS = Task(**MINIMAL)


def contents(path: Path) -> dict[str, tuple[bytes, bool]]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): (file.read_bytes(), bool(file.stat().st_mode & 0o100)) for file in files}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_wrote_comes_out_as_it_was_but_for_what_is_changed(name: str, tmp_path: Path) -> None:
    path, plain = (lay(name, tmp_path / str(executable), executable) for executable in (True, False))
    task = Task.from_harbor(path)
    assert contents(Task.from_harbor(plain).to_harbor(tmp_path / "again")) == contents(plain)
    save_tasks([task], tmp_path / "tasks.jsonl")
    [loaded] = load_tasks(tmp_path / "tasks.jsonl")
    assert loaded == task and contents(loaded.to_harbor(tmp_path / "third")) == contents(path)
    changes = {"id": "new", "metadata": {'a"b': "[x]\n"}, "instruction": "other"}
    out = task.model_copy(update=changes).to_harbor(tmp_path / "out")
    reread = Task.from_harbor(out)
    same = ("files", "tests", "source_scope", "image")
    expected = changes | {field: getattr(task, field) for field in same}
    assert {field: getattr(reread, field) for field in (*changes, *same)} == expected
    before, after = contents(path), contents(out)
    different = {file for file in {*before, *after} if before.get(file) != after.get(file)}
    assert different == {"task.toml", "instruction.md"}
    old, new = (tomllib.loads((folder / "task.toml").read_bytes().decode()) for folder in (path, out))
    for table in (old, new):
        table.setdefault("metadata", {}).pop("composer_nb", None)
    assert old == new


def test_a_directory_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.delattr(Path, "chmod")
        OURS.to_harbor(tmp_path / "t")
    assert not [*tmp_path.iterdir()]
    assert Task.from_harbor(OURS.to_harbor(tmp_path / "t")) == OURS
    with pytest.raises(FileExistsError):
        OURS.to_harbor(tmp_path / "t")


def test_our_table_may_go_into_an_inline_one(tmp_path: Path) -> None:
    path = lay("plain", tmp_path)
    (path / "task.toml").write_text("metadata = {a = 1}\n")
    task = Task.from_harbor(path)
    assert contents(task.to_harbor(tmp_path / "same")) == contents(path)
    folder = task.model_copy(update={"id": "other"}).to_harbor(tmp_path / "out")
    assert Task.from_harbor(folder).id == "other"
    assert tomllib.loads((folder / "task.toml").read_text())["metadata"]["a"] == 1


KEY = st.text(max_size=6)
VALUE = st.recursive(
    st.text(max_size=8) | st.integers(-9, 9) | st.booleans() | st.just("[metadata.composer_nb]"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=6,
)
PART = st.text("ab.é ", min_size=1, max_size=4).filter(lambda part: part.strip(".") != "")
PATH = st.lists(PART, min_size=1, max_size=3).map(lambda parts: "/".join(["x", *parts]))


@settings(max_examples=60)
@example(unknown={"0": {"": "a"}, "": ""}, timeout=1.0, files={}, instruction="", others="tests")
@given(
    unknown=st.dictionaries(KEY.filter(lambda key: key not in harbor.TaskFile.model_fields), VALUE, max_size=3),
    timeout=st.floats(0.001, 1e6),
    files=st.dictionaries(PATH, st.binary(max_size=12), max_size=4),
    instruction=st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    others=st.sampled_from(["environment", "tests", "solution", "steps", "."]),
)
def test_any_directory_comes_out_as_it_was(
    unknown: dict[str, object], timeout: float, files: dict[str, bytes], instruction: str, others: str
) -> None:
    files = {path: data for path, data in files.items() if not any(inner.startswith(path + "/") for inner in files)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "one")
        toml = f"{tomlkit.item(unknown).as_string()}\n"  # tables come last
        toml += f"[verifier]\ntimeout_sec = {timeout!r}\n"
        entries = {"task.toml": toml.encode(), "instruction.md": instruction.encode()}
        entries |= {"tests/test.sh": b"#!/bin/sh\n"} | {f"{others}/{name}": data for name, data in files.items()}
        task = Task.from_harbor(write(path, entries))
        assert task.settings.verifier.timeout_sec == timeout
        out = task.to_harbor(Path(folder, "two"))
        assert contents(out) == contents(path)
        reread = Task.from_harbor(out)
        assert reread.model_copy(update={"id": task.id, "kept": None}) == task.model_copy(update={"kept": None})


def test_the_package_harbor_reads_what_is_written_here_and_what_the_tests_take_for_foreign(tmp_path: Path) -> None:
    task = pytest.importorskip(
        "harbor.models.task.task", reason="harbor needs Python 3.12: pip install harbor lifts it"
    )
    OURS.to_harbor(tmp_path / "ours")
    assert task.Task.is_valid_dir(tmp_path / "ours")
    harbor_task = task.Task(tmp_path / "ours")
    assert harbor_task.instruction.strip() == OURS.instruction and harbor_task.config.schema_version == "1.4"
    assert harbor_task.config.environment.network_mode.value == "no-network"
    assert harbor_task.config.metadata["composer_nb"]["source_scope"] == ["f.py"]
    for name in FOREIGN:
        path = lay(name, tmp_path)
        assert task.Task.is_valid_dir(path), name
        theirs, ours = task.Task(path).config, Task.from_harbor(path).settings
        assert theirs.verifier.timeout_sec == ours.verifier.timeout_sec
        assert theirs.environment.memory_mb == ours.environment.memory_mb
        assert theirs.environment.cpus == ours.environment.cpus
