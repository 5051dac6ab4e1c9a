"""Measure a repository's suite before anything is changed: which tests count, what each of them calls, and their twins.

All tasks of a repository have the same solution, the repository itself. What holds of the solution is therefore found out once:
the tests that pass in every run whatever the hash seed, in reasonable time and without reading their own source, and their twins.

An environment is kept if more than 80 % of the tests pass (SWE-smith, arXiv 2504.21798).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from composer_nb.harness.grading.box import Boxes, JobResult, Place, Reach, RunnerEnded, TestJob
from composer_nb.harness.grading.plan import GradePlan, conftests, digest, gold_files, job, modules_of
from composer_nb.harness.grading.validate import with_twins
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.tasks.functions import parse_module
from composer_nb.harness.tasks.making.options import Options, RunOptions
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.runtime import packages_of
from composer_nb.harness.tasks.task import Task

KEPT_SHARE = 0.8
FEWEST = 8  # Tests that pass within the time of a suite that takes longer; the others are left out.
REPEATS = 4  # More runs of the tests that passed once and are quick enough.
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The measured suite of one state of a repository.

    Attributes:
        plan: The tests that count, with their twins.
        reach: By the keys of the tests that count.
        left_out: Node id -> why a test does not count: failing, skipped, flaky, slow, reads its source.
        suite_s: Seconds of one run of the tests that count.
    """

    plan: GradePlan
    reach: Mapping[str, Reach]
    left_out: Mapping[str, str]
    suite_s: float

    def nearest(self, places: Iterable[Place]) -> list[str]:
        """Return the keys of the tests that reach one of these functions, the most direct callers first."""
        functions = set(places)
        depths = {
            key: min(depth for function, depth in reach.depths.items() if function in functions)
            for key, reach in self.reach.items()
            if not functions.isdisjoint(reach.depths)
        }
        return sorted(depths, key=lambda key: (depths[key], len(self.reach[key].depths), key))

    def to_json(self) -> str:
        places = sorted({function for reach in self.reach.values() for function in reach.depths})
        numbers = {function: number for number, function in enumerate(places)}
        reach = {
            key: [test_reach.seconds, [[numbers[function], depth] for function, depth in test_reach.depths.items()]]
            for key, test_reach in self.reach.items()
        }
        table = {"plan": self.plan.to_json(), "places": places, "reach": reach, "left_out": dict(self.left_out)}
        return json.dumps(table | {"suite_s": self.suite_s})

    @classmethod
    def from_json(cls, text: str) -> Baseline:
        table = json.loads(text)
        places = [(path, line) for path, line in table["places"]]
        reach = {
            key: Reach(seconds=seconds, depths={places[number]: depth for number, depth in depths})
            for key, (seconds, depths) in table["reach"].items()
        }
        plan = GradePlan.from_json(table["plan"])
        return cls(plan=plan, reach=reach, left_out=table["left_out"], suite_s=table["suite_s"])


def whole(repository: Repository) -> Task:
    """Return the repository as a task without a change, for the graders."""
    return Task(
        id=repository.name,
        instruction="-",
        files=repository.files,
        tests=repository.hidden,
        source_scope=repository.scope,
        grader="pytest",
        metadata=repository.settings,
    )


