"""The version store on S3: a real server of its protocol on loopback, the same publisher and receivers as everywhere."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest
from test_version_store import FILES, assert_right, weights

from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import VersionStore, anchor, log

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
