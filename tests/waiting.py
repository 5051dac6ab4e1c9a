"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable
from typing import Any

from composer_nb.harness.sandbox.system.linux import patience


def wait(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until a condition holds, for so many seconds or longer on a busy machine."""
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
