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
import builtins
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from composer_nb.harness.grading.mutate import constants, other, other_exceptions
from composer_nb.harness.grading.plan import Kind, plain_lines

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
SHORT = 8
"""Letters: shorter texts are in many others."""
PLAIN = {"approx", "set", "frozenset", "dict", "list", "tuple", "Decimal", "Fraction", "Path", "date", "datetime"}
"""Makers of plain data."""
STATEFUL = {"eval", "exec", "getattr", "globals", "input", "iter", "locals", "next", "open", "vars", "id"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A change that may make a twin."""

    path: str
    start: int
    end: int
    text: str
    kind: Kind
    weak: bool = False
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
        expected = [
            each.args[0]
            for each in ast.walk(self.tree)
            if isinstance(each, ast.Call) and each.args and "aises" in ast.unparse(each.func)
        ]
        imported = {
            alias.asname or alias.name
            for each in self.tree.body
            if isinstance(each, ast.ImportFrom)
            for alias in each.names
        }
        self.exceptions = sorted(
            name
            for name in imported
            if name.endswith(("Error", "Exception"))
            or name in {each.id for each in expected if isinstance(each, ast.Name)}
        )
        """Imported by name: by their names, or because they are expected."""
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
    text = plain_lines(text)
    if "\f" in text:
        return []  # which the parser does not count: places would be wrong
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
        self.known = _known(source.tree, node, {name for names, _ in self.tables for name in names})

    def proposed(self) -> Iterator[Candidate]:
        unsure = self._unsure()
        found = [
            candidate
            for node in ast.walk(self.node)
            if isinstance(node, ast.Assert | ast.Call)
            for each in (self._expression(node.test) if isinstance(node, ast.Assert) else self._call(node))
            for candidate in [replace(each, weak=each.weak or node in unsure)]
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
        weak = kind == "exception"
        return Candidate(
            path=self.source.path, start=start, end=end, text=text, kind=kind, weak=weak, bases=bases, row=row
        )

    def _unsure(self) -> set[ast.AST]:
        """What may not be reached although all is right: in a loop over answers, behind a condition, after what raises."""
        found: set[ast.AST] = set()
        for node in ast.walk(self.node):
            sure = isinstance(node, ast.For) and not _calls(node.iter) and _names(node.iter) <= self.known
            if isinstance(node, ast.While | ast.If | ast.Try | ast.With | ast.For | ast.Lambda | Function) and not (
                sure or node is self.node or (isinstance(node, ast.With) and not _suppresses(node))
            ):
                found |= {
                    each
                    for body in (node.body if isinstance(node.body, list) else [node.body])
                    for each in ast.walk(body)
                }
        return found

    # Expressions that must be true.

    def _expression(self, node: ast.expr) -> Iterator[Candidate]:
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    yield from self._expression(part)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                yield self._change(node, f"({self.source.of(inner)})", "negation")
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                found = list(self._comparison(node, left, op, right))
                yield from found or [self._contrary(node)]
            case _:
                yield self._contrary(node)

    def _contrary(self, node: ast.expr) -> Candidate:
        return self._change(node, f"(not ({self.source.of(node)}))", "negation")

    def _comparison(self, node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Iterator[Candidate]:
        if isinstance(op, ast.Eq):
            yield from self._expected(node, left, right)
        elif isinstance(op, ast.In) and _is_text(left):
            yield self._change(left, _improbable(left, self.lot), "value")
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

    def _expected(self, node: ast.expr, left: ast.expr, right: ast.expr) -> Iterator[Candidate]:
        """Changes of whichever side of an equation is what was expected, never of the answer: a literal, or else the only side
        that the test knows by itself. Where neither tells, the equation becomes one that is false for right answers on either
        side, and true of what equals everything."""
        literal = [side for side in (right, left) if _names(side) <= PLAIN | {"pytest"}]
        known = [side for side in (right, left) if _names(side) <= self.known]
        side = literal[0] if literal else known[0] if len(known) == 1 else None
        if side is None:
            one, other = self.source.of(left), self.source.of(right)
            either = f"(({one}) == [{other}] or [{one}] == ({other}))"
            if isinstance(node, ast.Call):
                either = f"{self.source.of(node.func).rpartition('.')[0]}.assertTrue{either}"
            yield self._change(node, either, "value")
        elif isinstance(side, ast.Name):
            yield from self._variable(side)
        elif literals := _literals(side):
            yield self._literal(self.lot.choice(literals))
        else:
            yield self._change(side, f"[{self.source.of(side)}]", "value")

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
            for text in other_exceptions(wanted, self.lot, self.source.exceptions):
                yield self._change(wanted, text, "exception")
        elif name in EQUALS and len(node.args) >= 2:
            yield from self._expected(node, node.args[0], node.args[1])
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

    def _is_a_row(self, row: ast.expr, node: ast.expr, new: str) -> bool:
        """Whether a change makes a row look like one of the table: pytest would then give other ids to both."""
        (start, end), (first, last) = self.source.span(row), self.source.span(node)
        text = self.source.text[start:first] + new + self.source.text[last:end]
        return any(_looks(self.source.of(each)) == _looks(text) for _, rows in self.tables for each in rows)

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
                for text in other_exceptions(cell, self.lot, self.source.exceptions)[:1]:
                    yield self._change(cell, text, "exception", row=number)
            elif literals := _literals(cell):
                new = other(choice := self.lot.choice(literals), self.lot)
                if new is not None and not self._is_a_row(row, choice, new):
                    yield self._change(choice, new, "value", row=number)
            else:
                yield self._change(cell, f"[{self.source.of(cell)}]", "value", row=number)


def _looks(row: str) -> str:
    """What pytest makes of a row of parameters in the ids of tests: texts without quotes."""
    return row.translate(dict.fromkeys(map(ord, "'\"b()[], \n")))


def _is_text(node: ast.expr) -> bool:
    """Of other things than texts an answer may well hold the changed one too."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1


def _improbable(node: ast.expr, lot: random.Random) -> str:
    """Another text that an answer which holds the wanted one does not hold by chance."""
    text = ast.literal_eval(node)
    if len(text) >= SHORT:
        return other(node, lot) or repr(text + "x")
    for kind in [lot.choice(kind) for kind in ("bdfgklmnprt", "aeiou") * ((SHORT - len(text)) // 2 + 1)]:
        text += kind
    return repr(text)


def _suppresses(node: ast.With) -> bool:
    """Whether what follows in a `with` may be left out: by suppress or raises."""
    text = " ".join(ast.unparse(each.context_expr) for each in node.items)
    return "suppress" in text or "aises" in text


def _literals(node: ast.expr) -> list[ast.expr]:
    """What decides an expression's value; nothing where something is called, for that may give the same for another literal."""
    return [] if _calls(node) else list(constants(node))


def _calls(node: ast.expr) -> bool:
    """Whether an expression calls anything but `approx` and the makers of plain data."""
    names = [ast.unparse(each.func).rpartition(".")[2] for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(name not in PLAIN for name in names)


def _names(node: ast.AST) -> set[str]:
    """What an expression's value depends on, but for what it binds itself."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {each.id for each in names} - {each.id for each in names if isinstance(each.ctx, ast.Store)}


def _known(tree: ast.Module, test: Function, columns: set[str]) -> set[str]:
    """Names in a test whose values can not depend on the code under test."""
    outside = [each for node in tree.body if not isinstance(node, Function | ast.ClassDef) for each in ast.walk(node)]
    names = {"pytest", "math"} | PLAIN | set(dir(builtins)) - STATEFUL
    own = {each.id for each in ast.walk(test) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    arguments = {each.arg for each in ast.walk(test) if isinstance(each, ast.arg)}
    names = _grown(names, outside) - own - arguments
    return _grown(names | (columns - own), list(ast.walk(test)))


def _grown(names: set[str], nodes: Sequence[ast.AST]) -> set[str]:
    """With those that only assignments and loops bind, to what depends on known names."""
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
            for name, values in given.items()
            if len(values) == stores[name] and set().union(*map(_names, values)) <= names
        }
    return names
