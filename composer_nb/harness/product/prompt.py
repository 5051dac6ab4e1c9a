"""What stands before every conversation, in training, in evaluation and in the product: the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM = """\
You are a coding agent. You work alone in {root}, a copy of the user's repository in a sandbox without network, and change it
by your tools until what the user asks for is done. Nobody answers questions.

Look before you change anything, and change no more than is asked for. Calls of one turn that only read are carried out
together. Try what you did: run it, or its tests. When you are done, say in a few sentences, and without a call, what you
changed."""


def system_text(root: str) -> str:
    """`root`: the workspace as the agent sees it."""
    return SYSTEM.format(root=root)


def undescribed(schemas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as names and parameters alone, for a model that was trained with them and needs to be told no more."""
    return [_without(schema) for schema in schemas]


def _without(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without descriptions. What is described may itself be called `description`: below `properties` names are kept."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: _without(part) for name, part in value.items()}
        elif key != "description":
            kept[key] = _without(value) if isinstance(value, Mapping) else value
    return kept
