"""Arms of the bench: the same tasks with other tools, to measure the worth of a tool, or its description, to a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from composer_nb.harness.bench import bootstrap, scores, summarise
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.monitors import flags_of
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tools.toolset import NAMES, SEARCH, ToolSet
from composer_nb.harness.tools.workspace import Indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A choice of tools, with or without their descriptions."""

    offer: tuple[str, ...] = NAMES
    described: bool = True

    def tools(self) -> ToolSet:
        search = Indexes() if SEARCH in self.offer else None
        return ToolSet.cursor(search=search, offer=self.offer, described=self.described)

    def tiny(self) -> ToolSet:
        """Return the tools of tiny models, whose search is `grep`."""
        tools = ToolSet.tiny()
        return tools.only([name for name in tools.tools if name != "grep" or SEARCH in self.offer])


ARMS: Mapping[str, Arm] = {
    "all": Arm(),
    "bash": Arm(offer=("run_terminal_cmd",)),
    "no-search": Arm(offer=tuple(name for name in NAMES if name != SEARCH)),
    "no-descriptions": Arm(described=False),
}


TINY_ARMS = ("all", "no-search")
"""Arms at tasks of the grader `functions`: the compact format describes no tool, and there is no terminal."""
TINY = ("runs_tests", "retries_after_failed_test")
"""Figures of `summarise` that only the tools of tiny models report."""


def arms_of(names: str) -> dict[str, Arm]:
    """Return the arms of a list such as `all,bash`, or all for `every`. Raises ValueError for an unknown one."""
    wanted = list(ARMS) if names == "every" else names.split(",")
    if unknown := [name for name in wanted if name not in ARMS]:
        raise ValueError(f"--arms {unknown[0]}: there are {', '.join(ARMS)}, several with commas, or `every`")
    return {name: ARMS[name] for name in wanted}


def figures(
    attempts: Sequence[Attempt], greedy: Sequence[Attempt] = (), seed: int = 0, price: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return the figures of `summarise` that these tools report, and of `greedy` attempts if there are any; besides them

    `all_of_k`                   share of tasks that all k attempts solve (pass^k, tau-bench, arXiv 2406.12045)
    `flagged`, `disqualified`    share of attempts with a flag of the grader or of a monitor, and the tasks at which
                                 one was tampered with
    `seconds_p50`, `seconds_p95` of a rollout
    `dollars_per_task`           mean of an attempt's tokens at `price`: dollars per million tokens read, and written

    If no rollout has a grade, return the number of lost rollouts and the reason of the first."""
    stops = Counter(done.rollout.stop for done in attempts)
    lost = [done for done in attempts if not done.grade.known]
    said = [turn.observation for done in lost for turn in done.rollout.turns if turn.error == "ProviderError"]
    found = {"stops": dict(sorted(stops.items())), "infra_errors": len(lost), "lost_to": said[0] if said else ""}
    if len(lost) == len(attempts):
        return found | {"n_tasks": 0}
    seconds = [done.rollout.seconds for done in attempts if done.grade.known]
    median, late = (float(value) for value in np.quantile(seconds, [0.5, 0.95]))
    tiny = attempts[0].task.grader == "functions"
    summed = {n: value for n, value in summarise(attempts, greedy or None, seed).items() if tiny or n not in TINY}
    by_task = scores([done for done in attempts if done.grade.known], lambda done: done.task.id)
    return {
        **summed,
        **found,
        "all_of_k": float(np.mean([min(each) for each in by_task.values()])),
        "flagged": float(np.mean([bool(done.grade.flags or flags_of(done)) for done in attempts if done.grade.known])),
        "disqualified": sorted({done.task.id for done in attempts if done.grade.status == "tampered"}),
        "seconds_p50": median,
        "seconds_p95": late,
        "dollars_per_task": float(np.mean([_dollars(done.rollout, price) for done in attempts])) if price else None,
    }


def _dollars(rollout: Rollout, price: tuple[float, float]) -> float:
    read = rollout.counted[0] or rollout.tokens - rollout.sampled
    return (read * price[0] + rollout.sampled * price[1]) / 1e6


def detectable(tasks: int, samples: int, spread: float = 0.2) -> float:
    """Return the smallest difference in pass@1 that two policies show, each with `samples` attempts at the same tasks.

    With a power of 80 % at a level of 5 % (Lachin, Controlled Clinical Trials 2, 1981), where every attempt succeeds half of the
    time, which is the worst case. Attempts at one task are a cluster: `spread` is the standard deviation over tasks of what one
    policy gains, which only more tasks average out (.13 and .28 for the gains of RL in the two stored examples)."""
    return (1.96 + 0.84) * ((spread**2 + 2 * 0.25 / samples) / tasks) ** 0.5


def difference(one: Sequence[Attempt], other: Sequence[Attempt], seed: int = 0) -> list[float]:
    """Return the gain in pass@1 of `one` over `other` on tasks that both have grades of, with its 95 % interval by bootstrap over
    tasks (2,000 resamples); empty if there is no such task."""
    first, second = _means(one), _means(other)
    gains = np.array([first[task] - second[task] for task in sorted(first.keys() & second.keys())])
    if not len(gains):
        return []
    return [float(gains.mean()), *bootstrap(gains, seed)]


def _means(attempts: Sequence[Attempt]) -> dict[str, float]:
    by_task = scores([done for done in attempts if done.grade.known], lambda done: done.task.id)
    return {task: float(np.mean(values)) for task, values in by_task.items()}
