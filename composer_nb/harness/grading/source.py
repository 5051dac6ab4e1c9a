"""Static analysis of test modules: positions, literals, values that a test knows, and tests that depend on each other.

Reads source; executes nothing. Which tests a change touches is decided by names alone, over all hidden modules, so
rather too many than too few: runs with the change say nothing about a touched test.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from composer_nb.harness import syntax

PLAIN = {"approx", "set", "frozenset", "dict", "list", "tuple", "Decimal", "Fraction", "Path", "date", "datetime"}
"""Constructors of plain data."""
STATEFUL = {"eval", "exec", "getattr", "globals", "input", "iter", "locals", "next", "open", "vars", "id"}
RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Value = str | bytes | bool | int | float | complex | None
Role = tuple[str, int | str, bool]
"""An argument: function name, position or keyword, and whether the literal is inside a list, tuple, dict or set display."""


class ModuleSource:
    """A module's text, with offsets of syntax nodes."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.tree = path, text, syntax.parse(text)
        self.lines = [0]
        for line in text.split("\n"):  # as the parser counts them, once line ends are \n
            self.lines.append(self.lines[-1] + len(line) + 1)

        self.users: dict[str, list[str]] = {}
        """Tables of the module -> the tests that are parametrised by them."""
        self.raised = Counter(
            ast.unparse(each.args[0])
            for each in ast.walk(self.tree)
            if isinstance(each, ast.Call) and each.args and last_name(each.func) in RAISES
        )
        """Exceptions that the module expects, as it writes them."""
        outside = [n for top in self.tree.body if not isinstance(top, Function | ast.ClassDef) for n in ast.walk(top)]
        self.known = _grown({"pytest", "math"} | PLAIN | set(dir(builtins)) - STATEFUL, outside)
        """Names of the module whose values cannot depend on the code under test."""
        self.loads = Counter(each.id for each in ast.walk(self.tree) if isinstance(each, ast.Name))

    def offset(self, line: int, column: int) -> int:
        start = self.lines[line - 1]
        return start + len(self.text[start : self.lines[line]].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.text[start:end]


# Literals.


def values(node: ast.AST) -> tuple[Value, ...]:
    """Return the literals of an expression."""
    return tuple(
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str | bytes | int | float | complex)
    )


def constants(node: ast.expr) -> Iterator[ast.Constant]:
    """Yield the literals in an expression that can be replaced in place. Leaves out literals of f-strings, whose positions are
    unknown, and keyword arguments, which are tolerances rather than values."""
    match node:
        case ast.Constant():
            yield node
        case ast.JoinedStr():
            return
        case ast.Dict(values=children) | ast.Call(args=children):
            for child in children:
                yield from constants(child)
        case ast.Subscript():  # another index may well find the same
            yield from constants(node.value)
        case _:
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    yield from constants(each)


def arguments(call: ast.Call) -> Iterator[tuple[Role, ast.expr]]:
    """Yield the literals and names that a function is called with, also those inside displays."""
    name, first = last_name(call.func), 0
    if name in RAISES:  # which may call a function of their arguments
        if len(call.args) < 2:
            return
        name, first = last_name(call.args[1]), 2
    elif name in ("parametrize", "approx"):
        return
    given: Iterable[tuple[int | str | None, ast.expr]] = (
        *enumerate(call.args[first:]),
        *((each.arg, each.value) for each in call.keywords if not first),
    )
    for place, argument in given:
        inside = isinstance(argument, ast.List | ast.Tuple | ast.Dict | ast.Set) and not has_calls(argument)
        for node in constants(argument) if inside else [argument]:
            if place is not None and isinstance(node, ast.Constant | ast.Name):
                yield (name, place, inside), node


def cells_of(names: Sequence[str], row: ast.expr) -> list[ast.expr]:
    """Return the cells of a row of `parametrize`."""
    if isinstance(row, ast.Call):  # pytest.param
        return row.args
    if len(names) > 1:
        return row.elts if isinstance(row, ast.Tuple | ast.List) else []
    return [row]


