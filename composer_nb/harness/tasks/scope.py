"""Determine which files a task's source scope covers, and which files are tests."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath


def in_scope(path: str, scope: Iterable[str]) -> bool:
    """Return whether `path` matches one of the patterns.

    A pattern is a path, or a glob whose `*`, `?` and `[…]` stay inside one name and whose `**` stands for any number of
    folders: `src/**` is everything below `src`, `*.py` only what lies at the top.
    """
    return any(path == pattern or _fits(path.split("/"), pattern.split("/")) for pattern in scope)


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a pattern matches all names. The work is bounded by the product of both lengths."""
    positions = {0}  # numbers of names that the pattern may have matched so far
    for number, part in enumerate(pattern, 1):
        if part == "**":
            first = min(positions, default=len(names) + 1) + (number == len(pattern))
            positions = set(range(first, len(names) + 1))
        else:
            positions = {n + 1 for n in positions if n < len(names) and fnmatchcase(names[n], part)}
    return len(names) in positions


def is_test_module(path: str) -> bool:
    """Return whether pytest collects a file of this name: `test_….py` or `…_test.py`."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def is_conftest(path: str) -> bool:
    return PurePosixPath(path).name == "conftest.py"
