"""Publisher and receivers on real stores: what moves when, who may write, and a thousand damaged versions."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch
from torch import Tensor

from composer_nb.trainer.checkpoint import load_pretrained, save_pretrained, to_hugging_face
from composer_nb.trainer.store import Lease, Store, StoreError, folder, log
from composer_nb.trainer.version_store import BackgroundPublisher, Publisher, Receiver, SecondWriter, VersionReused
from composer_nb.trainer.weights import (
    DamagedVersion,
    ForeignBase,
    MisplacedVersion,
    MissingVersion,
    WeightFault,
    side_files,
    state_hash,
    verify,
)

FILES = {"config.json": b'{"model_type": "small"}'}


def weights(version: int, rows: int = 8) -> dict[str, Tensor]:
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
    got, wanted = receiver.fetch(version), weights(version)
    assert got.state.hash == got.manifest.hash == state_hash(got.tensors) == state_hash(wanted)
    assert all(torch.equal(got.tensors[name], wanted[name]) for name in wanted)
    assert got.files["config.json"] == FILES["config.json"]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}"
    memory = fsspec.filesystem("memory")
    if memory.exists(root):
        memory.rm(root, recursive=True)


# What moves when


def test_versions_arrive_bit_for_bit_and_unchanged_tensors_cost_nothing(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    assert receiver.newest() is None
    for version in range(4):
        follow(publisher, receiver, version)
    assert_right(receiver, 3)
    manifest = receiver.fetch(3).manifest
    assert manifest.base is not None and manifest.base.version == 2
    assert manifest.tensors["frozen"].encoding == "same" and manifest.tensors["layer.w"].encoding == "xor-planes-zstd1"
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
    assert [base(2), base(3), base(4)] == [1, 1, 1]
    publisher.acknowledge(3, state_hash(weights(3)))
    publisher.acknowledge(2, state_hash(weights(2)))
    assert base(5) == 3, "a late acknowledgement does not move it back"
    publisher.refuse()
    assert [base(6), base(7)] == [None, None], "a full version starts a chain of its own"
    for version in range(2, 8):
        assert_right(receiver, version)


@pytest.mark.parametrize("delay", range(8))
def test_acknowledgements_that_come_late_still_make_deltas(url: str, delay: int):
    publisher, receiver, waiting = Publisher(url, owner="run", full_every=20), Receiver(url), list[tuple[int, str]]()
    for version in range(40):
        publisher.publish(version, weights(version), FILES)
        waiting.append((version, receiver.install(receiver.fetch(version))))
        if len(waiting) > delay:
            publisher.acknowledge(*waiting.pop(0))
    full = [row["version"] for row in log(url) if row["base"] is None]
    assert len(full) == 2 * (1 + delay), "a chain begins with full versions until one of them is acknowledged"


def test_a_refusal_while_a_version_is_written_ends_its_chain(url: str, monkeypatch):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    write = publisher._write
    monkeypatch.setattr(publisher, "_write", lambda *parts: (write(*parts), publisher.refuse()))
    assert publisher.publish(1, weights(1), FILES).base is not None
    monkeypatch.undo()
    publisher.acknowledge(1, receiver.install(receiver.fetch(1)))
    assert publisher.publish(2, weights(2), FILES).base is None


def test_the_hash_of_other_weights_is_refused_and_the_next_version_is_full(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    publisher.publish(1, weights(1), FILES)
    with pytest.raises(ForeignBase, match="as version 1"):
        publisher.acknowledge(1, state_hash(weights(0)))
    assert publisher.publish(2, weights(2), FILES).base is None


def test_every_nth_version_is_full(url: str):
    publisher, receiver = Publisher(url, owner="run", full_every=3), Receiver(url)
    for version in range(8):
        follow(publisher, receiver, version)
    assert [row["version"] for row in log(url) if row["base"] is None] == [0, 3, 6]


def test_a_receiver_that_lags_and_one_that_joins_decode_the_chain(url: str):
    publisher, first, lagging = Publisher(url, owner="run"), Receiver(url, name="a"), Receiver(url, name="b")
    follow(publisher, first, 0)
    lagging.install(lagging.fetch(0))
    for version in range(1, 9):
        follow(publisher, first, version)
    for receiver in (first, lagging, Receiver(url)):
        assert_right(receiver, 8)
    lagging.install(lagging.fetch(8))
    publisher.publish(9, weights(9), FILES)
    assert_right(lagging, 9)


def test_fetching_moves_nothing_and_an_older_version_is_never_installed(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    publisher.publish(1, weights(1), FILES)
    publisher.publish(2, weights(2), FILES)
    one, two = receiver.fetch(1), receiver.fetch(2)
    assert receiver.version == 0
    assert receiver.install(two) == state_hash(weights(2)) and receiver.version == 2
    with pytest.raises(MisplacedVersion, match="version 1 can not follow version 2"):
        receiver.install(one)
    assert receiver.version == 2


def test_weights_that_changed_after_they_were_published_are_noticed(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    mine = weights(0)
    publisher.publish(0, mine, FILES)
    publisher.acknowledge(0, receiver.install(receiver.fetch(0)))
    mine["layer.w"][0] += 1
    publisher.publish(1, weights(1), FILES)
    with pytest.raises(DamagedVersion, match="layer.w is not what was published"):
        receiver.fetch(1)
    publisher.publish(2, weights(2), FILES)
    assert_right(receiver, 2)


def test_a_full_version_in_the_store_is_a_checkpoint_that_gives_equal_logits(make_model, tmp_path: Path):
    model = make_model(1)
    save_pretrained(model, tmp_path / "m")
    tensors = {name: tensor.bfloat16() for name, tensor in to_hugging_face(model).items()}
    Publisher(tmp_path / "store", owner="run").publish(7, tensors, side_files(tmp_path / "m"))
    assert verify(tmp_path / "store" / "v000007").hash == state_hash(tensors)
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad():
        ours, saved = (load_pretrained(path)(ids)[0] for path in (tmp_path / "store" / "v000007", tmp_path / "m"))
    assert torch.equal(ours, saved)


# Who may write


def test_a_second_writer_is_refused_until_the_first_gives_the_store_back(url: str):
    first = Publisher(url, owner="one")
    first.publish(0, weights(0), FILES)
    with pytest.raises(SecondWriter, match="written by 'one'"):
        Publisher(url, owner="two")
    first.publish(1, weights(1), FILES)
    first.close()
    second = Publisher(url, owner="two")
    second.publish(2, weights(2), FILES)
    for version in range(3):
        assert_right(Receiver(url), version)
    with pytest.raises(SecondWriter, match="now written by 'two'"):
        first.publish(3, weights(3), FILES)


def test_who_lost_the_store_can_publish_no_more_and_what_it_slips_in_is_not_taken(url: str, monkeypatch):
    first = Publisher(url, owner="one")
    first.publish(0, weights(0), FILES)
    second = Publisher(url, owner="two", takeover=True)
    for call in (lambda: first.publish(1, weights(9), FILES), lambda: first.prune(1), first.close):
        with pytest.raises(SecondWriter, match="now written by 'two'"):
            call()
    with monkeypatch.context() as patch:
        patch.setattr(first, "_check_lease", lambda: None)  # it looked just before it lost the store
        first.publish(1, weights(9), FILES)
    receiver = Receiver(url)
    with pytest.raises(SecondWriter, match="version 1 is by a writer that had lost the store"):
        receiver.fetch(1)
    assert receiver.newest() == 0
    second.publish(1, weights(1), FILES)
    assert_right(Receiver(url), 1)


def test_two_publishers_at_once_leave_one_version(url: str, monkeypatch):
    """The one that is late finds the other's manifest, and sees that the store is no longer its own."""
    late = Publisher(url, owner="run")
    check, calls = late._check_lease, iter([None, None])
    monkeypatch.setattr(late, "_check_lease", lambda: next(calls, False) is False and check())
    Publisher(url, owner="run").publish(0, weights(0), FILES)
    with pytest.raises(SecondWriter):
        late.publish(0, weights(5), FILES)
    assert Store(url).manifest(0).hash == state_hash(weights(0))


