"""Publisher and receivers on real stores: what moves when, who may write, what is kept."""

import threading
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from composer_nb.trainer.services.inference import fetch
from composer_nb.trainer.versions.manifest import DamagedVersion, MisplacedVersion, MissingVersion, state_hash
from composer_nb.trainer.versions.publisher import BackgroundPublisher, Publisher, VersionReused
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import StoreError, VersionStore, anchor, folder, log

FILES = {"config.json": b'{"model_type": "small"}'}


def weights(version: int, rows: int = 256) -> dict[str, Tensor]:
    """The weights of a version: some change with it, one never does."""
    noise = torch.Generator().manual_seed(version)
    w = torch.linspace(-1, 1, rows * 16).reshape(rows, 16)
    w[version % rows] += torch.rand(16, generator=noise)
    return {"layer.w": w.bfloat16(), "norm": torch.full((3,), float(version)), "frozen": torch.ones(5).half()}


def follow(publisher: Publisher, receiver: Receiver, version: int) -> None:
    """One version all the way: published, fetched, installed, acknowledged."""
    publisher.publish(version, weights(version), FILES)
    publisher.acknowledge(version, receiver.install(receiver.fetch(version)))


def assert_right(receiver: Receiver, version: int) -> None:
    fetched, expected = receiver.fetch(version), weights(version)
    assert fetched.state.hash == fetched.manifest.hash == state_hash(fetched.tensors) == state_hash(expected)
    assert all(torch.equal(fetched.tensors[name], expected[name]) for name in expected)
    assert fetched.files["config.json"] == FILES["config.json"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """On a disk; `test_version_fuzz.py` has stores in memory, `tests/hosts/test_faults_of_hosts.py` one on S3."""
    return f"file://{tmp_path}/store"


# What moves when


def test_versions_arrive_bit_for_bit_and_unchanged_tensors_cost_nothing(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    assert receiver.newest() is None
    for version in range(4):
        follow(publisher, receiver, version)
    assert_right(receiver, 3)
    manifest = receiver.fetch(3).manifest
    assert manifest.base is not None and manifest.base.version == 2
    encodings = {name: manifest.tensors[name].encoding for name in ("frozen", "layer.w")}
    assert encodings == {"frozen": "same", "layer.w": "conditioned-rans-4"}
    assert receiver.fetch(3).read_bytes == manifest.size < Receiver(url).fetch(3).read_bytes
    assert [row["base"] for row in log(url)] == [None, 0, 1, 2]
    assert [row["hash"] for row in log(url)] == [state_hash(weights(version)) for version in range(4)]


def test_the_baseline_moves_on_acknowledgement_alone(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)

    def base(version: int) -> int | None:
        manifest = publisher.publish(version, weights(version), FILES)
        return manifest.base and manifest.base.version

    assert [base(0), base(1)] == [None, None], "nothing is acknowledged yet"
    publisher.acknowledge(1, receiver.install(receiver.fetch(1)))
    assert [base(2), base(3)] == [1, 1]
    needs, hash = publisher._needs, state_hash(weights(3))
    publisher._needs = lambda *versions: publisher.acknowledge(3, hash) or needs(*versions)
    assert base(4) == 1, "acknowledged while its base was in use"
    publisher.acknowledge(2, state_hash(weights(2)))
    assert base(5) == 3, "a late acknowledgement does not move it back"
    VersionStore(url).write("refused/receiver.json", b"")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreError, match="try again"):
        patch.setattr(VersionStore, "reports", Mock(side_effect=StoreError("try again")))
        base(6)
    assert [base(6), base(7)] == [None, None], "a full version starts a chain of its own"
    for version in range(2, 8):
        assert_right(receiver, version)


def test_deltas_that_add_up_to_half_a_full_version_bring_an_anchor(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)

    def noisy(version: int) -> dict[str, Tensor]:
        """A fifth of the weights is new: a delta is about a fifth of a full version."""
        w = torch.zeros(500, 16)
        w[:100] = torch.rand(100, 16, generator=torch.Generator().manual_seed(version))
        return {"w": w}

    for version in range(8):
        publisher.publish(version, noisy(version), FILES)
        publisher.acknowledge(version, receiver.install(receiver.fetch(version)))
    rows = {row["version"]: row["bytes"] for row in log(url)}
    due = next(v for v in range(1, 8) if 2 * sum(rows[n] for n in range(1, v + 1)) >= 500 * 16 * 4)
    anchors = [row["version"] for row in log(url) if row["anchor_bytes"]]
    assert due in (2, 3) and anchors[0] == due and len(anchors) == 7 // due


def test_where_one_way_is_broken_the_other_is_taken(url: str):
    publisher, receiver = Publisher(url, owner="run", full_every=4), Receiver(url)
    for version in range(6):
        follow(publisher, receiver, version)
    store, manifest = VersionStore(url), f"{folder(4)}/manifest.json"
    data = store.read(manifest)
    store.remove_file(manifest)
    assert_right(Receiver(url, name="by the anchor of a lost version"), 5)
    store.write(manifest, data)
    store.write(f"{anchor(4)}/model.safetensors", b"damaged")
    assert_right(Receiver(url, name="by the chain"), 5)
    store.write(f"{folder(2)}/delta.safetensors", b"damaged")
    with pytest.raises(DamagedVersion):
        Receiver(url).fetch(5)
    publisher.publish(6, weights(6), FILES)
    assert_right(Receiver(url), 6)


# What the store remembers


def test_the_ledger_outlives_what_is_pruned(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    for version in range(6):
        publisher.publish(version, weights(version), FILES)
        publisher.acknowledge(version, receiver.install(receiver.fetch(version)), "engine-a")
    VersionStore(url).write("refused/receiver.json", b"")
    publisher.publish(6, weights(6), FILES)
    publisher.prune(1)
    rows = log(url)
    assert [row["version"] for row in rows] == list(range(7)) and [row["there"] for row in rows] == [False] * 6 + [True]
    assert [row["hash"] for row in rows] == [state_hash(weights(version)) for version in range(7)]
    assert [row["acknowledged"] for row in rows] == [["engine-a"]] * 6 + [[]]
    assert {row["owner"] for row in rows} == {"run"}


def test_fetching_moves_nothing_and_an_older_version_is_never_installed(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    publisher.publish(1, weights(1), FILES)
    publisher.publish(2, weights(2), FILES)
    first, second = receiver.fetch(1), receiver.fetch(2)
    assert receiver.version == 0
    assert receiver.install(second) == state_hash(weights(2)) and receiver.version == 2
    with pytest.raises(MisplacedVersion, match="version 1 cannot follow version 2"):
        receiver.install(first)
    assert receiver.version == 2


def test_weights_that_are_not_finite_are_not_published_and_the_last_good_version_stays(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    bad = weights(1)
    bad["layer.w"].view(-1)[1] = float("-inf")
    with pytest.raises(ValueError, match="version 1: layer.w holds NaN or infinity, so training has diverged"):
        publisher.publish(1, bad, FILES)
    assert receiver.newest() == 0
    publisher.publish(1, weights(1), FILES)
    assert_right(receiver, 1)


def test_side_files_lie_in_full_versions_and_are_those_of_every_version(url: str):
    publisher, receiver, files = Publisher(url, owner="run"), Receiver(url), {**FILES, "tokenizer.json": b"{}"}
    publisher.publish(0, weights(0), files)
    publisher.acknowledge(0, receiver.install(receiver.fetch(0)))
    delta = publisher.publish(1, weights(1), {**files, "config.json": b'{"a": 1}'})
    assert delta.base is not None and "tokenizer.json" not in delta.files
    assert Receiver(url).fetch(1).files == {"tokenizer.json": b"{}", "config.json": b'{"a": 1}'}


# Who may write


def test_a_publisher_that_comes_back_goes_on_with_a_full_version(url: str):
    before, receiver = Publisher(url, owner="run"), Receiver(url)
    for version in range(3):
        follow(before, receiver, version)
    after = Publisher(url, owner="run")
    assert after.publish(2, weights(2), FILES).hash == state_hash(weights(2)), "a step done over, with the same result"
    for damaged in ("delta.safetensors", "manifest.json"):
        VersionStore(url).write(f"{folder(2)}/{damaged}", b"damaged since")
        assert after.publish(2, weights(2), FILES).base is None and after.last == 2, "mended, in full"
        assert_right(Receiver(url), 2)
    VersionStore(url).remove(folder(1))
    with pytest.raises(VersionReused, match="publish as 3 or later"):
        after.publish(1, weights(7), FILES)
    assert after.publish(1, weights(1), FILES).base is None, "lost, and back"
    assert after.publish(3, weights(3), FILES).base is None
    assert_right(receiver, 3)


def test_a_receiver_that_runs_a_lost_version_does_not_take_its_successor_for_it(url: str):
    """Version 1 was run, then its manifest was lost before the publisher came back: its number is given once more."""
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    publisher.publish(1, weights(91), FILES)
    receiver.install(receiver.fetch(1))
    VersionStore(url).remove(f"{folder(1)}/manifest.json")
    publisher = Publisher(url, owner="run")
    follow(publisher, Receiver(url), 1)
    assert publisher.publish(2, weights(2), FILES).base is not None
    assert_right(receiver, 2)


# What is refused before anything changes


@pytest.mark.parametrize("restarted", [False, True])
def test_weights_of_another_form_are_refused(url: str, restarted: bool):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    if restarted:
        publisher = Publisher(url, owner="run")
    for name, tensor in (("more", torch.zeros(1)), ("norm", torch.zeros(4)), ("norm", torch.zeros(3).cfloat())):
        with pytest.raises(ValueError, match=name):
            publisher.publish(1, weights(1) | {name: tensor}, FILES)
    for files in ({}, {**FILES, "../x": b""}, {**FILES, "manifest.json": b""}):
        with pytest.raises(ValueError, match=r"config.json|cannot be a side file"):
            publisher.publish(1, weights(1), files)
    with pytest.raises(VersionReused):
        publisher.publish(0, weights(7), FILES)
    assert VersionStore(url).folders() == [0]
    publisher.publish(1, weights(1), FILES)
    assert_right(receiver, 1)


@pytest.mark.parametrize("fails_at", range(3))
def test_a_store_that_is_full_leaves_everything_as_it_was(url: str, fails_at: int, monkeypatch):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    placing, calls = VersionStore._placing, iter(range(99))

    @contextmanager
    def full(store, path):
        with placing(store, path) as part:
            if next(calls) == fails_at:
                raise StoreError("cannot be written (make room): No space left on device")
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "_placing", full)
        with pytest.raises(StoreError, match="cannot be written .make room.*No space left"):
            publisher.publish(1, weights(1), FILES)
    assert VersionStore(url).folders() == [0] and publisher.last == 0, "what was begun is removed"
    manifest = publisher.publish(1, weights(1), FILES)
    assert manifest.base is not None and manifest.base.version == 0
    assert_right(receiver, 1)


class Unreachable(Exception):
    """An error of an object store's library, which is no OSError."""


def test_a_far_store_that_refuses_for_a_while_costs_time_alone(monkeypatch):
    monkeypatch.setattr("composer_nb.trainer.versions.store.WAITS_S", (0, 0))
    publisher, receiver = Publisher(url := f"memory://{uuid.uuid4().hex}", owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    refusals, opening, informing = iter([1, 1]), MemoryFileSystem.open, MemoryFileSystem.info

    def refuse(act):
        def acting(*values, **options):
            if next(refusals, None):
                raise Unreachable("try again later")
            return act(*values, **options)

        return acting

    monkeypatch.setattr(MemoryFileSystem, "open", refuse(opening))
    assert publisher.publish(1, weights(1), FILES).base is not None
    monkeypatch.setattr(MemoryFileSystem, "info", refuse(informing))
    refusals = iter([1, 1])
    publisher.acknowledge(1, receiver.install(fetch(receiver, 1)))
    refusals = iter([1, 1])
    assert Publisher(url, owner="run").last == 1
    refusals = iter([1, 1, 1])
    with pytest.raises(StoreError, match="try again later"):
        publisher.publish(2, weights(2), FILES)
    assert publisher.publish(2, weights(2), FILES).base.version == 1
    refusals = iter([1] * 9)
    with pytest.raises(StoreError, match="try again later"):
        publisher.prune(1)
    assert VersionStore(url).folders() == [0, 1, 2], "what cannot be looked at is not taken for unfinished"


def test_an_old_listing_hides_no_version_and_costs_none(url: str, monkeypatch):
    publisher, receiver = Publisher(url, owner="run", full_every=2), Receiver(url)
    for version in range(6):
        follow(publisher, receiver, version)
    names, old = VersionStore.names, {}
    for name in ("", "anchors"):
        old[name] = VersionStore(url).names(name)
    monkeypatch.setattr(VersionStore, "names", lambda store, name="": old.get(name) or names(store, name))
    for version in range(6, 9):
        publisher.publish(version, weights(version), FILES)
        publisher.acknowledge(version, receiver.install(fetch(receiver, version)))
    assert publisher.prune(1) == [0, 1, 2, 3]
    monkeypatch.undo()
    assert VersionStore(url).folders() == [4, 5, 6, 7, 8] and VersionStore(url).folders("anchors")[-1] == 8
    for version in range(4, 9):  # what they are decoded from is there
        assert_right(Receiver(url), version)
    with pytest.raises(VersionReused):
        Publisher(url, owner="run").publish(8, weights(9), FILES)


# In the background


def test_an_error_in_the_background_surfaces_at_the_next_call_and_what_was_handed_over_is_published(url: str):
    inner, gate = Publisher(url, owner="run"), threading.Lock()
    publisher = BackgroundPublisher(inner)
    with gate, pytest.MonkeyPatch.context() as patch:
        publish = inner.publish
        patch.setattr(inner, "publish", lambda *work: [gate.acquire(), gate.release(), publish(*work)])
        publisher.publish(0, weights(0), FILES)
        publisher.publish(1, {"norm": torch.zeros(1)}, FILES)
    with pytest.raises(ValueError, match="not versions of one model"):
        publisher.close()
    assert [row["version"] for row in log(url)] == [0]


def test_a_receiver_follows_a_publisher_that_does_not_wait_for_it(url: str):
    inner, receiver, finished = Publisher(url, owner="run", full_every=7), Receiver(url), threading.Event()
    publisher, ran = BackgroundPublisher(inner), {}

    def engine() -> None:
        last = False
        while not last:
            last = finished.is_set()
            newest = receiver.newest()
            if newest is not None and newest > receiver.version:
                with suppress(MissingVersion):  # pruned while it was fetched: there is a newer one
                    ran[newest] = receiver.install(receiver.fetch(newest))
                    inner.acknowledge(newest, ran[newest])

    thread = threading.Thread(target=engine)
    thread.start()
    for version in range(60):
        publisher.publish(version, weights(version), FILES)
        if version % 10 == 9:
            publisher.prune(3, since=60)
    publisher.close()
    finished.set()
    thread.join()
    assert receiver.version == 59
    assert ran == {version: state_hash(weights(version)) for version in ran}


# Retention


def test_pruning_removes_what_was_never_finished_and_nothing_while_a_chain_can_not_be_read(url: str):
    publisher, receiver, store = Publisher(url, owner="run"), Receiver(url), VersionStore(url)
    for version in (0, 2):
        follow(publisher, receiver, version)
    store.write(f"{folder(1)}/delta.safetensors", b"half")
    store.write(f"{folder(9)}/delta.safetensors", b"not yet ours to judge")
    assert publisher.prune(1) == [1] and store.folders() == [0, 2, 9]
    store.write(f"{folder(2)}/manifest.json", b"{}")
    assert publisher.prune(1) == []
