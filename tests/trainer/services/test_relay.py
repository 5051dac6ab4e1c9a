"""A relay serves a region's receivers what the store has, once fetched, and nothing to strangers."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from composer_nb.trainer.services.cluster import RELAY
from composer_nb.trainer.services.relay import FileCache, Relay, RelayedStore
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import VersionStore, folder
from tests.trainer.versions.test_version_store import FILES, assert_right, weights


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with Relay(FileCache(tmp_path / "cache", keep=9000), "127.0.0.1") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(RELAY, f"127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


def test_every_file_crosses_the_link_once_and_nothing_depends_on_the_relay(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{tmp_path}/store/run"
    publisher = Publisher(url, owner="run")
    publisher.publish(0, weights(0), FILES)
    fetched, direct = Counter[str](), Counter[str]()
    chunks, read_file = VersionStore.chunks, VersionStore.read_file
    monkeypatch.setattr(VersionStore, "chunks", lambda s, name: fetched.update([name]) or chunks(s, name))
    monkeypatch.setattr(VersionStore, "read_file", lambda s, name, f: direct.update([name]) or read_file(s, name, f))
    with ThreadPoolExecutor(8) as pool:
        receivers = [Receiver(RelayedStore(url), name=f"{number}") for number in range(8)]
        list(pool.map(lambda receiver: assert_right(receiver, 0), receivers))
    assert len(fetched) == 2 and {*fetched.values()} == {1} and not direct
    # Bytes that were damaged here, and those of a relay that is gone, come from the store.
    publisher.publish(1, weights(1), FILES)
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(b"damaged")
    assert_right(Receiver(RelayedStore(url)), 0)
    assert direct.total() == 2
    relay.server_close()
    assert_right(Receiver(RelayedStore(url)), 1)
    assert direct[f"{folder(1)}/model.safetensors"] == 1


def test_a_relay_has_the_newest_files_and_serves_no_stranger(relay: Relay, tmp_path: Path) -> None:
    url = f"{tmp_path}/store/run"
    for version in range(3):
        Publisher(url, owner="run").publish(version, weights(version), FILES)
        assert_right(Receiver(RelayedStore(url)), version)
    sizes = [file.stat().st_size for file in (tmp_path / "cache").iterdir()]
    assert sum(sizes) <= 9000 < sum(sizes) + max(sizes)
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"http://127.0.0.1:{relay.server_port}/{'0' * 40}/{folder(2)}/model.safetensors?{url}", timeout=20)
