"""Atomic files."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from composer_nb.harness.files import replacing


def test_threads_that_write_one_file_at_once_do_not_share_a_part(tmp_path: Path) -> None:
    together = threading.Barrier(2)

    def write(text: str) -> None:
        with replacing(tmp_path / "file") as part:
            part.write_text(text)
            together.wait(60)

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(write, ("one", "two"))]
    assert (tmp_path / "file").read_text() in ("one", "two") and len([*tmp_path.iterdir()]) == 1
