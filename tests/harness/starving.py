"""A machine that gives a sandbox too little of its CPUs."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox.contract import Sandbox


def starve(box: Sandbox, share: float) -> None:
    """Give a sandbox of the backend `bwrap` about `share` of each CPU that `hogs` use."""
    group = box._machine.group
    if group is None or box.backend.name != "bwrap":
        pytest.skip("the shares of this sandbox are not ours to set")
    shares = 1024 * 0.8 ** os.nice(0) * share / (1 - share)  # weights of the kernel
    file = group.file("cpu.shares", "cpu.weight")
    file.write_text(str(max(1, round(shares if file.name == "cpu.shares" else shares * 100 / 1024))))


@contextlib.contextmanager
def hogs() -> Iterator[None]:
    """Keep the CPUs of this machine busy."""
    text = "import os\nos.sched_setaffinity(0, [{}])\nwhile True: pass"
    running = [subprocess.Popen([sys.executable, "-c", text.format(cpu)]) for cpu in os.sched_getaffinity(0)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.wait()
