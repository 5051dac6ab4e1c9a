"""The backend docker, beyond what all backends promise (`test_conformance.py`): its streams, its containers, its refusals."""

import io
import itertools
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from composer_nb.harness.sandbox.contract import SandboxSpec
from composer_nb.harness.sandbox.docker import DockerBackend, DockerChannel
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.image import build_image, host_image

SMALL = SandboxSpec(memory_bytes=128 << 20, disk_bytes=16 << 20, inodes=500, processes=20, cpus=0.5, open_files=64)


@pytest.fixture(scope="module")
def backend(docker_client: Any) -> Iterator[DockerBackend]:
    with DockerBackend(run_id="run-1") as docker_backend:
        yield docker_backend


# -- the attached streams ------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[DockerChannel, socket.socket]]:
    local, peer = socket.socketpair()
    channel = DockerChannel(local)
    yield channel, peer
    channel.close()
    peer.close()


def piece(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


@pytest.mark.parametrize("seed", range(5))
def test_the_output_is_told_from_the_errors_however_it_arrives(pair: tuple[DockerChannel, socket.socket], seed: int):
    channel, peer = pair
    chance = random.Random(seed)
    pieces = [(chance.choice((1, 1, 2)), chance.randbytes(chance.choice((0, 1, 7, 3000)))) for _ in range(200)]
    stream = b"".join(piece(*args) for args in pieces)

    def deliver() -> None:
        remaining = stream
        while remaining:
            size = chance.choice((1, 3, 8, 9, 5000))
            peer.sendall(remaining[:size])
            remaining = remaining[size:]
        peer.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=deliver)
    thread.start()
    received = bytearray()
    expected = b"".join(data for stream, data in pieces if stream == 1)
    while len(received) < len(expected):
        arrived = channel.receive(5)
        assert arrived
        received += arrived
    thread.join()
    assert bytes(received) == expected


def test_how_a_stream_ends(pair: tuple[DockerChannel, socket.socket]) -> None:
    channel, peer = pair
    with pytest.raises(TimeoutError):
        channel.receive(0.05)
    assert not channel.ended
    peer.sendall(piece(2, b"Traceback\n  line\n" * 1000 + b"MemoryError: full\n") + piece(1, b"last"))
    assert channel.receive(5) == b"last"
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="^MemoryError: full$"):
        channel.receive(5)
    assert channel.ended


# -- refusals ------------------------------------------------------------------------------------------------


@contextmanager
def built(docker_client: Any, name: str, *lines: str) -> Iterator[str]:
    """Build the host's image with further lines of a Dockerfile, return its name, and remove it in the end."""
    text, tag = "\n".join([f"FROM {host_image(docker_client)}", "USER 0", *lines]), f"composer-nb-test:{name}"
    docker_client.images.build(fileobj=io.BytesIO(text.encode()), tag=tag, rm=True)
    try:
        yield tag
    finally:
        docker_client.images.remove(tag, force=True)


@pytest.mark.docker
def test_what_an_image_sets_holds_for_commands(docker_client: Any, backend: DockerBackend) -> None:
    """As with `docker exec`: packages of a project often lie in an environment that only the image's PATH names."""
    program = "RUN mkdir -p /opt/x/bin && ln -s /bin/echo /opt/x/bin/said"
    variables = "ENV PATH=/opt/x/bin:/usr/local/bin:/usr/bin:/bin GREETING='a = b' HOME=/root"
    with built(docker_client, "environment", program, variables) as tag:
        with backend.create(SandboxSpec(image=tag)) as box:
            result = box.exec(["sh", "-c", 'said "$GREETING" $HOME'])
            assert (result.exit_code, result.stdout) == (0, b"a = b /workspace\n")
            assert box.exec(["sh", "-c", "echo $GREETING"], env={"GREETING": "mine"}).stdout == b"mine\n"
        with backend.create() as box:
            assert box.exec(["said"]).exit_code == 127


@pytest.mark.docker
def test_shared_memory_holds_no_programs(backend: DockerBackend) -> None:
    with backend.create(SMALL) as box:
        for folder, code in {"/dev/shm": 126, "/tmp": 0, "/workspace": 0}.items():
            assert box.exec(["sh", "-c", f"cp /bin/true {folder}/x && {folder}/x"]).exit_code == code


