"""Figures of routes: what they draw is what was counted."""

from __future__ import annotations

import io

import matplotlib.image
import numpy as np
import pytest

from composer_nb.labs.microscope import routes
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.recipe.mismatch import Comparison


def comparison(seed: int = 0, tokens: int = 4000, layers: int = 3) -> Comparison:
    """A router that flips where its margin is small, and log-probabilities that suffer where it does."""
    random = np.random.default_rng(seed)
    margins_NL = 10.0 ** random.uniform(-5, -0.1, (tokens, layers))
    flips_NL = random.random((tokens, layers)) < 0.5 * (margins_NL < 1e-3)
    flipped_S = flips_NL.any(1)
    on_S = random.normal(0, 1e-3, tokens)
    return Comparison(
        off_S=on_S + flipped_S * random.normal(0, 0.3, tokens),
        on_S=on_S,
        flipped_S=flipped_S,
        flips_NL=flips_NL,
        margins_NL=margins_NL.astype(np.float32),
    )


PAIRS = {"one": comparison(0), "int4-experts-int8-router": comparison(1)}


def shows_something(picture) -> bool:  # type: ignore[no-untyped-def]
    image = matplotlib.image.imread(io.BytesIO(picture.png()))
    return bool((image[..., :3] < 0.9).any(-1).mean() > 0.005)


def test_the_share_by_margin_counts_every_pair_once():
    found = PAIRS["one"]
    middle, share = routes.by_margin(found)
    assert (np.diff(middle) > 0).all() and ((share >= 0) & (share <= 1)).all()
    assert share[middle < 5e-4] == pytest.approx(0.5, abs=0.12) and not share[middle > 2e-3].any()
    edges = np.geomspace(max(1e-6, found.margins_NL.min()), 1.0, routes.BINS + 1)
    inside = [
        (found.margins_NL >= low) & (found.margins_NL < high) for low, high in zip(edges, edges[1:], strict=False)
    ]
    wanted = [found.flips_NL[cell].mean() for cell in inside if cell.sum() >= routes.ENOUGH]
    assert share == pytest.approx(wanted, abs=0.02)
    few = Comparison(**{name: getattr(found, name)[:4] for name in Comparison.__dataclass_fields__})
    assert len(routes.by_margin(few)[0]) == 0, "too few to say anything"


def test_ratios_outside_a_window_are_counted():
    gap = np.log([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0])
    assert routes.outside(gap, 0.2, 0.28) == 4
    assert routes.outside(np.zeros(5), 0.01, 0.01) == 0
    picture = routes.ratios(PAIRS, LossSettings(clip_low=0.1, clip_high=0.1))
    clip, _ = picture.axes
    heights = [[bar.get_height() for bar in bars] for bars in clip.containers]
    assert heights == [
        [routes.outside(getattr(found, side), 0.1, 0.1) for found in PAIRS.values()] for side in ("off_S", "on_S")
    ]
    names = [label.get_text() for label in clip.get_xticklabels()]
    assert [name.replace("\n", "") for name in names] == list(PAIRS) and "\n" in names[1]
