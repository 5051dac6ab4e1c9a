"""Read a symptom off a failing test: how it failed, as someone who ran into the bug could report it.

A symptom *tells* if it names what was done, what should have come of it, and what came instead: a call with its arguments and
both results, or the lines of the test that reproduce it. Values of a test's parameters replace their names. The test's name and
id are left out.

Everything that a symptom quotes comes out of a sandbox. It is treated as text, shortened, and kept on one line.
"""

import ast
import builtins
import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from composer_nb.harness import syntax
from composer_nb.harness.grading.box import Failure, TestResult
from composer_nb.harness.grading.source import Function, last_name

MAX_QUOTE = 160  # Characters of a value, a message or a call in a line.
MAX_LINES, MAX_CODE = 20, 1000  # Lines that reproduce a bug, and their characters.
FIXTURES = 2  # Fixtures that these lines may use without showing them.
CONTEXT = 24  # Characters shown before the first difference of two long values.
RAISES = ("raises", "assertRaises", "assertRaisesRegex", "deprecated_call", "warns", "assertWarns")
# unittest's assertions without their prefix `assert`, as expressions of the language.
UNITTEST = {
    **dict.fromkeys(("Equal", "Equals", "ListEqual", "DictEqual"), "({0}) == ({1})"), "NotEqual": "({0}) != ({1})",
    "In": "({0}) in ({1})", "NotIn": "({0}) not in ({1})", "Is": "({0}) is ({1})", "IsNone": "({0}) is None",
    "IsNotNone": "({0}) is not None", "True": "({0})", "False": "not ({0})", "IsInstance": "isinstance(({0}), ({1}))",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A failing test, as a report of a bug would tell it.

    Attributes:
        call: The expression that goes wrong; empty if it is no short line.
        code: Lines that lead to the call and end in it, if the call alone does not say everything.
        setup: Names in `code` that come from fixtures.
        message: Message of an exception that the code raised. An assertion's is not kept.
        missing: The exception that should have been raised.
    """

    call: str = ""
    code: str = ""
    setup: tuple[str, ...] = ()
    expected: str = ""
    actual: str = ""
    exception: str = ""
    message: str = ""
    missing: str = ""


def symptom(key: str, test: str, result: TestResult, failure: Failure | None) -> Symptom | None:
    """Return the symptom of one failing test; None if it does not tell. `test`: text of its module as it ran (`plan.normal`)."""
    where = key.rpartition("#")[0].split("::")[1:]
    tree = _parsed(test)
    function = find(tree, where)
    statement = _failing(function, failure.line) if function and failure else None
    if failure is None or function is None or statement is None or isinstance(statement, ast.Raise):
        return None  # a test that raises by itself shows no call
    values = _given(tree, function, failure.values)
    filled = _filled(statement, values)
    if (reproduction := _reproduced(tree, function, statement, values)) is None:
        return None
    code, setup = reproduction
    call, expected, actual = _sides(filled, failure)
    exception, missing = "", _not_raised(failure.message)
    if not missing and result.why not in ("AssertionError", "Failed", "failureException"):
        exception, missing = result.why, _expected(function, statement)
    if exception or missing:
        expected, actual = expected if len(expected) <= MAX_QUOTE else "", ""
    elif expected and actual:
        expected, actual = differing(expected, actual)
    else:
        return None
    if "\n" in call or len(call) > MAX_QUOTE:
        call, code = "", code or ast.unparse(filled)
    facts = {"call": call, "code": code, "expected": expected, "actual": actual, "exception": exception}
    facts |= {"message": short(failure.message) if exception else "", "missing": missing}
    own_name = re.compile(rf"\b{re.escape(where[-1])}\b(\.<locals>\.)?")
    return Symptom(setup=setup, **{name: own_name.sub("", text) for name, text in facts.items()})


@lru_cache(maxsize=32)
def _parsed(test: str) -> ast.Module:
    """Return a module's tree, which nobody changes."""
    return syntax.parse(test)


def _not_raised(message: str) -> str:
    if not re.search(r"DID NOT RAISE|not raised|DID NOT WARN", message):
        return ""
    match = re.search(r"(?<![\w.])(\w+(?:\.\w+)*+) not raised|<class '(?:\w+\.)*(\w+)'>", message)
    return (next(filter(None, match.groups()), "") if match else "") or "an exception"


def find(tree: ast.Module, where: list[str]) -> Function | None:
    """Return the test function of a key's parts after the path; of an inherited one, that of any class of the module."""
    body: list[ast.stmt] = tree.body
    for name in where[:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    others = [member for node in tree.body if isinstance(node, ast.ClassDef) for member in node.body if len(where) > 1]
    return next((node for node in [*body, *others] if isinstance(node, Function) and node.name == where[-1]), None)


def _failing(function: ast.AST, line: int) -> ast.stmt | None:
    """Return the smallest statement around a line."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    around = [node for node in inside if node.lineno <= line <= (node.end_lineno or 0)]
    return min(around, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


# What was done, what should have come of it, what came.


def _sides(statement: ast.stmt, failure: Failure) -> tuple[str, str, str]:
    """Return the expression that a failing statement is about and, of an assertion, what it should be and what it is."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[op], comparators=[right])):
            return _compared(op, left, right, failure)
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=inner)):
            return ast.unparse(inner), "false", "true"
        case ast.Assert(test=test):
            return ast.unparse(test), "true", "false"
        case ast.With(items=items, body=body) if any(map(_raises, items)):
            call = "\n".join(map(ast.unparse, body))
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name), args=[_, target, *rest], keywords=keywords)) if (
            name in RAISES
        ):
            call = ast.unparse(ast.Call(target, rest, keywords))
        case (
            ast.Assign(value=value)
            | ast.Expr(value=value)
            | ast.Return(value=ast.expr() as value)
            | ast.For(iter=value)
        ):
            call = ast.unparse(value)
        case _:
            call = ast.unparse(statement).split("\n")[0].rstrip(":")
    return call, "", ""


