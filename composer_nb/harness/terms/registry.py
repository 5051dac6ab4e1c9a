"""The registry of reward terms, and what calls are to them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.plain import function_named
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.untrusted import json_of

Term = Callable[[Rollout, Grade], float]
TERMS: dict[str, Term] = {}


def term(function: Term) -> Term:
    """Register a reward term under its function's name. Raises ValueError if another module has a term of this name."""
    registered = TERMS.get(name := function.__name__, function)
    if registered.__module__ != function.__module__:
        raise ValueError(f"a reward term {name!r} is registered by {registered.__module__}: give this one another name")
    TERMS[name] = function
    return function


def term_named(name: str) -> Term:
    """Return a registered term, or the function that `MODULE:FUNCTION` names. Raises ValueError if there is none."""
    if ":" in name:
        return function_named(name, "reward.weights")
    if name not in TERMS:
        for module in ("conduct", "style"):
            import_module(f"composer_nb.harness.terms.{module}")
    if name not in TERMS:
        raise ValueError(f"reward.weights names {name!r}; registered terms: {sorted(TERMS)}, or give MODULE:FUNCTION")
    return TERMS[name]


EDITS = frozenset({"edit_line", "substitute", "search_replace", "write", "apply_patch"})
# Tools that may change files.
CHANGES = EDITS | {"undo", "delete_file", "run_terminal_cmd"}


def called(turn: Turn) -> tuple[str, dict[str, Any]]:
    """Return the tool and the arguments of a call; both are empty if it cannot be parsed."""
    try:
        call = json_of(turn.call)
        return str(call["name"]), dict(call.get("arguments") or {})
    except (ValueError, TypeError, KeyError):
        return "", {}
