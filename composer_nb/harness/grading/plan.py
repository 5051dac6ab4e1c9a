"""Plan a task's grades: which of its hidden tests count, and which changed copies of them must fail. Only the host knows.

A *twin* is a hidden test with one expectation changed, so that a correct solution fails it (`twins.py`). A grade runs the tests
several times, each time in a new sandbox. For each test, a random choice of runs executes its twin in its place. No process
learns which version it has, and none ever has both. Code that makes tests pass without doing what they ask, by patching
comparisons, reading expectations from frames or claiming results, also makes twins pass; nothing that does what is asked passes
both. Code that tells the two versions apart, but does not know which is true, guesses right at best once in two. Code that
decides at random in each run guesses right once in 2^runs - 2.

Covers the tests that have a twin, and the expectation that was changed. A test has several twins, for each of its expectations
and with several values; each grade draws one of them. Does not cover tests without twins, nor code that recognises a false
expectation because it knows the answer.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from composer_nb.harness.grading.box import Call, TestJob
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.runtime import packages_of, workspace
from composer_nb.harness.tasks.scope import is_conftest, is_test_module
from composer_nb.harness.tasks.task import Task

Keys = frozenset[str] | None  # Keys of tests; None: of all.
PLAN = "pytest.plan"  # Metadata key of a task's plan.


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """One change of a hidden test: characters `start` to `end` of a file with \\n line ends become `text`.

    Attributes:
        keys: Tests that it makes fail.
        alone: Validation showed that its test tells right from wrong in a process of its own (`alone.py`).
    """

    path: str
    start: int
    end: int
    text: str
    keys: tuple[str, ...] = ()
    alone: bool = False


def _contradicting(twins: Any) -> Any:
    """Leave out what older versions kept as twins: changes that do not contradict their test."""
    if not (isinstance(twins, list) and all(isinstance(twin, dict) for twin in twins)):
        return twins
    strong = [twin for twin in twins if not (twin.get("weak") or twin.get("telling") or twin.get("besides"))]
    return [twin for twin in strong if twin.get("kind", "value") == "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A call and the gold patch's answer to it (`recorded.py`).

    Attributes:
        given: JSON of the arguments, as in `box.Call`.
        said: JSON, as `guest.calls.answer` writes it.
        telling: True if the task's start answers differently.
    """

    module: str
    name: str
    given: str
    said: str
    telling: bool

    @property
    def call(self) -> Call:
        return self.module, self.name, self.given


@dataclass(frozen=True, slots=True, kw_only=True)
class GradePlan:
    """The tests that count, their twins, and the recorded calls.

    Attributes:
        digest: Digest of the tests' texts. The plan is valid for these tests only.
        tests: Key -> pytest's node id.
    """

    digest: str
    tests: Mapping[str, str]
    twins: Annotated[tuple[Twin, ...], BeforeValidator(_contradicting)] = ()
    calls: tuple[RecordedCall, ...] = ()

    @property
    def covered(self) -> frozenset[str]:
        """Keys of the tests that have a twin."""
        return frozenset(key for twin in self.twins for key in twin.keys)

    @property
    def coverage(self) -> float:
        return len(self.covered) / len(self.tests) if self.tests else 0.0

    def to_json(self) -> str:
        return _PLANS.dump_json(self, exclude_defaults=True).decode()

    @classmethod
    def from_json(cls, text: str) -> GradePlan:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            return _PLANS.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not a plan of hidden tests: {error.errors()[0]['msg']}") from None


_PLANS = TypeAdapter(GradePlan)


def modules_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the test modules that contain these tests."""
    return tuple(sorted({key.partition("::")[0] for key in keys}))


def digest(task: Task) -> str:
    """Return the digest of everything that the positions of twins and the keys of tests depend on."""
    content = json.dumps([sorted(task.tests.items()), sorted(conftests(task).items())])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def conftests(task: Task) -> dict[str, str]:
    """Return the workspace's own conftests, as the task has them."""
    return {path: text for path, text in task.files.items() if is_conftest(path)}


