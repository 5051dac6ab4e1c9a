"""Find and replace lines of texts. Pure functions.

A text is edited with plain newlines; a file whose every line ends with a carriage return gets them back. If nothing matches
exactly, a lenient search accepts whole lines that differ in white space at their ends, or by one and the same indentation of all
of them, which the new lines then get too. Coding agents commonly match patches in these steps: exact, without trailing white
space, without indentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_nb.harness.tools.tool_call import ToolError


@dataclass(frozen=True, slots=True)
class Lines:
    """A text as lines."""

    lines: tuple[str, ...]
    ended: bool = True
    """The last line has a newline."""
    returns: bool = False
    """Each newline has a carriage return before it."""

    @classmethod
    def of(cls, text: str) -> Lines:
        returns = "\r\n" in text and text.count("\r\n") == text.count("\n")
        plain = text.replace("\r\n", "\n") if returns else text
        return cls(tuple(plain.removesuffix("\n").split("\n")) if plain else (), plain.endswith("\n"), returns)

    @property
    def plain(self) -> str:
        """The text with newlines alone."""
        return "\n".join(self.lines) + "\n" * (self.ended and bool(self.lines))

    def with_plain(self, text: str) -> str:
        """Return another text with the newlines of this one."""
        return text.replace("\n", "\r\n") if self.returns else text


@dataclass(frozen=True, slots=True)
class Match:
    """The place of wanted lines. `gained` is the indentation that all of them have in addition there, `lost` what they lack."""

    place: int
    gained: str = ""
    lost: str = ""

    def shifted(self, line: str) -> str:
        """Return a new line, indented like those that were found."""
        return self.gained + line.removeprefix(self.lost) if line.strip() else line


def matches(lines: Sequence[str], wanted: Sequence[str], start: int, strict: bool) -> list[Match]:
    """Return the places from `start` on where `wanted`, at least one line, is: exactly, or else (lenient) up to white space."""
    exact = [Match(place) for place in _places(lines, wanted, start)]
    if exact or strict:
        return exact
    ends = [line.rstrip() for line in lines]
    bare = [line.rstrip() for line in wanted]
    if close := [Match(place) for place in _places(ends, bare, start)]:
        return close
    if not any(bare):
        return []
    found = _places([line.strip() for line in lines], [line.strip() for line in bare], start)
    shifts = [_shift(place, ends[place : place + len(bare)], bare) for place in found]
    return [match for match in shifts if match is not None]


def _places(lines: Sequence[str], wanted: Sequence[str], start: int) -> Iterator[int]:
    """Yield places without overlaps, so that the time is linear in the length of the text."""
    text, part = "\n".join(("", *lines[start:], "")), "\n".join(("", *wanted, ""))
    number, counted = start, 0
    place = text.find(part)
    while place >= 0:
        number, counted = number + text.count("\n", counted, place), place
        yield number
        place = text.find(part, place + len(part) - 1)


def _shift(place: int, there: Sequence[str], wanted: Sequence[str]) -> Match | None:
    """Return the one shift of indentation between `wanted` and the lines there; None if they differ in it."""
    pairs = [(a, b) for a, b in zip(there, wanted, strict=True) if b]
    a, b = pairs[0]
    gained, lost = a[: max(len(a) - len(b), 0)], b[: max(len(b) - len(a), 0)]
    same = all(a == gained + b.removeprefix(lost) and b.startswith(lost) for a, b in pairs)
    return Match(place, gained, lost) if same else None


def replace(text: str, old: str, new: str, every: bool, strict: bool) -> tuple[str, list[int]]:
    """Return `text` with `new` for `old`, and the lines, from 1, at which `old` began.

    Raises ToolError (InvalidArguments) if nothing changes, or if `old` is missing, or occurs more than once without `every`.
    """
    if not old:
        raise ToolError("InvalidArguments", "old_string is empty: say what to replace, or use write")
    if old == new:
        raise ToolError("InvalidArguments", "old_string and new_string are the same")
    document = Lines.of(text)
    if document.returns:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    plain = document.plain
    places = list(_occurrences(plain, old))
    if places:
        _only(len(places), every)
        numbers = [plain.count("\n", 0, place) + 1 for place in places]
        return document.with_plain(plain.replace(old, new)), numbers
    wanted = old.strip("\n").split("\n")
    found = [] if strict or not old.strip() else matches(document.lines, wanted, 0, strict)
    if not found:
        raise ToolError("InvalidArguments", _why_not(plain, old))
    _only(len(found), every)
    lines = list(document.lines)
    fresh = _without_ends(new, old)
    for match in reversed(found):
        lines[match.place : match.place + len(wanted)] = [match.shifted(line) for line in fresh]
    changed = Lines(tuple(lines), document.ended).plain
    if changed == plain:
        raise ToolError("InvalidArguments", "the file would not change")
    return document.with_plain(changed), [match.place + 1 for match in found]


def _without_ends(new: str, old: str) -> list[str]:
    """Return the lines of `new` without the newlines that `old` has before and after its lines; none if nothing is left."""
    for _ in range(len(old) - len(old.lstrip("\n"))):
        new = new.removeprefix("\n")
    for _ in range(len(old) - len(old.rstrip("\n"))):
        new = new.removesuffix("\n")
    return new.split("\n") if new else []


def _occurrences(text: str, part: str) -> Iterator[int]:
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + len(part))


def _only(found: int, every: bool) -> None:
    if found > 1 and not every:
        text = f"old_string occurs {found} times: include more context, or set replace_all"
        raise ToolError("InvalidArguments", text)


def _why_not(text: str, old: str) -> str:
    """Return why `old` was not found, with a hint."""
    first = next(line.strip() for line in (*old.split("\n"), old) if line.strip() or line is old)
    near = [number for number, line in enumerate(text.split("\n"), 1) if first and first == line.strip()]
    hint = f"; its first line is line {near[0]}, but what follows, or white space, differs" if near else ""
    return f"old_string is not in the file{hint}"
