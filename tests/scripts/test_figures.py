"""scripts/docs/figures.py agrees with theory, and what it measures appears within seconds, too."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from composer_nb.harness.tasks.making.kinds import KINDS
from composer_nb.harness.tasks.task import load_tasks
from scripts.docs import figures

EXAMPLE = Path(__file__).parents[2] / "data" / "example" / "data"


def test_estimators_have_their_moments() -> None:
    """Those of 300,000 samples lie within five standard errors of a mean; the variance near its own where it is light."""
    for mean, kind, first, exact, second, variance in list(figures.kl(300_000))[1:]:
        off = 5 * (float(variance) / 300_000) ** 0.5 + 1e-3 * float(exact)
        assert float(first) == pytest.approx(float(exact), abs=off), (mean, kind)
        assert mean > 1 or float(second) == pytest.approx(float(variance), rel=0.1), (mean, kind)


def test_only_zigzag_chunks_balance_a_context() -> None:
    for ranks, plain, dealt in list(figures.zigzag(1024))[1:]:
        assert float(plain) == pytest.approx(2 - 1 / ranks, rel=2e-3) and float(dealt) == 1


def test_training_with_rounded_products_follows_bf16() -> None:
    """A text that repeats itself is learnt in 30 steps."""
    text = torch.arange(8000) ** 2 % 251
    bf16, mxfp8, nvfp4 = (figures.losses(recipe, text, 0, 30) for recipe in ("bf16", "mxfp8", "nvfp4"))
    assert bf16 < 1 and 0 < abs(mxfp8 - bf16) < 0.1 and 0 < abs(nvfp4 - bf16) < 0.3


def test_sizes_are_those_of_solutions_and_requests() -> None:
    """Quartiles of the example, as docs/figures.md has them."""
    _, lines, characters = figures.sizes(tasks := load_tasks(EXAMPLE / "heldout.jsonl"))
    assert (lines[2:5], characters[2:5]) == ((2, 2, 2), (13, 13, 42))
    below = [ax.get_xticklabels()[0].get_text() for ax in figures.draw_sizes(tasks).axes]
    assert [text.partition(",")[0] for text in below] == ["median 2", "median 13"]


def test_a_mix_counts_categories_and_then_kinds() -> None:
    assert KINDS.keys() < {*chain(*figures.CATEGORIES.values())}, "each kind that is no bug has a category"
    example = load_tasks(EXAMPLE / "rl.jsonl")
    kinds = ["git", "move", "rename", "rename", "arithmetic"]
    tasks = [t.model_copy(update={"metadata": {"kind": k}}) for t, k in zip(example, kinds, strict=False)]
    _, *rows = figures.mix(tasks)
    assert rows[0] == ("refactoring", "all", "", "", 3, "60%")
    assert rows[3] == ("refactoring", "rename", "–", "–", 2, "40%")
    assert {row[0] for row in rows[:3]} == {"refactoring", "version control", "fixing bugs"} and len(rows) == 3 + 4
    assert figures.draw_mix(tasks).axes[0].get_yticklabels()[0].get_text() == "refactoring"
