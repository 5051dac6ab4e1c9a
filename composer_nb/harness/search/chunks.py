"""Cut files into chunks: a function, a method, the head of a class, or the code between them.

Chunks of a file do not overlap. Imports alone are no chunk, and a lone constant belongs to the definition after it: both crowded
the top of the results when each was a chunk. Grammars are those of the tree-sitter project: Python's is always installed, the
others come with the extra `grammars`. A file without an installed grammar, or one that its grammar cannot parse, is cut into
windows of lines. Files may be hostile: nothing is executed, and sizes are bounded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tree_sitter import Language, Node, Parser

from composer_nb.harness.search.embedding import weigh

How = Literal["parsed", "plain", "no_grammar", "unparsable"]
"""Way in which a file was cut: by its grammar, or into windows because no grammar exists, it is not installed, or it fails."""

LONGEST_FILE = 1 << 20
"""Maximum bytes of an indexed file; longer files are data or generated."""
_LONG_LINE = 400
"""Average characters per line above which a file counts as minified."""
_FEW = 2
"""Maximum lines between definitions that are not a chunk of their own."""
_WINDOW, _LONGEST_CHUNK = 40, 100
"""Lines of a window, and the longest definition that is not cut into windows."""
_MOST_NODES = 20_000
"""Maximum siblings in a syntax tree; more means a table or an attack."""
_NAME, _PATH, _COMMENT = 3.0, 1.0, 1.0
"""Weights of a chunk's qualified name, of its path, and of its comments and docstring (again), beside 1 for its text."""
_IMPORT = re.compile("import|include|use_declaration|package")
"""Node types of imports."""
_REMARK = ('"', "'", 'r"', "#", "//", "/*")
"""Prefixes of a first line that is a docstring or a comment."""
_DOCSTRING = re.compile(r'"""(.*?)"""' + r"|'''(.*?)'''" + r"|^\s*(?:#|//+!?|\*)(.*)$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Syntax:
    """A grammar, and the types of its nodes that matter, separated by blanks."""

    module: str
    whole: str
    """Definitions that are one chunk: functions, methods, types."""
    holders: str = ""
    """Definitions that contain others, as a class does. Their heads are chunks of their own."""
    around: str = ""
    """Nodes that may stand between a holder and its definitions."""
    comment: str = "comment"
    function: str = "language"


_JS = "function_declaration generator_function_declaration method_definition lexical_declaration variable_declaration"
_IN_JS = "export_statement statement_block class_body expression_statement internal_module"
_C = "function_definition struct_specifier enum_specifier type_definition preproc_function_def"
_IN_C = "preproc_ifdef preproc_if preproc_else linkage_specification declaration_list field_declaration_list"
SYNTAX: Mapping[str, Syntax] = {
    "py pyi": Syntax(
        "tree_sitter_python",
        "function_definition",
        "class_definition",
        "decorated_definition block if_statement elif_clause else_clause try_statement except_clause finally_clause "
        "with_statement",
    ),
    "js jsx mjs cjs": Syntax("tree_sitter_javascript", _JS, "class_declaration", _IN_JS),
    "ts tsx mts cts": Syntax(
        "tree_sitter_typescript",
        _JS + " interface_declaration type_alias_declaration enum_declaration",
        "class_declaration abstract_class_declaration",
        _IN_JS,
        function="language_tsx",
    ),
    "go": Syntax("tree_sitter_go", "function_declaration method_declaration type_declaration"),
    "rs": Syntax(
        "tree_sitter_rust",
        "function_item struct_item enum_item macro_definition function_signature_item",
        "impl_item trait_item mod_item",
        "declaration_list",
        "line_comment block_comment attribute_item",
    ),
    "java": Syntax(
        "tree_sitter_java",
        "method_declaration constructor_declaration",
        "class_declaration interface_declaration enum_declaration record_declaration",
        "class_body interface_body enum_body enum_body_declarations",
        "line_comment block_comment",
    ),
    "c h": Syntax("tree_sitter_c", _C, around=_IN_C),
    "cc cpp cxx hh hpp hxx": Syntax(
        "tree_sitter_cpp", _C, "class_specifier namespace_definition", _IN_C + " template_declaration"
    ),
}
"""File name extensions of a language -> its syntax."""
_BY_EXTENSION = {extension: syntax for extensions, syntax in SYNTAX.items() for extension in extensions.split()}


@cache
def parser(syntax: Syntax) -> Parser | None:
    """Return a parser, or None if its grammar is not installed."""
    try:
        grammar = importlib.import_module(syntax.module)
    except ModuleNotFoundError:
        return None
    return Parser(Language(getattr(grammar, syntax.function)()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Lines of one chunk, from 1, both ends included."""

    first: int
    last: int
    name: str = ""
    """Qualified name, such as `Reader.close`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileChunks:
    """The C chunks of a file, and the N terms of all of them in one row."""

    spans: NDArray[np.int32]
    """[C, 2]: first and last line."""
    counts: NDArray[np.int32]
    """[C]: number of terms of each chunk."""
    terms: NDArray[np.uint64]
    """[N]"""
    weights: NDArray[np.float32]
    """[N]"""
    how: How


def unfit(data: bytes) -> str | None:
    """Return why a file is not indexed (`empty`, `too_large`, `binary`, `minified`), or None if it is."""
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
    """Cut a file that is not `unfit`."""
    lines = text_lines(data)
    spans, how = cut(path, data, lines)
    rows = [_weights(path, span, lines) for span in spans]
    counts = np.array([len(row) for row in rows], np.int32)
    size = int(counts.sum())
    return FileChunks(
        spans=np.array([(span.first, span.last) for span in spans], np.int32).reshape(-1, 2),
        counts=counts,
        terms=np.fromiter((term for row in rows for term in row), np.uint64, size),
        weights=np.fromiter((weight for row in rows for weight in row.values()), np.float32, size),
        how=how,
    )


def text_lines(data: bytes) -> list[str]:
    """Split a text into lines as grammars do: only a line feed ends one."""
    return data.decode(errors="replace").split("\n")


def _weights(path: str, span: Span, lines: Sequence[str]) -> dict[int, float]:
    text = "\n".join(lines[span.first - 1 : span.last])
    comment = " ".join(part for found in _DOCSTRING.findall(text) for part in found)
    return weigh([(text, 1.0), (span.name, _NAME), (path.removesuffix(".py"), _PATH), (comment, _COMMENT)])


def cut(path: str, data: bytes, lines: Sequence[str]) -> tuple[list[Span], How]:
    """Return the chunks of a file in order, and how they were found."""
    syntax = _BY_EXTENSION.get(path.rpartition(".")[2]) if "." in path else None
    reader = parser(syntax) if syntax else None
    if syntax and reader:
        root = reader.parse(data).root_node
        imports: set[int] = set()
        found = sorted(_definitions(root, syntax, imports), key=lambda span: (span.first, -span.last))
        if found or not root.has_error:
            return list(_chunks(found, lines, imports)), "parsed"
    how: How = "plain" if syntax is None else "no_grammar" if reader is None else "unparsable"
    return list(_windows(Span(first=1, last=len(lines)), lines, _WINDOW)), how


def _definitions(root: Node, syntax: Syntax, imports: set[int]) -> Iterator[Span]:
    """Yield the spans of definitions, holders included. A definition inside a function belongs to that function.

    Adds the lines of imports to `imports`.
    """
    whole, holders, around = (set(names.split()) for names in (syntax.whole, syntax.holders, syntax.around))
    comment = set(syntax.comment.split())
    waiting: list[tuple[Node, str, int | None]] = [(root, "", None)]
    while waiting:
        parent, holder, begun = waiting.pop()
        if parent.child_count > _MOST_NODES:
            continue
        above: int | None = None  # first line of the comments directly above the next child
        ended = -1
        for child in parent.children:
            kind, first, last = child.type, child.start_point.row + 1, child.end_point.row + 1
            if kind in comment:
                above = above if above is not None and first <= ended + 1 else first
                ended = last
                continue
            start = above if above is not None and first <= ended + 1 else first
            start = begun if begun is not None else start
            above = None
            if kind in whole or kind in holders:
                name = f"{holder}.{_name(child)}".strip(".")
                yield Span(first=start, last=last, name=name)
                if kind in holders:
                    waiting.append((child, name, None))
            elif kind in around:
                one = child.named_child_count <= 8 and kind in ("decorated_definition", "export_statement")
                waiting.append((child, holder, start if one else None))
            elif _IMPORT.search(kind):
                imports.update(range(first, last + 1))


def _name(node: Node) -> str:
    """Return the name of a definition, or the empty string if its node has none."""
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
    """Assign every line to the innermost definition around it; the rest of holders and of the file are chunks if they are not
    blank."""
    owner = np.zeros(len(lines) + 2, np.int32)
    for number, span in enumerate(found, 1):  # inner definitions come later
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
    """Yield a span without blank ends, in windows of `_WINDOW` lines if it is longer than `longest`."""
    full = [number for number in range(span.first, span.last + 1) if lines[number - 1].strip()]
    if full:
        size = _WINDOW if full[-1] - full[0] >= longest else full[-1] - full[0] + 1
        for start in range(full[0], full[-1] + 1, size):
            yield Span(first=start, last=min(start + size - 1, full[-1]), name=span.name)
