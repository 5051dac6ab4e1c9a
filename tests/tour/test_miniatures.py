"""Kinds of miniature repositories: the right answer is worth 1, none and a cheat nothing, and an expert solves all."""

import ast
from random import Random

import pytest

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.syntax import lints
from composer_nb.harness.tasks.functions import parse_test_files, parse_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.tour.expert import TRIES, ScriptedPolicy, searcher
from composer_nb.tour.miniatures import MUTANTS, OTHERS, VISIBLE, Kind, make_miniatures
from composer_nb.tour.programs import FAMILIES, Program
from composer_nb.tour.repairs import buggy, fingerprints

KINDS: tuple[Kind, ...] = ("bug", "feature", "tests", "lint", "rename")
COUNT = 16


@pytest.fixture(scope="module")
def executor(sandboxes: SandboxExecutor) -> CachedExecutor:
    return CachedExecutor(sandboxes)


@pytest.fixture(scope="module", params=KINDS)
def tasks(request: pytest.FixtureRequest, executor: CachedExecutor) -> list[Task]:
    return list(make_miniatures("kinds", COUNT, heldout=True, executor=executor, kinds=(request.param,)))


def functions_of(task: Task) -> dict[str, str]:
    """Return every function of a repository, renamed to `f`."""
    functions = {}
    for path in task.source_scope:
        body = ast.parse(task.solution.get(path, task.files[path])).body
        for node in body[1:-1] if isinstance(body[0], ast.ImportFrom) else body:  # without one that calls another
            assert isinstance(node, ast.FunctionDef)
            name, node.name = node.name, "f"
            functions[name] = ast.unparse(node)
    return functions


def emptied(task: Task) -> dict[str, str]:
    return task.files | dict.fromkeys(task.source_scope, "")


def without_tests(task: Task) -> dict[str, str]:
    return {path: text for path, text in task.files.items() if not path.startswith("test_")}


def with_true_tests(task: Task) -> dict[str, str]:
    """Return the files with tests that any code passes."""
    easy = "from builtins import abs\n\n\ndef test_0():\n    assert abs(1) == 1\n"
    return task.files | dict.fromkeys([path for path in task.files if path.startswith("test_")], easy)


def test_only_the_right_answer_is_worth_something(tasks: list[Task], executor: CachedExecutor) -> None:
    for task in tasks:
        gold = task.files | task.solution
        assert grade(task, gold, executor).passed, task.id
        for cheat in (dict, emptied, without_tests, with_true_tests):
            files = cheat(task.files) if cheat is dict else cheat(task)
            result = grade(task, files, executor)
            assert result.status == "graded" and not result.passed, (task.id, cheat)
        assert grade(task, gold | {"notes.txt": "x"}, executor).passed == (task.strictness != "lints")


def test_kinds_that_are_made_together_are_as_sound_as_alone(executor: CachedExecutor) -> None:
    """They share sandboxes: one that cannot be imported must not make its neighbours look broken."""
    for task in make_miniatures("heldout-000", 80, heldout=False, executor=executor, kinds=("bug", "feature", "lint")):
        for path in task.source_scope:
            ast.parse(task.files[path])
        assert not grade(task, task.files, executor).passed, task.id


def test_they_are_told_by_kind_and_the_same_seed_gives_the_same(tasks: list[Task], executor: CachedExecutor) -> None:
    kind: Kind = tasks[0].metadata.get("kind", "bug")  # type: ignore[assignment]
    same_tasks = make_miniatures("kinds", COUNT, heldout=True, executor=executor, kinds=(kind,))
    assert list(same_tasks) == tasks and len({task.id for task in tasks}) == COUNT
    beginning = {
        "bug": "fix ",
        "feature": "add {}: ",
        "tests": "test {}: ",
        "lint": "fix the lints",
        "rename": "rename {} -> ",
    }[kind]
    for task in tasks:
        assert task.instruction.startswith(beginning.format(task.metadata["function"]))
        assert buggy(task).startswith("def f(") and len(fingerprints([task])) >= 2
        if kind == "lint":
            [path] = task.solution
            assert len(lints(task.files[path])) == 1 and not lints(task.solution[path])
        if kind == "tests":
            assert 1 <= len(task.mutants) <= MUTANTS
            assert "mutants" not in "".join(task.files.values())
        else:
            for source in functions_of(task).values():
                assert Program(family="", source=source, spec="", inputs=()).heldout
            assert len(parse_test_files(task.visible_tests)) == VISIBLE + OTHERS * (len(functions_of(task)) - 1)


