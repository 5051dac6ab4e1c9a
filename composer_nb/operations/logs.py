"""Plain lines on the screen for what the package logs."""

import logging
import sys
from collections.abc import Callable
from typing import Literal


class _LineHandler(logging.Handler):
    """Writes each record as one line to the stream that `sys` holds at that moment, so each notebook cell gets its own lines."""

    def __init__(self, stream: Literal["stdout", "stderr"], render: Callable[[str], str]) -> None:
        super().__init__()
        self.stream, self.render = stream, render

    def emit(self, record: logging.LogRecord) -> None:
        print(self.render(self.format(record)), file=getattr(sys, self.stream), flush=True)


def print_lines(stream: Literal["stdout", "stderr"] = "stdout", render: Callable[[str], str] = str) -> None:
    """Print what the package logs from INFO on, one line a record, as `render` returns it. A later call replaces an earlier one.

    The command line calls this itself; a notebook or a program that wants to see the lines calls it once.
    """
    logger = logging.getLogger("composer_nb")
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _LineHandler)]
    logger.addHandler(_LineHandler(stream, render))
    logger.setLevel(logging.INFO)
