"""Must-fail twins: for hidden tests, changes that a right answer must fail.

This module reads test modules and proposes changes, `reach.py` says which tests they touch, and `validate.py` keeps the ones that
it has *seen* to fail on the gold patch, on an assertion, while the test itself passes.

Covers, in functions and methods that pytest collects by its default names: `assert` with `==`, `!=`, `<`, `in`, `is`, `not`,
`and` and plain truth; `pytest.approx`; expectations that stand in a row of `parametrize` or in a variable of the test;
`pytest.raises`; the assertions of unittest. Does not cover helpers that assert elsewhere, loops over tables inside a test
(only what the assertion itself names), snapshots, doctests and hypothesis. Reads source; executes nothing.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_nb.harness.grading.mutate import constants, other, other_exceptions
from composer_nb.harness.grading.plan import Kind

MAX_BODY = 4
"""Changes proposed for the body of one test."""
EQUALS = {
    "assertEqual", "assertEquals", "assertAlmostEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual",
    "assertSetEqual", "assertSequenceEqual", "assertMultiLineEqual", "assertCountEqual",
}  # fmt: skip
OPPOSITES = [
    ("assertTrue", "assertFalse"), ("assertIn", "assertNotIn"), ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"), ("assertNotEqual", "assertEqual"), ("assertGreater", "assertLessEqual"),
    ("assertLess", "assertGreaterEqual"), ("assertIsInstance", "assertNotIsInstance"), ("assertRegex", "assertNotRegex"),
    ("assertNotAlmostEqual", "assertAlmostEqual"),
]  # fmt: skip
OPPOSITE = {name: contrary for pair in OPPOSITES for name, contrary in (pair, pair[::-1])}
OPERATORS = {
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.NotIn: ("not in", "in"),
    ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<"), ast.In: ("in", "not in"),
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A change that may make a twin."""

    path: str
    start: int
    end: int
    text: str
    kind: Kind
    bases: tuple[str, ...]
    """Keys of the tests that it changes, up to `#`."""
    row: int | None = None
    """Of the tests of a parametrised function, which one it changes; None: all."""

    def changes(self, key: str) -> bool:
        base, _, number = key.rpartition("#")
        return base in self.bases and self.row in (None, int(number))


