"""Loss against reward: ranks, and a law."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from scripts.studies.transfer import law, rank_correlation, within_seeds


def test_the_correlation_is_that_of_ranks_within_seeds():
    one, other = pd.Series([3.0, 1.0, 2.0, 2.0, 5.0]), pd.Series([-9.0, 4.0, 0.5, 0.25, -100.0])
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    table = pd.DataFrame({"seed": [0, 0, 1, 1], "loss": [0.1, 0.2, 0.5, 0.6], "reward": [0.3, 0.2, 0.9, 0.8]})
    assert within_seeds(table) == pytest.approx(-1.0) and rank_correlation(table["loss"], table["reward"]) > 0


def test_the_law_is_fitted_without_the_largest_budget():
    tokens = np.array([1e4, 4e4, 16e4, 64e4])
    table = pd.DataFrame({"tokens": tokens, "code_loss": 9.0 - 0.4 * np.log(tokens)})
    table.loc[3, "code_loss"] -= 0.25
    fit, error = law(table)
    assert (fit.intercept, fit.slope, error) == pytest.approx((9.0, -0.4, 0.25))
