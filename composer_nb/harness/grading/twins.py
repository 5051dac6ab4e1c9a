"""Propose must-fail twins: changes of hidden tests that a right answer must fail.

This module reads test modules and proposes changes. `validate.py` keeps those that it has *seen* to fail on the gold patch, on an
assertion, while the test itself passes.

A change replaces one expected literal by another that the suite could have expected as well (`mutate.py`). It keeps the form of
its test, the same syntax tree and the same bytecode but for constants, and contradicts it: no answer satisfies both.

Covers, in functions and methods that pytest collects by its default names: `==` and a text before `in`, in an `assert` or in
unittest's assertions; `pytest.approx`; `match=` of `pytest.raises`; expectations in a row of `parametrize` or in a variable of
the test. Does not cover expectations without a literal (truth, comparisons, exceptions), values that the test also uses as an
input, assertions that correct code may not reach, tests that others inherit or call, helpers that assert elsewhere, snapshots,
doctests and hypothesis. Reads source; executes nothing.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from composer_nb.harness import syntax
from composer_nb.harness.grading import source as static
from composer_nb.harness.grading.mutate import LiteralContext, Suite, others
from composer_nb.harness.grading.plan import Twin, plain_lines
from composer_nb.harness.tasks.scope import is_test_module

VALUES = 4  # Changes proposed for one expectation.
CHANGES = 24  # Changes proposed for one test, unless it has more expectations than that: then each gets one.
EXPECTATIONS = 96  # Expectations of one test that get a change, drawn at random where there are more.
EQUALS = re.compile(r"assert(Almost|List|Dict|Tuple|Set|Sequence|MultiLine|Count)?Equals?")
SHORT = 8  # Letters: shorter texts are in many others.


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinCandidate(Twin):
    """A change that may make a twin; which tests it makes fail is not known yet.

    Attributes:
        base: Key of the test function that it changes, up to `#`.
        row: Number of the row that it changes, of a parametrised test; None means all.
    """

    base: str
    row: int | None = None

    def changes(self, key: str) -> bool:
        base, _, number = key.rpartition("#")
        return base == self.base and self.row in (None, int(number))


def all_candidates(modules: Mapping[str, str]) -> list[TwinCandidate]:
    """Return all changes proposed for a task's test modules. Tests whose function or class another piece of code names are left
    out: a change would reach those that inherit or call them. Raises SyntaxError, ValueError."""
    sources = {path: text for path, text in sorted(modules.items()) if path.endswith(".py")}
    nodes = [node for text in sources.values() for node in ast.walk(syntax.parse(plain_lines(text)))]
    nodes = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute | ast.alias)]
    names = {getattr(node, field, "") for node in nodes for field in ("id", "attr", "name")}
    tests = tests_of({path: text for path, text in sources.items() if is_test_module(path)})
    single = [test for test in tests if names.isdisjoint(test.base.split("::")[1:])]
    return [candidate for test in single for candidate in test.proposals()]


def tests_of(texts: Mapping[str, str]) -> list[TestSource]:
    """Return the test functions of a suite's modules. Raises SyntaxError, ValueError."""
    plain = {path: plain_lines(text) for path, text in texts.items()}
    # The parser does not count form feeds: positions would be wrong.
    modules = [static.ModuleSource(path, text) for path, text in plain.items() if "\f" not in text]
    suite = Suite.of(module.tree for module in modules)
    return [test for module in modules for test in _in_body(suite, module, module.tree.body, module.path)]


def _in_body(suite: Suite, module: static.ModuleSource, body: Sequence[ast.stmt], base: str) -> Iterator[TestSource]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(parent) for parent in node.bases]
            if node.name.startswith("Test") or any(name.endswith("TestCase") for name in bases):
                yield from _in_body(suite, module, node.body, f"{base}::{node.name}")
        elif isinstance(node, static.Function) and node.name.startswith("test"):
            yield TestSource(suite, module, node, f"{base}::{node.name}")