class Source:
    """A module's text, with offsets of syntax nodes."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.tree = path, text, ast.parse(text)
        self.lines = [0]
        for line in text.split("\n"):  # as the parser counts them, once line ends are \n
            self.lines.append(self.lines[-1] + len(line) + 1)

        self.users: dict[str, list[str]] = {}
        """Tables of the module -> the tests that are parametrised by them."""
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


def candidates(path: str, text: str) -> list[Candidate]:
    """All changes proposed for a test module; the same for the same text. Raises SyntaxError, ValueError."""
    if "\r" in text or "\f" in text:
        return []  # other line ends: places would be wrong
    source = Source(path, text)
    tests = list(_in_body(source, source.tree.body, path))
    for test in tests:
        if test.table_name:
            source.users.setdefault(test.table_name, []).append(test.base)
    return [candidate for test in tests for candidate in test.proposed()]


def _in_body(source: Source, body: Sequence[ast.stmt], base: str) -> Iterator[_Test]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(each) for each in node.bases]
            if node.name.startswith("Test") or any(name.endswith("TestCase") for name in bases):
                yield from _in_body(source, node.body, f"{base}::{node.name}")
        elif isinstance(node, Function) and node.name.startswith("test"):
            yield _Test(source, node, f"{base}::{node.name}")


class _Test:
    """One test function. Every change of it contradicts it: no answer that is right can satisfy both."""

    def __init__(self, source: Source, node: Function, base: str) -> None:
        self.source, self.node, self.base = source, node, base
        self.lot = random.Random(f"{base}\n{source.text}")
        self.table_name = ""
        self.tables = list(self._tables())
        self.used_columns: set[str] = set()

    def proposed(self) -> Iterator[Candidate]:
        found = [
            candidate
            for node in ast.walk(self.node)
            if isinstance(node, ast.Assert | ast.Call)
            for candidate in (self._expression(node.test) if isinstance(node, ast.Assert) else self._call(node))
        ]
        yield from found if len(found) <= MAX_BODY else self.lot.sample(found, MAX_BODY)
        users = self.source.users.get(self.table_name, [self.base])
        if self.table_name and self.source.loads[self.table_name] != len(users) + 1:
            return  # somebody else reads the table
        for names, rows in self.tables:
            for number, row in enumerate(rows):
                yield from self._row(names, number, row)

    def _change(self, node: ast.expr, text: str, kind: Kind, row: int | None = None) -> Candidate:
        start, end = self.source.span(node)
        bases = (self.base,) if row is None else tuple(self.source.users.get(self.table_name, [self.base]))
        return Candidate(path=self.source.path, start=start, end=end, text=text, kind=kind, bases=bases, row=row)

    # Expressions that must be true.

    def _expression(self, node: ast.expr) -> Iterator[Candidate]:
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    yield from self._expression(part)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                yield self._change(node, f"({self.source.of(inner)})", "negation")
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                found = list(self._comparison(left, op, right))
                yield from found or [self._contrary(node)]
            case _:
                yield self._contrary(node)

    def _contrary(self, node: ast.expr) -> Candidate:
        return self._change(node, f"(not ({self.source.of(node)}))", "negation")

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Iterator[Candidate]:
        if isinstance(op, ast.Eq):
            yield from self._expected(left, right)
        elif isinstance(op, ast.In) and (texts := [each for each in constants(left) if _is_text(each)]):
            yield self._literal(texts[0])
        else:
            yield from self._operator(left, right, *OPERATORS[type(op)])

    def _operator(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Candidate]:
        between = self.source.span(left)[1], self.source.span(right)[0]
        words = self.source.text[between[0] : between[1]]
        if words.strip().split() == old.split():
            start, end = between
            yield Candidate(
                path=self.source.path, start=start, end=end, text=f" {new} ", kind="negation", bases=(self.base,)
            )

    def _expected(self, left: ast.expr, right: ast.expr) -> Iterator[Candidate]:
        """Changes of whichever side of an equation is what was expected: the one that calls nothing but `approx`."""
        plain = [side for side in (right, left) if not _calls(side)]
        side = next((side for side in plain if not isinstance(side, ast.Name)), plain[0] if plain else right)
        if isinstance(side, ast.Name):
            yield from self._variable(side)
        elif literals := _literals(side):
            yield self._literal(self.lot.choice(literals))
        else:
            yield self._change(
                side, f"[{self.source.of(side)}]", "negation" if isinstance(side, ast.Attribute) else "value"
            )

    def _variable(self, name: ast.Name) -> Iterator[Candidate]:
        """Changes of what a variable holds, where it gets it."""
        if any(name.id in names for names, _ in self.tables):
            self.used_columns.add(name.id)
        values = [
            node.value
            for node in ast.walk(self.node)
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name.id]
        ]
        if len(values) == 1:
            if literals := _literals(values[0]):
                yield self._literal(self.lot.choice(literals))
            else:
                yield self._change(values[0], f"[{self.source.of(values[0])}]", "value")
        yield self._change(name, f"[{name.id}]", "negation")

    def _literal(self, node: ast.expr) -> Candidate:
        new = other(node, self.lot)
        return self._change(node, f"[{self.source.of(node)}]" if new is None else new, "value")

    # Calls that assert.

    def _call(self, node: ast.Call) -> Iterator[Candidate]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("raises", "assertRaises", "assertRaisesRegex") and node.args:
            wanted = node.args[0]
            if isinstance(wanted, ast.Name) and any(wanted.id in names for names, _ in self.tables):
                self.used_columns.add(wanted.id)
                return
            for text in other_exceptions(wanted, self.lot):
                yield self._change(wanted, text, "exception")
        elif name in EQUALS and len(node.args) >= 2:
            yield from self._expected(node.args[0], node.args[1])
        elif name in ("assertTrue", "assert_") and node.args and isinstance(node.args[0], ast.Compare):
            yield from self._expression(node.args[0])
        elif name in OPPOSITE and isinstance(node.func, ast.Attribute):
            value = node.func.value
            yield self._change(node.func, f"{self.source.of(value)}.{OPPOSITE[name]}", "negation")

    # Tables of parametrised tests.

    def _tables(self) -> Iterator[tuple[list[str], list[ast.expr]]]:
        found = [
            node
            for node in self.node.decorator_list
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize"
        ]
        if len(found) != 1 or len(found[0].args) < 2:  # several multiply: a row is several tests
            return
        names, rows = found[0].args[:2]
        if isinstance(rows, ast.Name):
            self.table_name, rows = rows.id, self._global(rows.id) or rows
        match names:
            case ast.Constant(value=str() as text):
                words = [word.strip() for word in text.split(",") if word.strip()]
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                words = [str(getattr(element, "value", "")) for element in elements]
            case _:
                return
        if isinstance(rows, ast.List | ast.Tuple) and not any(isinstance(row, ast.Starred) for row in rows.elts):
            yield words, rows.elts

    def _global(self, name: str) -> ast.expr | None:
        values = [
            node.value
            for node in self.source.tree.body
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]
        ]
        return values[0] if len(values) == 1 else None

    def _row(self, names: list[str], number: int, row: ast.expr) -> Iterator[Candidate]:
        cells = [row]
        if isinstance(row, ast.Call):  # pytest.param
            cells = row.args
        elif len(names) > 1:
            cells = row.elts if isinstance(row, ast.Tuple | ast.List) else []
        for name, cell in zip(names, cells, strict=False):
            if name not in self.used_columns:
                continue
            if isinstance(cell, ast.Name) and (cell.id.endswith(("Error", "Exception")) or cell.id == "StopIteration"):
                for text in other_exceptions(cell, self.lot)[:1]:
                    yield self._change(cell, text, "exception", row=number)
            elif literals := _literals(cell):
                new = other(choice := self.lot.choice(literals), self.lot)
                if new is not None:
                    yield self._change(choice, new, "value", row=number)
            else:
                yield self._change(cell, f"[{self.source.of(cell)}]", "value", row=number)


def _is_text(node: ast.expr) -> bool:
    """Of other things than texts an answer may well hold the changed one too."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1


def _literals(node: ast.expr) -> list[ast.expr]:
    """What decides an expression's value; nothing where something is called, for that may give the same for another literal."""
    return [] if _calls(node) else list(constants(node))


def _calls(node: ast.expr) -> bool:
    """Whether an expression calls anything but `approx` and the makers of plain data."""
    plain = {"approx", "set", "frozenset", "dict", "list", "tuple", "Decimal", "Fraction", "Path", "date", "datetime"}
    names = [ast.unparse(each.func).rpartition(".")[2] for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(name not in plain for name in names)
