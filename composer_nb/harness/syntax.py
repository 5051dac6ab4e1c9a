"""Parse Python source, one thread at a time: before Python 3.13, two threads that make syntax trees side by side can fail with
SystemError, "AST constructor recursion depth mismatch" (CPython issue 106905)."""

from __future__ import annotations

import ast
import threading
from typing import Any

_ALONE = threading.Lock()


def parse(text: str) -> ast.Module:
    """Return a syntax tree like `ast.parse`. Raises SyntaxError, ValueError, MemoryError, RecursionError."""
    with _ALONE:
        return ast.parse(text)


def literal_eval(text: str | ast.expr) -> Any:
    """Return a value like `ast.literal_eval`. Raises what `parse` does."""
    with _ALONE:
        return ast.literal_eval(text)
