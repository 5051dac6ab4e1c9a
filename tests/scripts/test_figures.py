"""docs/figures.md names every published figure once, with a command; scripts/docs/figures.py agrees with theory.

`test_docs.py` says whether the commands exist."""

import re
from pathlib import Path

import pytest

from scripts.docs import figures

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in TEXT.splitlines() if line[:3] == "| A"
]


def test_every_figure_stands_there_once_with_a_verdict() -> None:
    assert [row[0] for row in ROWS] == [f"A{n}" for n in range(1, 25)]
    for number, figure, command, measured, verdict in ROWS:
        kind = re.match(r"(Reproduced|Partly|Not)\b", verdict)
        assert figure and kind and (command == "none") == (not measured), number
        assert (
            kind[0] == "Not"
            if command == "none"
            else re.match(r"`(composer-nb|make|pytest|scripts/|notebooks/)", command)
        ), number
    assert "docs/figures.md" in (ROOT / "README.md").read_text(), "the README leads there; llms.txt does by itself"


def test_estimators_have_their_moments() -> None:
    """Those of 300,000 samples lie within five standard errors of a mean; the variance near its own where it is light."""
    for mean, kind, first, exact, second, variance in list(figures.kl(300_000))[1:]:
        off = 5 * (float(variance) / 300_000) ** 0.5 + 1e-3 * float(exact)
        assert float(first) == pytest.approx(float(exact), abs=off), (mean, kind)
        assert mean > 1 or float(second) == pytest.approx(float(variance), rel=0.1), (mean, kind)


def test_only_zigzag_chunks_balance_a_context() -> None:
    for ranks, plain, dealt in list(figures.zigzag(1024))[1:]:
        assert float(plain) == pytest.approx(2 - 1 / ranks, rel=2e-3) and float(dealt) == 1
