"""Make tasks from a repository with a pytest suite: `composer-nb tasks make`.

The same repository, seed and limit give the same tasks: candidates are drawn in a fixed order, tried some at a time, and kept in
that order, whichever finishes first. Outcomes are stored (`TaskStore`), so the same command continues where it was interrupted,
and a larger limit reuses what is known.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.recorded import Guarding, guard_of, guards_line, meets
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.tasks.making.baseline import Baseline, measure
from composer_nb.harness.tasks.making.changes import Change, bugs, combined, features
from composer_nb.harness.tasks.making.options import INI, Options, RunOptions, given_packages, plugins_in, read_options
from composer_nb.harness.tasks.making.repository import Repository, read_repository
from composer_nb.harness.tasks.making.trial import Subject, TaskStore, TrialOutcome, settle
from composer_nb.harness.tasks.runtime import PACKAGES, PACKAGES_DIGEST, allow_packages, packages_digest
from composer_nb.harness.tasks.task import Task, save_tasks

TASKS, RECORD, SUMMARY = "tasks.jsonl", "made.db", "summary.json"
SIDE_BY_SIDE = 2  # Sandboxes at a time.
AHEAD = 12  # Candidates drawn at a time.
SHARE = 6  # One task in SHARE is a missing feature, and one combines several bugs.
BELOW = 24  # Tasks below the required guard, without one that reaches it, after which a run ends.
FORMAT = "8"  # Version of the record. A new number makes earlier outcomes invalid.


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeProgress:
    """The progress of one run.

    Attributes:
        below: Tasks that were left out because of their guard.
    """

    doing: str
    tasks: int = 0
    limit: int = 0
    tried: int = 0
    below: str = ""


Told = Callable[[MakeProgress], None]


def make(
    path: Path,
    out: Path,
    backend: Backend,
    *,
    limit: int = 60,
    seed: str = "0",
    spec: SandboxSpec | None = None,
    running: RunOptions | None = None,
    require: Guarding = "none",
    report: Told = lambda state: None,
) -> dict[str, Any]:
    """Make up to `limit` tasks of the repository at `path` and write them into `out`. Return what was made, as in `SUMMARY`.

    `require` leaves out tasks with a lesser guard. Tasks that were kept are written even if an exception ends the call.

    Raises FileNotFoundError and ValueError for an unfit repository, an `out` that holds another one's tasks, or a guard that
    none of the first `BELOW` tasks reaches, and SandboxFailure.
    """
    began = time.monotonic()
    if limit < 1:
        raise ValueError(f"a limit of {limit} tasks: at least 1 is needed")
    if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
        raise ValueError(
            f"--out {out}: lies in the repository, so that its tasks would hold each other's answers; choose another"
        )
    running = running or RunOptions()
    if spec is None:  # an image's packages take more memory than the standard library
        spec = SandboxSpec(image=running.image, memory_bytes=2 << 30) if running.image else SandboxSpec()
    repository = read_repository(path)
    with TaskStore(out / RECORD) as store:
        repository, options = prepared(repository, running)
        _claim(store, repository, seed, out, [running.test_s, list(options.select), *options.paths, *options.ignored])
        if "baseline" not in store.facts:
            if options.dropped:
                report(MakeProgress(doing=f"leaving out pytest's {' '.join(options.dropped)}"))
            measured = measure(
                repository, backend, spec, lambda doing: report(MakeProgress(doing=doing)), running, options
            )
            store.keep_fact("baseline", measured.to_json())
        baseline = Baseline.from_json(store.facts["baseline"])
        maker = Maker(Subject(repository, baseline, backend, spec, seed), store, report, limit, require)
        tasks: list[Task] = []
        try:
            for task in maker.tasks():
                tasks.append(task)
        finally:
            if tasks:
                save_tasks(tasks, out / TASKS)
            summary = _summary(maker, tasks, time.monotonic() - began)
            write_json(out / SUMMARY, summary)
    return summary


def prepared(repository: Repository, running: RunOptions) -> tuple[Repository, Options]:
    """Return the repository with the packages that its tests need, and how they run. Raises ValueError."""
    settings: dict[str, str] = {"image": running.image} if running.image else {}
    plugins: list[str] = []
    if running.packages is not None:
        folder, packages = running.packages.resolve(), given_packages(running.packages)
        allow_packages(folder)
        settings |= {PACKAGES: str(folder), PACKAGES_DIGEST: packages_digest(packages)}
        plugins = plugins_in(folder)
    options = read_options(repository.files, running.pytest_args, plugins)
    settings |= {INI: options.ini} if options.ini else {}
    return replace(repository, settings=settings), options


def _claim(store: TaskStore, repository: Repository, seed: str, out: Path, ways: list[Any]) -> None:
    """Note whose tasks `out` holds. Raises ValueError if they belong to another repository or setting."""
    origin = [FORMAT, seed, sorted(repository.files.items()), sorted(repository.settings.items()), ways]
    fingerprint = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
    if "baseline" in store.facts and store.facts.get("made of") != fingerprint:  # without one, nothing was made yet
        raise ValueError(
            f"--out {out}: holds tasks of another repository, state of it, seed, or way to run its tests; choose another folder"
        )
    store.keep_fact("made of", fingerprint)


class Maker:
    """One run: draws candidates, tries them side by side, and keeps those that make tasks."""

    def __init__(self, subject: Subject, store: TaskStore, report: Told, limit: int, require: Guarding) -> None:
        reached = {function for reach in subject.baseline.reach.values() for function in reach.depths}
        self.units = [unit for unit in subject.units if unit.place in reached]
        self.subject, self.store, self.report, self.limit, self.require = subject, store, report, limit, require
        self.tried, self.below = 0, Counter[str]()
        # Tasks that were kept, by the change's key.
        self.found: dict[str, tuple[Change, Task]] = {}

    def tasks(self) -> Iterator[Task]:
        """Yield tasks as they are found: missing features, single bugs, several bugs at once.

        Raises ValueError if no test calls a function in which a bug can be planted.
        """
        if not self.units:
            reasons = "".join(f". {path}: {reason}" for path, reason in list(self.subject.unfit.items())[:3])
            raise ValueError(
                f"{self.subject.repository.name}: no test calls a function in which a bug can be planted. Tests of a package "
                f"that pytest itself imports, such as packaging, run on pytest's copy{reasons}"
            )
        files, seed, part = self.subject.repository.files, self.subject.seed, self.limit // SHARE
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            try:
                yield from self._kept(pool, "taking features away", features(files, self.units, seed), part)
                left = self.limit - len(self.found) - part
                yield from self._kept(pool, "planting bugs", bugs(files, self.units, seed), left)
                singles = [change for change, _ in self.found.values() if change.kind != "feature"]
                yield from self._kept(pool, "combining bugs", combined(singles, seed), part)
            finally:
                pool.shutdown(cancel_futures=True)

    def _kept(self, pool: ThreadPoolExecutor, doing: str, candidates: Iterable[Change], missing: int) -> Iterator[Task]:
        """Yield the tasks of the first `missing` candidates that make one, in the candidates' order."""
        stream = iter(candidates)
        while missing > 0 and (window := list(islice(stream, min(AHEAD, 2 * missing)))):
            fresh = [candidate for candidate in window if candidate.key not in self.store.outcomes]
            parts = [[self.found[key] for key in candidate.parts] for candidate in fresh]
            for outcome in pool.map(partial(settle, self.subject), fresh, parts):
                self.store.keep(outcome)
                self.tried += 1
                self._tell(doing)
            for change in window:
                outcome = self.store.outcomes[change.key]
                if outcome.task is None or outcome.verdict != "kept" or not missing:
                    continue
                by: Guarding = "none" if self.require == "none" else guard_of(outcome.task).by
                if meets(by, self.require):
                    missing -= 1
                    self.found[change.key] = change, outcome.task
                    self._tell(doing)
                    yield outcome.task
                else:
                    self.below[by] += 1
                    self._tell(doing)
            if not self.found and self.below.total() >= BELOW:
                raise ValueError(
                    f"{self.subject.repository.name}: none of {self.below.total()} tasks reaches --require {self.require} "
                    f"({guards_line(self.below)}). Recorded calls need functions with plain arguments and results; methods of "
                    "instances have none. Choose --require twins or none; the same folder continues with what was tried"
                )

    def _tell(self, doing: str) -> None:
        below = f"below --require {self.require}: {guards_line(self.below)}" if self.below else ""
        self.report(MakeProgress(doing=doing, tasks=len(self.found), limit=self.limit, tried=self.tried, below=below))


