"""Stores damaged in every way that we could think of: no wrong weights, every fault named, recovery always."""

import json
import random
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_version_store import FILES, assert_right, follow, weights

from composer_nb.trainer.versions import manifest
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import VersionStore, folder

LAST = 3
"""The newest version that was published before the damage: 0 is full, the others build on it one by one."""


class Killed(BaseException):
    """A process that ends at this point."""


class Case:
    """A store with four versions, one receiver that runs the last but one, and one that runs nothing."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.random, self.store = url, random.Random(seed), VersionStore(url)
        self.publisher = Publisher(url, owner="run")
        self.follower, self.joiner = (Receiver(url, name=name) for name in ("follower", "joiner"))
        for version in range(LAST):
            follow(self.publisher, self.follower, version)
        self.publisher.publish(LAST, weights(LAST), FILES)

    def _any_file(self) -> str:
        names = [f"{folder(v)}/{name}" for v in range(LAST + 1) for name in self.store.names(folder(v))]
        return self.random.choice(names)

    def _copy(self, source: int, target: int, names: list[str] | None = None, url: str = "") -> None:
        origin = VersionStore(url or self.url)
        for name in names or origin.names(folder(source)):
            self.store.write(f"{folder(target)}/{name}", origin.read(f"{folder(source)}/{name}"))

    # Each returns (version to ask for, the fault it must have, what its message must name)

    def _changed(self, change: Callable[[bytes], bytes]):
        name = self._any_file()
        data = self.store.read(name)
        self.store.write(name, change(data))
        return LAST, manifest.DamagedVersion, name

    def flipped(self):
        def flip(data: bytes) -> bytes:
            changed = bytearray(data)
            for at in self.random.sample(range(len(data)), self.random.choice([1, 1, 1, 2, 9])):
                changed[at] ^= 1 << self.random.randrange(8)
            return bytes(changed)

        return self._changed(flip)

    def truncated(self):
        return self._changed(lambda data: data[: self.random.randrange(len(data))])

    def extended(self):
        return self._changed(lambda data: data + self.random.choice([b"\0", b"\n", b" ", data]))

    def lost(self):
        """A file, or a whole version."""
        name = self.random.choice([self._any_file(), folder(self.random.randrange(LAST + 1))])
        self.store.remove(name)
        return LAST, manifest.MissingVersion, name

    def renamed(self):
        """Or duplicated."""
        source = self.random.randrange(LAST + 1)
        self._copy(source, LAST + 1)
        if self.random.random() < 0.5:
            self.store.remove(folder(source))
        return LAST + 1, manifest.MisplacedVersion, folder(LAST + 1)

    def reordered(self):
        a, b = self.random.sample(range(1, LAST + 1), 2)
        self._copy(a, LAST + 5)
        self._copy(b, a)
        self._copy(LAST + 5, b)
        self.store.remove(folder(LAST + 5))
        return LAST, manifest.MisplacedVersion, folder(max(a, b))

    def payload_of_another(self):
        a, b = self.random.sample(range(1, LAST + 1), 2)
        self._copy(a, b, ["delta.safetensors"])
        return LAST, manifest.DamagedVersion, folder(b)

    def foreign(self):
        """A complete version of another run replaces ours."""
        foreign_publisher = Publisher(self.url + "-other", owner="other")
        receiver = Receiver(self.url + "-other")
        version = self.random.randrange(LAST + 1)
        for number in range(version + 1) if self.random.random() < 0.5 or version == LAST else [version]:
            foreign_publisher.publish(number, weights(number + 50), FILES)
            foreign_publisher.acknowledge(number, receiver.install(receiver.fetch(number)))
        self.store.remove(folder(version))
        self._copy(version, version, url=self.url + "-other")
        return LAST, manifest.ForeignBase, f"version {version} "

    def killed(self):
        """The process ends at some write of the next version, at any byte of it; another one takes up the work."""
        placing, at, calls = VersionStore._placing, self.random.randrange(3), iter(range(9))

        @contextmanager
        def dying(store, path):
            if next(calls) == at:
                if self.random.random() < 0.5:
                    half = f"{folder(LAST + 1)}/{path.rpartition('/')[2]}.cut.part"
                    self.store.write(half, self.random.randbytes(99))
                raise Killed
            with placing(store, path) as part:
                yield part

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VersionStore, "remove", lambda self, name: None)
            patch.setattr(VersionStore, "_placing", dying)
            with pytest.raises(Killed):
                self.publisher.publish(LAST + 1, weights(99), FILES)
        self.publisher = Publisher(self.url, owner="run")
        return LAST + 1, manifest.MissingVersion, folder(LAST + 1)


KINDS = [name for name, value in vars(Case).items() if callable(value) and name[0] != "_"]


def survives(case: Case, kind: str) -> None:
    """Assert that a receiver gets only the weights published under the version it requested, that the fault is named, and that
    the next version repairs every receiver."""
    requested, fault, named = getattr(case, kind)()
    with pytest.raises(manifest.WeightFault) as caught:
        case.joiner.fetch(requested)
    assert type(caught.value) is fault and named in str(caught.value), (kind, caught.value)
    for receiver in (case.follower, case.joiner):
        while (newest := receiver.newest()) is not None and newest > receiver.version:
            try:
                assert_right(receiver, newest)
                break
            except manifest.WeightFault as error:
                assert str(error)
    note = json.loads(case.store.read("refused/joiner.json"))
    assert note["fault"] in {kind.__name__ for kind in manifest.WeightFault.__subclasses__()} and note["detail"]
    publisher, version = case.publisher, LAST + 2
    assert publisher.publish(version, weights(version), FILES).base is None
    for receiver in (case.follower, case.joiner):
        assert receiver.newest() == version
        assert_right(receiver, version)
        publisher.acknowledge(version, receiver.install(receiver.fetch(version)))
    after = publisher.publish(version + 1, weights(version + 1), FILES)
    assert after.base is not None and after.base.version == version, "deltas again"
    assert_right(case.joiner, version + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_versions(kind: str, tmp_path: Path):
    for seed in range(30):
        MemoryFileSystem.store.clear()
        survives(Case(f"memory://damage-{seed}", seed), kind)
    survives(Case(f"{tmp_path}/store", 77), kind)
