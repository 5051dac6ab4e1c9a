"""Arms of the bench: the same tasks with other tools, to measure the worth of a tool, or its description, to a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from composer_nb.harness.bench import bootstrap, scores, summarise
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.monitors import flags_of
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tools.search import Indexes
from composer_nb.harness.tools.toolset import NAMES, SEARCH, ToolSet
from composer_nb.harness.untrusted import visible


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


LOST = 0.01
"""Maximum share of attempts that may be lost to infrastructure faults."""


class TooManyLost(ValueError):
    """Too many attempts were lost for the figures to count."""

    exit_status = 1


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

    If no sampled rollout has a grade, return the number of lost rollouts, of all, and the reason of the first."""
    stops, every = Counter(attempt.rollout.stop for attempt in attempts), [*attempts, *greedy]
    lost = [attempt for attempt in every if not attempt.grade.known]
    reasons = [turn.observation for attempt in lost for turn in attempt.rollout.turns if turn.error == "ProviderError"]
    losses = {"stops": dict(sorted(stops.items())), "infra_errors": len(lost), "lost_share": len(lost) / len(every)}
    losses["lost_to"] = reasons[0] if reasons else ""
    graded = [attempt for attempt in attempts if attempt.grade.known]
    if not graded:
        return losses | {"n_tasks": 0}
    greedy = [attempt for attempt in greedy if attempt.grade.known]
    seconds = [attempt.rollout.seconds for attempt in graded]
    median, late = (float(value) for value in np.quantile(seconds, [0.5, 0.95]))
    tiny = attempts[0].task.grader == "functions"
    summed = {n: value for n, value in summarise(attempts, greedy or None, seed).items() if tiny or n not in TINY}
    by_task = scores(graded, lambda attempt: attempt.task.id)
    dollars = [_dollars(attempt.rollout, price) for attempt in attempts] if price else []
    return {
        **summed,
        **losses,
        "all_of_k": float(np.mean([min(solved) for solved in by_task.values()])),
        "flagged": float(np.mean([bool(attempt.grade.flags or flags_of(attempt)) for attempt in graded])),
        "disqualified": sorted({attempt.task.id for attempt in attempts if attempt.grade.status == "tampered"}),
        "seconds_p50": median,
        "seconds_p95": late,
        "dollars_per_task": float(np.mean(dollars)) if dollars else None,
    }


def _dollars(rollout: Rollout, price: tuple[float, float]) -> float:
    read = rollout.counted[0] or rollout.tokens - rollout.sampled
    return (read * price[0] + rollout.sampled * price[1]) / 1e6


def require_attempts(report: Mapping[str, Any], out: Path | None = None) -> None:
    """Raise TooManyLost if an arm of a report lost more than LOST of its attempts: its figures are of the rest alone, and an
    attempt is rarely lost by chance. `out`: folder in which the same command makes the lost ones again."""
    for arm, row in report["arms"].items():
        if row["lost_share"] > LOST:
            lost, why = row["infra_errors"], visible(row["lost_to"])[:300] or "see composer-nb doctor"
            again = f"; the same command with --out {out} makes these again" if out else ""
            share = f"{lost} of {round(lost / row['lost_share'])} attempts were lost"
            raise TooManyLost(f"arm {arm}: {share}, so its figures do not count{again}: {why}")


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
    by_task = scores([attempt for attempt in attempts if attempt.grade.known], lambda attempt: attempt.task.id)
    return {task: float(np.mean(values)) for task, values in by_task.items()}


def compare_evals(first: Path, second: Path, seed: int = 0) -> dict[str, Any]:
    """Return pass@1 of two evaluations (folders of `composer-nb eval`) at the tasks that both have grades of, by arm: `scores` of
    each, and `difference` of the second − the first, paired by task, with 95 % intervals by bootstrap over these tasks.
    `left_out`: tasks of the first, and of the second alone. Raises ValueError, FileNotFoundError."""
    arms = [
        {file.parent.name: _solved(file) for file in sorted(out.glob("*/rollouts.parquet"))} for out in (first, second)
    ]
    for out, scores_by_arm in zip((first, second), arms, strict=True):
        if not scores_by_arm:
            raise FileNotFoundError(f"{out}: neither a run nor the folder of an evaluation (composer-nb eval --out)")
    rows: dict[str, Any] = {}
    for arm in arms[0].keys() & arms[1].keys():
        old, new = arms[0][arm], arms[1][arm]
        shared = sorted(old.keys() & new.keys())
        left_out = [sorted(left.keys() - right.keys()) for left, right in ((old, new), (new, old))]
        rows[arm] = {"n_tasks": len(shared), "left_out": left_out}
        if shared:
            means = [np.array([solved[task] for task in shared]) for solved in (old, new)]
            rows[arm]["scores"] = [{"pass_at_1": float(mean.mean()), "ci95": bootstrap(mean, seed)} for mean in means]
            gain = means[1] - means[0]
            rows[arm]["difference"] = {"pass_at_1": float(gain.mean()), "ci95": bootstrap(gain, seed)}
    if not rows:
        raise ValueError(f"{first} has the arms {', '.join(arms[0])}, {second} {', '.join(arms[1])}: no arm is in both")
    return {"evals": [str(first), str(second)], "arms": dict(sorted(rows.items()))}


def _solved(file: Path) -> dict[str, float]:
    """Return the share of a task's graded attempts that solved it, by task. Raises ValueError for a damaged file."""
    try:
        table = pq.read_table(file, columns=["task_id", "status", "passed"]).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file}: damaged ({error!r:.200})") from None
    passed: dict[str, list[float]] = {}
    for row in table:
        if Grade(status=row["status"]).known:
            passed.setdefault(row["task_id"], []).append(float(row["passed"]))
    return {task: float(np.mean(values)) for task, values in passed.items()}
