"""A region's store: every file crosses once, what arrives is whole, and nothing but what was published is ever run."""

from __future__ import annotations

import uuid

import pytest
from test_version_store import FILES, assert_right, follow, weights

from composer_nb.trainer.versions.manifest import DamagedVersion
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.relay import Relay
from composer_nb.trainer.versions.store import Store, StoreError, folder, log


@pytest.fixture
def urls() -> tuple[str, str]:
    here = uuid.uuid4().hex
    return f"memory://{here}/origin", f"memory://{here}/region"


def test_each_file_crosses_the_line_once_however_many_receivers_there_are(urls, monkeypatch):
    origin, region = urls
    publisher, relay = Publisher(origin, owner="run"), Relay(origin, region, name="west")
    engines = [Receiver(region, name=f"engine{n}") for n in range(5)]
    read: list[str] = []
    chunks = Store.chunks
    monkeypatch.setattr(Store, "chunks", lambda self, name: (read.append(f"{self.url}/{name}"), chunks(self, name))[1])
    for version in range(4):
        publisher.publish(version, weights(version), FILES)
        assert relay.pull() == relay.pull() == version
        for engine in engines:
            assert_right(engine, version)
            engine.install(engine.fetch(version))
            engine.report()
        relay.forward()
    assert len(read) == len(set(read)) == 8 and all(name.startswith(origin) for name in read)
    assert relay.read_bytes == sum(row["bytes"] for row in log(origin))
    assert [row["base"] for row in log(origin)] == [None, 0, 1, 2], "engines acknowledged through the region"
    publisher.close()
    assert sorted(log(origin)[0]["acknowledged"]) == [f"west.engine{n}" for n in range(5)]


def test_a_region_that_joins_late_begins_with_the_anchor(urls):
    origin, region = urls
    publisher, receiver, relay = Publisher(origin, owner="run", full_every=4), Receiver(origin), None
    for version in range(7):
        follow(publisher, receiver, version)
    publisher.prune(1)
    relay = Relay(origin, region, name="late")
    assert relay.pull() == 6 and Store(region).folders() == [4, 5, 6]
    assert_right(Receiver(region), 6)
    follow(publisher, receiver, 7)
    before = relay.read_bytes
    assert relay.pull() == 7
    assert relay.read_bytes - before == log(origin)[7]["bytes"]


@pytest.mark.parametrize("times", [1, 2])
def test_what_arrives_damaged_is_asked_for_again_and_then_in_full(urls, monkeypatch, times: int):
    origin, region = urls
    publisher, relay, engine = Publisher(origin, owner="run"), Relay(origin, region, name="west"), Receiver(region)
    publisher.publish(0, weights(0), FILES)
    relay.pull()
    engine.install(engine.fetch(0))
    engine.report()
    relay.forward()
    publisher.publish(1, weights(1), FILES)
    chunks, left = Store.chunks, [times]

    def spoilt(self, name):
        for data in chunks(self, name):
            bad = left[0] > 0 and "delta" in name
            left[0] -= bad
            yield data[:-1] + bytes([data[-1] ^ 1]) if bad else data

    monkeypatch.setattr(Store, "chunks", spoilt)
    if times == 2:
        with pytest.raises(DamagedVersion, match="v000001/delta.safetensors"):
            relay.pull()
        assert not Store(region).exists(1) and relay.pull() == 0
        assert publisher.publish(2, weights(2), FILES).base is None
    assert relay.pull() == 3 - (3 - publisher.last) and Store(region).exists(publisher.last)
    assert_right(engine, publisher.last)


def test_a_line_that_breaks_loses_nothing_that_had_arrived(urls, monkeypatch):
    origin, region = urls
    publisher, receiver = Publisher(origin, owner="run"), Receiver(origin)
    for version in range(4):
        follow(publisher, receiver, version)
    relay, put, calls = Relay(origin, region, name="west"), Store.put, iter(range(99))

    def breaks(self, name, pieces):
        if next(calls) == 5:
            raise StoreError("the line is down")
        return put(self, name, pieces)

    monkeypatch.setattr(Store, "put", breaks)
    with pytest.raises(StoreError):
        relay.pull()
    assert [v for v in Store(region).folders() if Store(region).exists(v)] == [0, 1]
    so_far = relay.read_bytes
    assert relay.pull() == 3 and relay.read_bytes - so_far <= sum(row["bytes"] for row in log(origin)[2:])
    assert_right(Receiver(region), 3)


def test_a_region_forgets_what_nobody_needs(urls):
    origin, region = urls
    publisher, relay, engine = Publisher(origin, owner="run"), Relay(origin, region, name="west"), Receiver(region)
    for version in range(6):
        if version == 3:
            publisher.refuse()
        publisher.publish(version, weights(version), FILES)
        relay.pull()
        engine.install(engine.fetch(version))
        publisher.acknowledge(version, Store(origin).manifest(version).hash)
    assert relay.prune(2) == [0, 1, 2]
    assert_right(Receiver(region), 5)
    Store(region).write(f"{folder(4)}/manifest.json", b"{}")
    assert relay.prune(1) == [], "nothing while a manifest cannot be read"
    with pytest.raises(ValueError, match="keep=0"):
        relay.prune(0)
