"""How large the package is: a ratchet, which goes down with every clean-up and never up."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter

from tests.test_imports import PACKAGE, imported, modules

LIMITS = {"package": 45_079, "rl": 9_082, "file": 400, "function": 67, "folder": 14}
"""Code lines of the package, of what `trainer/rl.py` imports, of a file; lines of a function; files in a folder."""


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            told |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - told)


def test_nothing_grows() -> None:
    known = modules()
    texts = {name: path.read_text(encoding="utf-8") for name, path in known.items()}
    lines = {name: code_lines(text) for name, text in texts.items()}
    reached: set[str] = set()
    todo = [f"{PACKAGE}.trainer.rl"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imported(name, known[name], set(known))
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    folders = Counter(path.parent for path in known.values() if path.name != "__init__.py")
    found = {
        "package": sum(lines.values()),
        "rl": sum(lines[name] for name in reached),
        "file": max(lines.values()),
        "function": max(functions),
        "folder": max(folders.values()),
    }
    assert {name: size for name, size in found.items() if size > LIMITS[name]} == {}
