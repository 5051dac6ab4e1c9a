"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable

from composer_nb.harness.sandbox.system.linux import patience

PATIENCE_S = 60.0


def wait_until(happened: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return once something has happened. Fails after `seconds`, or longer on a busy machine."""
    deadline = time.monotonic() + patience(seconds)
    while not happened():
        assert time.monotonic() < deadline, f"waited for {seconds:g} s"
        time.sleep(0.02)
