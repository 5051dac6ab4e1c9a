"""The bench: attempts of a policy at held-out tasks, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from composer_nb.harness.agent import Agent, drive
from composer_nb.harness.attempt import Attempt, attempt
from composer_nb.harness.execute import Executor
from composer_nb.harness.policy import Policy
from composer_nb.harness.task import Task


def run_eval(
    policy: Policy, agent: Agent, tasks: Sequence[Task], executor: Executor, samples: int
) -> Iterator[Attempt]:
    """Attempts every task `samples` times. Attempts come in order of task, then sample, whatever ended first."""
    order = [task for task in tasks for _ in range(samples)]
    runs = (attempt(agent, task, number, policy.release) for number, task in enumerate(order))
    done = dict(drive(runs, policy, executor))
    return (done[number] for number in range(len(order)))


def summarise(sampled: Sequence[Attempt], greedy: Sequence[Attempt], seed: int = 0) -> dict[str, Any]:
    """Figures of a policy: `sampled` holds k attempts a task (at temperature 1), `greedy` one.

    pass_at_1 is the mean over tasks of the share solved; best_of_k the share of tasks that any of the k solved; ci95 a
    bootstrap over tasks of pass_at_1 (2,000 resamples), ci95_greedy likewise. Attempts lost to the infrastructure count
    neither as solved nor as tried.
    """
    by_task: dict[str, list[float]] = {}
    for done in sampled:
        scores = by_task.setdefault(done.task.id, [])
        if done.grade.status == "graded":
            scores.append(float(done.grade.passed))
    scored = {task: scores for task, scores in by_task.items() if scores}
    means = np.array([np.mean(scores) for scores in scored.values()])
    singles = np.array([float(done.grade.passed) for done in greedy if done.grade.status == "graded"])
    k = max((len(scores) for scores in scored.values()), default=0)
    families = sorted({done.task.metadata.get("family", "all") for done in sampled})
    return {
        "pass_at_1": float(means.mean()),
        "ci95": _bootstrap(means, seed),
        "pass_greedy": float(singles.mean()),
        "ci95_greedy": _bootstrap(singles, seed),
        "best_of_k": float(np.mean([max(scores) for scores in scored.values()])),
        "k": k,
        "n_tasks": len(scored),
        "infra_errors": sum(done.grade.status != "graded" for done in (*sampled, *greedy)),
        **behaviour(sampled),
        "by_family": {
            family: float(np.mean([d.grade.passed for d in sampled if d.task.metadata.get("family", "all") == family]))
            for family in families
        },
    }


def behaviour(attempts: Sequence[Attempt]) -> dict[str, float]:
    """How a policy goes about it: means over attempts."""
    rollouts = [done.rollout for done in attempts]
    calls = sum(len(rollout.turns) for rollout in rollouts)
    failed = [rollout for rollout in rollouts if any(_failed(turn) for turn in rollout.turns)]
    return {
        "tokens_per_task": float(np.mean([rollout.tokens for rollout in rollouts])),
        "sampled_per_task": float(np.mean([rollout.sampled for rollout in rollouts])),
        "tool_calls_per_task": calls / len(rollouts),
        "invalid_call_rate": sum(rollout.invalid_calls for rollout in rollouts) / max(1, calls),
        "runs_tests": float(np.mean([any(turn.tests_run for turn in rollout.turns) for rollout in rollouts])),
        "retries_after_failed_test": float(np.mean([_retried(rollout.turns) for rollout in failed])) if failed else 0.0,
        "finishes": float(np.mean([rollout.stop == "finished" for rollout in rollouts])),
    }


def _failed(turn: Any) -> bool:
    return turn.tests_run is not None and turn.tests_passed < turn.tests_run


def _retried(turns: Sequence[Any]) -> bool:
    """Whether an edit that was followed by a failed test was followed by another edit."""
    edits = [place for place, turn in enumerate(turns) if '"edit_line"' in turn.call and turn.error is None]
    failures = [place for place, turn in enumerate(turns) if _failed(turn)]
    return any(any(a < f < b for a in edits for b in edits) for f in failures)


def _bootstrap(values: np.ndarray, seed: int) -> list[float]:
    random = np.random.default_rng(seed)
    means = random.choice(values, (2000, len(values))).mean(1)
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]
