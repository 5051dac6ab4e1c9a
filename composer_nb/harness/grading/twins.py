"""Propose must-fail twins: changes of hidden tests that a right answer must fail.

This module reads test modules and proposes changes, `source.Dependents` finds the tests that they touch, and `validate.py` keeps
those that it has *seen* to fail on the gold patch, on an assertion, while the test itself passes.

A change keeps the form of its test: the same syntax tree and the same bytecode but for constants and names of exceptions. It
replaces an expected value by one that the suite could have expected as well (`mutate.py`), an expected exception by another one
that the suite expects, or, where nothing is expected that could be replaced, an input by one that should come out differently:
a call that must raise gets arguments like those of calls that must not. Only where none of these is to be had is the contrary
demanded in another form. Such changes are *telling*: they catch code that passes everything, and cover nothing.

Covers, in functions and methods that pytest collects by its default names: `assert` with `==`, `!=`, `<`, `in`, `is`, `not`,
`and` and plain truth; `pytest.approx`; expectations that stand in a row of `parametrize` or in a variable of the test;
`pytest.raises`; the assertions of unittest. Does not cover helpers that assert elsewhere, loops over tables inside a test
(only what the assertion itself names), snapshots, doctests and hypothesis. Reads source; executes nothing.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from composer_nb.harness import syntax
from composer_nb.harness.grading.mutate import LiteralContext, Suite, other_exceptions, others, telling
from composer_nb.harness.grading.plan import Kind, Twin, plain_lines
from composer_nb.harness.grading.source import (
    PLAIN,
    RAISES,
    Dependents,
    Function,
    ModuleSource,
    Role,
    Value,
    arguments,
    cells_of,
    constants,
    has_calls,
    known_in,
    last_name,
    names_in,
    tolerance,
    values,
)
from composer_nb.harness.tasks.scope import is_test_module

VALUES = 4
"""Changes proposed for one expectation; twice as many of an input, most of which make no difference."""
CHANGES = 24
"""Changes proposed for one test, unless it has more expectations than that: then each gets one."""
PLACES = 96
"""Expectations of one test that get a change, drawn at random where there are more."""
EQUALS = re.compile(r"assert(Almost|List|Dict|Tuple|Set|Sequence|MultiLine|Count)?Equals?")
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
Where = ast.expr | tuple[int, int]
SHORT = 8
"""Letters: shorter texts are in many others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinCandidate(Twin):
    """A change that may make a twin; which tests it makes fail is not known yet."""

    bases: tuple[str, ...]
    """Keys of the tests that it changes, up to `#`."""
    row: int | None = None
    """Number of the row that it changes, of a parametrised test; None means all."""

    def changes(self, key: str) -> bool:
        base, _, number = key.rpartition("#")
        return base in self.bases and self.row in (None, int(number))


class _Hidden:
    """All test modules of a suite: their literals, exceptions and inputs."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        plain = {path: plain_lines(text) for path, text in texts.items()}
        # The parser does not count form feeds: places would be wrong.
        self.sources = [ModuleSource(path, text) for path, text in plain.items() if "\f" not in text]
        self.suite = Suite.of(source.tree for source in self.sources)
        self.builtin_errors = Counter[str]()
        self.inputs: dict[Role, list[tuple[Value, bool]]] = {}
        """Literals that functions are called with, and whether the call must raise."""
        self.tests = [test for each in self.sources for test in _in_body(self, each, each.tree.body, each.path)]
        for source in self.sources:
            self.builtin_errors.update({name: n for name, n in source.raised.items() if hasattr(builtins, name)})
        for test in self.tests:
            if test.table_name:
                test.source.users.setdefault(test.table_name, []).append(test.base)
            for call in [each for each in ast.walk(test.node) if isinstance(each, ast.Call)]:
                for role, node in arguments(call):
                    found = test.cells(node.id) if isinstance(node, ast.Name) else [node]
                    pool = self.inputs.setdefault(role, [])
                    pool += [(each.value, call in test.raising) for each in found if isinstance(each, ast.Constant)]  # type: ignore[misc]


def candidates_of(texts: Mapping[str, str]) -> list[TwinCandidate]:
    """Return all changes proposed for the test modules of a suite. Raises SyntaxError, ValueError."""
    return [candidate for test in _Hidden(texts).tests for candidate in test.proposed()]


def all_candidates(tests: Mapping[str, str]) -> list[TwinCandidate]:
    """Return all changes proposed for a task's test modules, with all tests that they touch."""
    modules = {path: syntax.parse(plain_lines(text)) for path, text in sorted(tests.items()) if path.endswith(".py")}
    dependents = Dependents(modules)
    found = candidates_of({path: tests[path] for path in modules if is_test_module(path)})
    return [replace(each, bases=dependents.of(each.bases, each.row)) for each in found]


