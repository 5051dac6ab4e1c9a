"""Loss against reward: ranks, and a figure."""

from __future__ import annotations

import pandas as pd
import pytest
from scipy.stats import spearmanr

from scripts.transfer import figure, rank_correlation, row


def test_the_correlation_is_that_of_ranks():
    one, other = pd.Series([3.0, 1.0, 2.0, 2.0, 5.0]), pd.Series([-9.0, 4.0, 0.5, 0.25, -100.0])
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)


@pytest.mark.whole
def test_a_finished_run_gives_a_row_and_rows_a_figure(tiny_run):
    found = row(tiny_run)
    assert found["seed"] == 0 and found["steps"] == 30 and found["loss"] > 0 and -1 <= found["reward"] <= 1
    table = pd.DataFrame([found, found | {"steps": 60, "reward": 0.5, "loss": 0.1}, found | {"steps": 90}])
    assert figure(table).png()[1:4] == b"PNG"
