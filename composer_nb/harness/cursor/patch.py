"""Patches of models: from text to changes of files, and from a file's text to what a change makes of it. Pure functions.

Two formats, told apart by how they begin:

* *Begin Patch*: `*** Begin Patch`, then for each file `*** Add File: P` with lines that begin with +, `*** Delete File: P`, or
  `*** Update File: P`, perhaps `*** Move to: Q`, and hunks: a line `@@`, perhaps with a line to look for first (several such
  lines narrow it down), then lines that begin with a space, - or +, perhaps `*** End of File`; at the end `*** End Patch`. There
  are no line numbers: a hunk is at the first place after the one before where its old lines are.
* *unified diffs*, as `git diff` or `diff -u` write them: `---`, `+++`, hunks `@@ -a,b +c,d @@`; /dev/null for a file that is new
  or goes; `rename from` and `rename to`; `\\ No newline at end of file`. A hunk is where its old lines are, nearest to its
  number. Modes and binary patches are left out.

Strict: the text is a patch and nothing else, old lines are there exactly, lengths of hunks are right. Lenient: a fence of
Markdown or a shell's here-document around it, lengths that are wrong, an empty line that stands for an empty line of context,
and white space as in `edits.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from composer_nb.harness.cursor.edits import Lines, Match, matches
from composer_nb.harness.tool_call import ToolError

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
HEADER = re.compile(r"\*\*\* (Add|Delete|Update) File: (.+)")
RANGE = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
MOST_HUNKS = 500
"""In a patch; each is looked for in all of its file."""


@dataclass(slots=True)
class Hunk:
    """Lines with what is to become of them: " " stays, "-" goes, "+" comes."""

    anchors: list[str] = field(default_factory=list)
    """Lines to look for first, one after the other."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    at: int | None = None
    """The number, from 0, that its first old line should have."""
    at_end: bool = False
    ended: bool | None = None
    """Whether the file ends with a newline afterwards; None leaves it."""

    @property
    def old(self) -> list[str]:
        return [text for sign, text in self.lines if sign != "+"]


@dataclass(slots=True)
class Change:
    """Of one file."""

    kind: Literal["add", "delete", "update"]
    path: str
    to: str | None = None
    """Where it goes, if it moves."""
    hunks: list[Hunk] = field(default_factory=list)


def wrong(text: str) -> ToolError:
    return ToolError("InvalidArguments", text)


def parse(patch: str, strict: bool) -> list[Change]:
    """The changes of a patch, at least one, of different files. Raises ToolError (InvalidArguments)."""
    lines = patch.replace("\r\n", "\n").split("\n")
    if not strict:
        lines = _bare(lines)
    while lines and not lines[-1]:  # a line of one space is an empty line of context
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        raise wrong("the patch is empty")
    changes = _begin_patch(lines, strict) if lines[0].strip() == BEGIN else _unified(lines, strict)
    if not changes:
        raise wrong(f"the patch is neither `{BEGIN}` nor a unified diff (---, +++, @@), or changes nothing")
    paths = [path for change in changes for path in (change.path, change.to) if path]
    if twice := next((path for path, times in Counter(paths).items() if times > 1), None):
        raise wrong(f"{twice} is there twice: put all changes of a file into one part")
    if sum(1 + len(hunk.anchors) for change in changes for hunk in change.hunks) > MOST_HUNKS:
        raise wrong(f"more than {MOST_HUNKS} hunks: make several patches")
    return changes


def _bare(lines: list[str]) -> list[str]:
    """Without what stands around a patch: a fence, a here-document."""
    first = next((n for n, line in enumerate(lines) if line.strip() == BEGIN), None)
    if first is not None:
        last = next((n for n, line in enumerate(lines) if n > first and line.strip() == END), len(lines) - 1)
        return lines[first : last + 1]
    return [line for line in lines if not line.startswith("```")]


