"""Questions whose answers are known, mined from a Python repository: to measure search by, and to train its embedding on.

Three kinds, each by a rule:
* `docstring`: the first sentence of a function's docstring asks for the function. It must have four words, be said of no other
  function here, and the function must do something.
* `test`: a test's words, without the function's name, ask for the function that it calls. Exactly one function here has that
  name, and the test's name speaks of it.
* `bug`: an instruction, as a commit might have it, asks for the function in which a bug could be planted
  (`tour/repairs.py`). It names the file and the kind of bug, and says what the docstring says after its first sentence.

All docstrings of functions that are asked for are blanked, so that no question is its own answer; line numbers stay.
Mining parses with `ast` and is for repositories that one trusts not to break a parser.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from composer_nb.harness.search.embedding import split, words
from composer_nb.tour.repairs import bugs

_BUGS = {
    "compare": "compares the wrong way",
    "operator": "calculates with the wrong operator",
    "swap": "has its operands the wrong way round",
    "augmented": "adds up wrongly",
    "constant": "is off by one",
    "aggregate": "aggregates wrongly",
    "name": "uses the wrong variable",
}
_SHORTEST = 4
"""Words of a question."""
_LONGEST_MUTATED = 40
"""Lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, and the lines that answer it."""

    text: str
    path: str
    first: int
    last: int
    """Included."""
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mined:
    """A repository without the docstrings that would give the answers away, and its questions."""

    files: Mapping[str, bytes]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Function:
    path: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def first(self) -> int:
        return min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])

    @property
    def last(self) -> int:
        return self.node.end_lineno or self.node.lineno


def read_repository(root: Path, selects: Callable[[Path], bool] = lambda path: True) -> dict[str, bytes]:
    """Return the files of a folder whose relative path `selects` accepts; links are left out."""
    inside = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.as_posix(): (root / path).read_bytes() for path in inside if selects(path)}


def is_test_file(path: str) -> bool:
    return any(part.startswith(("test", "conftest")) or part.endswith("_test.py") for part in path.split("/"))


def mine(files: Mapping[str, bytes], seed: int = 0) -> Mined:
    """Return all questions of a repository. Files that Python cannot parse have none."""
    functions = [
        function for path, data in sorted(files.items()) if path.endswith(".py") for function in _functions(path, data)
    ]
    plain = [function for function in functions if not is_test_file(function.path) and _does_something(function.node)]
    sentence_counts = Counter(sentence for function in plain if (sentence := _sentences(function.node)[0]))
    rng = Random(seed)
    questions: list[Question] = []
    blank: dict[str, list[ast.stmt]] = {}
    for function in plain:
        first, remainder = _sentences(function.node)
        if not first:
            continue
        blank.setdefault(function.path, []).append(function.node.body[0])
        if sentence_counts[first] == 1 and len(first.split()) >= _SHORTEST:
            questions.append(_question(first, function, "docstring"))
            if len(remainder.split()) >= _SHORTEST and (planted := _planted(function.node, rng)):
                questions.append(_question(f"{function.path}: {_BUGS[planted]}. {remainder}", function, "bug"))
    questions += _tests(functions, plain)
    return Mined(
        files={path: _blanked(data, blank.get(path, [])) for path, data in files.items()}, questions=tuple(questions)
    )


def _question(text: str, function: _Function, kind: str) -> Question:
    return Question(text=text, path=function.path, first=function.first, last=function.last, kind=kind)


def _functions(path: str, data: bytes) -> Iterator[_Function]:
    """Functions and methods of a module, not those inside other functions."""
    try:
        waiting: list[ast.stmt] = ast.parse(data).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _Function(path, node)
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
            waiting = node.body + waiting


def _does_something(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    statements = [
        statement
        for statement in node.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    return not all(isinstance(statement, ast.Pass | ast.Raise) for statement in statements)


def _sentences(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str]:
    """Return the first sentence of the docstring, and 300 characters after it; empty if its lines hold other code."""
    first = node.body[0]
    if node.lineno == first.lineno or (len(node.body) > 1 and first.end_lineno == node.body[1].lineno):
        return "", ""
    text = re.sub(r"[ \t]+", " ", ast.get_docstring(node) or "").strip()
    match = re.match(r"(.+?)(?:\.(?=\s)|\.\Z|\n\s*\n|\Z)", text, re.DOTALL)
    if match is None:
        return "", ""
    return " ".join(match[1].split()), " ".join(text[match.end() :].split())[:300]


def _planted(node: ast.FunctionDef | ast.AsyncFunctionDef, rng: Random) -> str | None:
    """The kind of a bug that can be planted in the function, if it is short enough to look for one quickly."""
    if (node.end_lineno or 0) - node.lineno > _LONGEST_MUTATED:
        return None
    try:
        planted = bugs(ast.unparse(node), rng)
    except (ValueError, IndexError, RecursionError):  # of sites that another kind of program does not have
        return None
    return planted[0] if planted else None


def _terms(name: str) -> set[str]:
    return {term for word in words(name) for term in split(word)}


def _tests(functions: list[_Function], plain: list[_Function]) -> Iterator[Question]:
    names = Counter(function.node.name for function in functions)
    only = {function.node.name: function for function in plain if names[function.node.name] == 1}
    for function in functions:
        if not (is_test_file(function.path) and function.node.name.startswith("test")):
            continue
        spoken = _terms(function.node.name)
        calls = [node.func for node in ast.walk(function.node) if isinstance(node, ast.Call)]
        called = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in calls}
        for name in sorted(called & only.keys()):
            if _terms(name) & spoken:
                body = re.sub(rf"\b{re.escape(name)}\b", " ", ast.unparse(function.node))
                yield _question(f"{function.node.name.replace('_', ' ')} {body[:600]}", only[name], "test")


def _blanked(data: bytes, statements: list[ast.stmt]) -> bytes:
    """Return a file without these docstrings; their lines stay, empty."""
    if not statements:
        return data
    lines = data.split(b"\n")
    for statement in statements:
        for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            lines[number - 1] = b""
    return b"\n".join(lines)