class TestSource:
    """One test function. Changes come in a list for each expectation, the most fitting first."""

    __test__ = False

    def __init__(self, suite: Suite, module: static.ModuleSource, node: static.Function, base: str) -> None:
        self.suite, self.module, self.node, self.base = suite, module, node, base
        self.rng = Random(f"{base}\n{module.text}")
        self.columns, self.rows = self._table()
        self.expected_columns: set[str] = set()
        names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
        self.loads = Counter(name.id for name in names if isinstance(name.ctx, ast.Load))

    def proposals(self) -> Iterator[TwinCandidate]:
        unsure = self._unsure()
        nodes = [node for node in ast.walk(self.node) if isinstance(node, ast.Assert | ast.Call) and node not in unsure]
        groups = (self._assertion(node.test) if isinstance(node, ast.Assert) else self._call(node) for node in nodes)
        expectations = [changes for group in groups for changes in group if changes]
        if len(expectations) > EXPECTATIONS:
            expectations = self.rng.sample(expectations, EXPECTATIONS)
        share = max(1, min(VALUES, CHANGES // max(1, len(expectations))))
        for changes in expectations:
            yield from changes[:share]
        for number, row in enumerate(self.rows):
            cells = static.cells_of(self.columns, row)
            for name, cell in zip(self.columns, cells, strict=False):
                if name in self.expected_columns and self.loads[name] == 1:
                    inputs = tuple(value for other in cells if other is not cell for value in static.values(other))
                    changes = self._literals(cell, LiteralContext(inputs=inputs))
                    yield from (replace(change, row=number) for change in changes)

    def _unsure(self) -> set[ast.AST]:
        """Return nodes that correct code may not reach: in a loop over answers, behind a condition, after what raises."""
        nodes: set[ast.AST] = set()
        for node in ast.walk(self.node):
            match node:
                case ast.For(iter=table) if static.names_in(table) <= static.KNOWN:
                    continue
                case ast.With(items=items):
                    text = " ".join(ast.unparse(item.context_expr) for item in items)
                    bodies = node.body if "suppress" in text or "aises" in text else []
                case ast.While() | ast.If() | ast.Try() | ast.For() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    bodies = node.body if node is not self.node else []
                case ast.Lambda(body=value):
                    nodes |= {*ast.walk(value)}
                    continue
                case _:
                    continue
            nodes |= {child for statement in bodies for child in ast.walk(statement)}
        return nodes

    def _assertion(self, node: ast.expr) -> Iterator[list[TwinCandidate]]:
        """Yield changes of an expression that must be true."""
        match node:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    yield from self._assertion(part)
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                yield self._expected(node, left, right)
            case ast.Compare(left=left, ops=[ast.In()], comparators=[right]):
                yield self._text(left, right)

    def _call(self, node: ast.Call) -> Iterator[list[TwinCandidate]]:
        """Yield changes of a call that asserts."""
        name, args = static.last_name(node.func), node.args
        if name in static.RAISES:
            patterns = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
            patterns += args[1:2] if name == "assertRaisesRegex" else []
            yield from map(self._text, patterns)
        elif EQUALS.fullmatch(name) and len(args) >= 2:
            yield self._expected(node, args[0], args[1])
        elif name in ("assertTrue", "assert_") and args and isinstance(args[0], ast.Compare):
            yield from self._assertion(args[0])
        elif name == "assertIn" and len(args) >= 2:
            yield self._text(args[0], args[1])

    def _expected(self, node: ast.expr, left: ast.expr, right: ast.expr) -> list[TwinCandidate]:
        """Return changes of the expected side of an equation, never of the answer: of the only side that is made of literals and
        builtins, or of a variable that gets them."""
        sides = {side: literals for side in (left, right) if (literals := self._literal_of(side)) is not None}
        relative, absolute, certain = static.tolerance(node)
        if len(sides) != 1 or not certain:
            return []
        [(side, literals)] = sides.items()
        if literals is side and isinstance(side, ast.Name):
            self.expected_columns.add(side.id)
            return []
        inputs = static.values(left if side is right else right)
        return self._literals(literals, LiteralContext(inputs=inputs, apart=relative, apart_by=absolute))

    def _literal_of(self, side: ast.expr) -> ast.expr | None:
        """Return what a side of an equation gets its literals from, a column's name itself; None if it depends on anything else,
        or is a variable that the test uses twice: another value then does not contradict the test."""
        if isinstance(side, ast.Name) and side.id not in self.columns:
            assigned = _assigned(ast.walk(self.node), side.id)
            side = assigned[0] if len(assigned) == 1 and self.loads[side.id] == 1 else side
        fits = isinstance(side, ast.Name) and side.id in self.columns
        return side if fits or static.names_in(side) <= static.KNOWN else None

    def _text(self, expected: ast.expr, answer: ast.expr | None = None) -> list[TwinCandidate]:
        """Return changes of a text that another must contain."""
        if isinstance(expected, ast.Constant) and isinstance(expected.value, str) and len(expected.value) >= SHORT:
            return self._literals(expected, LiteralContext(inputs=static.values(answer) if answer else ()))
        return []

    def _literals(self, side: ast.expr, context: LiteralContext) -> list[TwinCandidate]:
        """Return changes of the literals that an expected value is made of."""
        leaves = list(static.constants(side))
        self.rng.shuffle(leaves)
        negated = {node.operand for node in ast.walk(side) if isinstance(node, ast.UnaryOp)}
        changes = []
        for leaf in leaves[:VALUES]:
            start, end = self.module.span(leaf)
            suited = replace(context, signed=leaf in negated)
            changes += [
                TwinCandidate(path=self.module.path, start=start, end=end, text=text, base=self.base)
                for text in others(leaf.value, self.rng, self.suite, suited, -(-VALUES // len(leaves)))
            ]
        return changes

    def _table(self) -> tuple[list[str], list[ast.expr]]:
        """Return the columns and rows by which the test alone is parametrised; none if it is so more than once, as a row is
        several tests then."""
        calls = [call for call in self.node.decorator_list if isinstance(call, ast.Call)]
        calls = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "parametrize"]
        if len(calls) != 1 or len(calls[0].args) < 2:
            return [], []
        names, rows = calls[0].args[:2]
        if isinstance(rows, ast.Name):
            assigned = _assigned(self.module.tree.body, rows.id)
            rows = assigned[0] if len(assigned) == 1 and self.module.names[rows.id] == 2 else rows
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


def _assigned(nodes: Iterable[ast.AST], name: str) -> list[ast.expr]:
    """Return the values that are assigned to a name, and to nothing else."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    return [node.value for node in assigned if [*map(ast.unparse, node.targets)] == [name]]
