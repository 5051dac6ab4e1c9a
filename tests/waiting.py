"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable

from composer_nb.harness.sandbox.system.linux import patience

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return once a condition holds. Fails after `seconds`, or later on a busy machine."""
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds:g} s"
        time.sleep(0.02)
