"""Sockets of Ray below a TMPDIR of any length: a batch system chooses it."""

import os
import tempfile
from pathlib import Path

import pytest

from composer_nb.harness.files import SOCKET_PATH
from composer_nb.harness.sandbox.reap import ResourceJournal
from composer_nb.trainer.services import cluster


def test_a_socket_fits_below_a_long_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    folders: list[Path] = []

    def start(folder: Path, machine: cluster.ClusterNode) -> None:
        folders.append(folder)
        raise ConnectionError("far enough")

    monkeypatch.setattr(cluster, "start", start)
    with pytest.raises(ConnectionError, match="far enough"):
        cluster.Cluster("", "x", ResourceJournal(tmp_path, "x"))
    socket = str(folders[0]) + cluster.SOCKET.removeprefix("/cnb-12345678")
    assert len(os.fsencode(socket)) <= SOCKET_PATH and not folders[0].exists()