def _compared(op: ast.cmpop, left: ast.expr, right: ast.expr, failure: Failure) -> tuple[str, str, str]:
    sign, left_value, right_value = failure.compared or _unequal(failure.message)
    left_text, right_text = ast.unparse(left), ast.unparse(right)
    if f" {sign} " not in ast.unparse(ast.Compare(ast.Name("x"), [op], [ast.Name("x")])):
        left_value = right_value = ""
    if isinstance(op, ast.Eq | ast.Is):
        if _plain(left_text) and not _plain(right_text):
            left_text, right_text, left_value, right_value = right_text, left_text, right_value, left_value
        return left_text, right_text if _plain(right_text) or not _plain(right_value) else right_value, left_value
    if isinstance(op, ast.In) and _plain(right_text):
        return left_text, f"one of {right_text}", left_value
    if isinstance(op, ast.In | ast.NotIn):
        return right_text, f"something {'with' if isinstance(op, ast.In) else 'without'} {left_text}", right_value
    return ast.unparse(ast.Compare(left, [op], [right])), "true", "false"


def _unequal(message: str) -> tuple[str, str, str]:
    """Return the values in unittest's message about two that differ, in the form of `Failure.compared`."""
    first, sign, second = message.removeprefix("AssertionError: ").partition(" != ")
    return ("==", first, second) if sign and " : " not in second and not first.endswith("differ: ") else ("", "", "")


def _plain(text: str) -> bool:
    """Return whether a text is a literal."""
    with suppress(ValueError, SyntaxError, TypeError):  # `{[1]}`
        syntax.literal_eval(text)
        return True
    return False


def _expected(function: Function, statement: ast.stmt) -> str:
    """Return the exception that a test expects of a statement."""
    around = [node for node in ast.walk(function) if isinstance(node, ast.With) and node is not statement]
    for item in (item for node in around if statement in ast.walk(node) for item in node.items):
        if _raises(item) and isinstance(item.context_expr, ast.Call) and item.context_expr.args:
            return ast.unparse(item.context_expr.args[0]).rpartition(".")[2].strip("()")
    return ""


def _raises(item: ast.withitem) -> bool:
    return isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) in RAISES


def differing(expected: str, actual: str) -> tuple[str, str]:
    """Return two values, cut to where they differ if one of them is long."""
    if max(len(expected), len(actual)) <= MAX_QUOTE:
        return short(expected), short(actual)
    unlike = (at for at, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1])
    start = max(0, next(unlike, min(len(expected), len(actual))) - CONTEXT)

    def cut(text: str) -> str:
        part = text[start : start + MAX_QUOTE // 2]
        return f"{'…' * bool(start)}{part}{'…' * (len(text) > start + len(part))}"

    return short(cut(expected)), short(cut(actual))


def short(text: str) -> str:
    """Return a text on one line, without addresses and folders, shortened."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    text = " ".join(re.sub(r"/\S*/", "", "".join(c if c.isprintable() else " " for c in text)).split())
    return text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 1] + "…"


# Lines that reproduce it.


class _Fill(ast.NodeTransformer):
    """A transformer that puts values in the places of names."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Fill an f-string if it can be written then: before Python 3.12, none of its values may have a backslash."""
        filled = self.generic_visit(copy.deepcopy(node))
        with suppress(ValueError):
            ast.unparse(filled)
            return filled
        return node


def _filled(statement: ast.stmt, values: Mapping[str, ast.expr]) -> ast.stmt:
    """Return a statement with values in the places of names; an assertion of unittest as one of the language."""
    filled: ast.stmt = _Fill(values).visit(copy.deepcopy(statement))
    match filled:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name), args=args)) if name.startswith("assert"):
            text = UNITTEST.get(name.removeprefix("assert"), "")
            if text and len(args) >= text.count("({"):
                return syntax.parse(f"assert {text.format(*map(ast.unparse, args))}").body[0]
    return filled