def _in_body(hidden: _Hidden, source: ModuleSource, body: Sequence[ast.stmt], base: str) -> Iterator[_Test]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(each) for each in node.bases]
            if node.name.startswith("Test") or any(name.endswith("TestCase") for name in bases):
                yield from _in_body(hidden, source, node.body, f"{base}::{node.name}")
        elif isinstance(node, Function) and node.name.startswith("test"):
            yield _Test(hidden, source, node, f"{base}::{node.name}")


class _Test:
    """One test function. Changes come in a list for each expectation, the most fitting first."""

    def __init__(self, hidden: _Hidden, source: ModuleSource, node: Function, base: str) -> None:
        self.hidden, self.source, self.node, self.base = hidden, source, node, base
        self.rng = Random(f"{base}\n{source.text}")
        self.table_name = ""
        self.columns, self.rows = self._table()
        self.used_columns: set[str] = set()
        self.loads = Counter(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        self.input_columns: dict[str, tuple[Role, bool]] = {}
        """Columns whose cells decide what no expected value tells -> what they are for, and whether that must raise."""
        self.known = known_in(source.known, node, set(self.columns))
        nodes = list(ast.walk(node))
        self.bodies = {
            item.context_expr: each.body for each in nodes if isinstance(each, ast.With) for item in each.items
        }
        calls = [each for each in nodes if isinstance(each, ast.Call) and last_name(each.func) in RAISES]
        inside = [statement for call in calls for statement in self.bodies.get(call, ())]
        self.raising = {*calls, *(each for statement in inside for each in ast.walk(statement))}

    def proposed(self) -> Iterator[TwinCandidate]:
        unsure = self._unsure()
        places = [
            [replace(each, weak=each.weak or node in unsure) for each in changes]
            for node in ast.walk(self.node)
            if isinstance(node, ast.Assert | ast.Call)
            for changes in (self._expression(node.test) if isinstance(node, ast.Assert) else self._call(node))
        ]
        places = self.rng.sample(places, min(len(places), PLACES)) if len(places) > PLACES else places
        share = max(1, min(VALUES, CHANGES // max(1, len(places))))
        for changes in places:
            yield from changes[: share * (1 + (changes[:1] != [] and changes[0].kind == "input"))]
        if self.table_name and self.source.loads[self.table_name] != len(self.users) + 1:
            return  # something else reads the table
        for number, row in enumerate(self.rows):
            yield from self._row(number, row)

    @property
    def users(self) -> list[str]:
        """The tests that the table is for."""
        return self.source.users.get(self.table_name, [self.base])

    def _change(
        self, where: Where, text: str, kind: Kind, *, row: int | None = None, weak: bool = False, telling: bool = False
    ) -> TwinCandidate:
        start, end = where if isinstance(where, tuple) else self.source.span(where)
        weak = weak or kind in ("exception", "input")
        bases = (self.base,) if row is None else tuple(self.users)
        place: dict[str, Any] = {"path": self.source.path, "start": start, "end": end, "bases": bases, "row": row}
        return TwinCandidate(**place, text=text, kind=kind, weak=weak, telling=telling)

    def _unsure(self) -> set[ast.AST]:
        """Return nodes that correct code may not reach: in a loop over answers, behind a condition, after what raises."""
        found: set[ast.AST] = set()
        for node in ast.walk(self.node):
            sure = isinstance(node, ast.For) and not has_calls(node.iter) and names_in(node.iter) <= self.known
            if isinstance(node, ast.While | ast.If | ast.Try | ast.With | ast.For | ast.Lambda | Function) and not (
                sure or node is self.node or (isinstance(node, ast.With) and not _suppresses(node))
            ):
                bodies = node.body if isinstance(node.body, list) else [node.body]
                found |= {each for body in bodies for each in ast.walk(body)}
        return found

    # Expressions that must be true.

    def _expression(self, node: ast.expr) -> Iterator[list[TwinCandidate]]:
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    yield from self._expression(part)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                yield from self._contrary(node, f"({self.source.of(inner)})")
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                yield from self._expected(node, left, right)
            case ast.Compare(left=ast.Constant(value=str() as text) as left, ops=[ast.In()], comparators=[right]) if (
                len(text) > 1
            ):
                yield self._literals(left, right, weak=len(text) < SHORT)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield self._inputs(node)
                yield list(self._operator(left, right, *OPERATORS[type(op)]))
            case _:
                yield from self._contrary(node, f"(not ({self.source.of(node)}))")

    def _contrary(self, node: ast.expr, text: str) -> Iterator[list[TwinCandidate]]:
        yield self._inputs(node)
        yield [self._change(node, text, "negation", telling=True)]

    def _operator(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[TwinCandidate]:
        start, end = self.source.span(left)[1], self.source.span(right)[0]
        if self.source.text[start:end].strip().split() == old.split():
            yield self._change((start, end), f" {new} ", "negation", telling=True)

    def _expected(self, node: ast.expr, left: ast.expr, right: ast.expr) -> Iterator[list[TwinCandidate]]:
        """Yield changes of the expected side of an equation, never of the answer: a literal, or else the only side that the test
        knows by itself. If neither is so, the equation becomes one that is false for right answers on either side, and true
        for what equals everything."""
        literal = [side for side in (right, left) if names_in(side) <= PLAIN | {"pytest"}]
        known = [side for side in (right, left) if names_in(side) <= self.known]
        side = literal[0] if literal else known[0] if len(known) == 1 else None
        if side is None:
            one, other = self.source.of(left), self.source.of(right)
            either = f"(({one}) == [{other}] or [{one}] == ({other}))"
            if isinstance(node, ast.Call):
                either = f"{self.source.of(node.func).rpartition('.')[0]}.assertTrue{either}"
            yield self._inputs(node)
            yield [self._change(node, either, "value", telling=True)]
            return
        answer = left if side is right else right
        rel, fixed, sure = tolerance(node)
        place = LiteralContext(inputs=values(answer), apart=rel, apart_by=fixed)
        if isinstance(side, ast.Name):
            yield from self._variable(side, place)
            return
        found = self._literals(side, answer, place=place, weak=not sure)
        yield found
        if all(each.telling for each in found):
            yield self._inputs(answer)
            yield [self._change(side, f"[{self.source.of(side)}]", "value", telling=True)]

    def _variable(self, name: ast.Name, place: LiteralContext) -> Iterator[list[TwinCandidate]]:
        """Yield changes of the value that a variable gets, where it gets it."""
        if name.id in self.columns:
            self.used_columns.add(name.id)
        given = _assigned(ast.walk(self.node), name.id)
        if len(given) == 1:
            yield self._literals(given[0], place=place, weak=self.loads[name.id] > 1)
        yield [self._change(name, f"[{name.id}]", "negation", telling=True)]

    def _literals(
        self,
        side: ast.expr,
        answer: ast.expr | None = None,
        *,
        place: LiteralContext | None = None,
        row: int | None = None,
        weak: bool = False,
    ) -> list[TwinCandidate]:
        """Return changes of the literals that an expected value is made of."""
        place = place or LiteralContext(inputs=values(answer) if answer else ())
        leaves = list(constants(side))
        self.rng.shuffle(leaves)
        minus = {each.operand for each in ast.walk(side) if isinstance(each, ast.UnaryOp)}
        found = []
        for leaf in leaves[:VALUES]:
            suited = replace(place, signed=leaf in minus)
            texts = others(leaf.value, self.rng, self.hidden.suite, suited, -(-VALUES // len(leaves)))
            tells = telling(leaf.value, self.hidden.suite)
            found += [self._change(leaf, text, "value", row=row, weak=weak, telling=tells) for text in texts]
        return [each for each in found if not each.telling] or found

    # Inputs that should come out differently.

    def _inputs(self, node: ast.expr, must_raise: bool = False) -> list[TwinCandidate]:
        """Return changes of literals that functions are called with."""
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        for call in calls:
            for role, argument in arguments(call):
                if isinstance(argument, ast.Name) and argument.id in self.columns:
                    self.input_columns[argument.id] = (role, must_raise)
        calls = [call for call in calls if any(isinstance(each, ast.Constant) for _, each in arguments(call))]
        found: dict[str, TwinCandidate] = {}
        for _ in range(6 * VALUES if calls else 0):
            call = self.rng.choice(calls)
            new = copy.deepcopy(call)
            literals = [(role, each) for role, each in arguments(new) if isinstance(each, ast.Constant)]
            for role, literal in literals if must_raise else [self.rng.choice(literals)]:
                [literal.value] = self._other_inputs(role, literal.value, must_raise, 1) or [literal.value]  # type: ignore[arg-type, list-item]
            if (text := ast.unparse(new)) != ast.unparse(call):
                found[text] = self._change(call, text, "input")
        return [*found.values()]

    def _other_inputs(self, role: Role, value: Value, must_raise: bool, count: int) -> list[Value]:
        """Return other inputs; if the call must raise, inputs of calls that do not."""
        pool = [each for each, raises in self.hidden.inputs.get(role, ()) if not (must_raise and raises)]
        pool = [each for each in pool if type(each) is type(value)]
        found: list[Value] = []
        for _ in range(2 * count if pool else 0):
            near = self.rng.choice(pool) if must_raise or self.rng.random() < 0.7 else value
            often = near != value and self.hidden.suite.count(near) > 1 and self.rng.random() < 0.5
            texts = [] if often else others(near, self.rng, self.hidden.suite)
            found += [syntax.literal_eval(text) for text in texts] or [near]
        return [each for each in dict.fromkeys(found) if each != value][:count]

    # Calls that assert.

    def _call(self, node: ast.Call) -> Iterator[list[TwinCandidate]]:
        name = last_name(node.func)
        if name in RAISES and node.args:
            wanted = node.args[0]
            if isinstance(wanted, ast.Name) and wanted.id in self.columns:
                self.used_columns.add(wanted.id)
            else:
                yield self._errors(wanted)
            for statement in self.bodies.get(node, [ast.Expr(node)])[-1:]:
                for inside in ast.iter_child_nodes(statement):
                    if isinstance(inside, ast.expr):
                        yield self._inputs(inside, must_raise=True)
            patterns = [each.value for each in node.keywords if each.arg == "match"]
            patterns += node.args[1:2] if name == "assertRaisesRegex" else []
            for text in patterns:
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value:
                    yield self._literals(text, weak=len(text.value) < SHORT)
        elif EQUALS.fullmatch(name) and len(node.args) >= 2:
            yield from self._expected(node, node.args[0], node.args[1])
        elif name in ("assertTrue", "assert_") and node.args and isinstance(node.args[0], ast.Compare):
            yield from self._expression(node.args[0])
        elif name in OPPOSITE and isinstance(node.func, ast.Attribute):
            if name == "assertIn" and node.args and isinstance(node.args[0], ast.Constant):
                yield from self._expression(ast.Compare(node.args[0], [ast.In()], node.args[1:2]))
            for argument in node.args[:1]:
                yield self._inputs(argument)
            new = f"{self.source.of(node.func.value)}.{OPPOSITE[name]}"
            yield [self._change(node.func, new, "negation", telling=True)]

    def _errors(self, wanted: ast.expr, row: int | None = None, count: int = VALUES // 2) -> list[TwinCandidate]:
        expected = self.hidden.builtin_errors | self.source.raised
        found = other_exceptions(wanted, self.rng, expected, count)
        return [self._change(wanted, text, "exception", row=row, telling=tells) for text, tells in found]

    # Tables of parametrised tests.

    def _table(self) -> tuple[list[str], list[ast.expr]]:
        """Return the columns and rows by which the test is parametrised; none if it is so more than once, as a row is several
        tests then."""
        found = [each for each in self.node.decorator_list if isinstance(each, ast.Call)]
        found = [each for each in found if isinstance(each.func, ast.Attribute) and each.func.attr == "parametrize"]
        if len(found) != 1 or len(found[0].args) < 2:
            return [], []
        names, rows = found[0].args[:2]
        if isinstance(rows, ast.Name):
            given = _assigned(self.source.tree.body, rows.id)
            self.table_name, rows = rows.id, given[0] if len(given) == 1 else rows
        match names:
            case ast.Constant(value=str() as text):
                columns = [word.strip() for word in text.split(",") if word.strip()]
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                columns = [str(getattr(element, "value", "")) for element in elements]
            case _:
                return [], []
        if isinstance(rows, ast.List | ast.Tuple) and not any(isinstance(row, ast.Starred) for row in rows.elts):
            return columns, rows.elts
        return [], []

    def cells(self, column: str) -> list[ast.expr]:
        """Return the cells of a column."""
        pairs = [pair for row in self.rows for pair in zip(self.columns, cells_of(self.columns, row), strict=False)]
        return [cell for name, cell in pairs if name == column]

    def _also_input(self, column: int) -> bool:
        """Return whether a test that the table is for uses a column twice: another value then does not contradict the test."""
        tests = [test for test in self.hidden.tests if test.base in self.users]
        return any(test.loads[name] > 1 for test in tests for name in test.columns[column : column + 1])

    def _row(self, number: int, row: ast.expr) -> Iterator[TwinCandidate]:
        cells = cells_of(self.columns, row)
        for column, (name, cell) in enumerate(zip(self.columns, cells, strict=False)):
            inputs = tuple(value for each in cells if each is not cell for value in values(each))
            if name in self.input_columns and isinstance(cell, ast.Constant):
                role, must_raise = self.input_columns[name]
                for value in self._other_inputs(role, cell.value, must_raise, 2 * VALUES):  # type: ignore[arg-type]
                    yield self._change(cell, repr(value), "input", row=number)
            if name not in self.used_columns:
                continue
            if isinstance(cell, ast.Name) and (cell.id.endswith(("Error", "Exception")) or cell.id == "StopIteration"):
                yield from self._errors(cell, row=number, count=1)
            elif found := self._literals(
                cell, place=LiteralContext(inputs=inputs), row=number, weak=self._also_input(column)
            ):
                yield from found
            else:
                yield self._change(cell, f"[{self.source.of(cell)}]", "value", row=number, telling=True)


def _assigned(nodes: Iterable[ast.AST], name: str) -> list[ast.expr]:
    """Return the values that are assigned to a name, and to nothing else."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    return [node.value for node in assigned if [*map(ast.unparse, node.targets)] == [name]]


def _suppresses(node: ast.With) -> bool:
    """Return whether what follows in a `with` may be left out: by suppress or raises."""
    text = " ".join(ast.unparse(each.context_expr) for each in node.items)
    return "suppress" in text or "aises" in text