def measure(
    repository: Repository,
    backend: Backend,
    spec: SandboxSpec,
    say: Say,
    running: RunOptions | None = None,
    options: Options | None = None,
) -> Baseline:
    """Measure the suite on the repository as it is.

    Raises ValueError for a suite that yields no tasks, and SandboxFailure, from which nothing follows.
    """
    running, options = running or RunOptions(), options or Options()
    task = whole(repository)
    _ = [parse_module(path, text) for path, text in conftests(task).items()]
    gold = gold_files(task)
    boxes = Boxes(backend=backend, spec=spec, timeout_s=running.suite_s)
    _refuse_copies(repository, backend, spec)

    def run(*jobs: TestJob) -> list[JobResult]:
        try:
            return boxes.run(jobs)
        except (SandboxDied, RunnerEnded) as error:
            raise ValueError(f"{repository.name}: its tests end the sandbox: {error}") from None

    say("running the suite as it is")
    everything = job(task, gold, (), None)
    chosen = replace(everything, select=options.select, tests=options.chosen(everything.tests))
    names, left_out, passing = _passing(repository, run(chosen)[0], running, say)
    say("finding out what each test calls")
    reach: dict[str, Reach] = {}
    groups = [frozenset(key for key in passing if key.partition("::")[0] == module) for module in modules_of(passing)]
    while groups:
        following = []
        jobs = [replace(job(task, gold, (), keys), reach=True) for keys in groups]
        for keys, ran in zip(groups, run(*jobs), strict=True):
            if "read_tests" in ran.flags and len(keys) > 1:  # one of them is to blame: which?
                ordered = sorted(keys)
                following += [frozenset(ordered[: len(keys) // 2]), frozenset(ordered[len(keys) // 2 :])]
                continue
            for key in keys:
                alone = ran.result(key).passed and key in ran.reached
                why = "reads its source" if "read_tests" in ran.flags else "" if alone else "flaky"
                if why or ran.reached[key].seconds > running.test_s:
                    left_out[names[key]] = why or "slow"
                else:
                    reach[key] = ran.reached[key]
        groups = following
    say(f"running {len(reach)} tests again")
    quick = job(task, gold, (), frozenset(reach))
    again = run(*(replace(quick, hash_seed=1 + number) for number in range(REPEATS)))
    for key in list(reach):
        if not all(ran.result(key).passed for ran in again):
            left_out[names[key]] = "flaky"
            del reach[key]
    if not reach:
        raise ValueError(f"{repository.name}: no test passes every time within --test-seconds {running.test_s:g}")
    say(f"looking for twins of {len(reach)} tests")
    plan = GradePlan(digest=digest(task), tests={key: names[key] for key in sorted(reach)})
    plan, problems = with_twins(task, plan, boxes)
    if problems:
        raise ValueError(f"{repository.name}: its suite cannot be graded: {problems[0][:300]}")
    return Baseline(plan=plan, reach=reach, left_out=left_out, suite_s=min(ran.seconds for ran in again))


def _passing(
    repository: Repository, ran: JobResult, running: RunOptions, say: Say
) -> tuple[dict[str, str], dict[str, str], set[str]]:
    """Return node ids by key, the reasons of those left out, and the keys that pass. Raises ValueError if too few pass."""
    names = {key: result.id for key, result in ran.results.items()}
    why = {"failed": "failing", "skipped": "skipped"}
    left_out = {names[key]: why[result.outcome] for key, result in ran.results.items() if not result.passed}
    passing = {key for key, result in ran.results.items() if result.passed}
    runnable = len(names) - sum(reason == "skipped" for reason in left_out.values())
    if "timeout" in ran.flags and len(passing) < FEWEST:
        raise ValueError(
            f"{repository.name}: its suite takes longer than {running.suite_s:g} s, with {len(names)} tests run by then; choose "
            "fewer by --pytest-args (-m, -k, --deselect, --ignore), or allow more by --suite-seconds"
        )
    errors = [line.removeprefix("INTERNALERROR> ")[:200] for line in ran.output.splitlines() if "Error" in line]
    missing = re.findall(r"No module named '([\w.]+)'", ran.output)
    remedy = f". Bring {missing[0]} by --packages FOLDER" if missing else ""
    if "ended_early" in ran.flags:
        after = f"after {list(names.values())[-1]}" if names else "before its first test"
        cause = f": {errors[-1]}" if errors else ""
        raise ValueError(f"{repository.name}: something ends its suite early, {after}{cause}{remedy}")
    if not runnable or len(passing) / runnable <= KEPT_SHARE:
        causes = Counter(result.why for result in ran.results.values() if result.outcome == "failed" and result.why)
        errors = errors or [f"mostly {why}" for why, _ in causes.most_common(1)]
        raise ValueError(
            f"{repository.name}: only {len(passing)} of {runnable} tests pass before anything is changed, and more than "
            f"{KEPT_SHARE:.0%} must{': ' + errors[-1] if errors else ''}{remedy}"
        )
    if "timeout" in ran.flags:
        say(f"its suite takes longer than --suite-seconds {running.suite_s:g}: the {len(names)} tests that ran count")
    return names, left_out, passing


_LOOK = """\
import os, sys, zipfile
found = []
for top in sys.path:
    for at, folders, names in os.walk(top):
        found += [os.path.join(at, name) for name in [*folders, *names] if name in sys.argv[1:]]
        for name in names:
            if name.endswith((".whl", ".zip", ".egg")):
                try:
                    inside = zipfile.ZipFile(os.path.join(at, name)).namelist()
                except (OSError, zipfile.BadZipFile):
                    continue
                found += [os.path.join(at, name)] * any(set(each.split("/")) & set(sys.argv[1:]) for each in inside)
print(found[0] if found else "")
"""


def _refuse_copies(repository: Repository, backend: Backend, spec: SandboxSpec) -> None:
    """Raise ValueError if the sandbox's Python has a copy of the package, where an agent could look up the answer."""
    tops = [top.removesuffix("/**").removeprefix("src/") for top in repository.scope]
    if tops == ["src"]:
        tops = sorted({path.split("/")[1] for path in repository.sources if path.count("/") > 1})
    named = {path.split("/")[0] for path in packages_of(whole(repository))}
    if both := sorted(named & {*tops, *(top.removesuffix(".py") for top in tops)}):
        raise ValueError(f"{repository.name}: a copy of it is among the packages: {both[0]}, where an agent could look")
    with backend.create(spec) as box:
        result = box.exec(["python3", *([] if spec.image else ["-S"]), "-c", _LOOK, *tops])
    if copy := result.stdout.decode("utf-8", "replace").strip():
        raise ValueError(f"{repository.name}: a copy of it lies in the sandbox, at {copy}, for an agent to look up")
