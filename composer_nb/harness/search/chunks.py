"""Cut files into chunks: a function, a method, the head of a class, or the code between them.

Chunks of a file do not overlap. Imports alone are no chunk, and a lone constant belongs to the definition after it: both crowded
the top of the results when each was a chunk. Python is cut by its grammar of the tree-sitter project, which reads unfinished code
too; any other file, and one that is too large or that the grammar cannot parse, is cut into windows of lines. Files may be
hostile: nothing is executed, and sizes are bounded.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tree_sitter_python
from numpy.typing import NDArray
from tree_sitter import Language, Node, Parser

from composer_nb.harness.search.embedding import weigh
from composer_nb.harness.syntax import MAX_TOKENS, TooLarge, count_tokens

# Maximum bytes of an indexed file; longer files are data or generated.
LONGEST_FILE = 1 << 20
# Average characters per line above which a file counts as minified.
_LONG_LINE = 400
# Maximum lines between definitions that are not a chunk of their own.
_FEW = 2
# Lines of a window, and the longest definition that is not cut into windows.
_WINDOW, _LONGEST_CHUNK = 40, 100
# Maximum siblings in a syntax tree; more means a table or an attack.
_MOST_NODES = 20_000
# Weights of a chunk's qualified name, of its path, and of its comments and docstring (again), beside 1 for its text.
_NAME, _PATH, _COMMENT = 3.0, 1.0, 1.0
_PYTHON = Language(tree_sitter_python.language())
# Types of nodes that may stand between a class or a module and its definitions.
_AROUND = {
    "decorated_definition", "block", "if_statement", "elif_clause", "else_clause", "try_statement", "except_clause",
    "finally_clause", "with_statement",
}  # fmt: skip
# Prefixes of a first line that is a docstring or a comment.
_REMARK = ('"', "'", 'r"', "#", "//", "/*")
_DOCSTRING = re.compile(r'"""(.*?)"""' + r"|'''(.*?)'''" + r"|^\s*(?:#|//+!?|\*)(.*)$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Lines of one chunk, from 1, both ends included.

    Attributes:
        name: Qualified name, such as `Reader.close`.
    """

    first: int
    last: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileChunks:
    """The C chunks of a file, and the N terms of all of them in one row.

    Attributes:
        spans: [C, 2]: first and last line.
        counts: [C]: number of terms of each chunk.
        terms: [N]
        weights: [N]
    """

    spans: NDArray[np.int32]
    counts: NDArray[np.int32]
    terms: NDArray[np.uint64]
    weights: NDArray[np.float32]


def unfit(data: bytes) -> str:
    """Return why a file is not indexed; empty if it is."""
    if not data:
        return "empty"
    if len(data) > LONGEST_FILE:
        return f"more than {LONGEST_FILE >> 20} MiB"
    if b"\0" in data:
        return "no text"
    return "minified" if len(data) > 20_000 and len(data) > _LONG_LINE * (data.count(b"\n") + 1) else ""


def chunk_file(path: str, data: bytes) -> FileChunks:
    """Cut a file that is not `unfit`."""
    lines = text_lines(data)
    spans = cut(path, data, lines)
    chunk_weights = [_weights(path, span, lines) for span in spans]
    counts = np.array([len(row) for row in chunk_weights], np.int32)
    term_count = int(counts.sum())
    return FileChunks(
        spans=np.array([(span.first, span.last) for span in spans], np.int32).reshape(-1, 2),
        counts=counts,
        terms=np.fromiter((term for row in chunk_weights for term in row), np.uint64, term_count),
        weights=np.fromiter((weight for row in chunk_weights for weight in row.values()), np.float32, term_count),
    )


def text_lines(data: bytes) -> list[str]:
    """Split a text into lines as grammars do: only a line feed ends one."""
    return data.decode(errors="replace").split("\n")


def _weights(path: str, span: Span, lines: Sequence[str]) -> dict[int, float]:
    text = "\n".join(lines[span.first - 1 : span.last])
    comment = " ".join(part for groups in _DOCSTRING.findall(text) for part in groups)
    return weigh([(text, 1.0), (span.name, _NAME), (path.removesuffix(".py"), _PATH), (comment, _COMMENT)])


def cut(path: str, data: bytes, lines: Sequence[str]) -> list[Span]:
    """Return the chunks of a file in order."""
    if path.endswith((".py", ".pyi")) and _has_few_tokens(lines):
        root = Parser(_PYTHON).parse(data).root_node
        import_lines: set[int] = set()
        spans = sorted(_definitions(root, import_lines), key=lambda span: (span.first, -span.last))
        if spans or not root.has_error:
            return list(_chunks(spans, lines, import_lines))
    return list(_windows(Span(first=1, last=len(lines)), lines, _WINDOW))


