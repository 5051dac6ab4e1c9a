"""Bugs to plant: for a node of libcst's tree, nodes that may stand in its place and mean something else.

Each kind is a generator `(node, rng, names) -> replacements`; `KINDS` says which nodes it looks at. None knows
where its node stands. Running tests shows whether a change matters, so a kind may also propose what changes nothing. Comments go
with the statement above which they stand, so that nothing tells what was there.

Reference: the procedural modifiers of SWE-smith (arXiv 2504.21798, section on bug generation) and classic mutation operators.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import libcst as cst

Mutate = Callable[[Any, Random, Sequence[str]], Iterator[cst.CSTNode]]
# Kind -> its generator, and the node types that it applies to.
Kinds = dict[str, tuple[Mutate, tuple[type[cst.CSTNode], ...]]]
Block = cst.IndentedBlock

PAIRS: list[tuple[type[cst.CSTNode], type[cst.CSTNode]]] = [
    (cst.LessThan, cst.LessThanEqual), (cst.GreaterThan, cst.GreaterThanEqual), (cst.Equal, cst.NotEqual), (cst.In, cst.NotIn),
    (cst.Is, cst.IsNot), (cst.And, cst.Or), (cst.Add, cst.Subtract), (cst.Divide, cst.FloorDivide), (cst.BitAnd, cst.BitOr),
    (cst.LeftShift, cst.RightShift), (cst.AddAssign, cst.SubtractAssign),
]  # fmt: skip
OTHER_OPERATOR = {first: second for pair in PAIRS for first, second in (pair, pair[::-1])} | {
    cst.Multiply: cst.FloorDivide, cst.Modulo: cst.FloorDivide, cst.Power: cst.Multiply, cst.BitXor: cst.BitOr,
    cst.MultiplyAssign: cst.AddAssign, cst.BitOrAssign: cst.BitAndAssign,
}  # fmt: skip
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
ASYMMETRIC = (
    cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power, cst.LeftShift, cst.RightShift,
    cst.LessThan, cst.GreaterThan, cst.LessThanEqual, cst.GreaterThanEqual, cst.In,
)  # fmt: skip
KEPT_DECORATORS = {"overload", "abstractmethod"}


# Expressions.


def operator(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """An operator becomes another of its class: `<` `<=`, `in` `not in`, `+` `-`, `and` `or`."""
    if other := OTHER_OPERATOR.get(type(node.operator)):
        yield node.with_changes(operator=other())


def negate(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A condition becomes its contrary."""
    if isinstance(node.test, cst.UnaryOperation) and isinstance(node.test.operator, cst.Not):
        contrary = node.test.expression
    else:
        contrary = cst.UnaryOperation(operator=cst.Not(), expression=_enclosed(node.test))
    # `if(x)` needs a space once the parentheses are not first any more.
    spaces = [field for field in ("whitespace_before_test", "whitespace_after_while") if hasattr(node, field)]
    yield node.with_changes(test=contrary, **dict.fromkeys(spaces, cst.SimpleWhitespace(" ")))


