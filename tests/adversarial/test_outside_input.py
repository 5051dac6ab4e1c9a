"""Input from outside that is read without being run: patterns, pytest's configuration, wheels, rows, kept work. Each
attack is refused, named or made harmless; one that would never end is cut short by pytest's time limit."""

import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iniconfig import IniConfig

from composer_nb.harness.carry import Blob
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.store import load_attempts
from composer_nb.harness.tasks import runtime
from composer_nb.harness.tasks.making.options import plugins_in, read_options
from composer_nb.harness.tasks.scope import in_scope
from composer_nb.harness.tasks.swe import from_swebench
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import parquet
from composer_nb.production.bench import compare_evals
from composer_nb.production.diff import patch
from composer_nb.production.work import CHANGES, DIFF, give_verdict
from composer_nb.trainer.learning.data import load_rows
from composer_nb.trainer.models.shards import read_shard
from tests.folders import write

# Patterns

DEEP = "/".join(["d"] * 40)


def test_stars_of_a_pattern_are_tried_in_bounded_work() -> None:
    assert not in_scope(DEEP, ["**/" * 20 + "y"]) and not in_scope(DEEP, ["d/**/" * 15 + "y"])
    assert in_scope(f"{DEEP}/y", ["**/" * 20 + "y"])


# Configuration of a foreign repository

PYPROJECT = {
    "a list's line": '[tool.pytest.ini_options]\nmarkers = ["a\\naddopts = -p evil"]\n',
    "a key's line": '[tool.pytest.ini_options]\n"x = 1\\naddopts" = "-p evil"\n',
    "a key's colon": '[tool.pytest.ini_options]\n"addopts: -p evil #" = ""\n',
    "addopts itself": '[tool.pytest.ini_options]\naddopts = "-p evil --rootdir=/ -c /x -o addopts=-pevil @file"\n',
}


@pytest.mark.parametrize("text", PYPROJECT.values(), ids=PYPROJECT)
def test_a_repositorys_configuration_adds_no_option(text: str) -> None:
    ini = read_options({"pyproject.toml": text, "test_a.py": ""}).ini
    assert "addopts" not in IniConfig("pytest.ini", data=f"[pytest]\n{ini}").sections["pytest"]


# Packages


@pytest.mark.parametrize(
    "text",
    ["[pytest11]\na = b\n  addopts = -p evil\n", "[pytest11]\na = -p evil\n", "no section", "[a]\nx\n", "\udcff"],
)
def test_a_plugin_that_packages_announce_is_a_module(tmp_path: Path, text: str) -> None:
    (tmp_path / "a-1.dist-info").mkdir()
    (tmp_path / "a-1.dist-info/entry_points.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    try:
        plugins = plugins_in(tmp_path)
    except ValueError:
        return
    assert plugins in ([], ["b"])


def test_a_task_that_names_a_folder_of_this_machine_fills_no_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "a.py").write_text("")
    assert runtime.read_packages(tmp_path) == {"a.py": b""}
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    runtime.read_packages.cache_clear()
    with pytest.raises(ValueError, match="more than packages"):
        runtime.read_packages(tmp_path)
    runtime.read_packages.cache_clear()


def test_a_foreign_task_may_name_no_folder_that_was_never_given_for_tests(tmp_path: Path) -> None:
    """It may know what lies there, as with a public package, and so its digest."""
    (tmp_path / "secret.py").write_text("x")
    named = {runtime.PACKAGES: str(tmp_path), runtime.PACKAGES_DIGEST: runtime.packages_digest({"secret.py": b"x"})}
    task = Task(id="t", instruction="-", files={}, tests={"test_a.py": ""}, source_scope=("a.py",), grader="pytest")
    task = task.model_copy(update={"metadata": named})
    with pytest.raises(
        ValueError, match=f"task t: {tmp_path} lacks composer_nb.packages, which `tasks make --packages` writes"
    ):
        runtime.packages_of(task)
    runtime.allow_packages(tmp_path)
    assert runtime.packages_of(task) == {"secret.py": b"x"}
    runtime.read_packages.cache_clear()


# Rows

ROW = {"instance_id": "a__b-1", "problem_statement": "x", "patch": "x", "test_patch": "x", "FAIL_TO_PASS": ["t.py::a"]}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..\\x", "a/../../x"])
def test_a_rows_patch_keeps_to_the_repository(name: str) -> None:
    diff = f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n"
    for row in (ROW | {"patch": diff}, ROW | {"test_patch": diff}):
        with pytest.raises(ValueError):
            from_swebench(row, {"t.py": ""})