def test_a_publisher_that_comes_back_goes_on_with_a_full_version(url: str):
    before, receiver = Publisher(url, owner="run"), Receiver(url)
    for version in range(3):
        follow(before, receiver, version)
    after = Publisher(url, owner="run")
    assert after.last == 2
    assert after.publish(2, weights(2), FILES).hash == state_hash(weights(2)), "a step done over, with the same result"
    with pytest.raises(VersionReused, match="publish as 3 or later"):
        after.publish(1, weights(7), FILES)
    assert after.publish(3, weights(3), FILES).base is None
    assert_right(receiver, 3)
    with pytest.raises(SecondWriter):
        before.publish(4, weights(4), FILES)


def test_a_receiver_that_runs_a_lost_version_does_not_take_its_successor_for_it(url: str):
    """Version 1 was run, then its manifest was lost before the publisher came back: its number is given once more."""
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    publisher.publish(1, weights(91), FILES)
    receiver.install(receiver.fetch(1))
    Store(url).remove(f"{folder(1)}/manifest.json")
    publisher = Publisher(url, owner="run")
    follow(publisher, Receiver(url), 1)
    assert publisher.publish(2, weights(2), FILES).base is not None
    assert_right(receiver, 2)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: None], ids=["damaged", "lost"])
def test_a_lease_that_is_damaged_or_lost_is_written_again(url: str, damage):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    publisher.publish(0, weights(0), FILES)
    store = Store(url)
    data = damage(store.read("writer.json"))
    store.remove("writer.json") if data is None else store.write("writer.json", data)
    with pytest.raises((DamagedVersion, MissingVersion), match="writer.json"):
        receiver.fetch(0)
    publisher.publish(1, weights(1), FILES)
    assert_right(receiver, 1)