def constant(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A whole number is off by one, True is False."""
    if isinstance(node, cst.Integer):
        try:
            value = int(node.value, 0)
        except ValueError:
            return
        yield node.with_changes(value=str(value + 1))
        if value > 0:
            yield node.with_changes(value=str(value - 1))
    elif isinstance(node, cst.Name) and node.value in ("True", "False"):
        yield node.with_changes(value="False" if node.value == "True" else "True")


def swap(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """The operands of an operator that is not symmetric change places."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, ASYMMETRIC):
        yield node.with_changes(left=_enclosed(node.right), right=_enclosed(node.left))
    elif isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        [target] = node.comparisons
        if isinstance(target.operator, ASYMMETRIC):
            new = target.with_changes(comparator=_enclosed(node.left))
            yield node.with_changes(left=_enclosed(target.comparator), comparisons=[new])


def _enclosed(node: cst.BaseExpression) -> cst.BaseExpression:
    plain = isinstance(node, cst.Name | cst.Call | cst.Attribute | cst.Subscript | cst.Integer | cst.SimpleString)
    return node if plain or node.lpar else node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def chain(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """One link of a chain of operators is lost."""
    if isinstance(node, cst.BooleanOperation) or isinstance(node.left, cst.BinaryOperation):
        for side in (node.left, node.right):
            enclosed = node.lpar and not side.lpar
            yield side.with_changes(lpar=node.lpar, rpar=node.rpar) if enclosed else side


def arguments(node: cst.Call, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Two neighbouring arguments change places."""
    for index, (first, other) in enumerate(pairwise(node.args)):
        plain = all(argument.keyword is None and not argument.star for argument in (first, other))
        if plain and not first.value.deep_equals(other.value):
            swapped = [first.with_changes(value=other.value), other.with_changes(value=first.value)]
            yield node.with_changes(args=[*node.args[:index], *swapped, *node.args[index + 2 :]])


def default(node: cst.Param, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A parameter's default is another value."""
    if isinstance(node.default, cst.Name) and node.default.value == "None":
        yield node.with_changes(default=cst.Name("False"))
    for new in constant(node.default, rng, names):
        yield node.with_changes(default=new)


def conversion(node: cst.Call, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A conversion or another call with one argument is lost: `list(x)` becomes `x`."""
    name = node.func.attr.value if isinstance(node.func, cst.Attribute) else getattr(node.func, "value", "")
    if name in CONVERSIONS and node.args and node.args[0].keyword is None and not node.args[0].star:
        yield _enclosed(node.args[0].value)


def bounds(node: cst.Slice, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A bound of a slice is lost."""
    for name in ("lower", "upper"):
        if getattr(node, name) is not None:
            yield node.with_changes(**{name: None})


def variable(node: cst.Arg, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Another variable of the function is handed on."""
    if isinstance(node.value, cst.Name) and node.value.value in names and len(names) > 1:
        yield node.with_changes(value=cst.Name(rng.choice([name for name in names if name != node.value.value])))


def callee(node: cst.Call, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A function or method with a counterpart is mistaken for it."""
    method = isinstance(node.func, cst.Attribute)
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and (other := OTHER_CALLEE.get(name.value)):
        yield node.with_changes(func=node.func.with_changes(attr=cst.Name(other)) if method else cst.Name(other))


def exception(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Another exception is raised, or waited for."""
    field = "exc" if isinstance(node, cst.Raise) else "type"
    raised = getattr(node, field)
    name = raised.func if isinstance(raised, cst.Call) else raised
    if isinstance(name, cst.Name) and name.value in EXCEPTIONS:
        new = cst.Name(rng.choice([other for other in EXCEPTIONS if other != name.value]))
        yield node.with_changes(**{field: raised.with_changes(func=new) if isinstance(raised, cst.Call) else new})


# Statements.


def flow(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """`break` becomes `continue`, and the other way round."""
    yield cst.Continue() if isinstance(node, cst.Break) else cst.Break()


def branches(node: cst.If, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """The two branches of a condition change places."""
    if isinstance(node.orelse, cst.Else) and isinstance(node.body, Block) and isinstance(node.orelse.body, Block):
        yield node.with_changes(body=node.orelse.body, orelse=node.orelse.with_changes(body=node.body))


def once(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A loop ends after its first round."""
    if isinstance(node.body, Block) and not _is(node.body.body[-1], cst.Return, cst.Raise, cst.Break):
        end = cst.SimpleStatementLine(body=[cst.Break()])
        yield node.with_changes(body=node.body.with_changes(body=[*node.body.body, end]))


def order(node: Block, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Two neighbouring lines change places."""
    for index, (first, other) in enumerate(pairwise(node.body)):
        if all(_is(line, cst.Assign, cst.AugAssign, cst.Expr) and not _is_docstring(line) for line in (first, other)):
            yield node.with_changes(body=[*node.body[:index], other, first, *node.body[index + 2 :]])


def _lost(field: str, fits: Callable[[Any], bool]) -> Mutate:
    """Return the kind that loses one item of a list: a statement of a block, an argument, a decorator."""

    def without(node: Any, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
        items = getattr(node, field)
        for index, item in enumerate(items):
            left = [*items[:index], *items[index + 1 :]]
            if field == "body":
                left = left or [cst.SimpleStatementLine(body=[cst.Pass()])]
            elif left and hasattr(left[-1], "comma"):
                left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            if fits(item):
                yield node.with_changes(**{field: left})

    return without


def _unwrapped(*kinds: type[cst.CSTNode]) -> Mutate:
    """Return the kind that leaves the body of a compound statement without the statement around it."""

    def inside(node: Block, rng: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
        for index, statement in enumerate(node.body):
            if isinstance(statement, kinds) and isinstance(body := getattr(statement, "body", None), Block):
                yield node.with_changes(body=[*node.body[:index], *body.body, *node.body[index + 1 :]])

    return inside


def _is(statement: Any, *kinds: type[cst.CSTNode]) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], kinds)


def _is_docstring(statement: Any) -> bool:
    text = cst.SimpleString | cst.ConcatenatedString
    return _is(statement, cst.Expr) and isinstance(statement.body[0].value, text)


KINDS: Kinds = {
    "compare": (operator, (cst.ComparisonTarget,)),
    "operator": (operator, (cst.BinaryOperation, cst.AugAssign)),
    "logic": (operator, (cst.BooleanOperation,)),
    "negate": (negate, (cst.If, cst.While, cst.IfExp, cst.CompIf)),
    "constant": (constant, (cst.Integer, cst.Name)),
    "swap": (swap, (cst.BinaryOperation, cst.Comparison)),
    "chain": (chain, (cst.BinaryOperation, cst.BooleanOperation)),
    "arguments": (arguments, (cst.Call,)),
    "keyword": (_lost("args", lambda item: item.keyword is not None), (cst.Call,)),
    "default": (default, (cst.Param,)),
    "conversion": (conversion, (cst.Call,)),
    "bounds": (bounds, (cst.Slice,)),
    "variable": (variable, (cst.Arg,)),
    "callee": (callee, (cst.Call,)),
    "exception": (exception, (cst.Raise, cst.ExceptHandler)),
    "flow": (flow, (cst.Break, cst.Continue)),
    "branches": (branches, (cst.If,)),
    "condition": (_lost("body", lambda item: isinstance(item, cst.If) and item.orelse is None), (Block,)),
    "always": (_unwrapped(cst.If), (Block,)),
    "assignment": (_lost("body", lambda item: _is(item, cst.Assign, cst.AugAssign, cst.AnnAssign)), (Block,)),
    "call": (_lost("body", lambda item: _is(item, cst.Expr) and isinstance(item.body[0].value, cst.Call)), (Block,)),
    "loop": (_lost("body", lambda item: isinstance(item, cst.For | cst.While)), (Block,)),
    "once": (once, (cst.For, cst.While)),
    "wrapper": (_unwrapped(cst.With, cst.Try), (Block,)),
    "order": (order, (Block,)),
    "decorator": (
        _lost("decorators", lambda item: getattr(item.decorator, "value", "") not in KEPT_DECORATORS),
        (cst.FunctionDef,),
    ),
}
