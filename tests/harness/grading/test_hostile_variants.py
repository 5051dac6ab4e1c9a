"""Random variants of the hostile patches never score. A thousand are in `pytest -m slow`, a few here."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.labs.attacks.patch_target import MODULE, TARGET
from tests.adversarial.patch_variants import PLACES, variant

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


@pytest.mark.slow
def test_many_variants_would_score_without_twins(backend: Backend, plans: dict[str, GradePlan]) -> None:
    plain = GradePlan(digest="", tests=plans[TARGET.id].tests)
    grades = [grade_pytest(TARGET, variant(seed).workspace, backend, plain, timeout_s=TIMEOUT_S) for seed in range(40)]
    assert sum(grade.passed for grade in grades) >= 10


def test_variants_vary() -> None:
    found = [variant(seed) for seed in range(300)]
    assert len({str(sorted(patch.files.items(), key=str)) for patch in found}) > 290
    assert all(any(f" at {place}" in patch.title for patch in found) for place in PLACES)
    assert sum(", " in patch.title for patch in found) > 150
    assert variant(5) == variant(5)
    for patch in found:
        for path, data in patch.files.items():
            if path == MODULE or path.startswith("util/"):
                assert data is not None
                compile(data.decode(), path, "exec")
