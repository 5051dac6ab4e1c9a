"""Parse patches written by models, and apply them to texts. Pure functions.

The format: `*** Begin Patch`, then for each file `*** Add File: P` with lines that begin with +, `*** Delete File: P`, or
`*** Update File: P`, optionally `*** Move to: Q`, and hunks: a line `@@`, optionally with a line to look for first (several such
lines narrow it down), then lines that begin with a space, - or +, optionally `*** End of File`; at the end `*** End Patch`. There
are no line numbers: a hunk applies at the first place after the previous hunk where its old lines are.

The text is a patch and nothing else, and old lines match exactly.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from composer_nb.harness.syntax import TextFormat
from composer_nb.harness.tools.edits import places
from composer_nb.harness.tools.session import file_lines
from composer_nb.harness.tools.tool_call import invalid

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
HEADER = re.compile(r"\*\*\* (Add|Delete|Update) File: (.+)")
# Maximum hunks of a patch; each searches its whole file, so also the most lines that all of a file's hunks search together.
MOST_HUNKS, MOST_LINES = 500, 20_000_000


@dataclass(slots=True)
class Hunk:
    """Lines with their signs: " " stays, "-" is removed, "+" is added.

    Attributes:
        anchors: Lines to look for first, one after the other.
    """

    anchors: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        return [text for sign, text in self.lines if sign != "+"]


Kind = Literal["add", "delete", "update"]


@dataclass(slots=True)
class FileChange:
    """The change of one file.

    Attributes:
        to: New path, if the file moves.
    """

    kind: Kind
    path: str
    to: str | None = None
    hunks: list[Hunk] = field(default_factory=list)


def parse(patch: str) -> list[FileChange]:
    """Return the changes of a patch, at least one, of different files. Raises ToolError (InvalidArguments)."""
    lines = patch.replace("\r\n", "\n").split("\n")
    while lines and not lines[-1]:  # a line of one space is an empty line of context
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        raise invalid("the patch is empty")
    if lines[0].strip() != BEGIN:
        raise invalid(f"the patch does not begin with `{BEGIN}`; apply a unified diff with `git apply` in the terminal")
    changes = _changes(lines)
    if not changes:
        raise invalid("the patch changes nothing")
    paths = [path for change in changes for path in (change.path, change.to) if path]
    if twice := next((path for path, times in Counter(paths).items() if times > 1), None):
        raise invalid(f"{twice} appears twice: put all changes of a file into one part")
    if sum(1 + len(hunk.anchors) for change in changes for hunk in change.hunks) > MOST_HUNKS:
        raise invalid(f"more than {MOST_HUNKS} hunks: make several patches")
    return changes


def _changes(lines: Sequence[str]) -> list[FileChange]:
    """Parse the lines of a patch after its first. Raises ToolError (InvalidArguments), which names the line."""
    changes: list[FileChange] = []
    if lines[-1].strip() != END:
        raise invalid(f"the last line must be `{END}`")
    for number, line in enumerate(lines[1:], 2):
        change = changes[-1] if changes else None
        if line.strip() == END:
            if number != len(lines):
                raise invalid(f"line {number}: `{END}` is not the last line")
            break
        if header := HEADER.fullmatch(line.rstrip()):
            kind = cast(Kind, header[1].lower())
            changes.append(FileChange(kind, header[2].strip()))
            if kind == "add":
                changes[-1].hunks.append(Hunk())
        elif change is None:
            raise invalid(f"line {number}: a `*** … File: PATH` must come first")
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
        elif change.kind == "update" and line[:1] in (" ", "-", "+"):
            if not change.hunks:
                change.hunks.append(Hunk())
            change.hunks[-1].lines.append((line[0], line[1:]))
        else:
            raise invalid(f"line {number} has no place in a patch that {change.kind}s a file: {line[:80]!r}")
    for change in changes:
        if change.kind == "update" and not change.to and not any(hunk.lines for hunk in change.hunks):
            raise invalid(f"{change.path}: no lines to change")
    return changes


def added(change: FileChange) -> str:
    """Return the text of a new file."""
    return "".join(f"{text}\n" for hunk in change.hunks for _, text in hunk.lines)


def updated(change: FileChange, text: str) -> str:
    """Apply a change to a file's text. Raises ToolError (InvalidArguments) for old lines that are not there, and for a search
    that would take seconds."""
    layout = TextFormat.of(text)
    plain = layout.plain(text)
    lines, start = file_lines(plain), 0
    if len(lines) * sum(1 + len(hunk.anchors) for hunk in change.hunks) > MOST_LINES:
        raise invalid(f"{change.path}: too many hunks for a file of {len(lines)} lines: make several patches")
    for hunk in change.hunks:
        for anchor in hunk.anchors:
            at_line = next(places(lines, [anchor], start), None)
            if at_line is None:
                raise invalid(f"{change.path}: no line {anchor[:80]!r} from line {start + 1} on")
            start = at_line + 1
        at = _find(lines, hunk, start, change.path)
        fresh = [line for sign, line in hunk.lines if sign != "-"]
        lines[at : at + len(hunk.old)] = fresh
        start = at + len(fresh)
    changed = "".join(f"{line}\n" for line in lines)
    return layout.restore(changed if plain.endswith("\n") or not plain else changed.removesuffix("\n"))


def _find(lines: Sequence[str], hunk: Hunk, start: int, path: str) -> int:
    """Return where a hunk's old lines are."""
    old = hunk.old
    if not old:
        return start if hunk.anchors else len(lines)
    at = next(places(lines, old, start), None)
    if hunk.at_end:
        last = len(lines) - len(old)
        at = last if last >= start and list(lines[last:]) == old else None
    if at is None:
        line = next((line for line in old if line.strip()), "")
        raise invalid(f"{path}: the old lines of a hunk, from {line.strip()[:80]!r}, are not behind line {start}")
    return at
