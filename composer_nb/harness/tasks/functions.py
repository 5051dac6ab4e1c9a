"""Tests as plain functions, checked outside the sandbox.

A test file of the grader `functions` contains only functions of one assertion:

    def test_0():
        assert f([3, 1], 4) == 7

The host parses them. A sandbox receives the code under test and the arguments, never the expected values, and returns the text of
each result; the host compares texts. Code that forges a pass has to know the right value. The comparison includes the exact type,
because `repr(True) != repr(1)`, the order of a dictionary, and the sign of a zero.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from composer_nb.harness.sandbox.requests import CALLER, CALLER_SOURCE, CallLimits, CallOutcome, CallRequest, value_text
from composer_nb.harness.syntax import literal_eval, parse

LONGEST_ARGUMENTS = 1 << 20  # Maximum characters of one call's arguments.


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTest:
    """One call and the value it must return.

    Attributes:
        id: Path and name, `test_f.py::test_0`.
        module: Module that the file imports the function from.
        arguments: Text of the tuple of arguments, `([3, 1], 4)`.
        expected: Text of the expected value, in the form of a sandbox's report (`value_text`).
    """

    id: str
    module: str
    function: str
    arguments: str
    expected: str


def is_test(path: str) -> bool:
    """Return whether a file of a workspace contains tests: its name begins with `test_`."""
    return PurePosixPath(path).name.startswith("test_")


def literal(value: object) -> str:
    """Return a literal of `value`. Raises ValueError for anything but plain data, and for infinity and NaN."""
    text = value_text(value, LONGEST_ARGUMENTS)
    if "inf" in text or "nan" in text:  # in a string, or a float that has no literal
        try:
            literal_eval(text)
        except ValueError:
            raise ValueError(f"{text[:80]}: inf and nan have no literal") from None
    return text


def render_tests(module: str, function: str, cases: list[tuple[tuple[object, ...], object]]) -> str:
    """Return a test file for `cases`, pairs of arguments and expected value. This is the inverse of `parse_tests`.

    Raises ValueError for a value that has no literal.
    """
    lines = [f"from {module} import {function}"]
    for number, (arguments, expected) in enumerate(cases):
        call = ", ".join(literal(argument) for argument in arguments)
        lines += ["", "", f"def test_{number}():", f"    assert {function}({call}) == {literal(expected)}"]
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=8192)
def parse_tests(path: str, text: str) -> tuple[FunctionTest, ...]:
    """Parse a test file. Raises ValueError, which names the line, for anything but tests of the plain form."""
    tree = parse_module(path, text)
    tests: list[FunctionTest] = []
    imported: dict[str, tuple[str, str]] = {}
    bound: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            bound += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            tests.append(_parse_test(path, node, imported))
            bound.append(node.name)
        else:
            raise ValueError(f"{path}:{node.lineno}: only imports and functions named test… may stand here")
    if len(set(bound)) < len(bound):
        raise ValueError(f"{path}: two tests or imports share a name; the second would hide the first")
    return tuple(tests)


def parse_module(path: str, text: str) -> ast.Module:
    """Parse a module without executing it. Raises ValueError, which names the line, if it is not Python."""
    try:
        return parse(text)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, too deep
        raise ValueError(f"{path}: not Python: {error or type(error).__name__}") from None


def _parse_test(path: str, node: ast.FunctionDef, imported: Mapping[str, tuple[str, str]]) -> FunctionTest:
    """Parse a test, `assert f(arguments) == value`. Raises ValueError for any other."""
    where = f"{path}:{node.lineno}: {node.name}"
    if node.decorator_list or any(value for _, value in ast.iter_fields(node.args)):
        raise ValueError(f"{where}: a test has no decorators and no parameters")
    match node.body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[wanted]), msg=None)]:
            pass
        case _:
            raise ValueError(f"{where}: the grader `functions` needs one line, `assert f(arguments) == value`")
    if not isinstance(call.func, ast.Name) or call.keywords or call.func.id not in imported:
        raise ValueError(f"{where}: call an imported function by its plain name with positional arguments")
    module, function = imported[call.func.id]
    try:
        arguments = literal(tuple(literal_eval(argument) for argument in call.args))
        expected = value_text(literal_eval(wanted))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{where}: arguments and value must be literals of plain data") from None
    id = f"{path}::{node.name}"
    return FunctionTest(id=id, module=module, function=function, arguments=arguments, expected=expected)


def parse_test_files(files: Mapping[str, str]) -> tuple[FunctionTest, ...]:
    """Return all tests of several files, in order of path. Raises ValueError if there is none."""
    tests = tuple(test for path in sorted(files) for test in parse_tests(path, files[path]))
    if not tests:
        raise ValueError("no test function found: a task without tests cannot be graded")
    return tests


def request_tests(
    files: Mapping[str, str], tests: Sequence[FunctionTest], limits: CallLimits | None = None
) -> CallRequest:
    """Return the request for the calls of `tests`: the code under test and the arguments, but no expected values. Tests of
    several functions are called through a generated module, in one process."""
    sources = {path: text for path, text in files.items() if not is_test(path)}
    targets = {(test.module, test.function) for test in tests}
    if len(targets) == 1:
        [(module, function)] = targets
        arguments = tuple(test.arguments for test in tests)
        return CallRequest(files=sources, module=module, function=function, arguments=arguments, limits=limits)
    arguments = tuple(f"({test.module!r}, {test.function!r}, {test.arguments})" for test in tests)
    sources[f"{CALLER}.py"] = CALLER_SOURCE
    return CallRequest(files=sources, module=CALLER, function="call", arguments=arguments, limits=limits)


def separated(tests: Sequence[FunctionTest]) -> list[tuple[FunctionTest, ...]]:
    """Return the tests in groups for one process each, so that no code of the agent can look an answer up.

    Code under test can read all arguments that its process receives, and one call's answer may stand among another's, as where
    two functions undo each other. Each function therefore has processes of its own, and so have its calls of which one reveals
    the other (`reveals`). Functions in files that the agent did not change are no exception: they may run its code in ways that
    no text shows.
    """
    by_function: dict[tuple[str, str], list[FunctionTest]] = {}
    for test in tests:
        by_function.setdefault((test.module, test.function), []).append(test)
    groups: list[tuple[FunctionTest, ...]] = []
    for function_tests in by_function.values():
        small = _undone(function_tests)
        parts: list[list[FunctionTest]] = []
        for test in function_tests:
            call = test.expected, test.arguments
            for part in parts:
                if not reveals(call, [(other.expected, other.arguments) for other in part], small):
                    part.append(test)
                    break
            else:
                parts.append([test])
        groups += map(tuple, parts)
    return groups


def _undone(tests: Sequence[FunctionTest]) -> bool:
    """Return whether the answers of at least half of a function's tests are arguments of others: too many for chance."""
    arguments = [{_bare(repr(value)) for value in literal_eval(test.arguments)} for test in tests]
    counts = Counter(text for texts in arguments for text in texts)
    answers = [_bare(test.expected) for test in tests]
    repeated = sum(counts[answer] > (answer in texts) for answer, texts in zip(answers, arguments, strict=True))
    return 2 * repeated >= len(tests)


