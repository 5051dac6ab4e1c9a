"""The simulated trials of a canary."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from scripts.studies.canary_trial import simulate


@pytest.mark.parametrize(("difference", "outcome"), [(-0.5, "withdrawn"), (0.3, "promoted")])
def test_large_differences_are_found(difference: float, outcome: str) -> None:
    given = Namespace(share=0.5, verdicts=60, users=200, accepted=0.6, taste=0.1)
    found = [simulate(np.random.default_rng(seed), given, difference) for seed in range(5)]
    assert [name for name, _ in found] == [outcome] * 5
    assert all(count <= 61 for _, count in found) if outcome == "withdrawn" else all(count >= 60 for _, count in found)
