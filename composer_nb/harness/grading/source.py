"""Static analysis of test modules: positions, literals and tolerances. Reads source; executes nothing."""

import ast
import builtins
from collections import Counter
from collections.abc import Iterator, Sequence

from composer_nb.harness import syntax

# Constructors of plain data.
PLAIN = {"approx", "set", "frozenset", "dict", "list", "tuple", "Decimal", "Fraction", "Path", "date", "datetime"}
STATEFUL = {"eval", "exec", "getattr", "globals", "input", "iter", "locals", "next", "open", "vars", "id"}
# Names whose values cannot depend on the code under test.
KNOWN = {"pytest", "math"} | PLAIN | set(dir(builtins)) - STATEFUL
RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Value = str | bytes | bool | int | float | complex | None


class ModuleSource:
    """A module's text, with offsets of syntax nodes."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.tree = path, text, syntax.parse(text)
        self.starts = [0]
        for line in text.split("\n"):  # as the parser counts them, once line ends are \n
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.names = Counter(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name))

    def offset(self, line: int, column: int) -> int:
        start = self.starts[line - 1]
        return start + len(self.text[start : self.starts[line]].encode()[:column].decode())

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)


def values(node: ast.AST) -> tuple[Value, ...]:
    """Return the literals of an expression."""
    return tuple(
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str | bytes | int | float | complex)
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
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    yield from constants(part)


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
    names = [ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(name not in PLAIN for name in names)


def tolerance(node: ast.expr) -> tuple[float, float, bool]:
    """Return the relative and the absolute difference beyond which no answer is close to both of two numbers, and whether these
    are certain."""
    for call in ast.walk(node):
        name = last_name(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(call, ast.Call) and name in ("approx", "assertAlmostEqual", "assertNotAlmostEqual"):
            options = {word.arg: word.value for word in call.keywords}
            first = ("rel", "abs") if name == "approx" else ("places", "msg", "delta")
            options |= dict(zip(first, call.args[1 if name == "approx" else 2 :], strict=False))
            numbers = {word: value.value for word, value in options.items() if isinstance(value, ast.Constant)}
            numbers_by_name = {word: float(value) for word, value in numbers.items() if isinstance(value, int | float)}
            sure = all(word in numbers_by_name for word in options if word in ("rel", "abs", "places", "delta"))
            fixed = numbers_by_name.get("delta", numbers_by_name.get("abs", 1e-7))
            if "places" in numbers_by_name:
                fixed = 10.0 ** -numbers_by_name["places"]
            return 3 * numbers_by_name.get("rel", 1e-6), 3 * fixed, sure
    return 0.0, 0.0, True


def names_in(node: ast.AST) -> set[str]:
    """Return the names that an expression depends on, without those that it binds itself."""
    names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
    return {name.id for name in names} - {name.id for name in names if isinstance(name.ctx, ast.Store)}
