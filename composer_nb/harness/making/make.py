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
from typing import TypeVar

from composer_nb.harness.making.baseline import Baseline, measure
from composer_nb.harness.making.changes import Change, Unit, bugs, combined, features, units
from composer_nb.harness.making.chores import Chore, lints, missing_tests, scan, settle_chore
from composer_nb.harness.making.refactors import refactors
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
CHORES = 10
"""One in CHORES is for the linter, one to write tests, one to refactor; what cannot be had of these becomes bugs."""
CHORES_TRIED = 4
"""So many are tried for each that is wanted."""
FORMAT = "3"
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
    if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
        raise ValueError(
            f"--out {out}: lies in the repository, so that its tasks would hold each other's answers; choose another"
        )
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


C = TypeVar("C", Change, Chore)
Waiting = Outcome | Future[Outcome]


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
        self.kept = self.tried = self.kept_now = 0

    def tasks(self) -> Iterator[Task]:
        """The tasks, as they are found: chores, features that are gone, single bugs, several bugs at once."""
        files, seed, part = self.subject.repository.files, self.subject.seed, self.limit // SHARE
        singles: list[tuple[Change, Task]] = []
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            try:
                for doing, chores in self._chores():
                    some = islice(chores, CHORES_TRIED * (self.limit // CHORES))
                    for _, task in self._kept(pool, doing, some, self.limit // CHORES, self._chore, ahead=1):
                        yield task
                for _, task in self._kept(
                    pool, "taking features away", features(files, self.units, seed), part, self._bug
                ):
                    yield task
                left = self.limit - self.kept_now - part
                for change, task in self._kept(pool, "planting bugs", bugs(files, self.units, seed), left, self._bug):
                    singles.append((change, task))
                    yield task
                parts = {change.key: (change, task) for change, task in singles}

                def several(pool: ThreadPoolExecutor, changes: Sequence[Change]) -> Iterator[Waiting]:
                    for change in changes:
                        made_of = [parts[key] for key in change.parts]
                        tasks, kinds = [task for _, task in made_of], [each for each, _ in made_of]
                        yield pool.submit(settle, self.subject, change, tasks, kinds)

                found = combined([change for change, _ in singles], seed)
                yield from (task for _, task in self._kept(pool, "combining bugs", found, part, several))
            finally:
                pool.shutdown(cancel_futures=True)

    def _chores(self) -> Iterator[tuple[str, Iterator[Chore]]]:
        if self.limit < CHORES:
            return
        held = self.store.fact("lint")
        if held is None:
            self.store.keep_fact("lint", held := json.dumps(scan(self.subject)))
        yield "planting lint", lints(self.subject, self.units, json.loads(held))
        yield "taking tests away", missing_tests(self.subject, self.units)
        yield "refactoring", refactors(self.subject, self.units)

    def _kept(
        self,
        pool: ThreadPoolExecutor,
        doing: str,
        candidates: Iterable[C],
        wanted: int,
        tried: Callable[[ThreadPoolExecutor, Sequence[C]], Iterable[Waiting]],
        ahead: int = 2,
    ) -> Iterator[tuple[C, Task]]:
        """The first `wanted` candidates that make tasks, in their order."""
        stream = iter(candidates)
        left = wanted
        while left > 0 and (window := list(islice(stream, min(SIDE_BY_SIDE * TOGETHER, ahead * left)))):
            known = {each.key: outcome for each in window if (outcome := self.store.outcome(each.key)) is not None}
            for waiting in list(tried(pool, [each for each in window if each.key not in known])):
                outcome = waiting if isinstance(waiting, Outcome) else waiting.result()
                known[outcome.key] = outcome
                self._note(outcome, doing)
            for each in window:
                outcome = known[each.key]
                if outcome.task is not None and outcome.verdict == "kept" and left > 0:
                    left -= 1
                    self.kept_now += 1
                    yield each, outcome.task

    def _bug(self, pool: ThreadPoolExecutor, fresh: Sequence[Change]) -> Iterator[Waiting]:
        """Those first that fail the first look."""
        size = max(1, -(-len(fresh) // SIDE_BY_SIDE))
        groups = [fresh[start : start + size] for start in range(0, len(fresh), size)]
        survivors = []
        for group, verdicts in zip(groups, pool.map(lambda each: look(self.subject, each), groups), strict=True):
            for change, verdict in zip(group, verdicts, strict=True):
                if verdict is None:
                    survivors.append(change)
                else:
                    yield Outcome(key=change.key, kind=change.kind, verdict=verdict, seconds=0.0)
        yield from [pool.submit(settle, self.subject, change) for change in survivors]

    def _chore(self, pool: ThreadPoolExecutor, fresh: Sequence[Chore]) -> Iterator[Waiting]:
        yield from [pool.submit(settle_chore, self.subject, chore, self.units) for chore in fresh]

    def _note(self, outcome: Outcome, doing: str) -> None:
        self.store.keep(outcome)
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