@pytest.mark.docker
def test_images_that_will_not_do(docker_client: Any, backend: DockerBackend) -> None:
    with built(docker_client, "no-python", "RUN rm /usr/bin/python3*"), built(docker_client, "volume", "VOLUME /data"):
        for image, message in (
            ("composer-nb-none/such:1", "has no image composer-nb-none/such:1: `docker pull"),
            ("composer-nb-test:no-python", "composer-nb-test:no-python has no python3"),
            ("composer-nb-test:volume", "keeps /data on the engine's disk, without a limit: build it without VOLUME"),
        ):
            with pytest.raises(SandboxUnavailable, match=message):
                backend.create(SandboxSpec(image=image))
    assert ours(docker_client) == []


@pytest.mark.docker
def test_an_image_of_which_not_every_file_can_be_mapped_is_told(docker_client: Any, monkeypatch: pytest.MonkeyPatch):
    """A container's soft limit of open files is 1024 with current engines; each map takes one."""
    many = "RUN mkdir /many && cd /many && seq 3000 | split -l 1 -a 4 && chmod 0 xaaaa && ln -s none broken"
    configuration = DockerBackend._configuration
    with built(docker_client, "many", many) as tag:
        for hard, expected in ((1 << 14, True), (1024, False)):

            def limited(*args: Any, hard: int = hard) -> dict[str, Any]:
                config = configuration(*args)
                config["HostConfig"]["Ulimits"].append({"Name": "nofile", "Soft": 1024, "Hard": hard})
                return config

            monkeypatch.setattr(DockerBackend, "_configuration", limited)
            with DockerBackend() as limited_backend, limited_backend.create(SandboxSpec(image=tag)):
                assert limited_backend.capabilities().enforced["page_cache"] == expected


# -- containers ----------------------------------------------------------------------------------------------


def ours(docker_client: Any, run_id: str = "run-1") -> list[str]:
    containers = docker_client.containers.list(all=True, filters={"label": f"composer_nb.run={run_id}"})
    return [container.name for container in containers]


@pytest.mark.docker
def test_closing_removes_what_is_left_and_keeps_no_connection(docker_client: Any) -> None:
    with DockerBackend(run_id="run-2") as backend:
        boxes = [backend.create(SMALL) for _ in range(2)]
        assert sorted(ours(docker_client, "run-2")) == sorted(box.id for box in boxes)
    assert ours(docker_client, "run-2") == []
    with pytest.raises(SandboxFailure):
        boxes[0].exec(["true"])

    with pytest.raises(SandboxFailure, match="this backend is closed"):  # as of a start that was under way
        backend._pin(boxes[0].spec.image)
    assert not backend._pins

    before = len(os.listdir("/proc/self/fd"))
    with DockerBackend(run_id="run-2") as backend:
        backend.create(SMALL).exec(["true"])
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.docker
def test_a_container_that_ends_from_outside(docker_client: Any, backend: DockerBackend) -> None:
    box = backend.create(SMALL)
    threading.Timer(0.3, docker_client.api.kill, [box.id]).start()
    with pytest.raises(SandboxFailure, match="ended unexpectedly"):
        box.exec(["sleep", "20"])
    assert ours(docker_client) == []


@pytest.mark.docker
def test_memory_that_ends_the_sandbox_is_told(backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tells it where the control group cannot be read, or is gone already."""
    box = backend.create(SMALL)
    monkeypatch.setattr(box._machine, "group", None)
    assert box.stats().memory_bytes is None and box.stats().cpu_s is None
    result = box.exec(["python3", "-c", "bytearray(400 << 20)"])
    assert result.exit_code == 137
    backend._client.api.kill(box.id)
    assert backend.kills(box.id, True) == 1
    kills = itertools.count()  # as if it had ended within the request
    monkeypatch.setattr(type(backend), "kills", lambda *_: next(kills))
    with pytest.raises(SandboxDied, match="its memory of 134217728 bytes was used up"):
        box.exec(["true"])


def test_the_steps_of_a_build_have_no_network(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    client = MagicMock()
    client.images.build.return_value = (MagicMock(id="sha256:" + "0" * 64), [])
    build_image(client, tmp_path)
    assert client.images.build.call_args.kwargs["network_mode"] == "none"
