"""The order of prompts: the task of each slot of RL.

Tasks are shuffled once (`Epochs`). With `curriculum.*`, harder tasks come late in a run (`Curriculum`):

    rollouts/rl_00000 … rl_00079      turns, thinking tokens and success of every group so far
        │ chosen(…)                   a pure function of them
        ▼
    rollouts/prompts_00080.json       the tasks of step 80: the next ones, harder ones, ones made of two that were solved

No task is used twice. The names of a step's tasks are written before a rollout at one of them begins, and never changed, so a
resumed run has the same prompts, and every reader finds them. References: Composer 2 technical report, §4 (harder data late, by
turns and thinking tokens); *Composer 2.5* (tasks made through the run).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, islice
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, Self

import pyarrow.parquet as pq

from composer_nb.harness.files import write_json
from composer_nb.harness.plain import Share
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tasks.task import LOWERED, Task, load_tasks
from composer_nb.harness.untrusted import json_of

# Tasks by id.
Known = Mapping[str, Task]
# Exponent of a task's difficulty in the weights with which tasks are drawn.
POWER = 2.0
# Maximum pairs of tasks that are tried for one that fits into one workspace.
PAIRS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """Settings for harder prompts late in RL. Raises ValueError if the shares add up to more than 1."""

    harder: Share = 0.0
    """Share of the prompts that are drawn by the difficulty of their kind so far. They are drawn from `data.rl_tasks`, which
    should be more than RL needs."""
    by: Literal["effort", "failures"] = "effort"
    """Measure of difficulty. effort: turns and thinking tokens. failures: the share of attempts that failed."""
    made: Share = 0.0
    """Share of the prompts that combine two solved tasks, with both bugs in one workspace (grader `functions` only)."""
    start: Share = 0.5
    """Share of the steps at the start in which prompts come in their original order."""

    def __post_init__(self) -> None:
        if self.harder + self.made > 1:
            raise ValueError(
                f"curriculum.harder={self.harder} and curriculum.made={self.made} are more than 1 together"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The parameters that determine the order of a run's prompts, together with its tasks and records.

    Attributes:
        prompts: Prompts per step.
        ahead: Number of steps whose records may be missing when a step's prompts are chosen.
    """

    seed: str
    prompts: int = 1
    steps: int = 1
    ahead: int = 0
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)

    @classmethod
    def of(cls, s: Any) -> Self:
        """Return the order of a run from its settings."""
        ahead = s.services.ahead if s.services.on else 0
        seed = f"{s.seed} {s.rl_seed}"
        return cls(seed=seed, prompts=s.rl.prompts, steps=s.rl.steps, ahead=ahead, curriculum=s.curriculum)