def _begin_patch(lines: Sequence[str], strict: bool) -> list[Change]:
    changes: list[Change] = []
    if strict and lines[-1].strip() != END:
        raise wrong(f"the last line must be `{END}`")
    for number, line in enumerate(lines[1:], 2):
        change = changes[-1] if changes else None
        if line.strip() == END:
            if number != len(lines):
                raise wrong(f"line {number}: `{END}` is not the last line")
            break
        if found := HEADER.fullmatch(line.rstrip()):
            kind = found[1].lower()
            changes.append(
                Change("add" if kind == "add" else "delete" if kind == "delete" else "update", found[2].strip())
            )
            if kind == "add":
                changes[-1].hunks.append(Hunk())
        elif change is None:
            raise wrong(f"line {number}: a `*** … File: PATH` must come first")
        elif line.startswith("*** Move to: ") and change.kind == "update" and not change.hunks:
            change.to = line.removeprefix("*** Move to: ").strip()
        elif line.startswith("@@") and change.kind == "update":
            if not change.hunks or change.hunks[-1].lines:
                change.hunks.append(Hunk())
            if anchor := line[2:].removeprefix(" ").rstrip():
                change.hunks[-1].anchors.append(anchor)
        elif line.strip() == END_OF_FILE and change.hunks:
            change.hunks[-1].at_end = True
        elif change.kind == "add" and line.startswith("+"):
            change.hunks[0].lines.append(("+", line[1:]))
        elif change.kind == "update" and (line[:1] in (" ", "-", "+") or (not line and not strict)):
            if not change.hunks:
                change.hunks.append(Hunk())
            change.hunks[-1].lines.append((line[:1] or " ", line[1:]))
        else:
            raise wrong(f"line {number} has no place in a patch that {change.kind}s a file: {line[:80]!r}")
    for change in changes:
        if change.kind == "update" and not change.to and not any(hunk.lines for hunk in change.hunks):
            raise wrong(f"{change.path}: no lines to change")
    return changes


def _unified(lines: Sequence[str], strict: bool) -> list[Change]:
    changes: list[Change] = []
    number, renamed = 0, ""
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("rename from "):
            renamed = line.removeprefix("rename from ")
        elif line.startswith("rename to ") and renamed:
            changes.append(Change("update", renamed, line.removeprefix("rename to ")))
        elif line.startswith("--- ") and number < len(lines) and lines[number].startswith("+++ "):
            before, after = _name(line, "a/"), _name(lines[number], "b/")
            number += 1
            moved = changes[-1] if changes and changes[-1].to and not changes[-1].hunks else None
            if moved is None or (moved.path, moved.to) != (before, after):
                changes.append(_header(before, after, number))
        elif found := RANGE.match(line):
            if not changes:
                raise wrong(f"line {number}: a hunk before any `---` and `+++`")
            number = _hunk(lines, number, found, changes[-1], strict)
        elif strict and line[:1] in (" ", "+", "-"):
            raise wrong(f"line {number} is in no hunk: {line[:80]!r}")
    for change in changes:
        if change.kind == "update" and not change.to and not change.hunks:
            raise wrong(f"{change.path}: no hunks")
    return changes


def _header(before: str | None, after: str | None, number: int) -> Change:
    """What the names in `---` and `+++` say, the second of which is line `number`."""
    if before is None and after is not None:
        return Change("add", after)
    if before is not None and after in (before, None):
        return Change("update" if after else "delete", before)
    raise wrong(
        f"line {number}: one file, or one and /dev/null, must be named; a move is told by `rename from` and `rename to`"
    )


def _name(line: str, prefix: str) -> str | None:
    name = line[4:].split("\t")[0].strip()
    return None if name == "/dev/null" else name.removeprefix(prefix)