def _given(tree: ast.Module, function: Function, values: Mapping[str, str]) -> dict[str, ast.expr]:
    """Return the plain values of a test's parameters and of its loops' variables. A fixture of the module is shown instead: its
    value may be what the bug made of it."""
    variables = {arg.arg for arg in [*function.args.args, *function.args.kwonlyargs]}
    variables -= {n.name for n in tree.body if isinstance(n, Function) and "request" not in _stored(n)}
    variables |= {name for node in ast.walk(function) if isinstance(node, ast.For) for name in _stored(node.target)}
    assigned = {n for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign) for n in _stored(node)}
    texts = {name: text for name, text in values.items() if name in variables - assigned and len(text) <= MAX_QUOTE}
    statements = {name: syntax.parse(text.strip()).body[0] for name, text in texts.items() if _plain(text)}
    return {name: statement.value for name, statement in statements.items() if isinstance(statement, ast.Expr)}


def _reproduced(
    tree: ast.Module, function: Function, statement: ast.stmt, values: Mapping[str, ast.expr]
) -> tuple[str, tuple[str, ...]] | None:
    """Return the test's lines that end in a statement, empty if it says everything itself, and the fixtures that they use; None
    if they do not say everything: what they use must be imported, built in, a fixture, or defined in them."""
    imported: dict[str, str] = {}
    for node in (node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)):
        for alias in node.names:
            single = copy.copy(node)
            single.names = [alias]
            imported.setdefault((alias.asname or alias.name).partition(".")[0], ast.unparse(single))
    available = set(imported) | set(dir(builtins))
    if not _free([_filled(statement, values)]) - available:
        return "", ()
    at = next(at for at, line in enumerate(function.body) if statement in ast.walk(line))
    lines = [_filled(function.body[at], values)]
    for line in reversed(function.body[:at]):
        asserts = isinstance(line, ast.Assert) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        if not asserts and (_free(lines) - available) & (_names(line) | _stored(line)):
            lines.insert(0, _Fill(values).visit(copy.deepcopy(line)))
    arguments = {arg.arg for arg in function.args.args} - {"self"}
    tables = {word for line in function.decorator_list for word in re.findall(r"\w+", ast.unparse(line))}
    if _free(lines) & arguments & tables:  # a parameter whose value cannot be written down
        return None
    # Definitions of the module that these lines use, fixtures among them.
    shared: list[ast.stmt] = []
    while more := [n for n in tree.body if n not in shared and _bound(n) & (_free(shared + lines) - available)]:
        shared = [node for node in tree.body if node in shared or node in more]
    lines = shared + lines
    free = _free(lines)
    setup = tuple(sorted(free & arguments))
    imports = dict.fromkeys(imported[name] for name in sorted(free & set(imported)) if name != "pytest")
    code = "\n".join([*imports, *map(ast.unparse, lines)])
    complete = not free - available - set(setup) and len(setup) <= FIXTURES
    return (code, setup) if complete and code.count("\n") < MAX_LINES and len(code) <= MAX_CODE else None


def _bound(definition: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds in it."""
    return {definition.name} if isinstance(definition, Function | ast.ClassDef) else _stored(definition)


def _free(lines: Sequence[ast.stmt]) -> set[str]:
    """Return the names that lines take from outside."""
    free, bound = set[str](), set[str]()
    for line in lines:
        targets = _stored(ast.Tuple(line.targets)) if isinstance(line, ast.Assign) else set()
        free |= _names(line, ast.Load) - bound - (_stored(line) - targets)
        bound |= _stored(line)
    return free


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, context)}


def _stored(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, inner scopes included."""
    names = _names(node, ast.Store)
    for child in ast.walk(node):
        match child:
            case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.alias(name=name):
                names.add(name.partition(".")[0])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return names
