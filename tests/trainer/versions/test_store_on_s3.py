"""The version store on S3: a real server of its protocol on loopback, the same publisher and receivers as everywhere."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest
from test_version_store import FILES, assert_right, follow, weights

from composer_nb.trainer.versions.manifest import DamagedVersion, MissingVersion
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver, SecondWriter
from composer_nb.trainer.versions.store import VersionStore, anchor, folder, log

moto_server = pytest.importorskip("moto.server", reason="moto, a development dependency, serves S3")
pytest.importorskip("s3fs", reason="s3fs, a development dependency, speaks to it")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        running.start()
        host, port = running.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fsspec.filesystem("s3").mkdir("weights")
        yield "s3://weights"
        running.stop()
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture
def bucket(server: str) -> str:
    return f"{server}/{uuid.uuid4().hex}"


def test_versions_go_through_s3_bit_for_bit(bucket: str, tmp_path):
    publisher, receiver = Publisher(bucket, owner="run", full_every=3), Receiver(bucket, name="far")
    for version in range(5):
        publisher.publish(version, weights(version), FILES)
        assert_right(receiver, version)
        receiver.install(receiver.fetch(version))
        receiver.report()
    assert VersionStore(bucket).anchors() == [3] and VersionStore(bucket).exists(3, anchor(3))
    rows = log(bucket)
    assert [row["base"] for row in rows] == [None, 0, 1, 2, 3] and rows[0]["acknowledged"] == ["far"]
    publisher.prune(1)
    assert VersionStore(bucket).folders() == [3, 4]
    assert_right(Receiver(bucket), 4)
    publisher.close()


def test_a_file_is_created_by_one_alone(bucket: str):
    store = VersionStore(bucket)
    assert store.create("v000000/manifest.json", b"one") and not store.create("v000000/manifest.json", b"two")
    assert store.read("v000000/manifest.json") == b"one"
    first = Publisher(bucket, owner="one")
    with pytest.raises(SecondWriter, match="written by 'one'"):
        Publisher(bucket, owner="two")
    Publisher(bucket, owner="two", takeover=True)
    with pytest.raises(SecondWriter, match="now written by 'two'"):
        first.publish(1, weights(1), FILES)


def test_damage_and_loss_are_named_and_mended(bucket: str):
    publisher, receiver = Publisher(bucket, owner="run"), Receiver(bucket)
    for version in range(3):
        follow(publisher, receiver, version)
    store = VersionStore(bucket)
    data = bytearray(store.read(f"{folder(1)}/delta.safetensors"))
    data[-1] ^= 1
    store.write(f"{folder(1)}/delta.safetensors", bytes(data))
    with pytest.raises(DamagedVersion, match="v000001/delta.safetensors"):
        Receiver(bucket, name="joiner").fetch(2)
    store.remove(folder(1))
    with pytest.raises(MissingVersion, match="v000001"):
        Receiver(bucket, name="joiner").fetch(2)
    assert publisher.publish(3, weights(3), FILES).base is None
    assert_right(Receiver(bucket), 3)