def _hunk(lines: Sequence[str], number: int, found: re.Match[str], change: Change, strict: bool) -> int:
    """Takes the hunk whose first line is `number`, from 0, into a change; the number of the line after it."""
    left = [1 if found[group] is None else int(found[group]) for group in (2, 4)]
    hunk = Hunk(at=max(int(found[1]) - 1, 0) if left[0] else int(found[1]))
    signs = {" ": (1, 1), "-": (1, 0), "+": (0, 1)}
    while number < len(lines):
        line = lines[number]
        if line.startswith("\\"):
            if hunk.lines and hunk.lines[-1][0] != "-":
                hunk.ended = False
            elif hunk.ended is None:
                hunk.ended = True  # the old file ends without a newline; unless the new one does too
        elif (line[:1] in signs and (strict or not _begins_file(lines, number))) or (not line and not strict):
            sign = line[:1] or " "
            if strict and left == [0, 0]:
                break
            left = [have - used for have, used in zip(left, signs[sign], strict=True)]
            hunk.lines.append((sign, line[1:]))
        else:
            break
        number += 1
    if strict and left != [0, 0]:
        raise wrong(f"{change.path}: the hunk {found[0]} has not as many lines as it says")
    change.hunks.append(hunk)
    return number


def _begins_file(lines: Sequence[str], number: int) -> bool:
    return lines[number].startswith("--- ") and number + 1 < len(lines) and lines[number + 1].startswith("+++ ")


def added(change: Change) -> str:
    """The text of a new file."""
    lines = [text for hunk in change.hunks for sign, text in hunk.lines if sign == "+"]
    ended = all(hunk.ended is not False for hunk in change.hunks)
    return Lines(tuple(lines), ended).plain


def updated(change: Change, text: str, strict: bool) -> str:
    """What a change makes of a file's text. Raises ToolError (InvalidArguments) for old lines that are not there."""
    document = Lines.of(text)
    lines, ended, start, drift = list(document.lines), document.ended or not document.lines, 0, 0
    for hunk in change.hunks:
        for anchor in hunk.anchors:
            start = _after(lines, anchor, start, strict, change.path)
        match = _find(lines, hunk, start, drift, strict, change.path)
        fresh: list[str] = []
        there = iter(lines[match.place : match.place + len(hunk.old)])
        for sign, line in hunk.lines:
            old = next(there) if sign != "+" else ""
            fresh += {" ": [old], "-": [], "+": [match.shifted(line)]}[sign]
        lines[match.place : match.place + len(hunk.old)] = fresh
        start = match.place + len(fresh)
        drift += len(fresh) - len(hunk.old)
        ended = ended if hunk.ended is None else hunk.ended
    return document.with_plain(Lines(tuple(lines), ended).plain)


def _after(lines: Sequence[str], anchor: str, start: int, strict: bool, path: str) -> int:
    found = matches(lines, [anchor], start, strict)
    if not found:
        raise wrong(f"{path}: no line {anchor[:80]!r} from line {start + 1} on")
    return found[0].place + 1


def _find(lines: Sequence[str], hunk: Hunk, start: int, drift: int, strict: bool, path: str) -> Match:
    """Where a hunk's old lines are."""
    old, expected = hunk.old, None if hunk.at is None else hunk.at + drift
    if not old:
        place = expected if expected is not None else start if hunk.anchors else len(lines)
        if place > len(lines):
            raise wrong(f"{path}: lines to insert at line {place + 1} of {len(lines)}")
        return Match(place)
    likely = len(lines) - len(old) if hunk.at_end else expected
    if likely is not None and likely >= start and list(lines[likely : likely + len(old)]) == old:
        return Match(likely)
    found = matches(lines, old, start, strict)
    if hunk.at_end:
        found = [match for match in found if match.place + len(old) == len(lines)]
    if not found:
        shown = next((line for line in old if line.strip()), "")
        raise wrong(
            f"{path}: the old lines of a hunk, from {shown.strip()[:80]!r}, are not there from line {start + 1} on"
        )
    return found[0] if expected is None else min(found, key=lambda match: abs(match.place - expected))
