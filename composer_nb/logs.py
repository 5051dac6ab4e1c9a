"""Plain lines on the screen for what the package logs."""

from __future__ import annotations

import logging
import sys
from typing import Literal


class _Lines(logging.Handler):
    """Writes each record as one line to the stream that `sys` holds at that moment, so each notebook cell gets its own lines."""

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        from composer_nb.harness.untrusted import visible_lines  # a record may quote a foreign run

        print(visible_lines(self.format(record)), file=getattr(sys, self.stream), flush=True)


def print_lines(stream: Literal["stdout", "stderr"] = "stdout", level: int = logging.INFO) -> None:
    """Print what the package logs from `level` on, one plain line a record. A later call replaces an earlier one.

    The command line calls this itself; a notebook or a program that wants to see the lines calls it once.
    """
    logger = logging.getLogger("composer_nb")
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _Lines)]
    logger.addHandler(_Lines(stream))
    logger.setLevel(level)
