"""The bench: a policy's attempts at held-out tasks, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Policy
from composer_nb.harness.rewards import own_reward
from composer_nb.harness.rollout import Turn
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.terms.registry import EDITS, Term, called
from composer_nb.harness.tool_errors import errors_of


def run_eval(
    policy: Policy, agent: Agent, tasks: Sequence[Task], executor: Executor, samples: int, slots: Sequence[int] = ()
) -> Iterator[Attempt]:
    """Attempt every task `samples` times. Return the attempts in order of task, then of sample, whichever ended first.

    `slots` are the positions of the tasks in a longer list. They number the rollouts and so determine their random draws.
    """
    places = zip(slots or range(len(tasks)), tasks, strict=True)
    order = [(slot * samples + n, task) for slot, task in places for n in range(samples)]
    runs = (agent.attempt(task, number) for number, task in order)
    attempts = dict(drive(runs, policy, executor))
    return (attempts[number] for number in range(len(order)))


def summarise(sampled: Sequence[Attempt], greedy: Sequence[Attempt] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return the figures of a policy. `sampled` holds k attempts per task at temperature 1; `greedy`, if given, holds one.

    pass_at_1 is the mean over tasks of the share solved. best_of_k is the share of tasks that any of the k attempts solved. ci95
    is a bootstrap of pass_at_1 over tasks (2,000 resamples), and ci95_greedy likewise. Attempts lost to infrastructure faults
    count neither as solved nor as tried. Raises ValueError if no other attempts are left.
    """
    graded = [attempt for attempt in sampled if attempt.grade.known]
    singles = np.array([float(attempt.grade.passed) for attempt in greedy or () if attempt.grade.known])
    if not graded or (greedy is not None and not len(singles)):
        raise ValueError("no attempt has a grade, so there are no figures; run `composer-nb doctor`")
    by_task = scores(graded, lambda attempt: attempt.task.id)
    means = np.array([np.mean(solved) for solved in by_task.values()])
    return {
        "pass_at_1": float(means.mean()),
        "ci95": bootstrap(means, seed),
        **({} if greedy is None else {"pass_greedy": float(singles.mean()), "ci95_greedy": bootstrap(singles, seed)}),
        "best_of_k": float(np.mean([max(solved) for solved in by_task.values()])),
        "k": max(len(solved) for solved in by_task.values()),
        "n_tasks": len(by_task),
        "infra_errors": sum(not attempt.grade.known for attempt in (*sampled, *(greedy or ()))),
        "timeouts": sum(attempt.grade.timeouts > 0 for attempt in (*graded, *(greedy or ()))),
        **behaviour(graded),
        "by_family": _shares(scores(graded, lambda attempt: attempt.task.metadata.get("family", "all"))),
        "by_kind": _shares(scores(graded, lambda attempt: attempt.task.metadata.get("kind", "bug"))),
    }


