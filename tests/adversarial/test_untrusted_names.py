"""Names that lead elsewhere: in manifests, tasks, run databases, checkpoints, diffs. Each is refused before a byte is written."""

import json
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from composer_nb.harness.carry import Blob
from composer_nb.harness.tasks import harbor
from composer_nb.harness.untrusted import UnsafeName, beneath, checked, protected, single
from composer_nb.production.accept import Conflict, accept
from composer_nb.production.checkout import changed, read_checkout
from composer_nb.trainer.models.shards import read_shards
from composer_nb.trainer.parallel.checkpoint import Reader, readable
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.versions.manifest import DamagedVersion, Manifest
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import StoreError, VersionStore
from composer_nb.trainer.weights import apply_delta, verify

OUTSIDE = [
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "a\0b", "a\\b", "..\\x",
    "C:x", "c:/x", "n" * 256, "/".join(["n" * 200] * 6), "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    for check in (checked, single, lambda name: beneath(tmp_path, name)):
        with pytest.raises(UnsafeName):
            check(name)


@pytest.mark.parametrize("name", ["a", "a/b", "...", "..a", "a b", "é", "-rf", "ab:c", "n" * 255, "a\udcff", "~"])
def test_an_odd_name_that_stays_is_taken(tmp_path: Path, name: str) -> None:
    assert checked(name) == name and beneath(tmp_path, name) == tmp_path / name


def test_links_are_followed_as_far_as_they_stay_beneath(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    targets = {
        "up": "..", "out": "/etc", "near": "sub", "gone": "../gone", "loop": "loop", "deep": "up/x",
        "round": "../root/sub",
    }  # fmt: skip
    for name, target in targets.items():
        (root / name).symlink_to(target)
    for name in ("near/x", "near", "round/x"):
        assert beneath(root, name) == root / name
    for name in ("up", "up/x", "out/passwd", "gone", "gone/x", "deep"):
        with pytest.raises(UnsafeName, match="through a link"):
            beneath(root, name)
    (tmp_path / "alias").symlink_to(root)
    assert beneath(tmp_path / "alias", "near/x") == tmp_path / "alias/near/x"


# What git's `verify_path`, `is_hfs_dotgit` and `is_ntfs_dotgit` refuse


@pytest.mark.parametrize(
    "path",
    [
        ".git", ".git/hooks/pre-commit", "a/.git/config", ".GIT/hooks/post-checkout", ".Git/config", ".gIt",
        ".g\u200cit/config", "\ufeff.git/x", ".gi\u202et", ".git\u206a", ".g\u200c\u200d\u200eIT",
        "git~1", "GIT~1/hooks/x", "a/git~2/config", "GI7EBA~1", ".git.", ".git ", ".git. . /x", ".git::$INDEX_ALLOCATION/x",
        ".git:stream", "a\\.git\\config", ".hg/hgrc", ".SVN/wc.db", ".jj/x", ".env", ".ENV", "sub/.Env", "env~1", ".env ",
    ],
)  # fmt: skip
def test_a_protected_name_is_seen_through_every_disguise(path: str) -> None:
    assert protected(path)


@pytest.mark.parametrize("path", ".gitignore .gitmodules .github/x a.git git~ .env.example x.env legit~1 ..git".split())
def test_a_name_that_only_looks_protected_is_not(path: str) -> None:
    assert not protected(path)


DISGUISED = [".GIT/hooks/pre-commit", ".Git/config", ".ENV", "git~1/config", "sub/.g\u200cit/config", ".git./x", "a\\b"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, text in {"a.py": "x = 1\n", ".env": "KEY", ".gitignore": ".env\n", ".git/config": "[core]\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("path", DISGUISED)
def test_an_agents_diff_brings_no_protected_name(repository: Path, path: str) -> None:
    checkout = read_checkout(repository)
    files = {name: blob for name in checkout.files if (blob := checkout.blob(name))}
    assert changed(checkout, files | {path: Blob(data=b"#!/bin/sh\n")}) == ({}, frozenset({path}))
    before = sorted(repository.rglob("*"))
    with pytest.raises(Conflict, match="nothing was written"):
        accept(checkout.root, files, {"a.py": Blob(data=b"x = 2\n"), path: Blob(data=b"#!/bin/sh\n")})
    assert sorted(repository.rglob("*")) == before and (repository / "a.py").read_text() == "x = 1\n"


def test_a_tracked_file_of_a_protected_name_can_be_changed(repository: Path) -> None:
    (repository / ".gitignore").write_text("")
    checkout = read_checkout(repository)
    changes, others = changed(checkout, {name: Blob(data=b"y") for name in checkout.files})
    assert ".env" in changes and not others
    accept(checkout.root, {name: blob for name in checkout.files if (blob := checkout.blob(name))}, changes)
    assert (repository / ".env").read_bytes() == b"y"


# Tasks


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "environment/../../x", "a\\..\\x", "environment//x", ""])
def test_a_tasks_rest_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    for fields in ({"rest": {name: "eA=="}}, {"executable": [name]}):
        with pytest.raises(ValueError, match="not a plain relative path"):
            harbor.ForeignFiles.model_validate({"name": "t", "toml": "", **fields})
    folder = tmp_path / "deep" / "task"
    with pytest.raises(UnsafeName):
        harbor.write(harbor.Directory(files={"task.toml": b"", name: b"x"}, executable=frozenset()), folder)
    assert not folder.exists()


# Weights


def published(tmp_path: Path) -> VersionStore:
    publisher = Publisher(tmp_path / "store", owner="run")
    publisher.publish(0, {"w": torch.ones(8)}, {"config.json": b"{}"})
    return VersionStore(tmp_path / "store")


def forge(data: bytes, old: str, new: str) -> bytes:
    """Return a manifest that gives one file another name and has a valid seal."""
    m = Manifest.load(data, "manifest")
    files = {new if name == old else name: file for name, file in m.files.items()}
    tensors = {
        name: entry.model_copy(update={"file": new if entry.file == old else entry.file})
        for name, entry in m.tensors.items()
    }
    return m.model_copy(update={"files": files, "tensors": tensors}).dump()


@pytest.mark.parametrize("old", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("new", ["../../escaped.safetensors", "/escaped", "sub/x", "MANIFEST.json", "a\\b", "..", ""])
def test_a_manifest_names_files_of_its_own_folder(tmp_path: Path, old: str, new: str) -> None:
    store = published(tmp_path)
    path = tmp_path / "store/v000000"
    (path / "manifest.json").write_bytes(forge((path / "manifest.json").read_bytes(), old, new))
    (tmp_path / "escaped.safetensors").write_bytes(b"mine")
    calls: list[Callable[[], Any]] = [
        lambda: verify(path),
        lambda: apply_delta(path, path, tmp_path / "out"),
        lambda: Receiver(store.url).fetch(0),
    ]
    for call in calls:
        with pytest.raises(DamagedVersion):
            call()
    assert (tmp_path / "escaped.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("url", ["file://{}/store", "memory://untrusted"])
@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\0b", "..\\x"])
def test_a_store_keeps_to_its_root(tmp_path: Path, name: str, url: str) -> None:
    store = VersionStore(url.format(tmp_path))
    calls: list[Callable[[], Any]] = [
        lambda: store.read(name), lambda: list(store.chunks(name)), lambda: store.write(name, b""),
        lambda: store.put(name, [b""]), lambda: store.remove(name), lambda: store.names(name), lambda: store.exists(0, name),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError, match="not a plain relative path"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_a_store_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/v000001").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="through a link"):
        VersionStore(tmp_path / "store").write("v000001/x", b"")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("shard", ["../a.safetensors", "/a.safetensors", "sub/a.safetensors", "a\0", 5, None, ["a"]])
def test_an_index_names_files_beside_it(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(ValueError, match="this index is damaged"):
        read_shards(tmp_path)


class Runs:
    """A pickle that runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoints_metadata_runs_nothing(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "step": torch.zeros(())}
    folder, mark = tmp_path / "checkpoint", tmp_path / "mark"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)
    loaded = {"w": torch.zeros(3), "step": torch.ones(())}
    dcp.load(loaded, storage_reader=Reader(folder), no_dist=True)
    assert torch.equal(loaded["w"], state["w"]) and loaded["step"] == 0
    reader, bomb = Reader(folder), pickle.dumps(Runs(mark))
    create_stream = reader.fs.create_stream

    @contextmanager
    def swapped_after_reading(path: Any, mode: str) -> Iterator[Any]:
        with create_stream(path, mode) as stream:
            yield stream
        Path(path).write_bytes(bomb)

    reader.fs.create_stream = swapped_after_reading  # type: ignore[method-assign]
    assert set(reader.read_metadata().state_dict_metadata) == {"w", "step"} and not mark.exists()
    (folder / ".metadata").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ValueError, match="describe no checkpoint"):
        Reader(folder).read_metadata()
    (folder / ".metadata").write_bytes(bomb)
    with pytest.raises(ValueError, match="would run"):
        Reader(folder).read_metadata()
    with pytest.raises(ValueError, match="not a checkpoint of this model"), readable(folder):
        dcp.load(loaded, storage_reader=Reader(folder), no_dist=True)
    assert not mark.exists()


def test_a_checkpoints_metadata_makes_no_table_as_long_as_it_says(tmp_path: Path) -> None:
    """The number under which a pickle keeps an object is a length that the unpickler in C allocates: here 4 GiB."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04Nr" + (1 << 28).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="describe no checkpoint"):
        Reader(tmp_path).read_metadata()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)


# Runs


@pytest.mark.parametrize("name", ["../../precious", "/tmp/precious", "link/x"])
def test_a_run_databases_checkpoint_lies_in_the_run(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "run")
    run.commit("rl", 1, {"w": torch.ones(1)}, [])
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/x").write_text("mine")
    (run.path / "checkpoints/link").symlink_to(tmp_path / "precious")
    with run.connect() as db:
        db.execute("UPDATE checkpoint SET file = ?", (name,))
    with pytest.raises(UnsafeName):
        run.checkpoint("rl")
    with pytest.raises(UnsafeName):
        run.commit("rl", 2, {"w": torch.ones(1)}, [])
    assert (tmp_path / "precious/x").read_text() == "mine"
