"""`composer-nb tasks make`: tasks from a repository with a pytest suite.

The same repository, seed and limit give the same tasks: candidates are drawn in a fixed order, tried some at a time, and kept in
that order, whichever finishes first. What ran is remembered (`store.py`), so the same command goes on where it was interrupted,
and a larger limit takes up what is known.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from composer_nb.harness.making.baseline import Baseline, measure
from composer_nb.harness.making.changes import Change, Unit, bugs, combined, features, units
from composer_nb.harness.making.repository import Repository, read_repository
from composer_nb.harness.making.store import Store
from composer_nb.harness.making.trial import Outcome, Subject, look, settle
from composer_nb.harness.sandboxes.contract import Backend, SandboxSpec
from composer_nb.harness.task import Task, save_tasks

TASKS, RECORD, SUMMARY = "tasks.jsonl", "made.db", "summary.json"
SIDE_BY_SIDE = 2
"""Sandboxes at a time."""
TOGETHER = 6
"""Changes tried in one sandbox."""
SHARE = 6
"""One task in SHARE is a feature that is gone, and one several bugs at once."""
FORMAT = "1"
"""Of the record: another number, and what was found out before is not taken for what would be found out now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far it is."""

    doing: str
    kept: int = 0
    wanted: int = 0
    tried: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What became of the candidates of one kind."""

    kind: str
    tried: int
    kept: int
    verdicts: dict[str, int]
    seconds: float
    """On survivors of the first look, in one sandbox or the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What was made, and of what."""

    repository: str
    tasks: int
    tests: int
    """That count."""
    left_out: dict[str, int]
    """Tests that do not, by reason."""
    coverage: float
    """Share of the tests that count with a twin."""
    suite_s: float
    kinds: list[Kind]
    wall_s: float
    """Of this call; what an earlier one found out takes no time."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def make(
    path: Path,
    out: Path,
    backend: Backend,
    *,
    limit: int = 60,
    seed: str = "0",
    spec: SandboxSpec | None = None,
    told: Callable[[State], None] = lambda state: None,
) -> Made:
    """Makes up to `limit` tasks of the repository at `path` and writes them into `out`.

    Raises FileNotFoundError and ValueError for what is no fit repository, or an `out` that holds another one's tasks, and
    SandboxFailure. Tasks that are kept are written whatever ends it.
    """
    began = time.monotonic()
    if limit < 1:
        raise ValueError(f"a limit of {limit} tasks: at least 1 is needed")
    spec = spec or SandboxSpec()
    repository = read_repository(path)
    with Store(out / RECORD) as store:
        _claim(store, repository, seed, out)
        held = store.fact("baseline")
        if held is None:
            found = measure(repository, backend, spec, lambda doing: told(State(doing=doing)))
            store.keep_fact("baseline", held := found.to_json())
        baseline = Baseline.from_json(held)
        maker = Maker(repository, baseline, backend, spec, seed, store, told, limit)
        tasks: list[Task] = []
        try:
            for task in maker.tasks():
                tasks.append(task)
        finally:
            if tasks:
                save_tasks(tasks, out / TASKS)
            made = _summary(repository, baseline, store, len(tasks), time.monotonic() - began)
            (out / SUMMARY).write_text(made.to_json() + "\n", encoding="utf-8")
    return made


def _claim(store: Store, repository: Repository, seed: str, out: Path) -> None:
    """Notes whose tasks `out` holds. Raises ValueError when they are others'."""
    own = hashlib.sha256(json.dumps([FORMAT, seed, sorted(repository.files.items())]).encode()).hexdigest()
    if store.fact("made of") not in (None, own):
        raise ValueError(f"--out {out}: holds tasks of another repository, state of it, or seed; choose another folder")
    store.keep_fact("made of", own)


