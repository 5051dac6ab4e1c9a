"""Arms of the bench: the same tasks with other tools, which say what a tool, or its description, is worth to a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.bench import summarise
from composer_nb.harness.cursor.toolset import NAMES, SEARCH, CursorTools
from composer_nb.harness.product.prompt import undescribed
from composer_nb.harness.search.workspace import Indexes
from composer_nb.harness.tools import ToolSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What is offered, and whether it is described."""

    offer: tuple[str, ...] = NAMES
    described: bool = True

    def tools(self, strict: bool = True) -> CursorTools:
        search = Indexes() if SEARCH in self.offer else None
        return ToolSet.cursor(strict=strict, search=search, offer=self.offer)

    def schemas(self, tools: CursorTools) -> list[dict[str, Any]]:
        return tools.schemas if self.described else undescribed(tools.schemas)


ARMS: Mapping[str, Arm] = {
    "all": Arm(),
    "bash": Arm(offer=("run_terminal_cmd",)),
    "no-search": Arm(offer=tuple(name for name in NAMES if name != SEARCH)),
    "no-descriptions": Arm(described=False),
}


def arms_of(names: str) -> dict[str, Arm]:
    """Those of a list as `all,bash`; `every` for all of them. Raises ValueError for one that there is not."""
    wanted = list(ARMS) if names == "every" else names.split(",")
    if unknown := [name for name in wanted if name not in ARMS]:
        raise ValueError(f"--arms {unknown[0]}: there are {', '.join(ARMS)}, several with commas, or `every`")
    return {name: ARMS[name] for name in wanted}


def figures(attempts: Sequence[Attempt], seed: int = 0) -> dict[str, Any]:
    """What `summarise` says, and seconds a rollout from its first message to its last."""
    seconds = [done.rollout.seconds for done in attempts if done.grade.known]
    found = summarise(attempts, None, seed)
    median, late = (float(value) for value in np.quantile(seconds, [0.5, 0.95]))
    stops = [done.rollout.stop for done in attempts]
    return found | {
        "seconds_p50": median,
        "seconds_p95": late,
        "stops": {stop: stops.count(stop) for stop in sorted(set(stops))},
    }


def difference(one: Sequence[Attempt], other: Sequence[Attempt], seed: int = 0) -> list[float]:
    """Gain in pass@1 of `one` over `other` on the tasks that both have grades of, with its 95 % interval by bootstrap over
    tasks (2,000 resamples)."""
    first, second = _means(one), _means(other)
    gains = np.array([first[task] - second[task] for task in sorted(first.keys() & second.keys())])
    if not len(gains):
        raise ValueError("the two have no graded task in common")
    means = np.random.default_rng(seed).choice(gains, (2000, len(gains))).mean(1)
    return [float(gains.mean()), *(float(x) for x in np.quantile(means, [0.025, 0.975]))]


def _means(attempts: Sequence[Attempt]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for done in attempts:
        if done.grade.known:
            scores.setdefault(done.task.id, []).append(float(done.grade.passed))
    return {task: float(np.mean(values)) for task, values in scores.items()}
