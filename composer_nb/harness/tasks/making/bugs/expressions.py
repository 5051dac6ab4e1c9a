"""Bugs inside expressions: for a node of libcst's tree, nodes that may stand in its place and mean something else.

Each kind is a generator `(node, lot, names) -> replacements`; `KINDS` says which nodes it looks at. None knows where its node
stands. Whether a change shows is found out by running tests, so a kind may also propose what changes nothing.
Reference: the procedural modifiers of SWE-smith (arXiv 2504.21798, section on bug generation) and classic mutation operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import libcst as cst

Maker = Callable[[Any, Random, Sequence[str]], Iterator[cst.CSTNode]]

COMPARISONS: dict[type[cst.BaseCompOp], type[cst.BaseCompOp]] = {
    cst.LessThan: cst.LessThanEqual,
    cst.LessThanEqual: cst.LessThan,
    cst.GreaterThan: cst.GreaterThanEqual,
    cst.GreaterThanEqual: cst.GreaterThan,
    cst.Equal: cst.NotEqual,
    cst.NotEqual: cst.Equal,
    cst.In: cst.NotIn,
    cst.NotIn: cst.In,
    cst.Is: cst.IsNot,
    cst.IsNot: cst.Is,
}
OPERATORS: dict[type[cst.CSTNode], type[cst.CSTNode]] = {
    cst.Add: cst.Subtract,
    cst.Subtract: cst.Add,
    cst.Multiply: cst.FloorDivide,
    cst.Divide: cst.FloorDivide,
    cst.FloorDivide: cst.Divide,
    cst.Modulo: cst.FloorDivide,
    cst.Power: cst.Multiply,
    cst.BitAnd: cst.BitOr,
    cst.BitOr: cst.BitAnd,
    cst.BitXor: cst.BitOr,
    cst.LeftShift: cst.RightShift,
    cst.RightShift: cst.LeftShift,
    cst.AddAssign: cst.SubtractAssign,
    cst.SubtractAssign: cst.AddAssign,
    cst.MultiplyAssign: cst.AddAssign,
    cst.BitOrAssign: cst.BitAndAssign,
}
CALLEES = [
    ("lower", "upper"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind"), ("split", "rsplit"),
    ("partition", "rpartition"), ("keys", "values"), ("append", "extend"), ("min", "max"), ("any", "all"), ("popleft", "pop"),
    ("update", "setdefault"), ("isdigit", "isalpha"), ("floor", "ceil"), ("match", "search"), ("index", "count"),
]  # fmt: skip
OTHER_CALLEE = {name: other for pair in CALLEES for name, other in (pair, pair[::-1])}
CONVERSIONS = {
    "list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "dict", "str", "int", "float", "bytes", "bool", "abs",
    "enumerate", "len", "repr", "deepcopy", "copy",
}  # fmt: skip
EXCEPTIONS = ("ValueError", "TypeError", "KeyError", "IndexError", "RuntimeError", "AttributeError", "StopIteration")
ORDERED = (cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power, cst.LeftShift, cst.RightShift)
COMMA = cst.MaybeSentinel.DEFAULT


def compare(node: cst.ComparisonTarget, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """The operator of a comparison becomes its neighbour: `<` `<=`, `in` `not in`."""
    if other := COMPARISONS.get(type(node.operator)):
        yield node.with_changes(operator=other())


def operator(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """An arithmetic operator becomes another of its class."""
    if other := OPERATORS.get(type(node.operator)):
        yield node.with_changes(operator=other())


def logic(node: cst.BooleanOperation, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """`and` becomes `or`, and the other way round."""
    yield node.with_changes(operator=cst.Or() if isinstance(node.operator, cst.And) else cst.And())


def negate(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A condition becomes its contrary."""
    yield node.with_changes(test=contrary(node.test), **_spaced(node))


