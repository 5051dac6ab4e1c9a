"""What an agent changed as a patch that `git apply` takes, binary files, links and permissions included.

Its work is bounded, whatever the files are: common lines are found between lines that stand in both files just once (patience
diff, B. Cohen), `difflib` only sees the few lines between two of these, and where there is no such line the rest is replaced as
a whole. The format is that of `git diff --binary --full-index`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from typing import Literal

Mode = Literal["100644", "100755", "120000"]
PLAIN: Mode = "100644"
EXECUTABLE: Mode = "100755"
LINK: Mode = "120000"
SMALL = 64
"""Lines of two texts together that `difflib` may compare: it can take the third power of them."""
DEPTH = 16
"""How often lines that stand there once are looked for between such lines."""
NO_BLOB = "0" * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """What a repository holds under a path."""

    data: bytes
    """Of a link: where it leads."""
    mode: Mode = PLAIN
    """A file, one that can be executed, a link."""

    @property
    def binary(self) -> bool:
        return b"\0" in self.data[:8000]  # as git has it

    @property
    def digest(self) -> str:
        """Git's name of it."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data, usedforsecurity=False).hexdigest()


Changes = Mapping[str, Blob | None]
"""By relative POSIX path; None for what is gone."""


def patch(before: Mapping[str, Blob], changes: Changes, whole: bool = True) -> bytes:
    """A patch from `before` to what `changes` make of it, which can be applied and taken back. `whole`: contents of binary files
    too, else their sizes, which is for eyes alone."""
    parts: list[bytes] = []
    for path, new in changes.items():
        old = before.get(path)
        if old is not None and new is not None and (old.mode == LINK) != (new.mode == LINK):
            parts += [*_change(path, old, None, whole), *_change(path, None, new, whole)]
        else:
            parts += _change(path, old, new, whole)
    return b"".join(parts)


def _change(path: str, old: Blob | None, new: Blob | None, whole: bool) -> Iterator[bytes]:
    one, other = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    yield b"diff --git %b %b\n" % (one, other)
    mode = ""
    if old is None:
        assert new is not None
        yield f"new file mode {new.mode}\n".encode()
    elif new is None:
        yield f"deleted file mode {old.mode}\n".encode()
    elif old.mode != new.mode:
        yield f"old mode {old.mode}\nnew mode {new.mode}\n".encode()
    else:
        mode = f" {new.mode}"
    first, second = (b"" if each is None else each.data for each in (old, new))
    if first == second and old is not None and new is not None:
        return
    yield f"index {old.digest if old else NO_BLOB}..{new.digest if new else NO_BLOB}{mode}\n".encode()
    if (old and old.binary) or (new and new.binary):
        if whole:
            yield b"GIT binary patch\n" + _literal(second) + _literal(first)
        else:
            yield f"Binary file: {len(first)} bytes before, {len(second)} after\n".encode()
    elif first != second:
        names = (b"/dev/null" if old is None else one, b"/dev/null" if new is None else other)
        for sign, name in zip((b"---", b"+++"), names, strict=True):
            yield sign + b" " + name + (b"\t" if b" " in name else b"") + b"\n"
        yield from _hunks(_lines(first), _lines(second))


_AWKWARD = re.compile(rb'[\x00-\x1f\x7f"\\]')


def _quoted(name: str) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if not _AWKWARD.search(raw):
        return raw
    return b'"' + _AWKWARD.sub(lambda sign: b"\\%03o" % sign[0][0], raw) + b'"'


def _literal(data: bytes) -> bytes:
    """A file as git writes it in a patch: its length, then of what deflate makes of it 52 bytes a line, in base 85."""
    packed = zlib.compress(data)
    lines = [packed[at : at + 52] for at in range(0, len(packed), 52)]
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    text = b"".join(letters[len(line) - 1 : len(line)] + base64.b85encode(line, pad=True) + b"\n" for line in lines)
    return b"literal %d\n%b\n" % (len(data), text)


def _lines(data: bytes) -> list[bytes]:
    return _SPLIT.findall(data)


_SPLIT = re.compile(rb"[^\n]*\n|[^\n]+$")