def test_the_expert_solves_them_in_the_limits_of_small_models(
    tasks: list[Task], renderer: CompactRenderer, executor: CachedExecutor
) -> None:
    agent = Agent(renderer, limits=Limits(turns=16, turn_tokens=200, tokens=4000))
    policy = ScriptedPolicy(renderer, lambda number: searcher(tasks[number], Random(number)))
    driven = drive((agent.attempt(t, n) for n, t in enumerate(tasks)), policy, executor)
    attempts: list[Attempt] = [attempt for _, attempt in driven]
    assert all(attempt.grade.passed and attempt.rollout.stop == "finished" for attempt in attempts)
    most = 6 if "kind" in tasks[0].metadata else 4 + TRIES
    assert all(attempt.rollout.invalid_calls == 0 and attempt.rollout.messages <= most for attempt in attempts)


def test_instructions_and_families(sandboxes: SandboxExecutor) -> None:
    executor = CachedExecutor(sandboxes)
    described = list(make_miniatures("told", 20, heldout=False, executor=executor, described=1.0))
    assert all(task.instruction.startswith(f"fix {task.metadata['function']}: ") for task in described)
    untold = list(
        make_miniatures("not", 20, heldout=False, executor=executor, described=0.0, families=frozenset({"loop"}))
    )
    assert {task.instruction for task in untold} == {"fix the tests"}
    assert {task.metadata["family"] for task in untold} == {"loop"} < set(FAMILIES)
    assert {len(task.source_scope) for task in untold} == {1, 2, 3}


# Tests that an agent writes.


@pytest.fixture(scope="module")
def weak(executor: CachedExecutor) -> Task:
    return next(make_miniatures("kinds", 1, heldout=True, executor=executor, kinds=("tests",)))


def test_tests_must_call_the_function_and_keep_what_was_there(weak: Task, executor: CachedExecutor) -> None:
    """Code is told apart by what it does: `getlines` would tell it by its text."""
    [(path, right)] = weak.solution.items()
    [name, module] = [weak.metadata["function"], parse_tests(path, weak.files[path])[0].module]
    spy = f"from linecache import getlines\n{weak.files[path]}\n\ndef test_9():\n    assert getlines({module + '.py'!r}) == []\n"
    renamed_test = right.replace("def test_0", "def test_x", 1)
    assert grade(weak, weak.files | {path: renamed_test}, executor).passed, "names are free"
    first = f"def test_0():{right.partition('def test_0():')[2].partition(chr(10) * 3)[0]}"
    fewer, unimported = right.replace(first, "").rstrip() + "\n", right.replace(f"import {name}", "import f")
    for text in (spy, fewer, unimported, right + "print(1)\n"):
        assert text != right
        result = grade(weak, weak.files | {path: text}, executor)
        assert not result.passed and "passes as it is" in result.tests


@pytest.mark.parametrize("mutants", ["{}", "[1]", '[{"../x": "y"}]', "no"])
def test_mutants_of_a_foreign_task_are_checked(weak: Task, mutants: str) -> None:
    with pytest.raises(ValueError, match=r"metadata\.mutants"):
        Task.model_validate(weak.model_dump() | {"metadata": weak.metadata | {"mutants": mutants}})


def test_mutants_need_tests_to_write(weak: Task) -> None:
    scope = tuple(path for path in weak.files if not path.startswith("test"))[:1]
    with pytest.raises(ValueError, match=r"one test file as source_scope|only imports and functions"):
        Task.model_validate(weak.model_dump() | {"source_scope": scope, "solution": {}})