def contrary(test: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    if not isinstance(test, cst.Name | cst.Call | cst.Attribute | cst.Subscript) and not test.lpar:
        test = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.UnaryOperation(operator=cst.Not(), expression=test)


def _spaced(node: Any) -> dict[str, cst.SimpleWhitespace]:
    """`if(x)` needs a space once the parentheses are not first any more."""
    field = "whitespace_before_test" if isinstance(node, cst.If | cst.CompIf) else "whitespace_after_while"
    return {field: cst.SimpleWhitespace(" ")} if hasattr(node, field) else {}


def constant(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A whole number is off by one, True is False."""
    if isinstance(node, cst.Integer):
        try:
            value = int(node.value, 0)
        except ValueError:
            return
        yield node.with_changes(value=str(value + 1))
        if value > 0:
            yield node.with_changes(value=str(value - 1))
    elif node.value in ("True", "False"):
        yield node.with_changes(value="False" if node.value == "True" else "True")


def swap(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """The operands of an operator that is not symmetric change places."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, ORDERED):
        yield node.with_changes(left=_enclosed(node.right), right=_enclosed(node.left))
    elif isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        [target] = node.comparisons
        if isinstance(
            target.operator, cst.LessThan | cst.GreaterThan | cst.LessThanEqual | cst.GreaterThanEqual | cst.In
        ):
            new = target.with_changes(comparator=_enclosed(node.left))
            yield node.with_changes(left=_enclosed(target.comparator), comparisons=[new])


def _enclosed(node: cst.BaseExpression) -> cst.BaseExpression:
    plain = isinstance(node, cst.Name | cst.Call | cst.Attribute | cst.Subscript | cst.Integer | cst.SimpleString)
    return node if plain or node.lpar else node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def chain(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """One link of a chain of operators is lost."""
    if isinstance(node, cst.BooleanOperation) or isinstance(node.left, cst.BinaryOperation):
        for side in (node.left, node.right):
            if not node.lpar or side.lpar:
                yield side
            else:
                yield side.with_changes(lpar=node.lpar, rpar=node.rpar)


def arguments(node: cst.Call, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Two neighbouring arguments change places."""
    plain = [arg.keyword is None and not arg.star for arg in node.args]
    for place in range(len(node.args) - 1):
        if plain[place] and plain[place + 1]:
            args = list(node.args)
            one, other = args[place], args[place + 1]
            if not one.value.deep_equals(other.value):
                args[place], args[place + 1] = one.with_changes(value=other.value), other.with_changes(value=one.value)
                yield node.with_changes(args=args)


def keyword(node: cst.Call, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A keyword argument is forgotten."""
    for place, arg in enumerate(node.args):
        if arg.keyword is not None:
            args = [*node.args[:place], *node.args[place + 1 :]]
            if args:
                args[-1] = args[-1].with_changes(comma=COMMA)
            yield node.with_changes(args=args)


def default(node: cst.Param, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A parameter's default is another value."""
    value = node.default
    if isinstance(value, cst.Integer) or (isinstance(value, cst.Name) and value.value in ("True", "False")):
        for new in constant(value, lot, names):
            yield node.with_changes(default=new)
    elif isinstance(value, cst.Name) and value.value == "None":
        yield node.with_changes(default=cst.Name("False"))


def conversion(node: cst.Call, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A conversion or another call with one argument is lost: `list(x)` becomes `x`."""
    name = node.func.attr.value if isinstance(node.func, cst.Attribute) else getattr(node.func, "value", "")
    if name in CONVERSIONS and node.args and node.args[0].keyword is None and not node.args[0].star:
        yield _enclosed(node.args[0].value)


def bounds(node: cst.Slice, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A bound of a slice is lost."""
    for name in ("lower", "upper"):
        if getattr(node, name) is not None:
            yield node.with_changes(**{name: None})


def variable(node: cst.Arg, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Another variable of the function is handed on."""
    others = [name for name in names if isinstance(node.value, cst.Name) and name != node.value.value]
    if others and isinstance(node.value, cst.Name) and node.value.value in names:
        yield node.with_changes(value=cst.Name(lot.choice(others)))


def callee(node: cst.Call, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A function or method with a counterpart is mistaken for it."""
    if isinstance(node.func, cst.Attribute) and (other := OTHER_CALLEE.get(node.func.attr.value)):
        yield node.with_changes(func=node.func.with_changes(attr=cst.Name(other)))
    elif isinstance(node.func, cst.Name) and (other := OTHER_CALLEE.get(node.func.value)):
        yield node.with_changes(func=cst.Name(other))


def exception(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Another exception is raised, or waited for."""
    field = "exc" if isinstance(node, cst.Raise) else "type"
    wanted = getattr(node, field)
    name = wanted.func if isinstance(wanted, cst.Call) else wanted
    if isinstance(name, cst.Name) and name.value in EXCEPTIONS:
        new = cst.Name(lot.choice([other for other in EXCEPTIONS if other != name.value]))
        yield node.with_changes(**{field: wanted.with_changes(func=new) if isinstance(wanted, cst.Call) else new})


def flow(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """`break` becomes `continue`, and the other way round."""
    yield cst.Continue() if isinstance(node, cst.Break) else cst.Break()


KINDS: dict[str, tuple[Maker, tuple[type[cst.CSTNode], ...]]] = {
    "compare": (compare, (cst.ComparisonTarget,)),
    "operator": (operator, (cst.BinaryOperation, cst.AugAssign)),
    "logic": (logic, (cst.BooleanOperation,)),
    "negate": (negate, (cst.If, cst.While, cst.IfExp, cst.CompIf)),
    "constant": (constant, (cst.Integer, cst.Name)),
    "swap": (swap, (cst.BinaryOperation, cst.Comparison)),
    "chain": (chain, (cst.BinaryOperation, cst.BooleanOperation)),
    "arguments": (arguments, (cst.Call,)),
    "keyword": (keyword, (cst.Call,)),
    "default": (default, (cst.Param,)),
    "conversion": (conversion, (cst.Call,)),
    "bounds": (bounds, (cst.Slice,)),
    "variable": (variable, (cst.Arg,)),
    "callee": (callee, (cst.Call,)),
    "exception": (exception, (cst.Raise, cst.ExceptHandler)),
    "flow": (flow, (cst.Break, cst.Continue)),
}
