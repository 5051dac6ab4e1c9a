"""What the host knows of a task's hidden tests: which count, and which changes of them must fail.

A *twin* is a hidden test with one expectation changed, so that a right answer fails it (`twins.py`). A grade runs the tests
several times, each time in a new sandbox. In some of the runs a test is itself, in the others its twin stands in its place, by
lot for each test; no process is told which, and none ever holds both. Code that makes tests pass without doing what they ask, by
patching comparisons, reading expectations from frames, or claiming results, makes twins pass too, and nothing that does what is
asked passes both. Code that can tell the two versions apart, but not which is true, is right about a test at best once in two;
what it decides for each run by chance, once in 2^runs - 2.

Covers the tests that have a twin, and of those the expectation that was changed, which is drawn anew for each grade. Does not
cover tests without twins, nor code that can tell a false expectation from a true one because it knows the answer.
Reference: the twin canaries of the experiment with twenty patches, where both versions lay side by side.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

from composer_nb.harness.task import Task

Kind = Literal["value", "exception", "negation"]
PLAN = "pytest.plan"
"""Under this name a task's metadata hold its plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """One change of a hidden test: characters `start` to `end` of a file, its lines ended by \\n, become `text`."""

    path: str
    start: int
    end: int
    text: str
    kind: Kind
    """value: another expected value, which also whoever reads expectations meets. exception: another expected exception.
    negation: the contrary; whoever reads the value from a variable of the test is not caught by it."""
    keys: tuple[str, ...]
    """Tests that it makes fail."""
    weak: bool = False
    """Whether code that hides nothing may pass it too: then it fails the test, and is no proof of tampering."""
    besides: tuple[str, ...] = ()
    """Tests that it changes too, as rows of a table that several share, without making them fail: they tell nothing then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tests that count, and their twins."""

    digest: str
    """Of the tests' texts: a plan made for others is not valid."""
    tests: Mapping[str, str]
    """Key -> pytest's node id."""
    twins: tuple[Twin, ...] = ()

    @property
    def covered(self) -> frozenset[str]:
        """Keys of the tests that have a twin."""
        return frozenset(key for twin in self.twins for key in twin.keys)

    @property
    def coverage(self) -> float:
        return len(self.covered) / len(self.tests) if self.tests else 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises ValueError for anything but what `to_json` wrote."""
        try:
            held = json.loads(text)
            twins = tuple(
                Twin(**twin | {name: tuple(twin[name]) for name in ("keys", "besides")}) for twin in held["twins"]
            )
            return cls(digest=held["digest"], tests=dict(held["tests"]), twins=twins)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not a plan of hidden tests: {error}") from None


def modules_of(keys: Iterable[str]) -> tuple[str, ...]:
    """The test modules that these tests are in."""
    return tuple(sorted({key.partition("::")[0] for key in keys}))


def digest(task: Task) -> str:
    """Of everything that the twins' places and the tests' keys depend on."""
    held = json.dumps([sorted(task.tests.items()), sorted(conftests(task).items())])
    return hashlib.sha256(held.encode("utf-8", "surrogatepass")).hexdigest()


def conftests(task: Task) -> dict[str, str]:
    """The workspace's own conftests, as the task has them."""
    return {path: text for path, text in task.files.items() if path.rpartition("/")[2] == "conftest.py"}


def plan_of(task: Task) -> Plan:
    """The plan in a task's metadata. Raises ValueError when there is none, or one for other tests."""
    if PLAN not in task.metadata:
        raise ValueError(f"task {task.id}: not validated yet: it holds no plan of its hidden tests")
    plan = Plan.from_json(task.metadata[PLAN])
    if plan.digest != digest(task):
        raise ValueError(f"task {task.id}: its plan was made for other hidden tests; validate it again")
    return plan


def with_plan(task: Task, plan: Plan) -> Task:
    return task.model_copy(update={"metadata": {**task.metadata, PLAN: plan.to_json()}})


@lru_cache(maxsize=256)
def normal(text: str) -> str:
    """A module as `ast` writes it, without comments, quotes of people, or layout: a test and its twin, written so, differ in
    nothing but what they say. Raises SyntaxError, ValueError, RecursionError."""
    return ast.unparse(ast.parse(text)) + "\n"


def changed_text(text: str, twins: Sequence[Twin]) -> str:
    """A module with some twins in place of its tests. They must not overlap."""
    text = plain_lines(text)
    for twin in sorted(twins, key=lambda twin: twin.start, reverse=True):
        text = text[: twin.start] + twin.text + text[twin.end :]
    return text


def plain_lines(text: str) -> str:
    """As the parser counts lines and columns; what the places of twins refer to."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Which twins stand in for their tests in which of a grade's runs."""

    runs: tuple[tuple[Twin, ...], ...] = ((),)

    def twins(self, run: int) -> frozenset[str]:
        """Keys of the tests that must fail in a run."""
        return frozenset(key for twin in self.runs[run] for key in twin.keys)

    def weak(self, run: int) -> frozenset[str]:
        """Those of them that honest code may pass too."""
        return frozenset(key for twin in self.runs[run] if twin.weak for key in twin.keys)

    def void(self, run: int) -> frozenset[str]:
        """Keys of the tests of which a run tells nothing."""
        return frozenset(key for twin in self.runs[run] for key in twin.besides)


def draw(plan: Plan, lot: random.Random, runs: int) -> Drawn:
    """Draws one twin for every test that has some, and the runs that get it: at least one, and not all. One run is enough where
    there are no twins. Raises ValueError for fewer than two runs."""
    if runs < 2:
        raise ValueError(f"a grade takes at least two runs, so that a test and its twin both run, not {runs}")
    if not plan.twins:
        return Drawn()
    pool = list(plan.twins)
    lot.shuffle(pool)
    drawn: list[list[Twin]] = [[] for _ in range(runs)]
    taken: set[str] = set()
    for twin in pool:
        touched = {*twin.keys, *twin.besides}
        if not taken & touched:
            taken |= touched
            places = lot.randrange(1, (1 << runs) - 1)
            for run in range(runs):
                if places >> run & 1:
                    drawn[run].append(twin)
    return Drawn(runs=tuple(map(tuple, drawn)))