def _shares(by: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {key: float(np.mean(by[key])) for key in sorted(by)}


def scores(
    graded: Sequence[Attempt],
    key: Callable[[Attempt], str],
    score: Callable[[Attempt], float] = lambda attempt: float(attempt.grade.passed),
) -> dict[str, list[float]]:
    """Return the scores of attempts, by default 1 for solved and 0 for unsolved ones, grouped by `key`."""
    by_key: dict[str, list[float]] = {}
    for attempt in graded:
        by_key.setdefault(key(attempt), []).append(score(attempt))
    return by_key


def reward_figures(attempts: Sequence[Attempt], reward: Term, seed: int = 0) -> dict[str, Any]:
    """Return the mean of a custom environment's reward over tasks, its 95 % interval by bootstrap over tasks, and the mean of the
    best of each task's attempts; nothing if no attempt has a grade. Raises like `own_reward`."""
    graded = [attempt for attempt in attempts if attempt.grade.known]
    by_task = scores(graded, lambda attempt: attempt.task.id, partial(own_reward, reward)).values()
    if not graded:
        return {}
    means = np.array([np.mean(rewards) for rewards in by_task])
    best = float(np.mean([max(rewards) for rewards in by_task]))
    return {"reward": float(means.mean()), "reward_ci95": bootstrap(means, seed), "reward_best_of_k": best}


LOOKS = frozenset({"read_file", "grep", "glob_file_search", "codebase_search", "list_dir"})
# Numbers of calls for `pass_within`.
WITHIN = (4, 8, 12, 20)
# Tries for `solved_at_try`.
TRIES = (1, 2, 3, 4, 5, 6)
# Answers of the tiny tools to an edit that they do not make.
UNDONE = ("same", "tried")
# Numbers of attempts for `filtered_best_of`.
FILTERED = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Course:
    """The course of an attempt: what it did, in order of its turns.

    Attributes:
        failed: Whether a test run failed after an edit.
        retried: Whether another edit followed that failure.
        tested: Whether a test run followed the first edit.
        accepted: Whether the last test run passed and no edit followed it.
        looks: Number of reads and searches before the first edit.
        tries: Number of stretches between test runs, and after the last, in which an edit was made; a refused repetition is
            none.
    """

    edited: bool
    failed: bool
    retried: bool
    tested: bool
    accepted: bool
    looks: int
    tries: int

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Course:
        """Return the course of a rollout with these turns."""
        names = [called(turn)[0] for turn in turns]
        edits = [n for n, turn in enumerate(turns) if names[n] in EDITS and turn.error is None]
        tests = [n for n, turn in enumerate(turns) if turn.tests_run]
        first_edit = edits[0] if edits else len(turns)
        failures = [n for n in tests if n > first_edit and (turns[n].tests_passed or 0) < (turns[n].tests_run or 0)]
        last_test = tests[-1] if tests else len(turns)
        effective, spans = [n for n in edits if turns[n].observation not in UNDONE], pairwise([-1, *tests, len(turns)])
        return cls(
            edited=bool(edits),
            failed=bool(failures),
            retried=any(edit > failures[0] for edit in edits) if failures else False,
            tested=any(n > first_edit for n in tests),
            accepted=bool(tests)
            and turns[last_test].tests_passed == turns[last_test].tests_run
            and last_test > max(edits, default=-1),
            looks=sum(name in LOOKS for name in names[:first_edit]),
            tries=sum(any(start < edit < end for edit in effective) for start, end in spans),
        )


def behaviour(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return figures of how a policy works, as means over attempts. A rate whose denominator is empty is None.

    `errors`                     calls by tool, and errors by tool and kind, as counts
    `retries_after_failed_test`  of attempts with a failed test after an edit, the share that edited again
    `recovery`                   of these, the share that solved the task; `recovery_n` counts them
    `tests_after_wrong_edit`     of attempts with a wrong edit, the share that ran tests after an edit
    `pass_within`                share of attempts that solved the task within this number of calls
    `tries`                      number of tries (edits up to the next test run are one), over attempts that edit
    `solved_at_try`              of attempts with at least this number of tries, the share that solved the task with it (hazard)
    `reads_before_edit`          reads and searches before the first edit, over attempts that edit
    `filtered_best_of`           share of tasks solved by the first of this number of attempts that passes the visible tests
    """
    rollouts = [attempt.rollout for attempt in attempts]
    courses = [Course.of(rollout.turns) for rollout in rollouts]
    passed = [attempt.grade.passed for attempt in attempts]
    pairs = list(zip(courses, passed, strict=True))
    calls = sum(rollout.calls for rollout in rollouts)
    recovered = [float(solved) for course, solved in pairs if course.retried]
    return {
        "tokens_per_task": float(np.mean([rollout.tokens for rollout in rollouts])),
        "sampled_per_task": float(np.mean([rollout.sampled for rollout in rollouts])),
        "tool_calls_per_task": calls / len(rollouts),
        "calls_per_turn": calls / max(1, sum(rollout.messages for rollout in rollouts)),
        "invalid_call_rate": sum(rollout.invalid_calls for rollout in rollouts) / calls if calls else None,
        "errors": errors_of(rollouts),
        "runs_tests": float(np.mean([any(turn.tests_run for turn in rollout.turns) for rollout in rollouts])),
        "tests_after_wrong_edit": _share([c.tested for c, solved in pairs if c.failed or (c.edited and not solved)]),
        "retries_after_failed_test": _share([course.retried for course in courses if course.failed]),
        "recovery": _share(recovered),
        "recovery_n": len(recovered),
        "tries": _share([course.tries for course in courses if course.edited]),
        "solved_at_try": {
            str(n): _share([solved and course.tries == n for course, solved in pairs if course.tries >= n])
            for n in TRIES
        },
        "reads_before_edit": _share([course.looks for course in courses if course.edited]),
        "finishes": float(np.mean([rollout.stop == "finished" for rollout in rollouts])),
        "pass_within": {
            str(most): float(np.mean([attempt.grade.passed and attempt.rollout.calls <= most for attempt in attempts]))
            for most in WITHIN
        },
        "filtered_best_of": {str(k): filtered_best_of(attempts, k) for k in FILTERED},
    }


def filtered_best_of(attempts: Sequence[Attempt], k: int) -> float | None:
    """Return the share of tasks solved by the first of k attempts that passes the visible tests, averaged over cyclic orders of
    the attempts; None if a task has fewer than k."""
    by_task: dict[str, list[tuple[bool, bool]]] = {}
    for attempt in attempts:
        accepted = Course.of(attempt.rollout.turns).accepted
        by_task.setdefault(attempt.task.id, []).append((accepted, attempt.grade.passed))
    if min(map(len, by_task.values())) < k:
        return None
    shares = []
    for tries in by_task.values():
        turned = [[*tries[n:], *tries[:n]][:k] for n in range(len(tries))]
        shares.append(np.mean([next((solved for accepted, solved in some if accepted), False) for some in turned]))
    return float(np.mean(shares))


def _share(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples passes, from n samples (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - passed, k) / comb(n, k)


def pass_hat_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that all of k samples pass, from n samples (tau-bench, arXiv 2406.12045)."""
    return comb(passed, k) / comb(n, k)


def resampled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return the means of 2,000 resamples."""
    return np.asarray(np.random.default_rng(seed).choice(values, (2000, len(values))).mean(1))


def bootstrap(values: NDArray[np.float64], seed: int) -> list[float]:
    """Return the 95 % bootstrap interval of a mean."""
    return [float(x) for x in np.quantile(resampled(values, seed), [0.025, 0.975])]


# Quantiles .975 of Student's t for 2, 3, … values; more have the last.
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the 95 % interval of the mean of a few values, as of seeds (Student's t); None for fewer than two."""
    n = len(values)
    return T_975[min(n - 2, len(T_975) - 1)] * float(np.std(values, ddof=1)) / sqrt(n) if n > 1 else None


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n (1927): the p with |share − p| ≤ z √(p(1 − p)/n); (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf(0.975) ** 2 / n
    middle, half = share + z2 / 2, sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def detectable(tasks: int, samples: int, spread: float = 0.2) -> float:
    """Return the smallest difference in pass@1 that two policies show, each with `samples` attempts at the same tasks.

    With a power of 80 % at a level of 5 % (Lachin, Controlled Clinical Trials 2, 1981), where every attempt succeeds half of the
    time, which is the worst case. Attempts at one task are a cluster: `spread` is the standard deviation over tasks of what one
    policy gains, which only more tasks average out (.13 and .28 for the gains of RL in the two stored examples)."""
    return (1.96 + 0.84) * ((spread**2 + 2 * 0.25 / samples) / tasks) ** 0.5
