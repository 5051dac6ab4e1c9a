"""How large the package is and how it reads: a ratchet with slack for a contribution, lowered after every clean-up."""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

from tests.test_imports import PACKAGE, ROOT, imported, modules

SIZES = {"package": 49_560, "core": 32_450, "rl": 5_830, "tests": 32_000}
"""Code lines as last recorded; `core` is kernels, harness and trainer, `rl` what `trainer/rl.py` imports."""
SLACK = 1.02
"""What a contribution may add before the record has to be looked at again."""
LIMITS = {"file": 500, "function": 67}
"""Code lines of a file; lines of a function."""
VAGUE = frozenset(
    "found given told made held kept seen said asked wanted known done taken shown drawn heard meant".split()
    + "thing things place each one own".split()
)
"""Names that say what happened to a thing instead of what it is."""
VAGUE_NAMES = 7
"""Variables and parameters with such names, as last counted."""

ADVICE = """
Code lines over the recorded size and {slack:.0%} of slack. First look for what the change makes superfluous, and for a
library that does it. If the lines are worth their keep, record the new size in tests/test_size.py, in a commit that says
what they bring.
"""


@cache
def code_lines(source: str) -> int:
    """Return the number of lines that hold code: no blank lines, comments or docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring_lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines)


@cache
def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in modules().items()}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return all nodes of syntax in the package, each with its module."""
    return [(name, node) for name, text in sources().items() for node in ast.walk(ast.parse(text))]


def rl_graph() -> set[str]:
    """Return the modules that `trainer/rl.py` imports, directly or not."""
    paths = modules()
    reached: set[str] = set()
    todo = [f"{PACKAGE}.trainer.rl"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imported(name, paths[name], set(paths))
    return reached


def test_package_and_tests_grow_only_within_their_slack() -> None:
    lines = {name: code_lines(text) for name, text in sources().items()}
    core = tuple(f"{PACKAGE}.{layer}" for layer in ("kernels", "harness", "trainer"))
    sizes = {
        "package": sum(lines.values()),
        "core": sum(size for name, size in lines.items() if name.startswith(core)),
        "rl": sum(lines[name] for name in rl_graph()),
        "tests": sum(code_lines(path.read_text(encoding="utf-8")) for path in Path(ROOT / "tests").rglob("*.py")),
    }
    over = {name: f"{size}, recorded {SIZES[name]}" for name, size in sizes.items() if size > SIZES[name] * SLACK}
    assert over == {}, ADVICE.format(slack=SLACK - 1)


def test_files_and_functions_can_be_read_in_one_sitting() -> None:
    files = {name: size for name, text in sources().items() if (size := code_lines(text)) > LIMITS["file"]}
    assert files == {}, f"a file has at most {LIMITS['file']} code lines: split it where an idea ends"
    functions = {
        f"{name}.{node.name}": length
        for name, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > LIMITS["function"]
    }
    assert functions == {}, f"a function has at most {LIMITS['function']} lines: split it where an idea ends"


def test_class_name_stands_for_one_thing() -> None:
    homes = Counter(node.name.lstrip("_") for _, node in nodes() if isinstance(node, ast.ClassDef))
    assert [name for name, count in homes.items() if count > 1] == []


def test_variables_are_named_after_what_they_hold() -> None:
    stored = [(name, n) for name, n in nodes() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    vague = [f"{name}:{node.lineno} {node.id}" for name, node in stored if node.id in VAGUE]
    vague += [
        f"{name}:{node.lineno} {node.arg}" for name, node in nodes() if isinstance(node, ast.arg) and node.arg in VAGUE
    ]
    assert len(vague) <= VAGUE_NAMES, "\n".join(vague)
