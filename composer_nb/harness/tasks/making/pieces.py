"""Pieces of a function that can become a function of their own: whole statements in whole lines, at most one result.

total = 0                      total = _compute_total(items)
for item in items:      ->
    total += item.size         def _compute_total(items):
                                   total = 0
                                   for item in items:
                                       total += item.size
                                   return total
"""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

from composer_nb.harness.grading.source import Function
from composer_nb.harness.grading.structure import AT_RUN_TIME
from composer_nb.harness.tasks.making.changes import MAX_LINES, function_of, header_of

LINES = (3, 30)  # Fewest and most lines of a piece.
SHARE = 0.6  # Largest share of the lines of a function's body.
MOST_INPUTS = 5
# Statements and expressions of a function that has no pieces here: they bind names or leave it in other ways than those below.
BARRED = (
    *(ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global, ast.Nonlocal, ast.Delete),
    *(ast.Match, ast.ClassDef, ast.Lambda),
)


class Piece(NamedTuple):
    """Statements in lines `start` to `end` of a function's text, from 0, without `end`.

    Attributes:
        inputs: Variables of the function that they read.
        output: The variable that they set and others read; empty for none.
        ends: They end the function, with its result.
    """

    start: int
    end: int
    inputs: tuple[str, ...]
    output: str
    ends: bool


def pieces(text: str, *, method: bool) -> Iterator[Piece]:
    """Yield the pieces of a function's text; of a method only if it is one of instances. Raises SyntaxError and ValueError."""
    node, lines = function_of(text), text.split("\n")
    nodes = list(ast.walk(node)) if node else []
    names = {item.id for item in nodes if isinstance(item, ast.Name)}
    nested = sum(isinstance(item, Function) for item in nodes) != 1
    if node is None or nested or names & AT_RUN_TIME or any(isinstance(item, BARRED) for item in nodes):
        return
    if len(lines) > MAX_LINES or (method and [argument.arg for argument in node.args.args[:1]] != ["self"]):
        return
    shift = 1 + header_of(text).count("\n")
    code = node.body[int(ast.get_docstring(node) is not None) :]
    bodies = [body for item in nodes if item is not node for _, body in ast.iter_fields(item) if _is_body(body)]
    for body in (code, *bodies):
        for first, last in combinations_with_replacement(range(len(body)), 2):
            start, end = body[first].lineno - shift, (body[last].end_lineno or 0) - shift + 1
            before = lines[start].encode()[: body[first].col_offset]
            rest = lines[end - 1].encode()[body[last].end_col_offset :]
            whole = not (before + rest).strip() and not lines[start].lstrip().startswith("elif")
            if whole and LINES[0] <= end - start <= min(LINES[1], SHARE * (len(lines) - code[0].lineno + shift)):
                ends = body is code and last == len(body) - 1 and isinstance(body[last], ast.Return)
                if (flow := _flow(node, body[first : last + 1], ends)) and len(flow[0]) <= MOST_INPUTS:
                    yield Piece(start, end, *flow, ends)


def _is_body(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _flow(node: Function, piece: Sequence[ast.stmt], ends: bool) -> tuple[tuple[str, ...], str] | None:
    """Return a piece's inputs and its output; None if it cannot stand alone."""
    inside = [item for statement in piece for item in ast.walk(statement)]
    in_loops = {id(item) for loop in inside if isinstance(loop, ast.For | ast.While) for item in ast.walk(loop)}
    for item in inside:
        leaves = isinstance(item, ast.Break | ast.Continue) and id(item) not in in_loops
        # The lines of a string would be indented otherwise.
        is_long = isinstance(item, ast.Constant | ast.JoinedStr) and item.lineno != item.end_lineno
        if leaves or is_long or (isinstance(item, ast.Return) and not ends):
            return None
    within = {id(item) for item in inside}
    outside = [item for item in ast.walk(node) if id(item) not in within]
    targets = [item.target for item in ast.walk(node) if isinstance(item, ast.comprehension)]
    in_targets = {id(item) for target in targets for item in ast.walk(target)}
    scoped = {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and id(item) in in_targets}

    def names(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> dict[str, None]:
        pairs = ((item.id, item) for item in nodes if isinstance(item, ast.Name) and isinstance(item.ctx, context))
        return {name: None for name, item in pairs if id(item) not in in_targets}

    aliases = [item for item in ast.walk(node) if isinstance(item, ast.alias)]
    imported = {(item.asname or item.name).partition(".")[0] for item in aliases}
    writes = names(inside, ast.Store)
    set_outside = {*names(outside, ast.Store), *(item.arg for item in outside if isinstance(item, ast.arg))}
    set_outside |= {item.name for item in outside if isinstance(item, ast.ExceptHandler) and item.name}
    if scoped & {*writes, *set_outside}:  # two variables of one name
        return None
    reads = names(inside, ast.Load)
    reads |= names([item.target for item in inside if isinstance(item, ast.AugAssign)], ast.Store)
    if imported & {*reads} or any(isinstance(item, ast.alias) for item in inside):
        return None
    inputs = [name for name in reads if name in set_outside]
    outputs = [] if ends else [name for name in writes if name in {*names(outside, ast.Load), *inputs}]
    assigned = [target for item in piece if isinstance(item, ast.Assign) for target in item.targets]
    if outputs and outputs[0] not in names(assigned, ast.Store):  # it may keep the value that it had
        if outputs[0] not in set_outside:
            return None
        inputs += [] if outputs[0] in inputs else outputs
    return (tuple(inputs), "".join(outputs)) if len(outputs) < 2 else None


def with_function(text: str, piece: Piece, name: str, *, method: bool) -> str:
    """Return a function's text with a piece replaced by a call, and the function or method that it becomes below it."""
    lines, indent = text.split("\n"), text.lstrip("\f")[: -len(text.lstrip())]
    block = lines[piece.start : piece.end]
    space = block[0][: -len(block[0].lstrip())]
    inputs = [variable for variable in piece.inputs if not method or variable != "self"]
    call = f"{'self.' * method}{name}({', '.join(inputs)})"
    head = "return " if piece.ends else f"{piece.output} = " if piece.output else ""
    body = textwrap.indent(textwrap.dedent("\n".join(block)), f"{indent}    ")
    result = [f"{indent}    return {piece.output}"] if piece.output else []
    parameters = ", ".join([*["self"] * method, *inputs])
    new = [*[""] * (2 - bool(indent)), f"{indent}def {name}({parameters}):", body, *result]
    return "\n".join([*lines[: piece.start], f"{space}{head}{call}", *lines[piece.end :], *new])