def _has_few_tokens(lines: Sequence[str]) -> bool:
    """Return whether a file is small enough to parse: 1 MiB of `a\\n` would take 330 MiB."""
    try:
        return sum(map(len, lines)) + len(lines) <= MAX_TOKENS or count_tokens("\n".join(lines)) > 0
    except TooLarge:
        return False


def _definitions(root: Node, import_lines: set[int]) -> Iterator[Span]:
    """Yield the span of each function, method and class, with its decorators and the comments directly above it.

    A definition inside a function belongs to that function. Nodes with more than _MOST_NODES children are skipped. The lines of
    imports outside functions are added to `import_lines`.
    """
    pending: list[tuple[Node, str, int | None]] = [(root, "", None)]
    while pending:
        parent, outer_name, decorated_from = pending.pop()
        if parent.child_count > _MOST_NODES:
            continue
        comments_first: int | None = None  # first line of the comments directly above the next child
        comment_last = -1
        for child in parent.children:
            kind, first, last = child.type, child.start_point.row + 1, child.end_point.row + 1
            first_with_comments = comments_first if comments_first is not None and first <= comment_last + 1 else first
            if kind == "comment":
                comments_first, comment_last = first_with_comments, last
                continue
            span_first = first_with_comments if decorated_from is None else decorated_from
            comments_first = None
            if kind in ("function_definition", "class_definition"):
                name = f"{outer_name}.{_name(child)}".strip(".")
                yield Span(first=span_first, last=last, name=name)
                if kind == "class_definition":
                    pending.append((child, name, None))
            elif kind in _AROUND:
                pending.append((child, outer_name, span_first if kind == "decorated_definition" else None))
            elif "import" in kind:
                import_lines.update(range(first, last + 1))


def _name(definition: Node) -> str:
    """Return the name of a definition, or the empty string if its node has none."""
    name = definition.child_by_field_name("name")
    return ((name and name.text) or b"").decode(errors="replace")[:200]


def _chunks(definitions: Sequence[Span], lines: Sequence[str], import_lines: set[int]) -> Iterator[Span]:
    """Assign every line to the innermost definition around it, and yield the chunks in order.

    The lines of a class or of the file around its definitions are chunks if they hold more than imports and _FEW lines; fewer
    lines belong to the definition after them."""
    owner = np.zeros(len(lines) + 2, np.int32)
    for number, span in enumerate(definitions, 1):  # inner definitions come later
        owner[span.first : span.last + 1] = number
    outer = {
        number for number, span in enumerate(definitions, 1) if (owner[span.first : span.last + 1] != number).any()
    }
    run_ends = np.flatnonzero(np.diff(owner[1:-1])) + 1
    runs = [(int(a) + 1, int(b)) for a, b in zip([0, *run_ends], [*run_ends, len(lines)], strict=True)]
    carried_first: int | None = None
    for first, last in runs:
        number = int(owner[first])
        span = definitions[number - 1] if number else Span(first=1, last=len(lines))
        if number and number not in outer:
            yield from _windows(Span(first=carried_first or first, last=last, name=span.name), lines, _LONGEST_CHUNK)
            carried_first = None
            continue
        filled_lines = [n for n in range(first, last + 1) if n not in import_lines and re.search(r"\w", lines[n - 1])]
        is_head = first == span.first and (bool(number) or (bool(filled_lines) and lines[0].startswith(_REMARK)))
        if is_head or len(filled_lines) > _FEW or (filled_lines and not definitions):
            yield from _windows(Span(first=carried_first or first, last=last, name=span.name), lines, _LONGEST_CHUNK)
            carried_first = None
        else:
            carried_first = (carried_first or filled_lines[0]) if filled_lines else None


def _windows(span: Span, lines: Sequence[str], max_lines: int) -> Iterator[Span]:
    """Yield a span without blank ends, in windows of `_WINDOW` lines if it is longer than `max_lines`."""
    filled = [number for number in range(span.first, span.last + 1) if lines[number - 1].strip()]
    if filled:
        size = _WINDOW if filled[-1] - filled[0] >= max_lines else filled[-1] - filled[0] + 1
        for start in range(filled[0], filled[-1] + 1, size):
            yield Span(first=start, last=min(start + size - 1, filled[-1]), name=span.name)
