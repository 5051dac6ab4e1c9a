"""A backend of each kind, one a module: what a sandbox promises is the same for all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec

SMALL = SandboxSpec(
    memory_bytes=160 << 20, disk_bytes=16 << 20, inodes=1000, processes=40, open_files=256, trusted=True
)


def make(name: str, request: pytest.FixtureRequest) -> Backend:
    if name == "docker":
        request.getfixturevalue("docker_client")
        return open_backend(name)
    return open_backend(name)


BACKENDS = ["bwrap", "process", pytest.param("docker", marks=pytest.mark.docker)]
ISOLATED = [name for name in BACKENDS if name != "process"]


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = make(request.param, request)
    yield made
    made.close()


@pytest.fixture(params=ISOLATED, scope="module")
def isolated(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = make(request.param, request)
    yield made
    made.close()


@pytest.fixture
def box(backend: Backend) -> Iterator[Sandbox]:
    with backend.create(SMALL) as made:
        yield made


@pytest.fixture
def cell(isolated: Backend) -> Iterator[Sandbox]:
    """A sandbox of a backend that isolates."""
    with isolated.create(SMALL) as made:
        yield made
