"""A file as chunks: a function, a method, the head of a class, what stands between them; plain windows where no grammar reads it.

Chunks of a file do not overlap. Imports alone are no chunk, and a lone constant belongs to the definition after it: both crowded
the top of the results when each was one. Files come from anywhere: nothing is executed, sizes are bounded, and a text that its
grammar can make nothing of is cut into windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tree_sitter import Node

from composer_nb.harness.search.languages import SYNTAX, Syntax, language_of, parser
from composer_nb.harness.search.terms import weigh

How = Literal["parsed", "plain", "no_grammar", "unparsable"]
"""How a file was cut: by its grammar; into windows because it has none, or it is not installed, or it found no sense."""

LONGEST_FILE = 1 << 20
"""Bytes. Longer ones are data or generated, and are not indexed."""
_LONG_LINE = 400
"""Characters a line on average, from which on a text is data or minified."""
_FEW = 2
"""Lines between definitions that are too few for a chunk of their own."""
_WINDOW, _LONGEST_CHUNK = 40, 100
"""Lines of a plain window, and from which on a definition is cut into windows."""
_MOST_NODES = 20_000
"""Siblings in a syntax tree: more means a table or an attack."""
_NAME, _PATH, _COMMENT = 3.0, 1.0, 1.0
"""Weights of a chunk's qualified name, of its path, and of its comment or docstring once more, beside 1 for its text."""
_IMPORT = re.compile("import|include|use_declaration|package")
"""In the names of nodes."""
_REMARK = ('"', "'", 'r"', "#", "//", "/*")
"""What the first line of a file begins with if it is a docstring or a comment."""
_DOCSTRING = re.compile(r'"""(.*?)"""' + r"|'''(.*?)'''" + r"|^\s*(?:#|//+!?|\*)(.*)$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Lines of one chunk, from 1, both ends included."""

    first: int
    last: int
    name: str = ""
    """Qualified by what holds it: `Reader.close`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileChunks:
    """What the index keeps of a file: C chunks, and the N terms of all of them in one row."""

    digest: bytes
    """Of the content."""
    spans: NDArray[np.int32]
    """[C, 2]: first and last line."""
    counts: NDArray[np.int32]
    """[C]: how many of the terms are whose."""
    terms: NDArray[np.uint64]
    """[N]"""
    weights: NDArray[np.float32]
    """[N]"""
    how: How


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def unfit(data: bytes) -> str | None:
    """Why a file is not indexed: `empty`, `too_large`, `binary`, `minified`; None if it is."""
    if not data:
        return "empty"
    if len(data) > LONGEST_FILE:
        return "too_large"
    if b"\0" in data:
        return "binary"
    if len(data) > 20_000 and len(data) > _LONG_LINE * (data.count(b"\n") + 1):
        return "minified"
    return None


def chunk_file(path: str, data: bytes) -> FileChunks:
    """The chunks of a file that is fit."""
    lines = text_lines(data)
    spans, how = cut(path, data, lines)
    rows = [_weights(path, span, lines) for span in spans]
    counts = np.array([len(row) for row in rows], np.int32)
    size = int(counts.sum())
    return FileChunks(
        digest=digest(data),
        spans=np.array([(span.first, span.last) for span in spans], np.int32).reshape(-1, 2),
        counts=counts,
        terms=np.fromiter((term for row in rows for term in row), np.uint64, size),
        weights=np.fromiter((weight for row in rows for weight in row.values()), np.float32, size),
        how=how,
    )


def text_lines(data: bytes) -> list[str]:
    """Lines as grammars count them: only a line feed ends one."""
    return data.decode(errors="replace").split("\n")


def _weights(path: str, span: Span, lines: Sequence[str]) -> dict[int, float]:
    text = "\n".join(lines[span.first - 1 : span.last])
    comment = " ".join(part for found in _DOCSTRING.findall(text) for part in found)
    return weigh([(text, 1.0), (span.name, _NAME), (path.removesuffix(".py"), _PATH), (comment, _COMMENT)])


def cut(path: str, data: bytes, lines: Sequence[str]) -> tuple[list[Span], How]:
    """The chunks of a file in order, and how they were found."""
    language = language_of(path)
    how: How = "plain"
    if language is not None:
        how = "no_grammar"
        if reader := parser(language):
            how = "unparsable"
            root = reader.parse(data).root_node
            imports: set[int] = set()
            found = sorted(_definitions(root, SYNTAX[language], imports), key=lambda span: (span.first, -span.last))
            if found or not root.has_error:
                return list(_chunks(found, lines, imports)), "parsed"
    return list(_windows(Span(first=1, last=len(lines)), lines, _WINDOW)), how


def _definitions(root: Node, syntax: Syntax, imports: set[int]) -> Iterator[Span]:
    """Spans of definitions and, around theirs, of holders; a definition inside a function belongs to it.

    Lines of imports are added to `imports`.
    """
    waiting: list[tuple[Node, str, int | None]] = [(root, "", None)]
    while waiting:
        parent, holder, begun = waiting.pop()
        if parent.child_count > _MOST_NODES:
            continue
        above: int | None = None  # where the comments directly above the next child begin
        ended = -1
        for child in parent.children:
            kind, first, last = child.type, child.start_point.row + 1, child.end_point.row + 1
            if kind in syntax.comment:
                above = above if above is not None and first <= ended + 1 else first
                ended = last
                continue
            start = above if above is not None and first <= ended + 1 else first
            start = begun if begun is not None else start
            above = None
            if kind in syntax.whole or kind in syntax.holders:
                name = f"{holder}.{_name(child)}".strip(".")
                yield Span(first=start, last=last, name=name)
                if kind in syntax.holders:
                    waiting.append((child, name, None))
            elif kind in syntax.around:
                one = child.named_child_count <= 8 and kind in ("decorated_definition", "export_statement")
                waiting.append((child, holder, start if one else None))
            elif _IMPORT.search(kind):
                imports.update(range(first, last + 1))


def _name(node: Node) -> str:
    """What a definition is called; empty where its node does not say."""
    for _ in range(8):  # C nests declarators
        if node.child_count == 0:
            return (node.text or b"").decode(errors="replace")[:200]
        if node.type in ("impl_item", "generic_type"):
            inner = node.child_by_field_name("type")
        else:
            inner = node.child_by_field_name("name") or node.child_by_field_name("declarator")
        if inner is None:
            inner = next((child for child in node.named_children[:4] if child.type.endswith(("tor", "_spec"))), None)
        if inner is None:
            break
        node = inner
    return ""


def _chunks(found: Sequence[Span], lines: Sequence[str], imports: set[int]) -> Iterator[Span]:
    """Every line goes to the innermost definition around it; what is left of holders and of the file are chunks if they say
    something."""
    owner = np.zeros(len(lines) + 2, np.int32)
    for number, span in enumerate(found, 1):  # inner ones come after those around them
        owner[span.first : span.last + 1] = number
    holders = {number for number, span in enumerate(found, 1) if (owner[span.first : span.last + 1] != number).any()}
    ends = np.flatnonzero(np.diff(owner[1:-1])) + 1
    runs = [(int(a) + 1, int(b)) for a, b in zip([0, *ends], [*ends, len(lines)], strict=True)]
    carried: int | None = None
    for first, last in runs:
        number = int(owner[first])
        span = found[number - 1] if number else Span(first=1, last=len(lines))
        if number and number not in holders:
            yield from _windows(Span(first=carried or first, last=last, name=span.name), lines, _LONGEST_CHUNK)
            carried = None
            continue
        said = [n for n in range(first, last + 1) if n not in imports and re.search(r"\w", lines[n - 1])]
        head = first == span.first and (bool(number) or (bool(said) and lines[0].startswith(_REMARK)))
        if head or len(said) > _FEW or (said and not found):
            yield from _windows(Span(first=carried or first, last=last, name=span.name), lines, _LONGEST_CHUNK)
            carried = None
        else:
            carried = (carried or said[0]) if said else None


def _windows(span: Span, lines: Sequence[str], longest: int) -> Iterator[Span]:
    """A span without blank ends, in windows of `_WINDOW` lines if it has more than `longest`."""
    first, last = span.first, span.last
    while first <= last and not lines[first - 1].strip():
        first += 1
    while last >= first and not lines[last - 1].strip():
        last -= 1
    size = _WINDOW if last - first >= longest else max(1, last - first + 1)
    for start in range(first, last + 1, size):
        yield Span(first=start, last=min(start + size - 1, last), name=span.name)