class Maker:
    """One run: draws candidates, has them tried side by side, keeps what holds."""

    def __init__(
        self,
        repository: Repository,
        baseline: Baseline,
        backend: Backend,
        spec: SandboxSpec,
        seed: str,
        store: Store,
        told: Callable[[State], None],
        limit: int,
    ) -> None:
        every = [unit for path in repository.sources for unit in _units(repository, path)]
        reached = {place for reach in baseline.reach.values() for place in reach.depths}
        self.units = [unit for unit in every if not reached.isdisjoint(unit.places)]
        names = frozenset(unit.name.rpartition(".")[2] for unit in every)
        self.subject = Subject(
            repository=repository, baseline=baseline, names=names, backend=backend, spec=spec, seed=seed
        )
        self.store, self.told, self.limit = store, told, limit
        self.kept = self.tried = 0

    def tasks(self) -> Iterator[Task]:
        """The tasks, as they are found: single bugs, features that are gone, several bugs at once."""
        files, seed = self.subject.repository.files, self.subject.seed
        part = self.limit // SHARE
        singles: list[tuple[Change, Task]] = []
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            try:
                for change, task in self._kept(
                    pool, "planting bugs", bugs(files, self.units, seed), self.limit - 2 * part
                ):
                    singles.append((change, task))
                    yield task
                for _, task in self._kept(pool, "taking features away", features(files, self.units, seed), part):
                    yield task
                several = combined([change for change, _ in singles], seed)
                parts = {change.key: (change, task) for change, task in singles}
                yield from (task for _, task in self._kept(pool, "combining bugs", several, part, parts))
            finally:
                pool.shutdown(cancel_futures=True)

    def _kept(
        self,
        pool: ThreadPoolExecutor,
        doing: str,
        changes: Iterable[Change],
        wanted: int,
        parts: dict[str, tuple[Change, Task]] | None = None,
    ) -> Iterator[tuple[Change, Task]]:
        """The first `wanted` changes that make tasks, in the order of the changes."""
        stream = iter(changes)
        left = wanted
        while left > 0 and (window := list(islice(stream, min(SIDE_BY_SIDE * TOGETHER, 2 * left)))):
            outcomes = self._window(pool, window, parts or {}, doing)
            for change, outcome in zip(window, outcomes, strict=True):
                if outcome.task is not None and outcome.verdict == "kept" and left > 0:
                    left -= 1
                    yield change, outcome.task

    def _window(
        self, pool: ThreadPoolExecutor, window: Sequence[Change], parts: dict[str, tuple[Change, Task]], doing: str
    ) -> list[Outcome]:
        """What becomes of some changes; those first that were tried before."""
        known = {change.key: outcome for change in window if (outcome := self.store.outcome(change.key)) is not None}
        fresh = [change for change in window if change.key not in known]
        survivors = fresh if parts else []
        if not parts:
            size = max(1, -(-len(fresh) // SIDE_BY_SIDE))
            groups = [fresh[start : start + size] for start in range(0, len(fresh), size)]
            for group, verdicts in zip(groups, pool.map(lambda each: look(self.subject, each), groups), strict=True):
                for change, verdict in zip(group, verdicts, strict=True):
                    if verdict is None:
                        survivors.append(change)
                    else:
                        self._note(
                            Outcome(key=change.key, kind=change.kind, verdict=verdict, seconds=0.0), known, doing
                        )
        waiting: list[Future[Outcome]] = []
        for change in survivors:
            made_of = [parts[key] for key in change.parts]
            waiting.append(
                pool.submit(settle, self.subject, change, [task for _, task in made_of], [each for each, _ in made_of])
            )
        for future in waiting:
            self._note(future.result(), known, doing)
        return [known[change.key] for change in window]

    def _note(self, outcome: Outcome, known: dict[str, Outcome], doing: str) -> None:
        self.store.keep(outcome)
        known[outcome.key] = outcome
        self.tried += 1
        self.kept += outcome.verdict == "kept"
        self.told(State(doing=doing, kept=self.kept, wanted=self.limit, tried=self.tried))


def _units(repository: Repository, path: str) -> list[Unit]:
    try:
        return units(path, repository.files[path])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # a template, or for another Python: no bug can be planted in it


def _summary(repository: Repository, baseline: Baseline, store: Store, tasks: int, wall_s: float) -> Made:
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in store.outcomes():
        by_kind.setdefault(outcome.kind, []).append(outcome)
    kinds = [
        Kind(
            kind=kind,
            tried=len(found),
            kept=sum(each.verdict == "kept" for each in found),
            verdicts=dict(Counter(str(each.verdict) for each in found)),
            seconds=round(sum(each.seconds for each in found), 1),
        )
        for kind, found in sorted(by_kind.items())
    ]
    return Made(
        repository=repository.name,
        tasks=tasks,
        tests=len(baseline.plan.tests),
        left_out=dict(Counter(baseline.left_out.values())),
        coverage=round(baseline.plan.coverage, 3),
        suite_s=round(baseline.suite_s, 2),
        kinds=kinds,
        wall_s=round(wall_s, 1),
    )
