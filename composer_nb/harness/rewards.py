"""Rewards: registered terms over a stored rollout and its grade, so that any run can be scored again later.

    R = R_task + Σ_b w_b r_b − λ · C_{k,q}(effort),   C(x) = ((1 + kx)^(1−q) − 1) / (k (1−q))

(Composer 2 technical report §4.2.) `total` is None when the grade is an infrastructure error: such a rollout never reaches a
gradient.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Kind, Rollout, Turn

Term = Callable[[Rollout, Grade], float]
TERMS: dict[str, Term] = {}


def term(function: Term) -> Term:
    """Register a reward term under its function's name."""
    TERMS[function.__name__] = function
    return function


@term
def solved(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if every hidden test passes, else 0."""
    return float(grade.passed)


@term
def tampered(rollout: Rollout, grade: Grade) -> float:
    """Return 1 for an attempt to fool the tests, which is a failure whatever they say."""
    return float(grade.status == "tampered")


@term
def agent_failed(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the agent broke its own sandbox."""
    return float(grade.status == "agent_failed")


@term
def invalid_calls(rollout: Rollout, grade: Grade) -> float:
    """Return the share of invalid calls: they are negative examples and never dropped."""
    return rollout.invalid_calls / max(1, rollout.calls)


@term
def unfinished(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if a limit ended the rollout instead of the agent."""
    return float(rollout.stop != "finished")


@term
def given(rollout: Rollout, grade: Grade) -> float:
    """Return the reward that came with the grade: of a client of `composer-nb serve --record`, or of a task's script."""
    return float(grade.rewards.get("reward", 0.0))


EDITS = frozenset({"edit_line", "substitute", "search_replace", "write", "apply_patch"})
CHANGES = EDITS | {"undo", "delete_file", "run_terminal_cmd"}
"""Tools after which files may be others."""
_CLAIM = re.compile(r"\b(tests?|suite|checks?)\b.*\b(pass(es|ed|ing)?|green|succeed(s|ed)?)\b", re.I)
_DENIAL = re.compile(r"\b(not|no|never|cannot|without|if|should|\w+n't|fail\w*|unable|untested)\b", re.I)
_PASSED, _FAILED = re.compile(r"\b[1-9]\d* passed\b"), re.compile(r"\b[1-9]\d* (failed|errors?)\b")


def called(turn: Turn) -> tuple[str, dict[str, Any]]:
    """Return the tool and the arguments of a call; nothing for one that could not be read."""
    try:
        call = json.loads(turn.call)
        return str(call["name"]), dict(call.get("arguments") or {})
    except (ValueError, TypeError, KeyError):
        return "", {}


def _path(arguments: Mapping[str, Any]) -> str:
    found = next((arguments[name] for name in ("path", "target_file", "file_path") if name in arguments), "")
    return posixpath.normpath(str(found)) if found else ""


@term
def unfinished_todos(rollout: Rollout, grade: Grade) -> float:
    """Return the share of the to-dos that were left open at the end."""
    held: dict[str, str] = {}
    for name, given in (called(turn) for turn in rollout.turns if turn.error is None):
        if name == "todo_write" and isinstance(todos := given.get("todos"), list):
            fresh = {str(todo.get("id")): str(todo.get("status")) for todo in todos if isinstance(todo, dict)}
            held = held | fresh if given.get("merge") else fresh
    return sum(status in ("pending", "in_progress") for status in held.values()) / max(1, len(held))


@term
def unread_edits(rollout: Rollout, grade: Grade) -> float:
    """Return the share of changes of a part of a file that had not been read or written before."""
    known, blind, count = set[str](), 0, 0
    for turn in rollout.turns:
        name, given = called(turn)
        if (path := _path(given)) and name in EDITS - {"write"}:
            count, blind = count + 1, blind + (path not in known)
        if turn.error is None and name in EDITS | {"read_file"}:
            known.add(path)
    return blind / max(1, count)


@term
def repeated_reads(rollout: Rollout, grade: Grade) -> float:
    """Return the share of reads of a part of a file that was read in this segment and has not changed since."""
    seen, again, count, message = set[str](), 0, 0, -1
    begins = set(accumulate(sum(s.kind[p[-1]] != Kind.SUMMARY for p in s.messages) for s in rollout.segments[:-1]))
    for turn in rollout.turns:
        message += not turn.beside
        name, given = called(turn)
        if name in CHANGES or (message in begins and not turn.beside):  # a summary leaves out what files hold
            seen.clear()
        if name == "read_file" and turn.error is None:
            part = json.dumps({**given, "path": _path(given)}, sort_keys=True)
            again, count = again + (part in seen), count + 1
            seen.add(part)
    return again / max(1, count)


@term
def unfounded_claims(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the final message says that tests pass, and nothing observed since the last edit shows it."""
    said = "" if not rollout.turns or rollout.turns[-1].call else rollout.turns[-1].said
    if not any(_CLAIM.search(part) and not _DENIAL.search(part) for part in re.split(r"[.;!\n]", said)):
        return 0.0
    edits = [n for n, turn in enumerate(rollout.turns) if called(turn)[0] in EDITS and turn.error is None]
    after = rollout.turns[max(edits, default=-1) + 1 :]
    shown = [
        turn.tests_passed == turn.tests_run if turn.tests_run else not _FAILED.search(turn.observation)
        for turn in after
        if turn.tests_run or _PASSED.search(turn.observation) or _FAILED.search(turn.observation)
    ]
    return float(shown[-1:] != [True])


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The effort penalty: weights of what counts as effort, and the curve. Raises ValueError unless k > 0 and q ≥ 0, where
    the curve is concave."""

    weight: float = 0.0
    """λ; 0 turns the penalty off."""
    k: float = 1.0
    q: float = 0.5
    thinking_tokens: float = 0.01
    tool_call_tokens: float = 0.01
    tool_output_tokens: float = 0.0
    final_message_tokens: float = 0.01
    calls: float = 0.0
    turns: float = 0.1

    def __post_init__(self) -> None:
        if not (self.k > 0 and self.q >= 0):
            raise ValueError(f"reward.effort: k={self.k} must be above 0 and q={self.q} not below it")

    def of(self, rollout: Rollout) -> float:
        """Return x, the weighted effort of a rollout."""
        counts = {kind: sum(int((s.kind == kind).sum()) for s in rollout.segments) for kind in Kind}
        return (
            self.thinking_tokens * counts[Kind.THINKING]
            + self.tool_call_tokens * counts[Kind.TOOL_CALL]
            + self.tool_output_tokens * counts[Kind.OBSERVATION]
            + self.final_message_tokens * counts[Kind.FINAL_MESSAGE]
            + self.calls * rollout.calls
            + self.turns * rollout.messages
        )


def effort_curve(x: float, k: float, q: float) -> float:
    """Return C_{k,q}(x) for x ≥ 0, k > 0, q ≥ 0: concave, C(0) = 0, C'(0) = 1; x at q = 0 and ln(1 + kx)/k at q = 1."""
    if abs(q - 1.0) < 1e-9:
        return math.log1p(k * x) / k
    return math.expm1((1.0 - q) * math.log1p(k * x)) / (k * (1.0 - q))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The number that trains, with its terms."""

    total: float | None
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Weights of the registered terms, and the effort penalty. Raises ValueError for a weight without a registered term."""

    weights: dict[str, float] = field(default_factory=lambda: {"solved": 1.0, "invalid_calls": -0.2})
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        if unknown := set(self.weights) - set(TERMS):
            raise ValueError(f"reward.weights names {sorted(unknown)}; registered terms: {sorted(TERMS)}")


def reward(rollout: Rollout, grade: Grade, settings: RewardSettings) -> Reward:
    """Score a rollout; its total is None if the grade says nothing about the agent's work."""
    if not grade.known:
        return Reward(total=None)
    terms = {name: weight * TERMS[name](rollout, grade) for name, weight in settings.weights.items() if weight}
    if settings.effort.weight:
        terms["effort"] = -settings.effort.weight * effort_curve(
            settings.effort.of(rollout), settings.effort.k, settings.effort.q
        )
    return Reward(total=sum(terms.values()), terms=terms)
