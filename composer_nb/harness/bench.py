"""The bench: attempts of a policy at held-out tasks, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent, Attempt
from composer_nb.harness.policy import Policy
from composer_nb.harness.rollout import Turn
from composer_nb.harness.sandbox.calls import Executor
from composer_nb.harness.tasks.task import Task


def run_eval(
    policy: Policy,
    agent: Agent,
    tasks: Sequence[Task],
    executor: Executor,
    samples: int,
    slots: Sequence[int] | None = None,
) -> Iterator[Attempt]:
    """Attempt every task `samples` times. Attempts come in order of task, then sample, whichever ended first.

    `slots` are the places of the tasks in a longer list; they number the rollouts and so decide their random draws.
    """
    places = range(len(tasks)) if slots is None else slots
    order = [
        (slot * samples + sample, task) for slot, task in zip(places, tasks, strict=True) for sample in range(samples)
    ]
    runs = (agent.attempt(task, number) for number, task in order)
    done = dict(drive(runs, policy, executor))
    return (done[number] for number in range(len(order)))


def summarise(sampled: Sequence[Attempt], greedy: Sequence[Attempt] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return the figures of a policy: `sampled` holds k attempts a task (at temperature 1), `greedy` one, if given.

    pass_at_1 is the mean over tasks of the share solved; best_of_k the share of tasks that any of the k solved; ci95 a
    bootstrap over tasks of pass_at_1 (2,000 resamples), ci95_greedy likewise. Attempts lost to the infrastructure count
    neither as solved nor as tried. Raises ValueError when no other is left.
    """
    graded = [done for done in sampled if done.grade.known]
    singles = np.array([float(done.grade.passed) for done in greedy or () if done.grade.known])
    if not graded or (greedy is not None and not len(singles)):
        raise ValueError("no attempt has a grade, so there are no figures; run `composer-nb doctor`")
    by_task = scores(graded, lambda done: done.task.id)
    means = np.array([np.mean(each) for each in by_task.values()])
    by_family = scores(graded, lambda done: done.task.metadata.get("family", "all"))
    return {
        "pass_at_1": float(means.mean()),
        "ci95": bootstrap(means, seed),
        **({} if greedy is None else {"pass_greedy": float(singles.mean()), "ci95_greedy": bootstrap(singles, seed)}),
        "best_of_k": float(np.mean([max(each) for each in by_task.values()])),
        "k": max(len(each) for each in by_task.values()),
        "n_tasks": len(by_task),
        "infra_errors": sum(not done.grade.known for done in (*sampled, *(greedy or ()))),
        **behaviour(graded),
        "by_family": {family: float(np.mean(by_family[family])) for family in sorted(by_family)},
    }


def scores(graded: Sequence[Attempt], key: Callable[[Attempt], str]) -> dict[str, list[float]]:
    """Return 1 for solved and 0 for unsolved attempts, grouped by `key`."""
    found: dict[str, list[float]] = {}
    for done in graded:
        found.setdefault(key(done), []).append(float(done.grade.passed))
    return found


def behaviour(attempts: Sequence[Attempt]) -> dict[str, float | None]:
    """Describe how a policy works, as means over attempts. `retries_after_failed_test` is the share of the attempts with an
    edit that failed the tests which edited again. A rate whose denominator is empty is None."""
    rollouts = [done.rollout for done in attempts]
    calls = sum(rollout.calls for rollout in rollouts)
    retried = [again for rollout in rollouts if (again := _retried(rollout.turns)) is not None]
    return {
        "tokens_per_task": float(np.mean([rollout.tokens for rollout in rollouts])),
        "sampled_per_task": float(np.mean([rollout.sampled for rollout in rollouts])),
        "tool_calls_per_task": calls / len(rollouts),
        "invalid_call_rate": sum(rollout.invalid_calls for rollout in rollouts) / calls if calls else None,
        "runs_tests": float(np.mean([any(turn.tests_run for turn in rollout.turns) for rollout in rollouts])),
        "retries_after_failed_test": float(np.mean(retried)) if retried else None,
        "finishes": float(np.mean([rollout.stop == "finished" for rollout in rollouts])),
    }


def _retried(turns: Sequence[Turn]) -> bool | None:
    """Return whether an edit followed a failed test of an earlier edit; None if no edit failed its test."""
    edits = [place for place, turn in enumerate(turns) if '"edit_line"' in turn.call and turn.error is None]
    failures = [place for place, turn in enumerate(turns) if (turn.tests_passed or 0) < (turn.tests_run or 0)]
    failures = [place for place in failures if edits and place > edits[0]]
    return any(edit > failures[0] for edit in edits) if failures else None


def bootstrap(values: NDArray[np.float64], seed: int) -> list[float]:
    """Return the 95 % interval of a mean, from 2,000 resamples."""
    random = np.random.default_rng(seed)
    means = random.choice(values, (2000, len(values))).mean(1)
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]
