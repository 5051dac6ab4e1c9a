"""Sockets of Ray and of kernels, below a TMPDIR of any length: a batch system chooses it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from composer_nb.harness.files import SOCKET_PATH, socket_folder
from composer_nb.harness.sandbox.reap import ResourceJournal
from composer_nb.jobs.notebook import _sockets
from composer_nb.trainer.services import cluster


@pytest.mark.parametrize("length", [5, 20, 60, 86, 120])
def test_a_socket_fits_below_the_folder_however_long_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    place = Path("/tmp", "x" * (length - 5))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    place.mkdir(exist_ok=True)
    folders: list[Path] = []

    def start(folder: Path, namespace: str) -> None:
        folders.append(folder)
        raise ConnectionError("far enough")

    monkeypatch.setattr(cluster, "start", start)
    try:
        with pytest.raises(ConnectionError, match="far enough"):
            cluster.Cluster("", "x", ResourceJournal(tmp_path, "x"))
        with _sockets() as kernels:
            longest = [str(folders[0]) + cluster.SOCKET.removeprefix("/cnb-12345678"), f"{kernels}/k-12345"]
        assert all(len(os.fsencode(path)) <= SOCKET_PATH for path in longest)
        assert not folders[0].exists() and socket_folder(SOCKET_PATH - length) == str(place)
    finally:
        if place != Path("/tmp"):
            place.rmdir()
