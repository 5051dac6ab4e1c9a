"""Cut a hidden module down to one expectation, so that the process that runs it holds nothing that confirms or refutes it.

Code under test can read every constant of the process that it shares with the tests. Expectations that stand in one process
therefore explain one another: the odd one out, the row that breaks the pattern of the others, the copy that was changed while
another was not. A test *stands alone* if its module still works without the other tests, the other rows and the other assertions,
and if its expected value is one literal that nothing left in the modules repeats. Only such tests count as a guard
(`recorded.guard`), and a grade runs some of them alone, each in a sandbox of its own (`pytest_grader.py`).

The name of the test and the ids of its rows go too, because they may say what is expected. Data files of the tests stay out.
Reads source; executes nothing. `validate.standing_alone` sees whether what is left works.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from composer_nb.harness.grading.box import TestJob
from composer_nb.harness.grading.plan import Twin, changed_text, conftests, silent
from composer_nb.harness.grading.source import RAISES, Function, ModuleSource, cells_of, has_calls, last_name
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.runtime import packages_of
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task

T = TypeVar("T")
NAME = "test_it"
SETUP = re.compile(r"(setup|teardown)(_?(module|function|class|method))?", re.I)
BODIES = ("body", "orelse", "handlers", "finalbody")
GUESSABLE = (None, True, False, 0, 1, "", b"")
PLAIN_TEXT = 4  # Minimum characters of a value that other texts do not contain by chance.


class _Unfit(Exception):
    """The expectation cannot stand alone."""


def lone_job(task: Task, files: Mapping[str, bytes], twin: Twin, changed: bool) -> TestJob | None:
    """Return the run of the one test that a twin changes, as itself or `changed`; None if the test cannot stand alone."""
    if len(twin.keys) != 1:
        return None
    try:
        cut = _Cut(changed_text(task.tests[twin.path], [twin] if changed else []), twin)
        modules = _with_helpers(task, twin.path, ast.unparse(cut.source.tree))
        hidden = {path: silent(text) for path, text in modules.items()}
        cut.refuse_repeated(hidden.values(), task.instruction)
    except (_Unfit, SyntaxError, ValueError, RecursionError):
        return None
    return TestJob(
        files={path: data for path, data in files.items() if path not in hidden},
        hidden=hidden,
        tests=(twin.path,),
        keys=frozenset([cut.key]),
        packages=packages_of(task),
        ini=task.metadata.get("pytest.ini", ""),
    )


def _with_helpers(task: Task, path: str, text: str) -> dict[str, str]:
    """Return a test module with its conftests and the helper modules that these name, but no other tests."""
    modules = {path: text} | conftests(task)
    rest = {path: text for path, text in task.tests.items() if path.endswith(".py") and not is_test_module(path)}
    while True:
        words = {word for text in modules.values() for word in re.findall(r"\w+", text)}
        named = [path for path in rest if PurePosixPath(path).stem in words | {"__init__"}]
        if not named:
            return modules
        modules |= {path: rest.pop(path) for path in named}


class _Cut:
    """A test module reduced to one expectation. Changes its syntax tree in place."""

    def __init__(self, text: str, twin: Twin) -> None:
        """Find the test of `twin` in its module's `text`, and reduce the module to what that test needs.

        Raises _Unfit if it cannot stand alone."""
        self.source, self.at = ModuleSource(twin.path, text), twin.start
        base, _, number = twin.keys[0].rpartition("#")
        _, *classes, name = base.split("::")
        body = self.source.tree.body
        path: list[ast.Module | ast.ClassDef] = [self.source.tree]
        for class_name in classes:
            path.append(_one([node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]))
            body = path[-1].body
        self.test = _one([node for node in body if isinstance(node, Function) and node.name == name])
        self.names: set[str] = set()
        in_table = self._cut_tables()
        self._cut_assertions(in_table)
        self.test.name = NAME
        inner: ast.AST = self.test
        for node in reversed(path):
            node.body = self._needed(node.body, inner)
            inner = node
        parts = [self.source.path, *classes, NAME]
        self.key = "::".join(parts) + ("#0" if in_table else f"#{number}")

    def holds(self, node: ast.AST) -> bool:
        start, end = self.source.span(node)  # type: ignore[arg-type]
        return start <= self.at < end

    def _literal(self, node: ast.expr) -> None:
        """Take the only literal of an expected value for the expectation. Raises _Unfit if there are several."""
        keywords = [child for child in ast.walk(node) if isinstance(child, ast.keyword)]
        words = {inside for keyword in keywords for inside in ast.walk(keyword)}
        constants = [child for child in ast.walk(node) if isinstance(child, ast.Constant)]
        self.literal = _one([constant for constant in constants if constant not in words])
        if not self.holds(self.literal) or self.literal.value in GUESSABLE:
            raise _Unfit

    def _cut_tables(self) -> bool:
        """Leave one row of the table that holds the expectation, and no ids. Return whether there is such a table."""
        in_table = False
        for call in self.test.decorator_list:
            if not (isinstance(call, ast.Call) and last_name(call.func) == "parametrize" and len(call.args) > 1):
                continue
            call.keywords = [word for word in call.keywords if word.arg != "ids"]
            names, rows = call.args[:2]
            if isinstance(rows, ast.Name):
                tables = [node for node in self.source.tree.body if isinstance(node, ast.Assign)]
                rows = _one([node for node in tables if ast.unparse(node.targets[0]) == rows.id]).value
            if not self.holds(rows):
                continue
            if not isinstance(rows, ast.List | ast.Tuple):
                raise _Unfit
            row = _one([node for node in rows.elts if self.holds(node)])
            rows.elts, in_table = [row], True
            if isinstance(row, ast.Call):
                row.keywords = [word for word in row.keywords if word.arg != "id"]
            text = names.value if isinstance(names, ast.Constant) else names
            count = len(str(text).split(",")) if isinstance(text, str) else len(getattr(names, "elts", "x"))
            self._literal(_one([cell for cell in cells_of(["x"] * count, row) if self.holds(cell)]))
        return in_table

    def _cut_assertions(self, in_table: bool) -> None:
        """Remove all assertions but that of the expectation. Raises _Unfit if several qualify."""
        statements = [*_statements(self.test.body)]
        asserting = [statement for statement in statements if _asserts(statement)]
        holding = [statement for statement in asserting if self.holds(statement)]
        assertion = _one(holding or asserting)
        if holding:
            match assertion:
                case ast.Assert(test=ast.Compare(left=left, comparators=[right])):
                    sides = [left, right]
                case ast.Expr(value=ast.Call(args=sides)):
                    pass
                case _:
                    raise _Unfit
            self._literal(_one([side for side in sides if self.holds(side)]))
        elif not in_table:
            assigned = [node for node in statements if isinstance(node, ast.Assign) and self.holds(node)]
            self._literal(_one(assigned).value)
        _filter(self.test, lambda node: not _asserts(node) or node is assertion)
        loaded = {
            name.id for name in ast.walk(self.test) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
        }
        _filter(self.test, lambda node: not _idle(node, loaded))

    def _needed(self, body: Sequence[ast.stmt], inner: ast.AST) -> list[ast.stmt]:
        """Return the statements of a module or class that its one test may need. Raises _Unfit if another test is among them."""
        needed: list[ast.stmt] = []
        self.names |= _mentioned(inner)
        while fresh := [node for node in body if node not in needed and node is not inner and self._needs(node)]:
            needed += fresh
            self.names |= set().union(*map(_mentioned, fresh))
        for node in needed:
            if isinstance(node, Function) and node.name.startswith("test"):
                raise _Unfit
            if isinstance(node, ast.ClassDef):
                rest = [item for item in node.body if not (isinstance(item, Function) and item.name.startswith("test"))]
                node.body = rest or [ast.Pass()]
        return [node for node in body if node in needed or node is inner]

    def _needs(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return True
        if isinstance(node, Function | ast.ClassDef):
            automatic = any("autouse" in ast.unparse(child) for child in node.decorator_list)
            return node.name in self.names or automatic or bool(SETUP.fullmatch(node.name))
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Call)
        names = [child for child in ast.walk(node) if isinstance(child, ast.Name)]
        bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        imports = any(isinstance(child, ast.Import | ast.ImportFrom) for child in ast.walk(node))
        return imports or not bound.isdisjoint(self.names | {"pytestmark", "pytest_plugins"})

    def refuse_repeated(self, modules: Iterable[str], instruction: str) -> None:
        """Raise _Unfit if the instruction, or more than one literal of the modules, is or contains the expected value."""
        value = str(self.literal.value)
        long = len(value) >= PLAIN_TEXT
        holds = re.compile(re.escape(value) if long else rf"(?<![\w.]){re.escape(value)}(?![\w.])")
        trees = map(parse, modules if long else [silent(ast.unparse(self.test))])
        literals = [literal for tree in trees for literal in ast.walk(tree) if isinstance(literal, ast.Constant)]
        if holds.search(instruction) or sum(bool(holds.search(str(literal.value))) for literal in literals) > 1:
            raise _Unfit


def _one(candidates: Sequence[T]) -> T:
    if len(candidates) != 1:
        raise _Unfit
    return candidates[0]


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        names = [last_name(item.context_expr.func) for item in node.items if isinstance(item.context_expr, ast.Call)]
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


def _filter(parent: ast.AST, keep: Callable[[ast.AST], bool]) -> None:
    """Remove statements from a function, at any depth outside assertions, unless `keep` returns True."""
    for name in BODIES:
        body = getattr(parent, name, None)
        if body:
            for statement in body:
                if not _asserts(statement):
                    _filter(statement, keep)
            left = [statement for statement in body if keep(statement)]
            setattr(parent, name, left or [ast.Pass()])


def _mentioned(node: ast.AST) -> set[str]:
    """Return the names, attributes, arguments and texts in a statement: whatever may lead to another one."""
    words = set[str]()
    for child in ast.walk(node):
        match child:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.Constant(value=str(word)):
                words.add(word)
    return words
