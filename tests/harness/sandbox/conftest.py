"""A backend of each kind, one a module: what a sandbox promises is the same for all. Docker's is slow."""

from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec

SMALL = SandboxSpec(memory_bytes=160 << 20, disk_bytes=16 << 20, inodes=1000, processes=40, open_files=256)
BACKENDS = ["bwrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])]


def make(name: str, request: pytest.FixtureRequest) -> Backend:
    if name == "docker":
        request.getfixturevalue("docker_client")
    return open_backend(name)


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with make(request.param, request) as sandboxes:
        yield sandboxes


@pytest.fixture(scope="module")
def bwrap() -> Iterator[BwrapBackend]:
    with BwrapBackend() as sandboxes:
        yield sandboxes


@pytest.fixture
def box(backend: Backend) -> Iterator[Sandbox]:
    with backend.create(SMALL) as sandbox:
        yield sandbox
