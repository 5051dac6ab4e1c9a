"""Pictures of routes and of an examination: what they draw is what was counted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from composer_nb.labs.microscope import routes, view
from composer_nb.labs.microscope.microscope import CauseStep, Examination, Figures, Finding, Where
from composer_nb.labs.microscope.numerics import CAUSES
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.recipe.mismatch import Comparison


def comparison(seed: int = 0, tokens: int = 4000, layers: int = 3) -> Comparison:
    """A router that flips where its margin is small, and log-probabilities that suffer where it does."""
    random = np.random.default_rng(seed)
    margins_NL = 10.0 ** random.uniform(-5, -0.1, (tokens, layers))
    flips_NL = random.random((tokens, layers)) < 0.5 * (margins_NL < 1e-3)
    flipped_S, on_S = flips_NL.any(1), random.normal(0, 1e-3, tokens)
    off_S = on_S + flipped_S * random.normal(0, 0.3, tokens)
    margins_NL = margins_NL.astype(np.float32)
    return Comparison(off_S=off_S, on_S=on_S, flipped_S=flipped_S, flips_NL=flips_NL, margins_NL=margins_NL)


PAIRS = {"one": comparison(0), "int4-experts-int8-router": comparison(1)}


def test_shares_by_margin_and_ratios_outside_a_window():
    pair = PAIRS["one"]
    middle, share = routes.by_margin(pair)
    assert share[middle < 5e-4] == pytest.approx(0.5, abs=0.12) and not share[middle > 2e-3].any()
    few = Comparison(**{name: getattr(pair, name)[:4] for name in Comparison.__dataclass_fields__})
    assert len(routes.by_margin(few)[0]) == 0, "too few to say anything"
    assert routes.outside(np.log([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0]), 0.2, 0.28) == 4
    clip, _ = routes.ratios(PAIRS, LossSettings(clip_low=0.1, clip_high=0.1)).axes
    heights = [[bar.get_height() for bar in bars] for bars in clip.containers]
    sides = ("off_S", "on_S")
    assert heights == [[routes.outside(getattr(pair, side), 0.1, 0.1) for pair in PAIRS.values()] for side in sides]


def figures(k3: float, p99: float) -> Figures:
    return Figures(p50=p99 / 10, p99=p99, most=2 * p99, k1=0.0, k3=k3, kl=k3)


def report() -> Examination:
    left = [1e-2, 3e-2, 1e-3, 1e-3, 1e-4, 0.0, 0.0]
    where = Where(row=1, token=2, layer=0, experts=(3,))
    apart_PN = np.random.default_rng(0).random((3, 9)).astype(np.float32)
    places = ((-1, "embedding"), (0, "attention"), (0, "experts"))
    return Examination(
        start=figures(1e-2, 0.3),
        steps=tuple(
            CauseStep(cause=cause.name, change="a → b", figures=figures(k3, 30 * k3), alone=k3)
            for cause, k3 in zip(CAUSES, left, strict=True)
        ),
        findings=(Finding(cause="GEMM", text="numerics <b>", where=where),),
        first=where,
        first_in="experts",
        versions={3: figures(0.0, 0.0)},
        places=places,
        apart_PN=apart_PN,
        lengths=(4, 5),
        tokens=20,
        tolerance=1e-4,
    )


def test_bars_are_contributions_and_the_map_rings_the_first_difference():
    examination = report()
    waterfall = view.waterfall(examination)
    for ax, name in zip(waterfall.axes, ("p99", "k3"), strict=True):
        bars = [bars[0] for bars in ax.containers][1:-1]
        values = [getattr(step, name) for step in (examination.start, *(step.figures for step in examination.steps))]
        contributions = [before - after for before, after in itertools.pairwise(values)]
        assert [bar.get_width() for bar in bars] == pytest.approx(np.abs(contributions), abs=2 * view.FLOORS[name])
        grown = [bar.get_facecolor() != bars[0].get_facecolor() for bar in bars]
        assert grown == [contribution < 0 for contribution in contributions]
    labels = [label.get_text() for label in waterfall.axes[0].get_yticklabels()]
    assert [label for label in labels if "●" in label] == ["● GEMM"]

    ax = view.apart(examination).axes[0]
    assert np.allclose(ax.images[0].get_array(), np.log10(examination.apart_PN[:, 4:]))
    assert [list(x) for x in ax.lines[0].get_data()] == [[2], [2]]
    other = view.apart(examination, row=0).axes[0]
    assert other.images[0].get_array().shape == (3, 4) and not other.lines
