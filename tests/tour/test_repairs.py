"""Repair tasks: one changed line, gold right and bug wrong in fresh sandboxes, the same again from the same seed."""

import ast
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor
from composer_nb.harness.tasks.functions import parse_test_files, passes, request_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.tour import repairs
from composer_nb.tour.programs import Program, draw_program

KINDS = {"compare", "operator", "swap", "augmented", "constant", "aggregate", "name"}
COUNT = 48


class Made:
    """Tasks of one call of `make_tasks`, and its executor."""

    def __init__(self, sandboxes: Executor, seed: str, count: int, heldout: bool) -> None:
        self.executor = CachedExecutor(sandboxes)
        self.tasks = list(repairs.make_tasks(seed, count, heldout=heldout, executor=self.executor))


@pytest.fixture(scope="module")
def training(sandboxes: SandboxExecutor) -> Made:
    return Made(sandboxes, "a seed", COUNT, False)


@pytest.fixture(scope="module")
def heldout(sandboxes: SandboxExecutor) -> Made:
    return Made(sandboxes, "a seed", 24, True)


def test_a_bug_changes_exactly_one_line() -> None:
    rng, kinds = Random("bugs"), Counter()
    for _ in range(600):
        source = draw_program(rng).source
        planted = repairs.bugs(source, rng)
        if planted is None:
            continue
        kind, text = planted
        kinds[kind] += 1
        before, after = source.split("\n"), text.split("\n")
        assert len(before) == len(after)
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
        assert ast.unparse(ast.parse(text)) == text
    assert set(kinds) == KINDS and sum(kinds.values()) > 400


def requests_of(task: Task) -> list[CallRequest]:
    """Return requests for the bug and the solution on the visible tests, and for both on the hidden ones."""
    return [
        request_tests(files, parse_test_files(tests))
        for tests in (task.visible_tests, task.tests)
        for files in (task.files, task.files | task.solution)
    ]


def test_fresh_sandboxes_pass_gold_and_fail_bugs(training: Made, heldout: Made, sandboxes: SandboxExecutor) -> None:
    for generated in (training, heldout):
        requests = [request for task in generated.tasks for request in requests_of(task)]
        fresh = sandboxes.run(requests)
        assert generated.executor.run(requests) == fresh
        for index, task in enumerate(generated.tasks):
            groups = [tests for tests in (task.visible_tests, task.tests) for _ in range(2)]
            bug_visible, gold_visible, bug_hidden, gold_hidden = (
                [passes(test, outcome) for test, outcome in zip(parse_test_files(tests), outcomes, strict=True)]
                for tests, outcomes in zip(groups, fresh[4 * index : 4 * index + 4], strict=True)
            )
            assert all(gold_visible) and all(gold_hidden), task.id
            assert not bug_visible[0] and not all(bug_hidden), task.id


def test_the_same_seed_gives_the_same_tasks(training: Made, sandboxes: SandboxExecutor) -> None:
    assert Made(sandboxes, "a seed", 30, False).tasks == training.tasks[:30]


def test_held_out_structures_are_in_no_other_task(training: Made, heldout: Made) -> None:
    seen, new = ({task.metadata["structure"] for task in made.tasks} for made in (training, heldout))
    assert not seen & new
    assert not repairs.fingerprints(training.tasks) & repairs.fingerprints(heldout.tasks)
    assert not repairs.buggy_prints(training.tasks) & repairs.fingerprints(heldout.tasks)


PROGRAM = Program(family="fn2", source="def f(x):\n    return x + 1", spec="x plus 1", inputs=("any",))


@settings(max_examples=60)
@given(fails=st.lists(st.booleans(), min_size=12, max_size=12))
def test_tests_are_dealt_so_that_the_bug_shows_in_both(fails: list[bool]) -> None:
    inputs = tuple((n,) for n in range(len(fails)))
    candidate = repairs.BuggyProgram(
        program=PROGRAM, kind="constant", buggy="def f(x):\n    return x", inputs=inputs, expected=tuple(range(1, 13))
    )
    wrong = CallOutcome(status="returned", text="0")
    outcomes = tuple(wrong if failed else right for failed, right in zip(fails, candidate.right, strict=True))
    task = repairs.make_task(candidate, outcomes)
    if sum(fails) < 2:
        assert task is None
        return
    assert task is not None
    dealt = [parse_test_files(tests) for tests in (task.visible_tests, task.tests)]
    visible, hidden = ([int(test.arguments[1:-2]) for test in tests] for tests in dealt)
    assert sorted(visible + hidden) == list(range(12)) and len(visible) == repairs.VISIBLE
    assert fails[visible[0]] and any(fails[n] for n in hidden)
