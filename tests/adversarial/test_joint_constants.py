"""Code under test that reads the constants of a whole module of hidden tests and concludes which are true. It must not pass.

Each attack answers by a rule that it fits to all expectations that its process holds: most agree, and the twins are the ones that
do not. `joint` grades without the tests that run alone, to show that the attack works.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from composer_nb.harness.grading.grade import grade_functions
from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.recorded import guard
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.functions import parse_test_files, passes, request_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.joint import CODEC, FITTED, JOINT, LOOKED_UP, PAIRS, ROUND_TRIPS, joint_task

GRADES = 8
IN_A_CLASS = "class TestScale:\n    def setup_method(self):\n        self.scale = Scale()\n"
IN_A_CLASS += "".join(f"    def test_{x}(self):\n        assert self.scale.up({x}) == {y}\n" for x, y in PAIRS.items())


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with BwrapBackend() as made:
        yield made


@pytest.fixture(scope="module", params=["rows", "a class"])
def judged(request: pytest.FixtureRequest, backend: Backend) -> tuple[Task, GradePlan]:
    task = JOINT.get(request.param) or joint_task("a class", IN_A_CLASS)
    found = validate_task(task, backend, repeats=1)
    assert found.plan is not None and found.valid, found.problems
    assert guard(found.plan, found.fail_to_pass).by == "twins", found.guard
    return task, found.plan


def test_a_rule_fitted_to_all_constants_does_not_pass(judged: tuple[Task, GradePlan], backend: Backend) -> None:
    task, plan = judged
    files = {"scale.py": FITTED.encode()}
    joint = replace(plan, twins=tuple(replace(twin, alone=False) for twin in plan.twins))
    alone = [grade_pytest(task, files, backend, plan, rng=random.Random(seed)) for seed in range(GRADES)]
    without = [grade_pytest(task, files, backend, joint, rng=random.Random(seed)) for seed in range(3)]
    assert any(grade.passed and not grade.flags for grade in without), (
        "the attack works, but for the tests that run alone"
    )
    assert sum(grade.passed for grade in alone) <= GRADES // 4, "one in eight passes by chance"


@pytest.mark.parametrize("name", list(ROUND_TRIPS))
def test_answers_are_not_looked_up_among_the_arguments_of_other_calls(name: str) -> None:
    task = ROUND_TRIPS[name]
    with SandboxExecutor() as calls:
        [outcomes] = calls.run([request_tests({"codec.py": LOOKED_UP}, tests := parse_test_files(task.tests))])
        assert all(map(passes, tests, outcomes)), "the attack works in one process"
        assert not any(grade_functions(task, {"codec.py": LOOKED_UP}, calls).tests.values())
        assert grade_functions(task, {"codec.py": CODEC}, calls).passed


def test_a_function_that_runs_the_agents_code_unseen_shares_no_process() -> None:
    task = ROUND_TRIPS["round-trip"]
    loads = "import pkgutil\n{0} = pkgutil.resolve_name('co' + 'dec:{0}')\n"
    files = task.files | {"one.py": loads.format("enc"), "two.py": loads.format("dec")}
    tests = task.tests["test_codec.py"].replace(
        "from codec import enc, dec", "from one import enc\nfrom two import dec"
    )
    task = task.model_copy(update={"files": files, "tests": {"test_codec.py": tests}})
    with SandboxExecutor() as calls:
        assert not any(grade_functions(task, {**files, "codec.py": LOOKED_UP}, calls).tests.values())
        assert grade_functions(task, {**files, "codec.py": CODEC}, calls).passed