FEW = {"", "None", "True", "False", "0", "1", "-1"}  # Answers that are guessed as easily as looked up.


def reveals(call: tuple[str, str], others: Iterable[tuple[str, str]], small: bool = False) -> bool:
    """Return whether the arguments of a call hold the answer of another one of the same function, or the other way round.

    A call is the texts of its answer and of its arguments. An answer is held by the same characters but for quotes and brackets,
    or by a word of it that its own arguments lack. Numbers of one or two digits are everywhere and count only if `small`.
    """
    return any(_held(call, other[1], small) or _held(other, call[1], small) for other in others)


def _held(call: tuple[str, str], arguments: str, small: bool) -> bool:
    answer, own_arguments = map(_bare, call)
    arguments = _bare(arguments)
    texts = {answer, *(word for word in _WORDS.findall(answer) if word not in own_arguments)}
    return any(
        text in arguments if len(text) >= LONG else re.search(rf"(?<![\w.-]){re.escape(text)}(?![\w.])", arguments)
        for text in texts
        if text not in FEW and (small or not re.fullmatch(r"-?\d{1,2}", text))
    )


LONG = 4  # Characters of a text that does not stand in another by chance.
_WORDS = re.compile(rf"[^\s,:]{{{LONG},}}")


@lru_cache(maxsize=8192)
def _bare(text: str) -> str:
    """Return a literal without what distinguishes 7 from "7", [7], (7,) and 7.0."""
    return re.sub(r"set\(\)|\bb(?=['\"])|[][(){}'\"]|,(?=\))|(?<=\d)\.0\b", "", text)


def passes(test: FunctionTest, outcome: CallOutcome) -> bool:
    """Return whether the call returned the expected value, including its type."""
    return outcome.status == "returned" and outcome.text == test.expected
