"""A region's store: every file crosses once, what arrives is whole, and nothing but what was published is ever run."""

import uuid

import pytest
from test_version_store import FILES, assert_right, follow, weights

from composer_nb.cli import main
from composer_nb.operations import studies
from composer_nb.trainer.versions.manifest import MANIFEST, DamagedVersion
from composer_nb.trainer.versions.mirror import Mirror
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import StoreError, VersionStore, log


@pytest.fixture
def urls() -> tuple[str, str]:
    here = uuid.uuid4().hex
    return f"memory://{here}/origin", f"memory://{here}/region"


def test_each_file_crosses_the_line_once_also_when_it_breaks(urls, monkeypatch: pytest.MonkeyPatch):
    origin, region = urls
    publisher, mirror = Publisher(origin, owner="run"), Mirror(origin, region, name="west")
    engines = [Receiver(region, name=f"engine{n}") for n in range(5)]
    read, put, last = list[str](), VersionStore.put, {"v000001/config.json"}

    def once_down(self, name, pieces):
        if self.url == region and name in last:
            last.clear()
            raise StoreError("the line is down")
        read.extend([name] if self.url == region and name[0] == "v" and not name.endswith(MANIFEST) else [])
        return put(self, name, pieces)

    monkeypatch.setattr(VersionStore, "put", once_down)
    for version in range(4):
        publisher.publish(version, weights(version), FILES)
        if version == 1:
            with pytest.raises(StoreError):
                mirror.pull()
            assert not VersionStore(region).exists(1), "no version without all of its files"
        assert mirror.pull() == mirror.pull() == version
        for engine in engines:
            assert_right(engine, version)
            engine.install(engine.fetch(version))
            engine.report()
        mirror.forward()
    assert len(read) == len(set(read)) == 2 * 4, "also what had arrived when the line broke"
    assert [row["base"] for row in log(origin)] == [None, 0, 1, 2], "engines acknowledged through the region"
    publisher.publish(4, weights(4), FILES)
    assert sorted(log(origin)[3]["acknowledged"]) == [f"west.engine{n}" for n in range(5)]


def test_a_region_that_joins_late_begins_with_the_anchor(urls, monkeypatch: pytest.MonkeyPatch, capsys):
    origin, region = urls
    publisher, receiver = Publisher(origin, owner="run", full_every=4), Receiver(origin)
    for version in range(7):
        follow(publisher, receiver, version)
    publisher.prune(1)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert main(["weights", "mirror", origin, region, "--name", "late"]) == 130
    assert f"version 6 is in {region}" in capsys.readouterr().out and studies.MIRROR_S > 0
    assert VersionStore(region).folders() == [4, 5, 6]
    assert_right(Receiver(region), 6)


def test_what_arrives_damaged_is_never_run_and_the_next_version_is_full(urls, monkeypatch: pytest.MonkeyPatch):
    origin, region = urls
    publisher, mirror, engine = Publisher(origin, owner="run"), Mirror(origin, region, name="west"), Receiver(region)
    publisher.publish(0, weights(0), FILES)
    mirror.pull()
    engine.install(engine.fetch(0))
    engine.report()
    mirror.forward()
    publisher.publish(1, weights(1), FILES)
    chunks = VersionStore.chunks

    def spoil(self, name):
        for data in chunks(self, name):
            yield data[:-1] + bytes([data[-1] ^ 1]) if "delta" in name and self.url == origin else data

    monkeypatch.setattr(VersionStore, "chunks", spoil)
    with pytest.raises(DamagedVersion, match=r"v000001/delta.safetensors"):
        mirror.pull()
    assert not VersionStore(region).exists(1) and mirror.pull() == 0
    assert publisher.publish(2, weights(2), FILES).base is None
    assert mirror.pull() == 2
    assert_right(engine, 2)
