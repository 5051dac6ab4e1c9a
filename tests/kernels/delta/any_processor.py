"""Tests of a file once more, in a process of its own for which numba makes code of any processor."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys, pytest
from composer_nb.kernels.delta import vectors
assert not vectors.has_avx2()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", *sys.argv[1:]]))
"""


def assert_they_pass(keyword: str, file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, keyword, file],
        env=os.environ | {"NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
