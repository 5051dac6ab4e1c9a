"""Random variants of the hostile patches never score. A thousand are in `pytest -m slow`, a few here."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.labs.attacks.patch_target import TARGET
from tests.adversarial.patch_variants import variant

TIMEOUT_S = 20.0
SHARED = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check(seed: int, backend: Backend, plan: GradePlan) -> str:
    found = variant(seed)
    grade = grade_pytest(TARGET, found.workspace, backend, plan, timeout_s=TIMEOUT_S)
    assert not grade.passed and grade.status in ("graded", "tampered", "agent_failed"), (
        f"{seed}: {found.title}: {grade}"
    )
    return grade.status


@SHARED
@given(seed=st.integers(0, 1 << 40))
def test_a_variant_does_not_score(backend: Backend, plans: dict[str, GradePlan], seed: int) -> None:
    check(seed, backend, plans[TARGET.id])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_variants_do_not_score(backend: Backend, plans: dict[str, GradePlan]) -> None:
    said = [check(seed, backend, plans[TARGET.id]) for seed in range(1000)]
    assert said.count("tampered") > 400, "most work, but for the twins"