def _hunks(old: Sequence[bytes], new: Sequence[bytes], context: int = 3) -> Iterator[bytes]:
    for group in Lines(old, new).get_grouped_opcodes(context):
        spans = (group[0][1], group[-1][2]), (group[0][3], group[-1][4])
        yield b"@@ -%b +%b @@\n" % tuple(_span(*span) for span in spans)
        for kind, i, i_end, j, j_end in group:
            same = kind == "equal"
            signed = [(b" " if same else b"-", line) for line in old[i:i_end]]
            signed += [] if same else [(b"+", line) for line in new[j:j_end]]
            for sign, line in signed:
                yield sign + line + (b"" if line.endswith(b"\n") else b"\n\\ No newline at end of file\n")


def _span(start: int, end: int) -> bytes:
    return b"%d,%d" % (start + 1 if end > start else start, end - start)


class Lines(SequenceMatcher[bytes]):
    """Two texts as lines, with the pairs of equal ones that `patience` finds."""

    def __init__(self, old: Sequence[bytes], new: Sequence[bytes]) -> None:
        super().__init__(None, (), ())
        self.a, self.b = old, new

    def get_matching_blocks(self) -> list[Match]:
        blocks: list[Match] = []
        for i, j, size in [*patience(self.a, self.b), (len(self.a), len(self.b), 0)]:
            if blocks and size and (blocks[-1].a + blocks[-1].size, blocks[-1].b + blocks[-1].size) == (i, j):
                blocks[-1] = blocks[-1]._replace(size=blocks[-1].size + size)
            else:
                blocks.append(Match(i, j, size))
        return blocks


def patience(old: Sequence[bytes], new: Sequence[bytes], depth: int = DEPTH) -> Iterator[tuple[int, int, int]]:
    """(place in `old`, place in `new`, length) of equal runs, growing in both. In O(n log n) for n lines."""
    ends = list(zip(old, new, strict=False))
    head = next((n for n, (one, other) in enumerate(ends) if one != other), len(ends))
    rest = list(zip(reversed(old[head:]), reversed(new[head:]), strict=False))
    tail = next((n for n, (one, other) in enumerate(rest) if one != other), len(rest))
    if head:
        yield 0, 0, head
    first, second = old[head : len(old) - tail], new[head : len(new) - tail]
    if first and second:
        yield from ((head + i, head + j, size) for i, j, size in _inner(first, second, depth))
    if tail:
        yield len(old) - tail, len(new) - tail, tail


def _inner(old: Sequence[bytes], new: Sequence[bytes], depth: int) -> Iterator[tuple[int, int, int]]:
    """Of texts that neither begin nor end alike."""
    if len(old) + len(new) <= SMALL:
        yield from (
            block for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks() if block.size
        )
        return
    anchors = _anchors(old, new) if depth else []
    i = j = 0
    for a, b in [*anchors, (len(old), len(new))] if anchors else []:
        for x, y, size in patience(old[i:a], new[j:b], depth - 1):
            yield i + x, j + y, size
        if a < len(old):
            yield a, b, 1
        i, j = a + 1, b + 1


def _anchors(old: Sequence[bytes], new: Sequence[bytes]) -> list[tuple[int, int]]:
    """The longest chain, growing in both, of lines that stand in each text just once (patience sorting)."""
    counts, others = Counter(old), Counter(new)
    places = {line: j for j, line in enumerate(new) if others[line] == 1}
    pairs = [(i, places[line]) for i, line in enumerate(old) if counts[line] == 1 and line in places]
    tops: list[int] = []
    piles: list[int] = []  # of each pile, which pair is on top
    below: list[int] = []
    for number, (_, j) in enumerate(pairs):
        pile = bisect_left(tops, j)
        below.append(piles[pile - 1] if pile else -1)
        tops[pile : pile + 1], piles[pile : pile + 1] = [j], [number]
    chain: list[tuple[int, int]] = []
    at = piles[-1] if piles else -1
    while at >= 0:
        chain.append(pairs[at])
        at = below[at]
    return chain[::-1]
