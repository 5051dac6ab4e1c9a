"""Which files a task's source scope covers, and which files are tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath


def in_scope(path: str, scope: Iterable[str]) -> bool:
    """Whether `path` is named by one of the patterns.

    A pattern is a path, or a glob whose `*`, `?` and `[…]` stay inside one name and whose `**` stands for any number of
    folders: `src/**` is everything below `src`, `*.py` only what lies at the top.
    """
    return any(path == pattern or _fits(path.split("/"), pattern.split("/")) for pattern in scope)


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(names)
        return any(_fits(names[skipped:], pattern[1:]) for skipped in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def is_test_module(path: str) -> bool:
    """Whether pytest would collect a file by its name: `test_….py` or `…_test.py`."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def is_conftest(path: str) -> bool:
    return PurePosixPath(path).name == "conftest.py"
