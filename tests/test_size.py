"""How large the package is: a ratchet with slack for a contribution, lowered after every clean-up."""

from __future__ import annotations

import ast
import io
import tokenize

from tests.test_imports import PACKAGE, imported, modules

SIZES = {"package": 47_704, "rl": 9_654}
"""Code lines of the package, and of what `trainer/rl.py` imports, as last recorded."""
SLACK = 1.02
"""What a contribution may add before the record has to be looked at again."""
LIMITS = {"file": 500, "function": 67}
"""Code lines of a file; lines of a function."""

ADVICE = """
Code lines over the recorded size and {slack:.0%} of slack. First look for what the change makes superfluous, and for a
library that does it. If the lines are worth their keep, record the new size in tests/test_size.py, in a commit that says
what they bring.
"""


def code_lines(source: str) -> int:
    """Return the number of lines that hold code: no blank lines, comments or docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring_lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines)


def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in modules().items()}


def rl_graph() -> set[str]:
    """Return the modules that `trainer/rl.py` imports, directly or not."""
    known = modules()
    reached: set[str] = set()
    todo = [f"{PACKAGE}.trainer.rl"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imported(name, known[name], set(known))
    return reached


def test_package_grows_only_within_its_slack() -> None:
    lines = {name: code_lines(text) for name, text in sources().items()}
    sizes = {"package": sum(lines.values()), "rl": sum(lines[name] for name in rl_graph())}
    over = {name: f"{size}, recorded {SIZES[name]}" for name, size in sizes.items() if size > SIZES[name] * SLACK}
    assert over == {}, ADVICE.format(slack=SLACK - 1)


def test_files_and_functions_can_be_read_in_one_sitting() -> None:
    files = {name: size for name, text in sources().items() if (size := code_lines(text)) > LIMITS["file"]}
    assert files == {}, f"a file has at most {LIMITS['file']} code lines: split it where an idea ends"
    functions = {
        f"{name}.{node.name}": length
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > LIMITS["function"]
    }
    assert functions == {}, f"a function has at most {LIMITS['function']} lines: split it where an idea ends"