class Epochs(list[Task]):
    """Tasks in the order in which RL trains on them. Places beyond the end are further epochs, each in another order."""

    def __init__(self, tasks: Iterable[Task], seed: str) -> None:
        order = list(tasks)
        Random(f"rl tasks {seed}").shuffle(order)
        super().__init__(order)
        self._seed = seed

    def __getitem__(self, slot: int) -> Task:  # type: ignore[override]
        epoch, position = divmod(slot, len(self))
        return super().__getitem__(
            _shuffled(len(self), f"rl tasks {self._seed} {epoch}")[position] if epoch else position
        )

    def places(self, count: int) -> Iterator[tuple[int, str]]:
        """Yield the slots of the epochs that hold `count` prompts, with the ids of their tasks."""
        return ((slot, self[slot].id) for slot in range(max(1, -(-count // len(self))) * len(self)))


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: str) -> Sequence[int]:
    return Random(seed).sample(range(count), count)


def prompt_order(run: Path, order: Order) -> Epochs:
    """Return the tasks of a run's slots. Raises ValueError for tasks that do not suit a curriculum."""
    tasks, c = load_tasks(run / "data" / "rl.jsonl"), order.curriculum
    return Curriculum(run, tasks, order) if c.harder or c.made else Epochs(tasks, order.seed)


def tasks_by_id(run: Path) -> dict[str, Task]:
    """Return all tasks of a run's rollouts, including combined ones."""
    tasks = {task.id: task for task in load_tasks(run / "data" / "rl.jsonl")}
    listed = [name for file in sorted((run / "rollouts").glob("prompts_*.json")) for name in json_of(file.read_bytes())]
    return tasks | {name: named(name, tasks) for name in listed}


# A curriculum


class Tried(NamedTuple):
    """A group that was trained on.

    Attributes:
        thinking: Tokens.
        solved: Share.
    """

    task: str
    turns: float
    thinking: float
    solved: float

    @property
    def failures(self) -> float:
        return 1 - self.solved


class Curriculum(Epochs):
    """Tasks by slot, chosen step by step. Raises ValueError if tasks run out, or cannot be combined."""

    def __init__(self, run: Path, tasks: Sequence[Task], order: Order) -> None:
        super().__init__(tasks, order.seed)
        self._run, self._order = run, order
        self._known = {task.id: task for task in self}
        self._blocks: dict[int, list[str]] = {}
        self._tried: dict[int, list[Tried]] = {}
        if order.curriculum.made and _pair([task for task in self if _combinable(task)]) is None:
            raise ValueError(
                f"curriculum.made={order.curriculum.made}: no two tasks of the grader `functions` fit into one workspace"
            )

    def __getitem__(self, slot: int) -> Task:  # type: ignore[override]
        step, position = divmod(slot, self._order.prompts)
        return named(self._block(step)[position], self._known)

    def places(self, count: int) -> Iterator[tuple[int, str]]:
        """Yield the slots of the chosen steps, with the ids of their tasks."""
        files = sorted((self._run / "rollouts").glob("prompts_*.json"))
        return enumerate(name for file in files for name in json_of(file.read_bytes()))

    def _block(self, step: int) -> list[str]:
        if step not in self._blocks:
            file = self._run / "rollouts" / f"prompts_{step:05d}.json"
            if not file.is_file():
                used = [name for before in range(step) for name in self._block(before)]
                tried = [group for before in range(step - self._order.ahead) for group in self._outcomes(before)]
                write_json(file, chosen(step, self._order, self._known, used, tried))
            self._blocks[step] = json_of(file.read_bytes())
        return self._blocks[step]

    def _outcomes(self, step: int) -> list[Tried]:
        if step not in self._tried:
            files = sorted((self._run / "rollouts").glob(f"rl_{step:05d}_*.parquet"))
            groups = [row for file in files for row in outcomes(file)]
            if not groups:
                return []  # its groups were dropped, or it is not finished yet
            self._tried[step] = groups
        return self._tried[step]


def outcomes(file: Path) -> list[Tried]:
    """Return the outcome of each group of a stored step."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(file, columns=["task_id", "turns", "kind", "passed"]).to_pylist():
        groups.setdefault(row["task_id"], []).append(row)
    return [
        Tried(
            task,
            turns=sum(len(json.loads(row["turns"])) for row in rows) / len(rows),
            thinking=sum(row["kind"].count(Kind.THINKING) for row in rows) / len(rows),
            solved=sum(row["passed"] for row in rows) / len(rows),
        )
        for task, rows in sorted(groups.items())
    ]


def chosen(step: int, order: Order, tasks: Known, used: Sequence[str], tried: Sequence[Tried]) -> list[str]:
    """Return the names of a step's tasks. `tasks` is in the order of prompts. A name `one+two` is a combined task. Raises
    ValueError if no task is left."""
    c, rng = order.curriculum, Random(f"curriculum {order.seed} {step}")
    is_begun = bool(tried) and step >= c.start * order.steps
    excluded, parts = set(used), {part for name in used if name not in tasks for part in name.split("+")}
    difficulty = difficulty_of(tried, tasks, ("turns", "thinking") if c.by == "effort" else ("failures",))
    names: list[str] = []
    for _ in range(order.prompts):
        unused = [name for name in tasks if name not in excluded]
        draw, name = rng.random() if is_begun else 1.0, None
        if draw < c.made:
            name = _made(tried, tasks, parts, rng)
        elif draw < c.made + c.harder and unused:
            weights = [difficulty(tasks[candidate]) ** POWER or 1e-9 for candidate in unused]  # all at 0: all alike
            name = rng.choices(unused, weights)[0]
        if name is None and not unused:
            raise ValueError(f"curriculum.*: all {len(tasks)} tasks are taken by step {step + 1}; raise data.rl_tasks")
        names.append(name or unused[0])
        excluded.add(names[-1])
        parts |= {*names[-1].split("+")} if names[-1] not in tasks else set()
    return names


def difficulty_of(tried: Sequence[Tried], tasks: Known, measures: Sequence[str]) -> Callable[[Task], float]:
    """Return a function that estimates a task's difficulty from tasks of its kind: the mean of measures (fields of `Tried`), each
    as a multiple of its mean; 1 for a kind without attempts."""
    overall = {name: sum(getattr(group, name) for group in tried) / max(1, len(tried)) for name in measures}
    sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for group in tried:
        ratios = [getattr(group, name) / mean for name, mean in overall.items() if mean]
        sums[kind_of(named(group.task, tasks))].append(sum(ratios) / max(1, len(ratios)))
    means = {kind: sum(values) / len(values) for kind, values in sums.items()}
    return lambda task: means.get(kind_of(task), 1.0)


def kind_of(task: Task) -> tuple[str, ...]:
    """Return the kind of a task: the recorded difficulty, the structure's family and bug, or the repository."""
    metadata_keys = ("difficulty", "kind", "family", "bug", "repository")
    return (*(task.metadata.get(name, "") for name in metadata_keys), str(len(task.source_scope)))


def _made(tried: Sequence[Tried], tasks: Known, parts: set[str], rng: Random) -> str | None:
    """Return the name of a task that combines two solved tasks that are not yet parts; None if no two fit."""
    solved = [group.task for group in tried if group.solved > 0.5 and group.task in tasks and group.task not in parts]
    candidates = [tasks[name] for name in solved if _combinable(tasks[name])]
    rng.shuffle(candidates)
    pair = _pair(candidates)
    return None if pair is None else f"{pair[0].id}+{pair[1].id}"


def _pair(tasks: Sequence[Task]) -> tuple[Task, Task] | None:
    """Return the first two tasks that fit into one workspace."""
    return next((pair for pair in islice(combinations(tasks, 2), PAIRS) if not _clash(*pair)), None)


def _combinable(task: Task) -> bool:
    return task.grader == "functions" and not task.mutants and "+" not in task.id


def _clash(a: Task, b: Task) -> bool:
    pairs = ((a.files, b.files), (a.tests, b.tests), (a.files, b.tests), (a.tests, b.files))
    return any(not mapping.keys().isdisjoint(other) for mapping, other in pairs)


def named(name: str, tasks: Known) -> Task:
    """Return a task by name: a known one, or `one+two`. Raises KeyError for an unknown name."""
    if name in tasks:
        return tasks[name]
    first, _, two = name.partition("+")
    return combined(tasks[first], tasks[two])


def combined(a: Task, b: Task) -> Task:
    """Return a task with the requests and the files of two tasks; their turns and tokens add up. Its correct answer is that of
    both, so it needs no check. Raises ValueError if their files clash."""
    if _clash(a, b):
        raise ValueError(f"tasks {a.id} and {b.id} share files")
    requests = dict.fromkeys((a.instruction, b.instruction))
    limit_names = [name for name in LOWERED.values() if name in a.metadata and name in b.metadata]
    limits = {name: str(int(a.metadata[name]) + int(b.metadata[name])) for name in limit_names}
    difficulties = [task.metadata.get("difficulty", "1") for task in (a, b)]
    difficulty = str(sum(map(int, difficulties))) if all(map(str.isdecimal, difficulties)) else "+".join(difficulties)
    return Task.model_validate(
        a.model_dump()
        | {
            "id": f"{a.id}+{b.id}",
            "instruction": "; ".join(requests),
            **{name: {**getattr(a, name), **getattr(b, name)} for name in ("files", "tests", "solution")},
            "source_scope": (*a.source_scope, *b.source_scope),
            "metadata": a.metadata | limits | {"difficulty": difficulty},
        }
    )
