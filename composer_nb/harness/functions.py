"""Tests as plain functions, checked outside the sandbox.

A test file of the `functions` grader holds nothing but functions of one assertion:

    def test_0():
        assert f([3, 1], 4) == 7

The host parses them. A sandbox receives the code under test and the arguments, never the expected values, and returns the
text of each result; the host compares texts. Whoever wants to forge a pass has to know the right value, and the exact type
is part of the comparison because `repr(True) != repr(1)`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTest:
    """One call and the value it must return."""

    id: str
    """Path and name, `test_f.py::test_0`."""
    module: str
    """Where the file imports the function from."""
    function: str
    arguments: str
    """Text of the tuple of arguments, `([3, 1], 4)`."""
    expected: str
    """`repr` of the value wanted."""


def render_tests(module: str, function: str, cases: list[tuple[tuple[object, ...], object]]) -> str:
    """Writes a test file for `cases`, pairs of arguments and wanted value. The inverse of `parse_tests`."""
    lines = [f"from {module} import {function}"]
    for number, (arguments, wanted) in enumerate(cases):
        call = ", ".join(repr(argument) for argument in arguments)
        lines += ["", "", f"def test_{number}():", f"    assert {function}({call}) == {wanted!r}"]
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=65536)
def parse_tests(path: str, text: str) -> tuple[FunctionTest, ...]:
    """Reads a test file. Raises ValueError that names the line when it holds anything but tests of the plain form."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    tests = []
    modules: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {alias.asname or alias.name: node.module for alias in node.names}
            continue
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
            raise ValueError(f"{path}:{node.lineno}: only imports and functions named test… may stand here")
        tests.append(_parse_test(path, node, modules))
    names = [test.id for test in tests]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two tests share a name; the second would hide the first")
    return tuple(tests)


def _parse_test(path: str, node: ast.FunctionDef, modules: Mapping[str, str]) -> FunctionTest:
    where = f"{path}:{node.lineno}: {node.name}"
    match node.body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[wanted]))]:
            pass
        case _:
            raise ValueError(f"{where}: the grader `functions` needs one line, `assert f(arguments) == value`")
    if not isinstance(call.func, ast.Name) or call.keywords or call.func.id not in modules:
        raise ValueError(f"{where}: call an imported function by its plain name with positional arguments")
    try:
        arguments = tuple(ast.literal_eval(argument) for argument in call.args)
        expected = ast.literal_eval(wanted)
    except ValueError:
        raise ValueError(f"{where}: arguments and value must be literals") from None
    return FunctionTest(
        id=f"{path}::{node.name}",
        module=modules[call.func.id],
        function=call.func.id,
        arguments=repr(arguments),
        expected=repr(expected),
    )


def parse_test_files(files: Mapping[str, str]) -> tuple[FunctionTest, ...]:
    """All tests of several files, in order of path. Raises ValueError when there is none."""
    tests = tuple(test for path in sorted(files) for test in parse_tests(path, files[path]))
    if not tests:
        raise ValueError("no test function found: a task without tests can not be graded")
    return tests
