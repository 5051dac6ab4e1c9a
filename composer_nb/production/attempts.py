"""Attempts of a bench: many at a time, kept as they end, and resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from composer_nb.harness.agent.turns import TurnPolicy
from composer_nb.harness.attempt import Environment, attempt
from composer_nb.harness.files import write_atomic
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.grading.plan import PLAN
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task

Cast = Callable[[Task, int], TurnPolicy]
"""Makes the turn policy of an attempt from its task and the number of the rollout."""


def check_fit(tasks: Sequence[Task]) -> bool:
    """Return whether the tasks are of the grader `functions`, at which agents have the tiny tools. Raises ValueError where only
    some are, and for tasks that lack a plan of their tests."""
    tiny = tasks[0].grader == "functions"
    for task in tasks:
        at = f"task {task.id}"
        if (task.grader == "functions") != tiny:
            raise ValueError(f"{at}: the grader `functions` needs other tools; do not mix such tasks with others")
        if task.grader == "pytest" and PLAN not in task.metadata:
            raise ValueError(f"{at}: has no plan of its tests; composer-nb tasks make, or grading.validate, makes one")
    return tiny


def attempt_all(
    tasks: Sequence[Task], samples: int, place: Environment, cast: Cast, keep: Path, workers: int = 2
) -> Iterator[tuple[int, Attempt]]:
    """Attempt every task `samples` times, `workers` at a time, and yield each attempt as it ends, with its number.

    Each attempt is written into `keep` when it ends, and one that is there already is read instead of repeated, so a killed
    bench resumes. Attempts that the infrastructure failed are not kept. When closed early, as by Ctrl-C, it closes the backend.
    Raises ValueError like `check_fit`.
    """
    check_fit(tasks)
    keep.mkdir(parents=True, exist_ok=True)
    slots = [(task, number, sample) for number, task in enumerate(tasks) for sample in range(samples)]

    def one(task: Task, number: int, sample: int) -> Attempt:
        path = keep / f"{hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:24]}-{sample}.safetensors"
        if path.is_file():
            with suppress(ValueError):  # damaged: it is made again
                return unpack_attempt(path.read_bytes(), task)
        done = attempt(task, place, cast(task, number * samples + sample))
        if done.grade.known:
            write_atomic(path, pack_attempt(done))
        return done

    with ThreadPoolExecutor(workers, thread_name_prefix="attempt") as pool:
        futures = {pool.submit(one, *slot): number for number, slot in enumerate(slots)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            if place.backend:
                place.backend.close()  # ends what still runs
            raise