# What is refused before anything changes


@pytest.mark.parametrize(
    "change",
    [
        {"more": torch.zeros(1)},
        {"norm": torch.zeros(4)},
        {"norm": torch.zeros(3).double()},
        {"norm": torch.zeros(3, dtype=torch.complex64)},
    ],
    ids=["name", "shape", "dtype", "complex"],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_weights_of_another_form_are_refused(url: str, change: dict[str, Tensor], restarted: bool):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    if restarted:
        publisher = Publisher(url, owner="run")
    with pytest.raises(ValueError, match="norm|more"):
        publisher.publish(1, weights(1) | change, FILES)
    assert Store(url).folders() == [0]
    publisher.publish(1, weights(1), FILES)
    assert_right(receiver, 1)


@pytest.mark.parametrize("files", [{}, {**FILES, "../x": b""}, {**FILES, "manifest.json": b""}], ids=str)
def test_side_files_that_can_not_be_are_refused(url: str, files: dict[str, bytes]):
    with pytest.raises(ValueError, match="config.json|can not be a side file"):
        Publisher(url, owner="run").publish(0, weights(0), files)
    assert Store(url).folders() == []


@pytest.mark.parametrize("fails_at", range(3))
def test_a_store_that_is_full_leaves_everything_as_it_was(url: str, fails_at: int, monkeypatch):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    kind, calls = type(fsspec.core.url_to_fs(url)[0]), iter(range(99))
    write = kind.pipe_file

    def full(self, path, value, **options):
        if next(calls) == fails_at:
            raise OSError(28, "No space left on device")
        write(self, path, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "pipe_file", full)
        with pytest.raises(StoreError, match="can not be written .make room.*No space left"):
            publisher.publish(1, weights(1), FILES)
    assert receiver.newest() == 0 and publisher.last == 0
    assert not any(name.endswith(".part") for name in Store(url).names(folder(1)))
    manifest = publisher.publish(1, weights(1), FILES)
    assert manifest.base is not None and manifest.base.version == 0
    assert_right(receiver, 1)


def test_a_store_that_can_not_be_written_is_refused_at_once(tmp_path: Path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError):
        Publisher(tmp_path / "store", owner="run")


def test_settings_that_can_not_be(url: str):
    with pytest.raises(ValueError, match="full_every=0"):
        Publisher(url, owner="run", full_every=0)
    with pytest.raises(ValueError, match="keep=0"):
        Publisher(url, owner="run").prune(0)


# In the background


def test_the_background_publisher_publishes_in_order_and_close_waits_for_all(url: str):
    publisher = BackgroundPublisher(Publisher(url, owner="run"))
    for version in range(6):
        publisher.publish(version, weights(version), FILES)
    publisher.close()
    publisher.close()
    assert [row["version"] for row in log(url)] == list(range(6))
    with pytest.raises(RuntimeError, match="after shutdown"):
        publisher.publish(6, weights(6), FILES)


def test_an_error_in_the_background_surfaces_at_the_next_call_and_what_was_handed_over_is_published(url: str):
    inner, gate = Publisher(url, owner="run"), threading.Lock()
    publisher, form = BackgroundPublisher(inner, depth=3), "not versions of one model"
    with gate, pytest.MonkeyPatch.context() as patch:
        publish = inner.publish
        patch.setattr(inner, "publish", lambda *work: [gate.acquire(), gate.release(), publish(*work)])
        publisher.publish(0, weights(0), FILES)
        publisher.publish(1, {"norm": torch.zeros(1)}, FILES)
        publisher.publish(2, weights(2), FILES)
    with pytest.raises(ValueError, match=form):
        publisher.close()
    assert [row["version"] for row in log(url)] == [0, 2]
    publisher = BackgroundPublisher(inner, depth=1)
    publisher.publish(3, {"norm": torch.zeros(1)}, FILES)
    with pytest.raises(ValueError, match=form):
        publisher.publish(4, weights(4), FILES)
    publisher.publish(4, weights(4), FILES)
    publisher.close()
    assert [row["version"] for row in log(url)] == [0, 2, 4]


def test_the_queue_is_bounded(url: str, monkeypatch):
    inner, gate = Publisher(url, owner="run"), threading.Event()
    monkeypatch.setattr(inner, "publish", lambda *_: gate.wait())
    publisher = BackgroundPublisher(inner, depth=2)
    caller = threading.Thread(target=lambda: [publisher.publish(v, weights(v), FILES) for v in range(3)])
    caller.start()
    caller.join(0.2)
    assert caller.is_alive(), "one is being published, one waits, the third is not taken yet"
    gate.set()
    caller.join()
    publisher.close()


def test_a_receiver_follows_a_publisher_that_does_not_wait_for_it(url: str):
    inner, receiver, done = Publisher(url, owner="run", full_every=7), Receiver(url), threading.Event()
    publisher, ran = BackgroundPublisher(inner), {}

    def engine() -> None:
        last = False
        while not last:
            last = done.is_set()
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
            inner.prune(3)
    publisher.close()
    done.set()
    thread.join()
    assert receiver.version == 59
    assert ran == {version: state_hash(weights(version)) for version in ran}


# Done over


def test_the_same_weights_again_mend_a_version_that_was_damaged(url: str):
    publisher, receiver = Publisher(url, owner="run", full_every=10), Receiver(url)
    for version in range(3):
        follow(publisher, receiver, version)
    store = Store(url)
    [name] = [n for n in store.manifest(2).files if n.endswith(".safetensors")]
    store.write(f"{folder(2)}/{name}", b"damaged")
    with pytest.raises(WeightFault):
        Receiver(url).fetch(2)
    again = Publisher(url, owner="run", full_every=10)
    again.publish(2, weights(2), FILES)
    assert_right(Receiver(url), 2)


# Retention


def test_pruning_keeps_what_newer_versions_are_decoded_from(url: str):
    publisher, receiver = Publisher(url, owner="run", full_every=4), Receiver(url)
    for version in range(11):
        follow(publisher, receiver, version)
    assert publisher.prune(2, pins=[1]) == [2, 3, 4, 5, 6, 7]
    assert Store(url).folders() == [0, 1, 8, 9, 10]
    for version in Store(url).folders():
        assert_right(Receiver(url), version)
    follow(publisher, receiver, 11)
    assert_right(Receiver(url), 11)


def test_pruning_keeps_the_baseline_and_what_may_become_one(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    for version in range(3):
        follow(publisher, receiver, version)
    publisher.refuse()
    publisher.publish(3, weights(3), FILES)
    publisher.publish(4, weights(4), FILES)
    assert publisher.prune(1) == [0, 1, 2]
    publisher.acknowledge(3, state_hash(weights(3)))
    manifest = publisher.publish(5, weights(5), FILES)
    assert manifest.base is not None and manifest.base.version == 3
    assert publisher.prune(1) == [] and Store(url).folders() == [3, 4, 5], "4 may still be acknowledged"
    assert_right(Receiver(url), 5)


def test_pruning_removes_what_was_never_finished_and_nothing_while_a_chain_can_not_be_read(url: str):
    publisher, receiver, store = Publisher(url, owner="run"), Receiver(url), Store(url)
    for version in (0, 2):
        follow(publisher, receiver, version)
    store.write(f"{folder(1)}/delta.safetensors", b"half")
    store.write(f"{folder(9)}/delta.safetensors", b"not yet ours to judge")
    assert publisher.prune(1) == [1] and store.folders() == [0, 2, 9]
    store.write(f"{folder(2)}/manifest.json", b"{}")
    assert publisher.prune(1) == []


# A thousand damaged versions

LAST = 3
"""The newest version that was published before the damage: 0 is full, the others build on it one by one."""


class Killed(BaseException):
    """A process that ends at this point."""


class Case:
    """A store with four versions, one receiver that runs the last but one, and one that runs nothing."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.random, self.store = url, random.Random(seed), Store(url)
        self.publisher, self.follower, self.joiner = (
            Publisher(url, owner="run"),
            Receiver(url, name="follower"),
            Receiver(url, name="joiner"),
        )
        for version in range(LAST):
            follow(self.publisher, self.follower, version)
        self.publisher.publish(LAST, weights(LAST), FILES)

    def any_file(self) -> str:
        names = [f"{folder(v)}/{name}" for v in range(LAST + 1) for name in self.store.names(folder(v))]
        return self.random.choice([*names, "writer.json"])

    def copy(self, source: int, target: int, names: list[str] | None = None, url: str = "") -> None:
        origin = Store(url or self.url)
        for name in names or origin.names(folder(source)):
            self.store.write(f"{folder(target)}/{name}", origin.read(f"{folder(source)}/{name}"))

    # Each returns (version to ask for, the fault it must have, what its message must name)

    def flipped(self):
        name = self.any_file()
        data = bytearray(self.store.read(name))
        for _ in range(self.random.choice([1, 1, 1, 2, 9])):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        if bytes(data) == self.store.read(name):
            data[0] ^= 1
        self.store.write(name, bytes(data))
        return LAST, DamagedVersion, name

    def truncated(self):
        name = self.any_file()
        data = self.store.read(name)
        self.store.write(name, data[: self.random.randrange(len(data))])
        return LAST, DamagedVersion, name

    def extended(self):
        name = self.any_file()
        data = self.store.read(name)
        self.store.write(name, data + self.random.choice([b"\0", b"\n", b" ", data]))
        return LAST, DamagedVersion, name

    def lost(self):
        name = self.any_file()
        self.store.remove(name)
        return LAST, MissingVersion, name

    def lost_whole(self):
        version = self.random.randrange(LAST + 1)
        self.store.remove(folder(version))
        return LAST, MissingVersion, folder(version)

    def renamed(self):
        source = self.random.randrange(LAST + 1)
        self.copy(source, LAST + 1)
        self.store.remove(folder(source))
        return LAST + 1, MisplacedVersion, folder(LAST + 1)

    def duplicated(self):
        self.copy(self.random.randrange(LAST + 1), LAST + 1)
        return LAST + 1, MisplacedVersion, folder(LAST + 1)

    def reordered(self):
        a, b = self.random.sample(range(1, LAST + 1), 2)
        self.copy(a, LAST + 5)
        self.copy(b, a)
        self.copy(LAST + 5, b)
        self.store.remove(folder(LAST + 5))
        return LAST, MisplacedVersion, folder(max(a, b))

    def payload_of_another(self):
        a, b = self.random.sample(range(1, LAST + 1), 2)
        self.copy(a, b, ["delta.safetensors"])
        return LAST, DamagedVersion, folder(b)

    def foreign(self):
        """A store of another run, version by version as whole as ours, is mixed in: without its lease, or with it."""
        other = Publisher(self.url + "-other", owner="other")
        receiver = Receiver(self.url + "-other")
        for version in range(LAST + 1):
            other.publish(version, weights(version + 50), FILES)
            other.acknowledge(version, receiver.install(receiver.fetch(version)))
        version = self.random.randrange(LAST + 1)
        self.store.remove(folder(version))
        self.copy(version, version, url=self.url + "-other")
        return LAST, SecondWriter, f"version {version} "

    def foreign_base(self):
        """A version before the last is replaced by one that the lease allows, whole in itself."""
        version = self.random.randrange(LAST)
        other = self.url + "-other"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("uuid.uuid4", lambda: uuid.UUID(self.publisher._lease.token))
            Publisher(other, owner="other").publish(version, weights(version + 50), FILES)
        self.store.remove(folder(version))
        self.copy(version, version, url=other)
        return LAST, ForeignBase, f"version {version} "

    def second_writer(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.publisher, "_take", None)
            zombie = self.publisher
            self.publisher = Publisher(self.url, owner="two", takeover=True)
            patch.setattr(zombie, "_check_lease", lambda: None)
            zombie.publish(LAST + 1, weights(99), FILES)
        return LAST + 1, SecondWriter, f"version {LAST + 1} "

    def killed(self):
        """The process ends at some write of the next version, or in the middle of it; another one takes up the work."""
        write, at, calls = Store._write, self.random.randrange(3), iter(range(9))

        def dying(store, name, data, *, new):
            if next(calls) == at:
                if self.random.random() < 0.5:
                    write(store, f"{name}.cut.part", data[: self.random.randrange(len(data))], new=False)
                raise Killed
            write(store, name, data, new=new)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "_write", dying)
            with pytest.raises(Killed):
                self.publisher.publish(LAST + 1, weights(99), FILES)
        self.publisher = Publisher(self.url, owner="run")
        return LAST + 1, MissingVersion, folder(LAST + 1)


KINDS = [name for name, value in vars(Case).items() if callable(value) and name not in ("__init__", "any_file", "copy")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damaged_versions(kind: str, tmp_path: Path):
    """1,040 in all, 80 of each kind: no receiver ever gets other weights than those published under the number it asked
    for, each fault is named, and the next version brings all of them back."""
    memory = fsspec.filesystem("memory")
    for seed in range(80):
        url = f"{tmp_path}/{seed}" if seed % 8 == 0 else f"memory://damage-{uuid.uuid4().hex}"
        case = Case(url, seed)
        asked, fault, named = getattr(case, kind)()
        with pytest.raises(WeightFault) as caught:
            case.joiner.fetch(asked)
        assert type(caught.value) is fault and named in str(caught.value), (kind, seed, caught.value)
        for receiver in (case.follower, case.joiner):
            while (newest := receiver.newest()) is not None and newest > receiver.version:
                try:
                    assert_right(receiver, newest)
                    break
                except WeightFault as other:
                    assert str(other)
        note = json.loads(case.store.read("refused/joiner.json"))
        assert note["fault"] in {kind.__name__ for kind in WeightFault.__subclasses__()} and note["detail"]
        publisher, version = case.publisher, LAST + 2
        assert publisher.publish(version, weights(version), FILES).base is None
        for receiver in (case.follower, case.joiner):
            assert receiver.newest() == version
            assert_right(receiver, version)
            publisher.acknowledge(version, receiver.install(receiver.fetch(version)))
        after = publisher.publish(version + 1, weights(version + 1), FILES)
        assert after.base is not None and after.base.version == version, "deltas again"
        assert_right(case.joiner, version + 1)
        if url.startswith("memory"):
            for root in (url, url + "-other"):
                if memory.exists(root):
                    memory.rm(root, recursive=True)


def test_a_note_that_can_not_be_written_is_said_so(url: str, monkeypatch):
    Publisher(url, owner="run").publish(0, weights(0), FILES)
    store = Store(url)
    store.write(f"{folder(0)}/config.json", b"{")

    def refuses(self, name, data):
        raise StoreError("read only")

    monkeypatch.setattr(Store, "write", refuses)
    with pytest.raises(DamagedVersion) as caught:
        Receiver(url).fetch(0)
    assert caught.value.__notes__ == ["and no full version could be asked for: read only"]


def test_the_log_names_what_is_damaged(url: str):
    publisher, receiver = Publisher(url, owner="run"), Receiver(url)
    follow(publisher, receiver, 0)
    follow(publisher, receiver, 1)
    Store(url).write(f"{folder(0)}/manifest.json", Lease(owner=None, token="", since=0).dump())
    rows = log(url)
    assert rows[0]["fault"] == "DamagedVersion" and "manifest" in rows[0]["detail"]
    assert rows[1]["base"] == 0
