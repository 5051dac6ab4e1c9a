"""Rewards: registered terms over a stored rollout and its grade, so that any run can be scored again later.

This module has the terms that every run needs. `harness/terms/` has more, which are imported once a weight names one.
`docs/rewards.md` lists all terms.

    R = R_task + Σ_b w_b r_b − λ · s^p · C_{k,q}(effort),   C(x) = ((1 + kx)^(1−q) − 1) / (k (1−q))

(Composer 2 technical report §4.2, where p = 0; s is the share of the group that is solved.) `total` is None when the grade is an
infrastructure error: such a rollout never reaches a gradient.
"""

import math
import traceback
from bdb import BdbQuit
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from composer_nb.harness.blocking import CallTimeout, TooManyBlocked
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.plain import NotNegative, Positive, function_named, require_ranges
from composer_nb.harness.rollout import Kind, Rollout
from composer_nb.harness.terms.registry import Term, term, term_named

# Key of a custom environment's reward in a grade's `rewards`.
OWN = "own"
# Key of a judge's rating in a grade's `rewards`.
JUDGED = "judged"


@term
def solved(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if every hidden test passes, else 0."""
    return float(grade.passed)


@term
def tampered(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the agent tampered with the tests, which is a failure whatever their result."""
    return float(grade.status == "tampered")


@term
def agent_failed(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the agent broke its own sandbox."""
    return float(grade.status == "agent_failed")


@term
def invalid_calls(rollout: Rollout, grade: Grade) -> float:
    """Return the share of invalid calls, which are negative examples and never dropped."""
    return rollout.invalid_calls / max(1, rollout.calls)


@term
def unfinished(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if a limit ended the rollout instead of the agent."""
    return float(rollout.stop != "finished")


@term
def given(rollout: Rollout, grade: Grade) -> float:
    """Return the reward stored in the grade, from a client of `composer-nb serve --record` or from a task's script."""
    return float(grade.rewards.get("reward", 0.0))


@term
def judged(rollout: Rollout, grade: Grade) -> float:
    """Return what `reward.judge` returned for the attempt; 0 if it rated none of the group."""
    return float(grade.rewards.get(JUDGED, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The effort penalty: the weights of effort, and the curve. Raises ValueError unless k > 0 and q ≥ 0, which make the curve
    concave, and for negative weights of effort: the curve begins at 0."""

    weight: float = 0.0
    """λ; 0 turns the penalty off."""
    by_solved: NotNegative = 0.0
    """Power p of s, the share of the group that is solved: λ becomes λ · s^p, so that effort is cheap where few attempts succeed
    (with p = 1, the adaptive length penalty of arXiv 2506.05256). 0: one λ for all tasks."""
    k: Positive = 1.0
    q: NotNegative = 0.5
    thinking_tokens: NotNegative = 0.01
    tool_call_tokens: NotNegative = 0.01
    tool_output_tokens: NotNegative = 0.0
    final_message_tokens: NotNegative = 0.01
    calls: NotNegative = 0.0
    turns: NotNegative = 0.1

    def __post_init__(self) -> None:
        require_ranges(self, "reward.effort")

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
    """The reward of a rollout, with its terms."""

    total: float | None
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Weights of the registered terms, the effort penalty, and the judge. Raises ValueError for a weight without a registered
    term, and for a judge that cannot be imported."""

    weights: dict[str, float] = field(default_factory=lambda: {"solved": 1.0, "invalid_calls": -0.2})
    effort: Effort = field(default_factory=Effort)
    judge: str = ""
    """`MODULE:FUNCTION`, which is called with each graded attempt of RL while others are sampled. It returns a number, the term
    `judged`, or None if it cannot tell: then the term is the mean of the group."""
    judge_share: NotNegative = 1.0
    """Seconds that calls of the judge may take for each second of the run, together in one environment worker. What ends while
    they have taken more is not judged."""

    def __post_init__(self) -> None:
        require_ranges(self, "reward")
        for name in self.weights:
            term_named(name)
        if self.judge:
            function_named(self.judge, "reward.judge")

    def tried(self, pairs: Iterable[tuple[Rollout, Grade]] = ()) -> None:
        """Score an empty rollout and the rollouts in `pairs`, so that a failing term is found before it ends a run. Raises
        ValueError for such a term."""
        nothing = Rollout(task_id="", segments=(), turns=(), files={}, stop="tokens")
        for pair in ((nothing, Grade(status="graded")), *pairs):
            reward(*pair, self)


def fault(what: str, error: BaseException) -> ValueError:
    """Return the exception to raise after a user's code raised `error` or exited: one line with the place in that code."""
    ours = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    if quits := isinstance(error, BdbQuit):
        frames = [frame for frame in frames if Path(frame.filename).name not in ("_base.py", "bdb.py", "pdb.py")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if quits:
        return ValueError(f"{what}: {NO_TERMINAL}{where}")
    text = "; ".join(detail["msg"] for detail in error.errors()) if isinstance(error, ValidationError) else str(error)
    return ValueError(f"{what} ended in {type(error).__name__}: {text.partition(chr(10))[0]}{where}")


NO_TERMINAL = (
    "breakpoint() has no terminal in the processes of a run. A reward stops there when `composer-nb rl`, in a terminal, tries it "
    "before the run; docs/rl.md (An environment of your own) runs a whole attempt in one process. Take it out for the run"
)


def own_reward(term: Term, attempt: Attempt) -> float:
    """Return the reward of an attempt by an environment of the user's own. Raises ValueError if `term` fails or does not return a
    finite number, and CallTimeout and TooManyBlocked if it blocks (`EnvSettings.reward_function`)."""
    class_name = getattr(term, "__qualname__", "").removesuffix("reward")
    what = f"env.tasks: {class_name if class_name.endswith('.') else ''}reward(rollout, grade) of {attempt.task.id}"
    try:
        total = term(attempt.rollout, attempt.grade)
    except (CallTimeout, TooManyBlocked):
        raise
    except (Exception, SystemExit) as error:
        raise fault(what, error) from error
    if not isinstance(total, int | float | np.number) or not np.isfinite(total):
        raise ValueError(f"{what} returned {total!r:.80} ({type(total).__name__}); it must return a finite number")
    return float(total)


def _weighted(name: str, weight: float, rollout: Rollout, grade: Grade) -> float:
    """Return a weighted term. Raises ValueError if it fails or is not a finite number."""
    try:
        value = weight * float(term_named(name)(rollout, grade))
        if not math.isfinite(value):
            raise ValueError(f"{value} is no finite number")
    except Exception as error:  # whatever a term raises
        where = f"of task {rollout.task_id}" if rollout.task_id else "without turns"
        text = f"reward.weights: {name} fails on a rollout {where}: {error!r}; mend it, or leave it out"
        raise ValueError(text) from error
    return value


def reward(rollout: Rollout, grade: Grade, settings: RewardSettings, solved_share: float = 1.0) -> Reward:
    """Score a rollout of a group of which `solved_share` is solved. The total is None if the grade says nothing about the agent's
    work. Raises ValueError if a term fails."""
    if not grade.known:
        return Reward(total=None)
    terms = {name: _weighted(name, w, rollout, grade) for name, w in settings.weights.items() if w}
    if (effort := settings.effort).weight:
        price = effort.weight * solved_share**effort.by_solved
        terms["effort"] = -price * effort_curve(effort.of(rollout), effort.k, effort.q)
    return Reward(total=sum(terms.values()), terms=terms)


def rated_alike(group: Sequence[Attempt]) -> list[Attempt]:
    """Return a group whose attempts are all rated, if any is: those without a rating get the mean of the others, so that the term
    `judged` changes their advantage as little as can be."""
    ratings = [attempt.grade.rewards[JUDGED] for attempt in group if JUDGED in attempt.grade.rewards]
    if len(ratings) in (0, len(group)):
        return [*group]
    mean = sum(ratings) / len(ratings)
    return [replace(a, grade=replace(a.grade, rewards={JUDGED: mean, **a.grade.rewards})) for a in group]
