"""Plain values as JSON that tells their types apart, and as the literals that Python writes.

Part of the programs inside sandboxes, where code under test runs in the same process: what comes out is worth what the host's
comparison makes of it. Serves the host too. Uses the standard library alone and runs on Python 3.9 and newer.
"""

from __future__ import annotations

import json
import typing

Json = typing.Any

DEEPEST = 40
ROOM = 8 << 10  # characters and values of one call's arguments, or of its result


class NotPlain(Exception):
    """A value that is not built from builtin types alone, is too deep, or too large."""


def encode(value: typing.Any, room: int = ROOM, depth: int = DEEPEST) -> Json:
    """Return `value` as JSON that tells types apart; sets are in the order of their texts.

    Plain are None, bool, int, float, str, bytes, and list, tuple, set, frozenset and dict of plain values. Subclasses are not.
    `room`: characters and values, at most. Raises NotPlain.
    """
    return _encode(value, [room], depth)


def _encode(value: typing.Any, room: list[int], depth: int) -> Json:
    kind = type(value)
    room[0] -= 1 + (len(value) if kind in (str, bytes) else 0)
    if room[0] < 0 or depth < 0:
        raise NotPlain
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= 13_000):
        return value
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in (list, tuple):
        return {kind.__name__: [_encode(item, room, depth - 1) for item in value]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((_encode(item, room, depth - 1) for item in value), key=json.dumps)}
    if kind is dict:
        return {"dict": [[_encode(part, room, depth - 1) for part in pair] for pair in value.items()]}
    raise NotPlain


def decode(encoded: Json) -> typing.Any:
    """Return the value that `encode` wrote."""
    if not isinstance(encoded, dict):
        return encoded
    [(kind, inside)] = encoded.items()
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "dict":
        return {decode(key): decode(value) for key, value in inside}
    build: typing.Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
    return build(map(decode, inside))


def value_text(value: typing.Any, limit: int) -> str:
    """Return `repr(value)`, with the elements of sets in the order of their texts.

    Raises NotPlain for what `encode` refuses, for frozensets, which have no literal, and for longer texts.
    """
    text = _literal(encode(value, limit, 50))
    if len(text) > limit:
        raise NotPlain
    return text


def _literal(encoded: Json) -> str:
    if not isinstance(encoded, dict):
        return repr(encoded)
    [(kind, inside)] = encoded.items()
    if kind == "bytes":
        return repr(bytes.fromhex(inside))
    if kind == "dict":
        return "{" + ", ".join(_literal(key) + ": " + _literal(value) for key, value in inside) + "}"
    texts = [_literal(item) for item in inside]
    if kind == "list":
        return "[" + ", ".join(texts) + "]"
    if kind == "tuple":
        return "(" + ", ".join(texts) + ("," if len(texts) == 1 else "") + ")"
    if kind == "set":
        return "{" + ", ".join(sorted(texts)) + "}" if texts else "set()"
    raise NotPlain
