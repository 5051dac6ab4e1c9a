"""Plans on disk, the lot by which twins are drawn, and the verdict over all runs."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading.box import JobResult, TestResult
from composer_nb.harness.grading.plan import GradePlan, Twin, draw
from composer_nb.harness.grading.pytest_grader import judge

KEYS = [f"test_a.py::test_{n}#0" for n in range(6)]


PASSED, FAILED = TestResult(outcome="passed", id="id"), TestResult(outcome="failed", id="id")


def results_of(*names: str, passed: bool = True) -> dict[str, TestResult]:
    """Return results of tests whose keys are their ids."""
    return {name: replace(PASSED if passed else FAILED, id=name) for name in names}


def twin(*keys: str, text: str = "x") -> Twin:
    return Twin(path="test_a.py", start=1, end=2, text=text, keys=keys)


OF_SOME = st.sets(st.sampled_from(KEYS), min_size=1, max_size=3).map(lambda keys: tuple(sorted(keys)))
TWIN = st.builds(Twin, path=st.text(), start=st.integers(0, 99), end=st.integers(0, 99), text=st.text(), keys=OF_SOME)
TWINS = st.lists(TWIN, max_size=8).map(tuple)


@pytest.mark.parametrize("contents", [{"kind": "negation"}, {"weak": True}, {"telling": True}, {"besides": ["b"]}])
def test_plans_of_older_versions_lose_twins_that_contradict_nothing(contents: dict[str, object]) -> None:
    strong = {"path": "test_a.py", "start": 1, "end": 2, "text": "x", "kind": "value", "keys": [KEYS[0]]}
    plan = GradePlan.from_json(json.dumps({"digest": "d", "tests": {}, "twins": [strong, strong | contents]}))
    assert plan.twins == (twin(KEYS[0]),)


@given(TWINS, st.integers(), st.integers(2, 5))
def test_what_is_drawn(twins: tuple[Twin, ...], seed: int, runs: int) -> None:
    plan = GradePlan(digest="", tests={key: key for key in KEYS}, twins=twins)
    twin_runs = draw(plan, random.Random(seed), runs)
    assert len(twin_runs) == (runs if twins else 1)
    drawn_twins = {twin for run in twin_runs for twin in run}
    places = {twin: [number for number, run in enumerate(twin_runs) if twin in run] for twin in drawn_twins}
    assert all(0 < len(numbers) < runs for numbers in places.values())
    assert all(len(set(run)) == len(run) for run in twin_runs)
    counts = Counter(key for candidate in drawn_twins for key in candidate.keys)
    assert set(counts.values()) <= {1}, "no test has two twins"
    never_drawn = [candidate for candidate in twins if not set(candidate.keys) & set(counts)]
    assert never_drawn == [], "whatever could be drawn was drawn"


def test_the_lot_is_fair() -> None:
    """Each twin of a test comes up, in each set of runs, and two tests' places do not depend on each other."""
    twins = tuple(twin(key, text=text) for key in KEYS[:3] for text in "ab")
    plan = GradePlan(digest="", tests={key: key for key in KEYS}, twins=twins)
    lot, frequencies = random.Random(1), Counter[tuple[str, str, tuple[int, ...]]]()
    pairs = Counter[tuple[bool, bool]]()
    for _ in range(3600):
        twin_runs = draw(plan, lot, 3)
        for candidate in {twin for run in twin_runs for twin in run}:
            frequencies[candidate.keys[0], candidate.text, tuple(n for n in range(3) if candidate in twin_runs[n])] += 1
        first, second = (any(key in candidate.keys for candidate in twin_runs[0]) for key in KEYS[:2])
        pairs[first, second] += 1
    assert len(frequencies) == 3 * 2 * 6 and all(230 < count < 370 for count in frequencies.values())
    assert len(pairs) == 4 and all(800 < count < 1000 for count in pairs.values())


@given(st.integers(0, 1 << 30), st.integers(1, 3))
def test_whoever_cheats_in_some_runs_only_must_guess_them_all(seed: int, tests: int) -> None:
    """Of the sets of runs in which code that cannot tell twins may cheat, one in six is right for each test."""
    twins = tuple(twin(key) for key in KEYS[:tests])
    plan = GradePlan(digest="", tests={key: key for key in KEYS[:tests]}, twins=twins)
    twin_runs = draw(plan, random.Random(seed), 3)
    scored = 0
    for cheats in range(1 << 3):
        outcome = [results_of(*plan.tests, passed=bool(cheats >> run & 1)) for run in range(3)]
        passed, flags = judge(plan, twin_runs, [JobResult(results=results) for results in outcome])
        scored += all(passed.values())
        assert not all(passed.values()) or not flags
    assert scored <= 1
    assert "twin_passed" in judge(plan, twin_runs, [JobResult(results=results_of(*plan.tests))] * 3)[1]


@pytest.mark.parametrize(
    ("real", "changed", "passed", "flags"),
    [
        ([PASSED], [FAILED], True, set()),
        ([FAILED], [FAILED], False, set()),
        ([PASSED], [PASSED], False, {"twin_passed"}),
        ([FAILED], [PASSED], False, set()),  # as a wrong answer does that happens to be the twin's
        ([None], [FAILED], False, set()),
        ([PASSED], [None], True, set()),
        ([PASSED, FAILED], [FAILED], False, {"inconsistent"}),  # what chance decides does not pass
        ([FAILED], [PASSED, FAILED], False, {"inconsistent"}),
        ([PASSED], [PASSED, FAILED], False, {"inconsistent", "twin_passed"}),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_verdict_over_a_test_and_its_twin(
    real: list[TestResult | None], changed: list[TestResult | None], passed: bool, flags: set[str], order: int
) -> None:
    plan = GradePlan(digest="", tests={KEYS[0]: "id"}, twins=(twin(KEYS[0]),))
    runs = [*(((), results) for results in real), *((plan.twins, results) for results in changed)][::order]
    job_results = [JobResult(results={} if result is None else {KEYS[0]: result}) for _, result in runs]
    assert judge(plan, tuple(twins for twins, _ in runs), job_results) == ({"id": passed}, flags)


def test_a_pass_of_another_test_is_no_pass() -> None:
    plan = GradePlan(digest="", tests={KEYS[0]: "id"}, twins=(twin(KEYS[0]),))
    stray = JobResult(results={KEYS[0]: TestResult(outcome="passed", id="other")})
    failed = JobResult(results={KEYS[0]: FAILED})
    assert judge(plan, ((), plan.twins), [stray, failed]) == ({"id": False}, set())
    tampered = judge(plan, ((), plan.twins), [JobResult(results={KEYS[0]: PASSED}), stray])
    assert tampered == ({"id": False}, {"twin_passed"}), "the ids of twins are their own: a changed row has another"