def _summary(maker: Maker, tasks: Sequence[Task], wall_s: float) -> dict[str, Any]:
    """Return counts and times.

    `below` counts tasks below the required guard, by their guard. `files_left_out` are the files of the repository that are in
    no task, and `no_bugs_in` the sources in which no bug can be planted, with why. `left_out` are tests that do not count, by
    reason, and `coverage` is the share of the others with a twin. Seconds of a kind are those of candidates that passed the first
    look, summed over sandboxes, and `wall_s` those of this call, in which outcomes of an earlier one take no time.
    """
    subject, baseline = maker.subject, maker.subject.baseline
    by_kind: dict[str, list[TrialOutcome]] = {}
    for outcome in maker.store.outcomes.values():
        by_kind.setdefault(outcome.kind, []).append(outcome)
    kinds = [
        {
            "kind": kind,
            "tried": len(outcomes),
            "kept": sum(outcome.verdict == "kept" for outcome in outcomes),
            "verdicts": Counter(str(outcome.verdict) for outcome in outcomes),
            "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        }
        for kind, outcomes in sorted(by_kind.items())
    ]
    return {
        "repository": subject.repository.name,
        "tasks": len(tasks),
        "tests": len(baseline.plan.tests),
        "left_out": Counter(baseline.left_out.values()),
        "coverage": round(baseline.plan.coverage, 3),
        "suite_s": round(baseline.suite_s, 2),
        "kinds": kinds,
        "below": dict(maker.below),
        "files_left_out": subject.repository.left_out,
        "no_bugs_in": subject.unfit,
        "guards": {task.id: asdict(guard_of(task)) for task in tasks},
        "wall_s": round(wall_s, 1),
    }
