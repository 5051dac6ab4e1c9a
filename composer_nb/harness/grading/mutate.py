"""Other values than the expected one: for a literal in a test's text, a text of the same kind that means something else."""

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Iterator, Sequence

EMPTY = {"List": "[{}]", "Tuple": "({},)", "Dict": "{{'{}': {}}}"}
"""What an empty display becomes."""
NOTHING = ("0", "1", "''", "False")
"""What None becomes; and some of them become None, so that neither is the changed one by its looks."""
OTHER_EXCEPTIONS = ("ValueError", "TypeError", "KeyError", "IndexError", "RuntimeError", "ZeroDivisionError", "OSError")


def constants(node: ast.expr) -> Iterator[ast.expr]:
    """Literals in an expression that can be replaced where they stand, and empty displays. Not those of f-strings, whose places
    are not known, nor keyword arguments, which are rather tolerances than values."""
    match node:
        case ast.Constant():
            yield node
        case ast.JoinedStr():
            return
        case ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
            yield node
        case ast.Dict():
            for value in node.values:
                yield from constants(value)
        case ast.Subscript():  # another index may well find the same
            yield from constants(node.value)
        case ast.Call():
            for argument in node.args:
                yield from constants(argument)
        case _:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    yield from constants(child)


def other(node: ast.expr, lot: random.Random) -> str | None:
    """The text of another value than a literal's; None for a literal that has none."""
    if not isinstance(node, ast.Constant):
        words = (lot.choice("abcnkx"), lot.randrange(1, 10)) if isinstance(node, ast.Dict) else (lot.randrange(1, 10),)
        return EMPTY[type(node).__name__].format(*words) if type(node).__name__ in EMPTY else None
    if node.value is not None and repr(node.value) in NOTHING and lot.random() < 0.25:
        return "None"
    match node.value:
        case bool() as value:
            return repr(not value)
        case int() as value:
            steps = [step for step in (-3, -2, -1, 1, 2, 3) if value + step >= 0 or value < 0]
            return repr(value + lot.choice(steps))
        case float() as value:
            return _other_float(value, lot)
        case complex() as value:
            return repr(value + 1)
        case str() as value:
            return repr(_other_text(value, lot))
        case bytes() as value:
            return repr(_other_text(value.decode("latin-1"), lot).encode("latin-1"))
        case None:
            return lot.choice(NOTHING)
    return None


def _other_float(value: float, lot: random.Random) -> str | None:
    if not abs(value) < 1e300:  # infinity and what is not a number
        return "0.0"
    digits = len(repr(value).partition(".")[2]) if "e" not in repr(value) else 6
    new = round(
        value + max(1.0, abs(value)) * lot.choice((1.0, 1.5, 2.0)), max(1, digits)
    )  # past every sensible tolerance
    return repr(new if new != value else value + 1.0)


def _other_text(text: str, lot: random.Random) -> str:
    """One character another of its kind."""
    places = [place for place, letter in enumerate(text) if letter.isascii() and letter.isalnum()]
    if not places:
        return text + "x"
    place = lot.choice(places)
    kinds = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    kind = next(kind for kind in kinds if text[place] in kind)
    return text[:place] + lot.choice(kind.replace(text[place], "")) + text[place + 1 :]


def other_exceptions(wanted: ast.expr, lot: random.Random, own: Sequence[str] = ()) -> list[str]:
    """Two exceptions that are no kin of the wanted ones: nothing that is right raises them as well. For one of the project's own,
    others that the module expects, `own`, come first; what is kin to it is found out on the gold patch."""
    names = {node.id for node in ast.walk(wanted) if isinstance(node, ast.Name)}
    if not any(hasattr(builtins, name) for name in names) and (others := [name for name in own if name not in names]):
        return lot.sample(others, min(2, len(others)))
    kinds = [kind for name in names if isinstance(kind := getattr(builtins, name, None), type)]
    strangers = [
        name
        for name in OTHER_EXCEPTIONS
        if not any(
            issubclass(kind, one) or issubclass(one, kind) for one in [getattr(builtins, name)] for kind in kinds
        )
    ]
    return lot.sample(strangers, min(2, len(strangers)))
