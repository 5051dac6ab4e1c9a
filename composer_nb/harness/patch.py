"""Unified diffs as git writes them, applied to texts in memory. Pure: no process, no file, whatever a patch says.

Strict: every hunk must lie exactly where it says, on exactly the lines it says. Covers new, deleted, renamed and changed text
files; not binary patches, copies, nor paths that git has to quote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(slots=True)
class _Change:
    old: str | None
    new: str | None
    hunks: list[tuple[int, list[str], list[str]]] = field(default_factory=list)
    """(first line, counted from 0; lines before; lines after), lines with their ends."""
    named: bool = False
    """Whether the lines with its names have been read."""


def apply_patch(files: Mapping[str, str], patch: str, reverse: bool = False) -> dict[str, str | None]:
    """The files that a patch changes, as they are after it; None for one that is gone.

    Raises ValueError for what is no such patch, or does not fit the files.
    """
    after: dict[str, str | None] = {}
    for change in _parse(patch):
        old, new = (change.new, change.old) if reverse else (change.old, change.new)
        if old is not None and after.get(old, files.get(old)) is None:
            raise ValueError(f"the patch changes {old!r}, which is not there")
        if new is not None and new != old and after.get(new, files.get(new)) is not None:
            raise ValueError(f"the patch makes {new!r}, which is there already")
        before = "" if old is None else str(after.get(old, files.get(old)))
        text = _applied(before, change, reverse, str(new or old))
        if old is not None and old != new:
            after[old] = None
        if new is not None:
            after[new] = text
    if not after:
        raise ValueError("the patch changes nothing")
    return after


def _applied(text: str, change: _Change, reverse: bool, name: str) -> str:
    lines, done, shift = split_lines(text), 0, 0
    result: list[str] = []
    for start, old, new in change.hunks:
        before, after = (new, old) if reverse else (old, new)
        at = start + (shift if reverse else 0)
        shift += len(new) - len(old)
        if at < done or lines[at : at + len(before)] != before:
            raise ValueError(f"the patch does not fit {name!r} at line {at + 1}")
        result += lines[done:at] + after
        done = at + len(before)
    return "".join(result + lines[done:])


def split_lines(text: str) -> list[str]:
    """Lines with their ends; only a line feed ends one."""
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def _parse(patch: str) -> list[_Change]:
    changes: list[_Change] = []
    lines = patch.removesuffix("\n").split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("diff --git "):
            changes.append(_named(line))
        elif line.startswith(("--- ", "+++ ")) and not (changes and changes[-1].hunks and line.startswith("+++ ")):
            if line.startswith("--- ") and (not changes or changes[-1].named):  # without a line of git's before it
                changes.append(_Change(None, None))
            if not changes:
                raise ValueError(f"the patch begins in the middle: {line[:80]!r}")
            changes[-1].named = True
            setattr(changes[-1], "old" if line.startswith("--- ") else "new", _path(line[4:]))
        elif line.startswith("@@ ") and changes:
            at = _hunk(lines, at - 1, changes[-1])
        elif changes and line.startswith(("new file mode", "deleted file mode")):
            setattr(changes[-1], "old" if line.startswith("new") else "new", None)
        elif line.startswith(("Binary files ", "GIT binary patch", "copy from ")):
            raise ValueError(f"the patch has a part that can not be applied: {line[:80]!r}")
    if any(change.old is None and change.new is None for change in changes):
        raise ValueError("the patch has a part without a file's name")
    return changes


def _named(line: str) -> _Change:
    """From `diff --git a/OLD b/NEW`: either they are the same, or one of them has no space in it."""
    names = line.removeprefix("diff --git ")
    if '"' in names:
        raise ValueError(f"the patch has a path that git had to quote: {names[:80]}")
    half = len(names) // 2
    if names[:half].removeprefix("a/") == names[half + 1 :].removeprefix("b/"):
        old, new = names[:half], names[half + 1 :]
    else:
        old, _, new = names.partition(" b/")
        new = "b/" + new
    return _Change(_path(old), _path(new))


def _path(name: str) -> str | None:
    name = name.split("\t")[0].rstrip("\r")
    if name == "/dev/null":
        return None
    plain = name[2:] if name.startswith(("a/", "b/")) else name
    if '"' in name or plain.startswith("/") or ".." in plain.split("/") or not plain:
        raise ValueError(f"the patch names {name[:80]!r}, which is no plain path")
    return plain


def _hunk(lines: list[str], at: int, change: _Change) -> int:
    """Reads a hunk whose head is at `at`; returns where it ends."""
    head = _HUNK.match(lines[at])
    if head is None:
        raise ValueError(f"the patch has a hunk without numbers: {lines[at][:80]!r}")
    wanted = (int(head[2] or 1), int(head[4] or 1))
    old: list[str] = []
    new: list[str] = []
    sides: list[list[str]] = []
    place = at + 1
    while place < len(lines):
        line = lines[place]
        if line.startswith("\\") and sides:
            for side in sides:
                side[-1] = side[-1].removesuffix("\n")
        elif (len(old), len(new)) == wanted:
            break
        elif line[:1] in (" ", "-", "+", ""):
            sides = {"-": [old], "+": [new]}.get(line[:1], [old, new])
            for side in sides:
                side.append(line[1:] + "\n")
        else:
            break
        place += 1
    if (len(old), len(new)) != wanted:
        raise ValueError(f"the patch has a hunk that is cut off: {lines[at][:80]!r}")
    change.hunks.append((max(int(head[1]) - (1 if wanted[0] else 0), 0), old, new))
    return place
