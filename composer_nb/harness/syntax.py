"""Parse Python source of others: within a limit of size, without its byte order mark, and one thread at a time.

Before Python 3.13, two threads that make syntax trees side by side can fail with SystemError, "AST constructor recursion depth
mismatch" (CPython issue 106905). Whoever wrote a text must not choose how much memory its tree takes: `a\\n`, repeated to 0.5
MiB, would take 467 MiB.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# Maximum tokens of a text that is parsed. A token takes up to 0.9 KiB of a syntax tree, and 3 µs. Words of strings and
# comments count too. Five of the 1,141 longest modules of a large environment have more.
MAX_TOKENS = 200_000
# Maximum depth of a syntax tree. `ast.unparse` and visitors recurse, and fail at about twice this depth.
MAX_DEPTH = 200
_MARK = "\ufeff"
_ALONE = threading.Lock()
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


class TextFormat(NamedTuple):
    """Byte order mark and line ends of a file. Editors on Windows write both.

    Attributes:
        mark: A byte order mark, which Python accepts in a file, but not in a string.
        newline: The line end, if all lines have the same; a text with several keeps them in `plain`.
    """

    mark: str = ""
    newline: str = "\n"

    @classmethod
    def of(cls, text: str) -> TextFormat:
        same = "\r\n" in text and text.count("\r\n") == text.count("\n")
        return cls(_MARK if text.startswith(_MARK) else "", "\r\n" if same else "\n")

    def plain(self, text: str) -> str:
        """Return a text of this layout without its mark, and with plain line ends."""
        return text.removeprefix(self.mark).replace(self.newline, "\n")

    def restore(self, plain: str) -> str:
        """Return a plain text in this layout."""
        return self.mark + plain.replace("\n", self.newline)


class TooLarge(ValueError):
    """A text of more tokens than may be parsed."""


def count_tokens(text: str, limit: int = MAX_TOKENS) -> int:
    """Return an upper bound of a text's tokens, in linear time. Raises TooLarge above the limit."""
    count = sum(1 for _ in _TOKEN.finditer(text)) if len(text) <= 16 * limit else len(text)
    if count > limit:
        raise TooLarge(f"not parsed: {len(text)} characters with more than {limit} tokens")
    return count


def _source(text: str) -> str:
    """Return a text that may be parsed. Raises TooLarge."""
    if len(text) > MAX_TOKENS:
        count_tokens(text)
    return text.removeprefix(_MARK)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the parser's lock. Raises ValueError for a text that is nested too deeply."""
    with _ALONE:
        try:
            yield
        except (MemoryError, RecursionError):
            raise ValueError("nested too deeply") from None


def parse(text: str) -> ast.Module:
    """Return a syntax tree like `ast.parse`. Raises SyntaxError, and ValueError: TooLarge, or if it is nested too deeply."""
    with _alone():
        tree = ast.parse(_source(text))
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise ValueError("nested too deeply")


def nodes_of(text: str) -> list[ast.AST]:
    """Return the nodes of a module; none if it cannot be parsed."""
    try:
        return list(ast.walk(parse(text)))
    except (SyntaxError, ValueError):
        return []


def literal_eval(text: str | ast.expr) -> Any:
    """Return a value like `ast.literal_eval`. Raises what `parse` does."""
    with _alone():
        return ast.literal_eval(_source(text) if isinstance(text, str) else text)


def lints(text: str) -> list[str]:
    """Return what a linter finds in a module: names that are imported or assigned and never used, and names that do not exist,
    each with its outermost function or class. Code that cannot be parsed is one finding."""
    try:
        parse(text)  # refuses what is nested too deeply for `_scopes`
        with _alone():
            module = symtable.symtable(_source(text), "", "exec")
    except (SyntaxError, ValueError) as error:
        return [f"not Python: {error}"]
    inner = [(f" in {child.get_name()}", nested) for child in module.get_children() for nested in _scopes(child)]
    scopes = [("", module), *inner]
    names = {*vars(builtins), "__name__", "__file__", "__doc__"}
    for where, scope in scopes:
        names |= {s.get_name() for s in scope.get_symbols() if s.is_declared_global() or (not where and s.is_local())}
    referenced = {
        scope.get_id(): {s.get_name() for s in scope.get_symbols() if s.is_referenced()} for _, scope in scopes
    }
    problems = []
    for where, scope in scopes:
        used = set[str]().union(*(referenced[nested.get_id()] for nested in _scopes(scope)))
        local = scope.get_type() == "function"
        for symbol in scope.get_symbols():
            name = symbol.get_name()
            if name not in used and (symbol.is_imported() or (local and symbol.is_assigned() and symbol.is_local())):
                problems.append(f"unused {name}{where}")
            if symbol.is_referenced() and symbol.is_global() and name not in names:
                problems.append(f"no name {name}{where}")
    return problems


def _scopes(scope: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield scope
    for inner in scope.get_children():
        yield from _scopes(inner)
