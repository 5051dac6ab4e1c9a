"""Parse Python source, one thread at a time: before Python 3.13, two threads that make syntax trees side by side can fail with
SystemError, "AST constructor recursion depth mismatch" (CPython issue 106905)."""

from __future__ import annotations

import ast
import builtins
import symtable
import threading
from collections.abc import Iterator
from typing import Any

_ALONE = threading.Lock()


def parse(text: str) -> ast.Module:
    """Return a syntax tree like `ast.parse`. Raises SyntaxError, ValueError, MemoryError, RecursionError."""
    with _ALONE:
        return ast.parse(text)


def nodes_of(text: str) -> list[ast.AST]:
    """Return the nodes of a module; none if it cannot be parsed."""
    try:
        return list(ast.walk(parse(text)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []


def literal_eval(text: str | ast.expr) -> Any:
    """Return a value like `ast.literal_eval`. Raises what `parse` does."""
    with _ALONE:
        return ast.literal_eval(text)


def lints(text: str) -> list[str]:
    """Return what a linter finds in a module: names that are imported or assigned and never used, and names that do not exist,
    each with its outermost function or class. Code that cannot be parsed is one finding."""
    try:
        with _ALONE:
            module = symtable.symtable(text, "", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return [f"not Python: {error}"]
    inner = [(f" in {each.get_name()}", one) for each in module.get_children() for one in _scopes(each)]
    scopes = [("", module), *inner]
    known = {*vars(builtins), "__name__", "__file__", "__doc__"}
    for place, scope in scopes:
        known |= {s.get_name() for s in scope.get_symbols() if s.is_declared_global() or (not place and s.is_local())}
    found = []
    for place, scope in scopes:
        used = {symbol.get_name() for one in _scopes(scope) for symbol in one.get_symbols() if symbol.is_referenced()}
        local = scope.get_type() == "function"
        for symbol in scope.get_symbols():
            name = symbol.get_name()
            if name not in used and (symbol.is_imported() or (local and symbol.is_assigned() and symbol.is_local())):
                found.append(f"unused {name}{place}")
            if symbol.is_referenced() and symbol.is_global() and name not in known:
                found.append(f"no name {name}{place}")
    return found


def _scopes(scope: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield scope
    for inner in scope.get_children():
        yield from _scopes(inner)
