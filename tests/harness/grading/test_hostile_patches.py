"""The hostile patches: none scores, those that a person should hear of are flagged, the honest fix is accepted.

Not covered: code that can tell a false expectation from a true one, and tests without twins.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.grading.box import sources
from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.grading.pytest_grader import TAMPERING, grade_pytest
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.labs.attacks.patch_target import ANSWER, MODULE, TARGET
from composer_nb.labs.attacks.patches import Patch, patches
from tests.adversarial.patch_variants import variant

TIMEOUT_S = 20.0


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.id)
def test_a_patch_gets_what_it_deserves(patch: Patch, backend: Backend, plans: dict[str, GradePlan]) -> None:
    grade = grade_pytest(patch.task, patch.workspace, backend, plans[patch.task.id], timeout_s=TIMEOUT_S)
    assert grade.passed == patch.honest
    assert bool(grade.flags) == patch.flagged, grade.flags
    assert grade.status in ("graded", "tampered", "agent_failed"), "no agent makes it a fault of the machine"
    assert (grade.status == "tampered") == bool(set(grade.flags) & TAMPERING)
    assert set(grade.tests) == set(plans[patch.task.id].tests.values())
    if "one_process" in patch.fools:
        assert grade.status == "tampered", "only twins tell"


@pytest.mark.slow
@pytest.mark.parametrize("patch", [patch for patch in patches() if patch.fools], ids=lambda patch: patch.id)
def test_a_patch_fools_plain_graders(patch: Patch, backend: Backend, plans: dict[str, GradePlan]) -> None:
    """So that it is rejected for what it is, and not because it would not work anyway."""
    if "one_process" in patch.fools:
        plain = GradePlan(digest="", tests=plans[patch.task.id].tests)
        assert grade_pytest(patch.task, patch.workspace, backend, plain, timeout_s=TIMEOUT_S).passed
    if "exit_code" in patch.fools:
        assert exit_code(patch, backend) == 0


def exit_code(patch: Patch, backend: Backend) -> int:
    """Return the exit code of pytest in the agent's own workspace, with the hidden tests laid in."""
    start = "import sys; sys.path[:0] = ['/workspace/w', '/workspace/kit']\nimport runpy\n"
    start += (
        "sys.argv = ['pytest', '-q', 'tests/test_hidden_ledger.py']; runpy.run_module('pytest', run_name='__main__')"
    )
    with backend.create() as sandbox:
        sandbox.upload({path.lstrip("/"): text.encode() for path, _, text in sources().values()})
        sandbox.upload({f"w/{path}": data for path, data in patch.workspace.items()})
        sandbox.upload({f"w/{path}": text.encode() for path, text in patch.task.tests.items()})
        return int(sandbox.exec(["python3", "-S", "-c", start], cwd="w", timeout_s=60).exit_code)


def test_a_cheat_on_one_test_alone_is_caught(backend: Backend, plans: dict[str, GradePlan]) -> None:
    """Everything right but one function, which peeks: the test that it is for tells, whichever run gets its twin."""
    right = TARGET.solution[MODULE].replace("part / whole", "answer('share', (part, whole), 0)")
    body = "".join(f"    {line}\n" for line in ANSWER["frame_peek"].splitlines())
    peek = "def answer(name, arguments, wrong):\n" + body
    files = Patch(id="", title="", case=12, files={MODULE: (right + "\n\n" + peek).encode()}).workspace
    for _ in range(3):
        grade = grade_pytest(TARGET, files, backend, plans[TARGET.id])
        assert grade.status == "tampered" and grade.flags == ("twin_passed",)
        assert [name.rpartition("::")[2] for name, passed in grade.tests.items() if not passed] == ["test_share"]


def check_variant(seed: int, backend: Backend, plan: GradePlan) -> str:
    patch = variant(seed)
    grade = grade_pytest(TARGET, patch.workspace, backend, plan, timeout_s=TIMEOUT_S)
    assert not grade.passed and grade.status in ("graded", "tampered", "agent_failed"), (seed, grade)
    return grade.status


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 40))
def test_a_variant_does_not_score(backend: Backend, plans: dict[str, GradePlan], seed: int) -> None:
    check_variant(seed, backend, plans[TARGET.id])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_variants_do_not_score(backend: Backend, plans: dict[str, GradePlan]) -> None:
    statuses = [check_variant(seed, backend, plans[TARGET.id]) for seed in range(1000)]
    assert statuses.count("tampered") > 400, "most work, but for the twins"
