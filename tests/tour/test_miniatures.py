"""Miniature repositories: right answers pass, bugs fail where an agent can see it, and nothing held out is shown."""

from __future__ import annotations

import ast
from random import Random

import pytest

from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.functions import parse_test_files, passes, request_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.tour.miniatures import ENUMERABLE, HIDDEN, OTHERS, VISIBLE, make_miniatures
from composer_nb.tour.programs import FAMILIES, HELDOUT_SHARE, Program
from composer_nb.tour.repairs import bugs, neighbours

COUNT = 24


@pytest.fixture(scope="module", params=[False, True])
def made(request: pytest.FixtureRequest, sandboxes: SandboxExecutor) -> tuple[bool, list[Task]]:
    executor = CachedExecutor(sandboxes)
    return request.param, list(make_miniatures("seed", COUNT, heldout=request.param, executor=executor))


def functions_of(task: Task) -> dict[str, str]:
    """Every function of a repository, as `f`."""
    found = {}
    for path in task.source_scope:
        for node in ast.parse(task.solution.get(path, task.files[path])).body:
            assert isinstance(node, ast.FunctionDef)
            name, node.name = node.name, "f"
            found[name] = ast.unparse(node)
    return found


def test_the_same_seed_gives_the_same_tasks(made: tuple[bool, list[Task]], sandboxes: SandboxExecutor) -> None:
    heldout, tasks = made
    again = make_miniatures("seed", 10, heldout=heldout, executor=CachedExecutor(sandboxes))
    assert list(again) == tasks[:10]
    assert len({task.id for task in tasks}) == COUNT


def test_the_right_answer_passes_and_the_first_failure_names_the_function(
    made: tuple[bool, list[Task]], sandboxes: SandboxExecutor
) -> None:
    for task in made[1]:
        seen, graded = parse_test_files(task.visible_tests), parse_test_files(task.tests)
        others = len(functions_of(task)) - 1
        assert len(seen) == VISIBLE + OTHERS * others and len(graded) == HIDDEN + OTHERS * others
        right = task.files | task.solution
        requests = [request_tests(files, tests) for tests in (seen, graded) for files in (task.files, right)]
        results = [
            [passes(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
            for tests, outcomes in zip((seen, seen, graded, graded), sandboxes.run(requests), strict=True)
        ]
        bug_seen, right_seen, bug_graded, right_graded = results
        assert all(right_seen) and all(right_graded), task.id
        assert not all(bug_graded), task.id
        assert seen[bug_seen.index(False)].function == task.metadata["function"]
        assert all(
            test.function == task.metadata["function"] for test, ok in zip(seen, bug_seen, strict=True) if not ok
        )


def test_every_function_is_on_the_side_of_the_split_that_its_task_is_on(made: tuple[bool, list[Task]]) -> None:
    for task in made[1]:
        for source in functions_of(task).values():
            program = Program(family="", source=source, spec="", inputs=())
            assert program.heldout == made[0] == (int(program.structure[:2], 16) < HELDOUT_SHARE * 256)


def test_instructions_and_families(sandboxes: SandboxExecutor) -> None:
    executor = CachedExecutor(sandboxes)
    told = list(make_miniatures("told", 20, heldout=False, executor=executor, told=1.0))
    assert all(task.instruction.startswith(f"fix {task.metadata['function']}: ") for task in told)
    untold = list(make_miniatures("not", 20, heldout=False, executor=executor, told=0.0, families=frozenset({"loop"})))
    assert {task.instruction for task in untold} == {"fix the tests"}
    assert {task.metadata["family"] for task in untold} == {"loop"} < set(FAMILIES)
    assert {len(task.source_scope) for task in untold} == {1, 2, 3}


def test_a_bug_that_can_be_enumerated_is_undone_by_a_neighbour(made: tuple[bool, list[Task]]) -> None:
    for task in made[1]:
        right = functions_of(task)[task.metadata["function"]]
        for seed in range(4):
            planted = bugs(right, Random(seed), ENUMERABLE)
            if planted is not None:
                assert right in [text for _, text in neighbours(planted[1], ENUMERABLE)]


def test_neighbours_differ_from_the_source_in_one_line_and_from_each_other() -> None:
    source = "def f(xs, k):\n    t = 0\n    for x in xs:\n        if x > k:\n            t += x * 2\n    return t"
    found = [text for _, text in neighbours(source, ENUMERABLE)]
    assert len(found) == len(set(found)) == 5 + 4 + 3
    assert {kind for kind, _ in neighbours(source, ("compare",))} == {"compare"}
    for text in found:
        assert sum(a != b for a, b in zip(text.split("\n"), source.split("\n"), strict=True)) == 1
