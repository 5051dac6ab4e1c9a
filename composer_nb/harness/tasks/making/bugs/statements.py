"""Bugs of whole statements and classes: what `expressions.py` is for expressions.

Comments go with the statement above which they stand, so that nothing tells what was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import libcst as cst

from composer_nb.harness.tasks.making.bugs.expressions import Maker

Block = cst.IndentedBlock
KEPT_DECORATORS = {"overload", "abstractmethod"}


def branches(node: cst.If, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """The two branches of a condition change places."""
    if isinstance(node.orelse, cst.Else) and isinstance(node.body, Block) and isinstance(node.orelse.body, Block):
        yield node.with_changes(body=node.orelse.body, orelse=node.orelse.with_changes(body=node.body))


def _statements(node: Block) -> Iterator[tuple[int, cst.BaseStatement]]:
    """Statements of a block, but for a docstring."""
    for place, statement in enumerate(node.body):
        first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if not (isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)):
            yield place, statement


def _instead(node: Block, place: int, new: Sequence[cst.BaseStatement]) -> Block:
    body = [*node.body[:place], *new, *node.body[place + 1 :]]
    return node.with_changes(body=body or [cst.SimpleStatementLine(body=[cst.Pass()])])


def _is(statement: cst.BaseStatement, *kinds: type[cst.BaseSmallStatement]) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], kinds)


def condition(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A conditional statement is lost."""
    for place, statement in _statements(node):
        if isinstance(statement, cst.If) and statement.orelse is None:
            yield _instead(node, place, [])


def always(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """What was done on a condition is done always."""
    for place, statement in _statements(node):
        if isinstance(statement, cst.If) and isinstance(statement.body, Block):
            yield _instead(node, place, list(statement.body.body))


def assignment(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """An assignment is lost."""
    for place, statement in _statements(node):
        if _is(statement, cst.Assign, cst.AugAssign, cst.AnnAssign):
            yield _instead(node, place, [])


def call(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A call for its effect is lost."""
    for place, statement in _statements(node):
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Expr):
            if isinstance(statement.body[0].value, cst.Call):
                yield _instead(node, place, [])


def loop(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A loop is lost."""
    for place, statement in _statements(node):
        if isinstance(statement, cst.For | cst.While):
            yield _instead(node, place, [])


def once(node: Any, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A loop ends after its first round."""
    if isinstance(node.body, Block) and not _is(node.body.body[-1], cst.Return, cst.Raise, cst.Break):
        end = cst.SimpleStatementLine(body=[cst.Break()])
        yield node.with_changes(body=node.body.with_changes(body=[*node.body.body, end]))


def wrapper(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """What `with` or `try` is around is left without it."""
    for place, statement in _statements(node):
        if isinstance(statement, cst.With | cst.Try) and isinstance(statement.body, Block):
            yield _instead(node, place, list(statement.body.body))


def order(node: Block, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Two neighbouring lines change places."""
    found = list(_statements(node))
    for (place, one), (_, other) in pairwise(found):
        if all(_is(each, cst.Assign, cst.AugAssign, cst.Expr) for each in (one, other)):
            yield node.with_changes(body=[*node.body[:place], other, one, *node.body[place + 2 :]])


def bases(node: cst.ClassDef, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A class loses a base."""
    for place in range(len(node.bases)):
        left = [*node.bases[:place], *node.bases[place + 1 :]]
        if left:
            left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        yield node.with_changes(bases=left)


def method(node: cst.ClassDef, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A class loses a method, and inherits what its bases have instead."""
    if isinstance(node.body, Block):
        for place, statement in enumerate(node.body.body):
            if isinstance(statement, cst.FunctionDef):
                yield node.with_changes(body=_instead(node.body, place, []))


def decorator(node: cst.FunctionDef, lot: Random, names: Sequence[str]) -> Iterator[cst.CSTNode]:
    """A function or method loses a decorator."""
    for place, each in enumerate(node.decorators):
        if getattr(each.decorator, "value", "") not in KEPT_DECORATORS:
            yield node.with_changes(decorators=[*node.decorators[:place], *node.decorators[place + 1 :]])


KINDS: dict[str, tuple[Maker, tuple[type[cst.CSTNode], ...]]] = {
    "branches": (branches, (cst.If,)),
    "condition": (condition, (Block,)),
    "always": (always, (Block,)),
    "assignment": (assignment, (Block,)),
    "call": (call, (Block,)),
    "loop": (loop, (Block,)),
    "once": (once, (cst.For, cst.While)),
    "wrapper": (wrapper, (Block,)),
    "order": (order, (Block,)),
    "decorator": (decorator, (cst.FunctionDef,)),
}
OF_CLASSES: dict[str, tuple[Maker, tuple[type[cst.CSTNode], ...]]] = {
    "bases": (bases, (cst.ClassDef,)),
    "method": (method, (cst.ClassDef,)),
}
