"""Make tasks from a repository with a pytest suite: `composer-nb tasks make`.

The same repository, seed and limit give the same tasks: candidates are drawn in a fixed order, tried some at a time, and kept in
that order, whichever finishes first. Outcomes are stored (`TaskStore`), so the same command continues where it was interrupted,
and a larger limit reuses what is known.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.recorded import Guarding, guard_of, guards_line, meets
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.tasks.making.baseline import Baseline, measure
from composer_nb.harness.tasks.making.changes import Change, bugs, combined, features
from composer_nb.harness.tasks.making.kinds import KINDS
from composer_nb.harness.tasks.making.options import INI, Options, RunOptions, given_packages, plugins_in, read_options
from composer_nb.harness.tasks.making.repository import Repository, read_repository
from composer_nb.harness.tasks.making.trial import Assignment, Part, Subject, TaskStore, TrialOutcome, settle
from composer_nb.harness.tasks.runtime import PACKAGES, PACKAGES_DIGEST, allow_packages, packages_digest
from composer_nb.harness.tasks.task import Task, save_tasks

TASKS, RECORD, SUMMARY = "tasks.jsonl", "made.db", "summary.json"
SIDE_BY_SIDE = 2  # Sandboxes at a time.
AHEAD = 12  # Candidates drawn at a time.
SHARE = 6  # One task in SHARE is a missing feature, and one combines several bugs.
BELOW = 24  # Tasks below the required guard, without one that reaches it, after which a run ends.
PLANTED = ("feature", "bug", "combined")  # Kinds that are made by default.
FORMAT = "9"  # Version of the record. A new number makes earlier outcomes invalid.


# Is told what is being done, and counts of tasks.
Report = Callable[[str, str], None]


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
    kinds: Sequence[str] = PLANTED,
    report: Report = lambda doing, counts: None,
) -> dict[str, Any]:
    """Make up to `limit` tasks of the repository at `path` and write them into `out`. Return what was made, as in `SUMMARY`.

    `require` leaves out tasks with a lesser guard. `kinds`: of PLANTED and KINDS. Tasks that were kept are written even if an
    exception ends the call.

    Raises FileNotFoundError and ValueError for an unfit repository, an `out` that holds another one's tasks, an unknown kind or
    one without a candidate, or a guard that none of the first `BELOW` tasks reaches, and SandboxFailure.
    """
    began = time.monotonic()
    if limit < 1:
        raise ValueError(f"a limit of {limit} tasks: at least 1 is needed")
    kinds = tuple(dict.fromkeys(kinds))
    if unknown := [kind for kind in kinds if kind not in (*PLANTED, *KINDS)] or [""] * (not kinds):
        raise ValueError(f"--kinds {unknown[0]}: no such kind; choose from {','.join([*PLANTED, *KINDS])}")
    if "combined" in kinds and "bug" not in kinds:
        raise ValueError("--kinds combined: combines tasks of the kind bug; add it")
    if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"--out {out}: lies in the repository, so tasks would hold answers; choose another")
    running = running or RunOptions()
    if spec is None:  # an image's packages take more memory than the standard library
        spec = SandboxSpec(image=running.image, memory_bytes=2 << 30) if running.image else SandboxSpec()
    repository = read_repository(path)
    with TaskStore(out / RECORD) as store:
        repository, options = prepared(repository, running)
        way = [running.test_s, list(options.select), *options.paths, *options.ignored]
        origin = [FORMAT, seed, sorted(repository.files.items()), sorted(repository.settings.items()), way]
        store.claim("made of", json.dumps(origin))
        if "baseline" not in store.facts:
            if options.dropped:
                report(f"leaving out pytest's {' '.join(options.dropped)}", "")
            measured = measure(repository, backend, spec, lambda doing: report(doing, ""), running, options)
            store.keep_fact("baseline", measured.to_json())
        baseline = Baseline.from_json(store.facts["baseline"])
        maker = Maker(Subject(repository, baseline, backend, spec, seed), store, report, limit, require, kinds)
        try:
            with writing(lambda: [task for _, task in maker.kept.values()], out / TASKS):
                maker.run()
        finally:
            summary = _summary(maker, time.monotonic() - began)
            write_json(out / SUMMARY, summary)
    return summary


@contextmanager
def writing(tasks: Callable[[], Sequence[Task]], file: Path) -> Iterator[None]:
    """Write the tasks at the end. An exception does not replace more tasks, of an earlier call, by fewer."""
    least = file.read_bytes().count(b"\n") if file.is_file() else 0
    try:
        yield
        least = 0
    finally:
        if len(tasks()) > least:
            save_tasks(tasks(), file)


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


class Maker:
    """One run: draws candidates, tries them side by side, and keeps those that make tasks."""

    def __init__(
        self,
        subject: Subject,
        store: TaskStore,
        report: Report,
        limit: int,
        require: Guarding,
        kinds: Sequence[str] = PLANTED,
    ) -> None:
        self.subject, self.store, self.report, self.limit, self.require = subject, store, report, limit, require
        self.kinds, self.tried, self.below = kinds, 0, Counter[str]()
        # By the candidate's key.
        self.kept: dict[str, tuple[Change | Assignment, Task]] = {}

    def run(self) -> None:
        """Make missing features, single bugs, several bugs at once, and then tasks of KINDS, of each an equal share.

        Raises ValueError if no test calls a function in which a bug can be planted, or a kind of KINDS has no candidate.
        """
        name, files, seed = self.subject.repository.name, self.subject.repository.files, self.subject.seed
        units = self.subject.reached
        if not units:
            reasons = "".join(f". {path}: {reason}" for path, reason in list(self.subject.unfit.items())[:3])
            raise ValueError(
                f"{name}: no test calls a function in which a bug can be planted. Tests of a package that pytest itself "
                f"imports, such as packaging, run on pytest's copy{reasons}"
            )
        share, rest = divmod(self.limit, len(self.kinds))
        shares = {kind: share + (number < rest) for number, kind in enumerate(self.kinds)}
        assignments = {kind: self._assignments(kind) for kind in self.kinds if kind in KINDS}
        planted = sum(shares[kind] for kind in self.kinds if kind in PLANTED)
        part = planted // SHARE if "bug" in self.kinds else planted
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            try:
                if "feature" in self.kinds:
                    self._try(pool, "taking features away", features(files, units, seed), part)
                if "bug" in self.kinds:
                    missing = planted - len(self.kept) - part * ("combined" in self.kinds)
                    self._try(pool, "planting bugs", bugs(files, units, seed), missing)
                if "combined" in self.kinds:
                    changes = [change for change, _ in self.kept.values() if isinstance(change, Change)]
                    singles = [change for change in changes if change.kind != "feature"]
                    self._try(pool, "combining bugs", combined(singles, seed), part)
                for kind, candidates in assignments.items():
                    self._try(pool, f"making tasks of the kind {kind}", candidates, shares[kind])
            finally:
                pool.shutdown(cancel_futures=True)

    def _assignments(self, kind: str) -> Iterator[Assignment]:
        candidates = KINDS[kind].candidates(self.subject)
        if (first := next(candidates, None)) is None:
            raise ValueError(f"{self.subject.repository.name}: --kinds {kind}: no candidate, {KINDS[kind].needs}")
        return chain([first], candidates)

    def _try(self, pool: Executor, doing: str, candidates: Iterator[Change | Assignment], missing: int) -> None:
        """Keep the tasks of the first `missing` candidates that make one, in the candidates' order."""
        while missing > 0 and (window := list(islice(candidates, min(AHEAD, 2 * missing)))):
            fresh = [change for change in window if change.key not in self.store.outcomes]
            parts = [[cast(Part, self.kept[key]) for key in change.parts] for change in fresh]
            for outcome in pool.map(partial(settle, self.subject), fresh, parts):
                self.store.keep(outcome)
                self.tried += 1
                self._tell(doing)
            for change in window:
                task = self.store.outcomes[change.key].task
                if task is None or not missing:
                    continue
                by: Guarding = "none" if self.require == "none" else guard_of(task).by
                if meets(by, self.require):
                    missing -= 1
                    self.kept[change.key] = change, task
                else:
                    self.below[by] += 1
                self._tell(doing)
            if not self.kept and self.below.total() >= BELOW:
                raise ValueError(
                    f"{self.subject.repository.name}: none of {self.below.total()} tasks reaches --require {self.require} "
                    f"({guards_line(self.below)}). Recorded calls need functions with plain arguments and results; methods of "
                    "instances have none. Choose --require twins or none; the same folder continues with what was tried"
                )

    def _tell(self, doing: str) -> None:
        below = f"; below --require {self.require}: {guards_line(self.below)}" if self.below else ""
        self.report(doing, f"{len(self.kept)} of {self.limit} tasks, {self.tried} tried{below}")


def _summary(maker: Maker, wall_s: float) -> dict[str, Any]:
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
        "tasks": len(maker.kept),
        "tests": len(baseline.plan.tests),
        "left_out": Counter(baseline.left_out.values()),
        "coverage": round(baseline.plan.coverage, 3),
        "suite_s": round(baseline.suite_s, 2),
        "kinds": kinds,
        "below": dict(maker.below),
        "files_left_out": subject.repository.left_out,
        "no_bugs_in": subject.unfit,
        "guards": {task.id: asdict(guard_of(task)) for _, task in maker.kept.values()},
        "wall_s": round(wall_s, 1),
    }