# Work that waits for a verdict


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Work whose diff shows a new, harmless file, ready to be forged."""
    (tmp_path / "repository/.git/hooks").mkdir(parents=True)
    path = tmp_path / "kept"
    path.mkdir()
    (path / "verdict.json").write_text('{"verdict": "open"}')
    (path / DIFF).write_bytes(patch({}, {"a": Blob(data=b"safe\n")}))
    return path


NEW = {"mode": "100755", "data": "ZXZpbAo="}
SAFE = {"mode": "100644", "data": "c2FmZQo="}


def forged(changes: Any, subfolder: str = "") -> Callable[[Path], Any]:
    return lambda root: {"repository": str(root / subfolder), "changes": changes}


SAFELY = {"a": [None, SAFE]}
FORGED: dict[str, Callable[[Path], Any]] = {
    "not what its diff shows": forged({"a": [None, NEW]}),
    "a history": forged(SAFELY, ".git/hooks"),
    "a link to a history": forged(SAFELY, "link"),
    "where one stands": lambda root: {"repository": ".", "changes": SAFELY},
    "a path that leads out": forged({"../a": [None, SAFE]}),
    "an empty folder that would go": forged(SAFELY | {"empty/folder/x": [None, None]}),
    "a device": forged({"a": [None, NEW | {"mode": "060000"}]}),
    "no object": lambda root: [],
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_forged_work_is_not_accepted(attempt: Path, forged: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch):
    root = attempt.parent / "repository"
    (root / "link").symlink_to(".git/hooks")
    (root / "empty/folder").mkdir(parents=True)
    monkeypatch.chdir(root)
    before = sorted(attempt.parent.rglob("*"))
    (attempt / CHANGES).write_text(json.dumps(forged(root)))
    with pytest.raises(ValueError, match=r"nothing was written|damaged"):
        give_verdict(attempt, "accepted")
    assert sorted(attempt.parent.rglob("*")) == sorted([*before, attempt / CHANGES])


def test_work_as_its_diff_shows_it_is_accepted(attempt: Path) -> None:
    root = attempt.parent / "repository"
    (attempt / CHANGES).write_text(json.dumps({"repository": str(root), "changes": {"a": [None, SAFE]}}))
    with pytest.raises(ValueError, match=rf"are for {root}; nothing was written.*add --repository {root}"):
        give_verdict(attempt, "accepted")  # from another folder: the diff does not show where
    with pytest.raises(ValueError, match="nothing was written"):
        give_verdict(attempt, "accepted", root / ".git")
    (no_room := attempt / f"verdict.json.{os.getpid()}-{threading.get_ident()}.part").mkdir()
    with pytest.raises(OSError):
        give_verdict(attempt, "accepted", root)
    assert not (root / "a").exists()
    no_room.rmdir()
    assert give_verdict(attempt, "accepted", root) == (root, 1) and (root / "a").read_text() == "safe\n"


# Weights


def tensor(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} | fields


HEADERS: dict[str, Any] = {
    "backwards": {"w": tensor(data_offsets=[32, 0])},
    "below the file": {"w": tensor(data_offsets=[-32, 0])},
    "beyond the file": {"w": tensor(shape=[1 << 61], data_offsets=[0, 1 << 63])},
    "a size that overflows": {"w": tensor(shape=[1 << 32, 1 << 32], data_offsets=[0, 0])},
    "over one another": {"w": tensor(), "v": tensor()},
    "deep": b'{"__metadata__":' + b"[" * 100_000,
    "one name twice": b'{"w":%s,"w":%s}' % ((json.dumps(tensor()).encode(),) * 2),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_of_weights_is_named(tmp_path: Path, header: Any) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    for length in (len(text), 1 << 63):
        file.write_bytes(struct.pack("<Q", length) + text + bytes(32))
        with pytest.raises(ValueError, match="this shard is damaged"):
            read_shard(file)


def test_a_small_table_that_announces_many_rows_is_refused(tmp_path: Path) -> None:
    names = {"task_id": pa.array(["a"]), "instruction": pa.array(["b"])}
    columns = {name: pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int8)), x) for name, x in names.items()}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 10**4
    with pytest.raises(ValueError, match=r"x.parquet: damaged.* announces 1,000,000 rows"):
        load_attempts(tmp_path / "x.parquet", {})
    write(tmp_path / "eval", {"all/rollouts.parquet": (tmp_path / "x.parquet").read_bytes()})
    with pytest.raises(ValueError, match=r"rollouts.parquet: damaged.* announces 1,000,000 rows"):
        compare_evals(tmp_path / "eval", tmp_path / "eval")
    pq.write_table(pa.table(names), tmp_path / "y.parquet")
    assert parquet(tmp_path / "y.parquet") == tmp_path / "y.parquet"


def test_compressed_rows_of_demonstrations_are_refused(tmp_path: Path) -> None:
    zeros = np.zeros(10**6, np.int32)
    np.savez_compressed(tmp_path / "x.npz", lengths=zeros, token_ids=zeros, weight=zeros)
    with pytest.raises(ValueError, match=r"x.npz: damaged \(it is compressed\)"):
        load_rows(tmp_path / "x.npz")


# Kernel state of two sandboxes

SHARED = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
make = sys.argv[1] == "make"
mode = 0o1666 if make else 0
found = [name for name, made in (
    ("shm", libc.shmget(7777, 4096, mode)), ("msg", libc.msgget(7777, mode)), ("sem", libc.semget(7777, 1, mode)),
) if made >= 0]
for path in ("/dev/shm/shared", "/tmp/shared"):
    open(path, "w").close() if make else None
    found += [path] * os.path.exists(path)
print(*found)
if make:
    open("ready", "w").close()
    time.sleep(600)
"""
EVERYTHING = b"shm msg sem /dev/shm/shared /tmp/shared\n"


def test_two_sandboxes_share_no_memory_queue_or_file() -> None:
    with BwrapBackend() as backend, backend.create() as maker, backend.create() as reader:
        maker.write("a.py", SHARED.encode())
        maker.exec_background(["python3", "a.py", "make"], log="log")
        while maker.exec(["test", "-e", "ready"]).exit_code:
            assert maker.stats().processes, maker.read("log")
            time.sleep(0.05)
        outputs = [box.exec(["python3", "-c", SHARED, "find"]).stdout for box in (maker, reader)]
        assert outputs == [EVERYTHING, b"\n"]