def last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def has_calls(node: ast.expr) -> bool:
    """Return whether an expression calls anything but constructors of plain data."""
    names = [ast.unparse(each.func).rpartition(".")[2] for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(name not in PLAIN for name in names)


def tolerance(node: ast.expr) -> tuple[float, float, bool]:
    """Return the relative and the absolute difference beyond which no answer is close to both of two numbers, and whether these
    are certain."""
    for each in ast.walk(node):
        name = last_name(each.func) if isinstance(each, ast.Call) else ""
        if isinstance(each, ast.Call) and name in ("approx", "assertAlmostEqual", "assertNotAlmostEqual"):
            given = {word.arg: word.value for word in each.keywords}
            first = ("rel", "abs") if name == "approx" else ("places", "msg", "delta")
            given |= dict(zip(first, each.args[1 if name == "approx" else 2 :], strict=False))
            numbers = {word: each.value for word, each in given.items() if isinstance(each, ast.Constant)}
            held = {word: float(each) for word, each in numbers.items() if isinstance(each, int | float)}
            sure = all(word in held for word in given if word in ("rel", "abs", "places", "delta"))
            fixed = 10.0 ** -held["places"] if "places" in held else held.get("delta", held.get("abs", 1e-7))
            return 3 * held.get("rel", 1e-6), 3 * fixed, sure
    return 0.0, 0.0, True


# Names that a test knows.


def names_in(node: ast.AST) -> set[str]:
    """Return the names that an expression depends on, without those that it binds itself."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {each.id for each in names} - {each.id for each in names if isinstance(each.ctx, ast.Store)}


def known_in(outside: set[str], test: Function, columns: set[str]) -> set[str]:
    """Return the names in a test whose values cannot depend on the code under test."""
    nodes = list(ast.walk(test))
    own = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    names = outside - own - {each.arg for each in nodes if isinstance(each, ast.arg)}
    return _grown(names | (columns - own), nodes)


def _grown(names: set[str], nodes: Sequence[ast.AST]) -> set[str]:
    """Add the names that only assignments and loops bind, to values that depend on known names."""
    given: dict[str, list[ast.expr]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[target], value=value) | ast.For(target=target, iter=value):
                for name in [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]:
                    given.setdefault(name, []).append(value)
    stores = Counter(each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    for _ in given:
        names = names | {
            name
            for name, bound in given.items()
            if len(bound) == stores[name] and set().union(*map(names_in, bound)) <= names
        }
    return names


# Tests that depend on each other.


class Dependents:
    """The classes and the callers of all hidden modules."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.callers = {path: _callers(tree) for path, tree in modules.items()}
        self.methods: list[tuple[str, str, set[str]]] = []
        self.below: dict[str, set[str]] = {}
        for path, tree in modules.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    own = {each.name for each in node.body if isinstance(each, Function)}
                    self.methods.append((path, node.name, own))
                    for base in node.bases:
                        self.below.setdefault(ast.unparse(base).rpartition(".")[2], set()).add(node.name)

    def of(self, tests: Sequence[str], row: int | None) -> tuple[str, ...]:
        """Return tests, by key up to `#`, with all that inherit or call them."""
        found = list(tests)
        for test in found:  # grows
            path, *place = test.split("::")
            new = self._heirs(place[0], place[1]) if len(place) == 2 else []
            if row is None:
                for other in self.callers if len(place) == 1 else (path,):
                    imported = other == path or place[-1] in self.callers[other]
                    new += [f"{other}::{name}" for name in sorted(self.callers[other].get(place[-1], ())) if imported]
            found += [each for each in dict.fromkeys(new) if each not in found]
        return tuple(found)

    def _heirs(self, name: str, method: str) -> list[str]:
        """Return the same method in all subclasses."""
        names = [name]
        for each in names:  # grows
            names += sorted(self.below.get(each, set()) - set(names))
        return [f"{path}::{each}::{method}" for path, each, own in self.methods if each in names and method not in own]


def _callers(tree: ast.Module) -> dict[str, set[str]]:
    """Return names -> the functions and methods of a module that mention them, `f` or `Class::f`."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        inside = [(f"{node.name}::", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for place, function in inside:
            if isinstance(function, Function):
                for each in ast.walk(function):
                    name = each.id if isinstance(each, ast.Name) else getattr(each, "attr", "")
                    found.setdefault(name, set()).add(place + function.name)
    return found