def plan_of(task: Task) -> GradePlan:
    """Return the plan in a task's metadata, as strict as the task asks for. Raises ValueError if there is none, or one for other
    tests."""
    if PLAN not in task.metadata:
        raise ValueError(f"task {task.id}: not validated yet: it holds no plan of its hidden tests")
    plan = GradePlan.from_json(task.metadata[PLAN])
    if plan.digest != digest(task):
        raise ValueError(f"task {task.id}: its plan was made for other hidden tests; validate it again")
    return replace(plan, twins=(), calls=()) if task.strictness == "tests" else plan


def with_plan(task: Task, plan: GradePlan) -> Task:
    return task.model_copy(update={"metadata": {**task.metadata, PLAN: plan.to_json()}})


def gold_files(task: Task) -> dict[str, bytes]:
    """Return the workspace with the solution applied."""
    return workspace(task) | {path: text.encode() for path, text in task.solution.items()}


@lru_cache(maxsize=256)
def normal(text: str) -> str:
    """Return a module as `ast` writes it, without comments, quoting style and layout, so that a test and its twin differ in
    nothing but what they state. Raises SyntaxError, ValueError, RecursionError."""
    return ast.unparse(parse(text)) + "\n"


@lru_cache(maxsize=256)
def silent(text: str) -> str:
    """Return a module like `normal`, with empty docstrings and without assertion messages.

    Messages often state in words what a test expects, which would tell it from its twin. A module that mentions AssertionError
    may read its messages and keeps them. Raises what `normal` does.
    """
    tree = parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and "AssertionError" not in text:
            node.msg = None
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value = ast.Constant("")
    return ast.unparse(tree) + "\n"


def changed_text(text: str, twins: Sequence[Twin]) -> str:
    """Return a module with some tests replaced by twins, which must not overlap."""
    text = plain_lines(text)
    for twin in sorted(twins, key=lambda twin: twin.start, reverse=True):
        text = text[: twin.start] + twin.text + text[twin.end :]
    return text


def plain_lines(text: str) -> str:
    """Return text with the line ends that the parser counts and without a byte order mark; positions of twins refer to it."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def job(
    task: Task, files: Mapping[str, bytes], twins: Sequence[Twin] = (), keys: Keys = None, *, explain: bool = False
) -> TestJob:
    """Return one run of a task's hidden tests on `files`, with some tests replaced by twins.

    Args:
        keys: the tests to run; None runs all.
        explain: keep the messages of assertions, and report how tests failed.
    """
    written = normal if explain else silent
    modules = {path: text for path, text in task.tests.items() if path.endswith(".py")}
    sealed = conftests(task) | modules
    for path, text in sealed.items():
        sealed[path] = written(changed_text(text, [twin for twin in twins if twin.path == path]))
    data = {path: text.encode() for path, text in task.tests.items() if path not in modules}
    plain = {path: content for path, content in files.items() if path not in sealed}
    return TestJob(
        files=plain | data,
        hidden=sealed,
        tests=tuple(sorted(filter(is_test_module, modules))) if keys is None else modules_of(keys),
        keys=keys,
        packages=packages_of(task),
        ini=task.metadata.get("pytest.ini", ""),
        explain=explain,
    )


Runs = tuple[tuple[Twin, ...], ...]  # The twins that replace their tests in each run of a grade.


def draw(plan: GradePlan, rng: Random, runs: int) -> Runs:
    """Draw one twin for each test that has some, and the runs that execute it: at least one, and not all.

    Without twins, one run is enough. Raises ValueError for fewer than two runs.
    """
    if runs < 2:
        raise ValueError(f"a grade takes at least two runs, so that a test and its twin both run, not {runs}")
    if not plan.twins:
        return ((),)
    pool = list(plan.twins)
    rng.shuffle(pool)
    twin_sets: list[list[Twin]] = [[] for _ in range(runs)]
    replaced: set[str] = set()
    for twin in pool:
        if replaced.isdisjoint(twin.keys):
            replaced.update(twin.keys)
            bits = rng.randrange(1, (1 << runs) - 1)
            for number in range(runs):
                twin_sets[number] += [twin] * (bits >> number & 1)
    return tuple(map(tuple, twin_sets))
