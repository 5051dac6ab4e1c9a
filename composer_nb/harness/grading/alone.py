"""Cut a hidden module down to one expectation, so that the process that runs it holds nothing that confirms or refutes it.

Code under test can read every constant of the process that it shares with the tests. Expectations that stand in one process
therefore explain one another: the odd one out, the row that breaks the pattern of the others, the copy that was changed while
another was not. A test *stands alone* if its module still works without the other tests, the other rows and the other assertions,
and if its expected value is one literal that nothing left in the modules repeats. Only such tests count as a guard
(`recorded.guard`), and a grade runs some of them alone, each in a sandbox of its own (`pytest_grader.py`).

The name of the test and the ids of its rows go too, because they may say what is expected. Data files of the tests stay out.
Reads source; executes nothing. `validate.standing_alone` sees whether what is left works.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from composer_nb.harness.grading.box import Job
from composer_nb.harness.grading.plan import Twin, changed_text, conftests, silent
from composer_nb.harness.grading.source import RAISES, Function, Source, cells_of, has_calls, last_name
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.runtime import packages_of
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task

T = TypeVar("T")
NAME = "test_it"
SETUP = re.compile(r"(setup|teardown)(_?(module|function|class|method))?", re.I)
BODIES = ("body", "orelse", "handlers", "finalbody")
GUESSABLE = (None, True, False, 0, 1, "", b"")
PLAIN_TEXT = 4
"""Characters of a value that no other text contains by chance."""


class _Unfit(Exception):
    """The expectation cannot stand alone."""


def lone_job(task: Task, files: Mapping[str, bytes], twin: Twin, changed: bool) -> Job | None:
    """Return the run of the one test that a twin changes, as itself or `changed`; None if the test cannot stand alone."""
    if len(twin.keys) != 1 or twin.besides or twin.weak or twin.telling or twin.kind != "value":
        return None
    try:
        cut = _Cut(changed_text(task.tests[twin.path], [twin] if changed else []), twin)
        hidden = {
            path: silent(text) for path, text in _with_helpers(task, twin.path, ast.unparse(cut.source.tree)).items()
        }
        cut.refuse_repeated(hidden.values(), task.instruction)
    except (_Unfit, SyntaxError, ValueError, RecursionError):
        return None
    return Job(
        files={path: data for path, data in files.items() if path not in hidden},
        hidden=hidden,
        tests=(twin.path,),
        keys=frozenset([cut.key]),
        packages=packages_of(task),
        ini=task.metadata.get("pytest.ini", ""),
    )


def _with_helpers(task: Task, path: str, text: str) -> dict[str, str]:
    """Return a test module with the conftests and with the modules beside the tests that these name, but no other tests."""
    kept = {path: text} | conftests(task)
    rest = {path: text for path, text in task.tests.items() if path.endswith(".py") and not is_test_module(path)}
    while True:
        words = {word for text in kept.values() for word in re.findall(r"\w+", text)}
        named = [path for path in rest if PurePosixPath(path).stem in words | {"__init__"}]
        if not named:
            return kept
        kept |= {path: rest.pop(path) for path in named}


class _Cut:
    """A test module without what a single expectation does not need. Its tree changes in place."""

    def __init__(self, text: str, twin: Twin) -> None:
        self.source, self.at = Source(twin.path, text), twin.start
        base, _, number = twin.keys[0].rpartition("#")
        _, *classes, name = base.split("::")
        body = self.source.tree.body
        path: list[ast.Module | ast.ClassDef] = [self.source.tree]
        for each in classes:
            path.append(_one([node for node in body if isinstance(node, ast.ClassDef) and node.name == each]))
            body = path[-1].body
        self.test = _one([node for node in body if isinstance(node, Function) and node.name == name])
        self.names: set[str] = set()
        own_row = self._cut_tables()
        self._cut_assertions(own_row)
        self.test.name = NAME
        inner: ast.AST = self.test
        for node in reversed(path):
            node.body = self._needed(node.body, inner)
            inner = node
        place = [self.source.path, *classes, NAME]
        self.key = "::".join(place) + ("#0" if own_row else f"#{number}")

    def holds(self, node: ast.AST) -> bool:
        start, end = self.source.span(node)  # type: ignore[arg-type]
        return start <= self.at < end

    def _literal(self, node: ast.expr) -> None:
        """Take the only literal of an expected value for the expectation. Raises _Unfit if there are several."""
        words = {inside for each in ast.walk(node) if isinstance(each, ast.keyword) for inside in ast.walk(each.value)}
        self.literal = _one([each for each in ast.walk(node) if isinstance(each, ast.Constant) and each not in words])
        if not self.holds(self.literal) or self.literal.value in GUESSABLE:
            raise _Unfit

    def _cut_tables(self) -> bool:
        """Leave one row of the table that holds the expectation, and no ids. Return whether there is such a table."""
        found = False
        for call in self.test.decorator_list:
            if not (isinstance(call, ast.Call) and last_name(call.func) == "parametrize" and len(call.args) > 1):
                continue
            call.keywords = [word for word in call.keywords if word.arg != "ids"]
            names, rows = call.args[:2]
            if isinstance(rows, ast.Name):
                tables = [each for each in self.source.tree.body if isinstance(each, ast.Assign)]
                rows = _one([each for each in tables if ast.unparse(each.targets[0]) == rows.id]).value
            if not self.holds(rows):
                continue
            if not isinstance(rows, ast.List | ast.Tuple):
                raise _Unfit
            row = _one([each for each in rows.elts if self.holds(each)])
            rows.elts, found = [row], True
            if isinstance(row, ast.Call):
                row.keywords = [word for word in row.keywords if word.arg != "id"]
            text = names.value if isinstance(names, ast.Constant) else names
            count = len(str(text).split(",")) if isinstance(text, str) else len(getattr(names, "elts", "x"))
            self._literal(_one([cell for cell in cells_of(["x"] * count, row) if self.holds(cell)]))
        return found

    def _cut_assertions(self, own_row: bool) -> None:
        """Remove all assertions but that of the expectation. Raises _Unfit if it does not follow which one that is."""
        asserting = [each for each in _statements(self.test.body) if _asserts(each)]
        holding = [each for each in asserting if self.holds(each)]
        if own_row or not holding:
            _one(asserting)
        if not own_row and not holding:
            assigned = [
                each for each in _statements(self.test.body) if isinstance(each, ast.Assign) and self.holds(each)
            ]
            self._literal(_one(assigned).value)
        elif not own_row:
            match _one(holding):
                case ast.Assert(test=ast.Compare(left=left, comparators=[right])):
                    sides = [left, right]
                case ast.Expr(value=ast.Call(args=sides)):
                    pass
                case _:
                    raise _Unfit
            self._literal(_one([each for each in sides if self.holds(each)]))
        _filter(self.test, lambda node: not _asserts(node) or own_row or not holding or node in holding)
        loaded = {
            each.id for each in ast.walk(self.test) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        }
        _filter(self.test, lambda node: not _idle(node, loaded))

    def _needed(self, body: Sequence[ast.stmt], inner: ast.AST) -> list[ast.stmt]:
        """Return the statements of a module or class that its one test may need. Raises _Unfit if another test is among them."""
        kept: list[ast.stmt] = []
        self.names |= _mentioned(inner)
        while fresh := [each for each in body if each not in kept and each is not inner and self._wanted(each)]:
            kept += fresh
            self.names |= set().union(*map(_mentioned, fresh))
        for each in kept:
            if isinstance(each, Function) and each.name.startswith("test"):
                raise _Unfit
            if isinstance(each, ast.ClassDef):
                each.body = [n for n in each.body if not (isinstance(n, Function) and n.name.startswith("test"))]
                each.body = each.body or [ast.Pass()]
        return [each for each in body if each in kept or each is inner]

    def _wanted(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return True
        if isinstance(node, Function | ast.ClassDef):
            automatic = any("autouse" in ast.unparse(each) for each in node.decorator_list)
            return node.name in self.names or automatic or bool(SETUP.fullmatch(node.name))
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Call)
        bound = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        imports = any(isinstance(each, ast.Import | ast.ImportFrom) for each in ast.walk(node))
        return imports or not bound.isdisjoint(self.names | {"pytestmark", "pytest_plugins"})

    def refuse_repeated(self, modules: Iterable[str], instruction: str) -> None:
        """Raise _Unfit if the instruction, or more than one literal of the modules, is or contains the expected value."""
        value = str(self.literal.value)
        long = len(value) >= PLAIN_TEXT
        holds = re.compile(re.escape(value) if long else rf"(?<![\w.]){re.escape(value)}(?![\w.])")
        trees = map(parse, modules if long else [silent(ast.unparse(self.test))])
        literals = [each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Constant)]
        if holds.search(instruction) or sum(bool(holds.search(str(each.value))) for each in literals) > 1:
            raise _Unfit


def _one(found: Sequence[T]) -> T:
    if len(found) != 1:
        raise _Unfit
    return found[0]


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        names = [last_name(each.context_expr.func) for each in node.items if isinstance(each.context_expr, ast.Call)]
        return any(name in RAISES or name.startswith("assert") for name in names)
    named = node.value if isinstance(node, ast.Expr) else None
    name = last_name(named.func) if isinstance(named, ast.Call) else ""
    return isinstance(node, ast.Assert) or name in RAISES or name.startswith("assert") or name == "fail"


def _idle(node: ast.AST, loaded: set[str]) -> bool:
    """Return whether a statement assigns plain data to a name that nothing reads."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name not in loaded and not has_calls(value)
    return False


def _statements(body: Iterable[Any]) -> Iterator[ast.AST]:
    """Yield statements and what they contain, but not what is inside an assertion."""
    for node in body:
        yield node
        if not _asserts(node):
            for name in BODIES:
                yield from _statements(getattr(node, name, []))


def _filter(node: ast.AST, keep: Callable[[ast.AST], bool]) -> None:
    """Remove the statements that are not to be kept from a function, at any depth outside assertions."""
    for name in BODIES:
        body = getattr(node, name, None)
        if body:
            for each in body:
                if not _asserts(each):
                    _filter(each, keep)
            left = [each for each in body if keep(each)]
            setattr(node, name, left or [ast.Pass()])


def _mentioned(node: ast.AST) -> set[str]:
    """Return the names, attributes, arguments and texts in a statement: whatever may lead to another one."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return found | {
        each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
