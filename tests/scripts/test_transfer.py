"""The study of transfer: its runs, as docs/midtraining.md lists them, bear out what the pages say of them."""

import re
from pathlib import Path

import pandas as pd
import pytest

from scripts.studies.transfer import law, rank_correlation, within_seeds

PAGE = Path(__file__).resolve().parents[2] / "docs" / "midtraining.md"
ROW = r"^\| (\d) \| ([\d,]+) \| [\d.]+ [kM] \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"


def test_the_runs_on_the_page_have_its_correlations_and_its_law() -> None:
    rows = [[float(cell.replace(",", "")) for cell in row] for row in re.findall(ROW, PAGE.read_text(), re.M)]
    runs = pd.DataFrame(rows, columns=["seed", "tokens", "code_loss", "loss", "reward"])
    assert len(runs) == 9 and within_seeds(runs) == pytest.approx(-1)
    assert rank_correlation(runs["loss"], runs["reward"]) == pytest.approx(-0.42, abs=0.005)
    fit, error = law(runs)
    assert fit.slope < 0 and error == pytest.approx(-0.07, abs=0.02), "the page rounds losses"
    errors = [law(seed_rows)[1] for _, seed_rows in runs.groupby("seed")]
    assert (min(errors), max(errors)) == pytest.approx((-0.24, 0.23), abs=0.02)
