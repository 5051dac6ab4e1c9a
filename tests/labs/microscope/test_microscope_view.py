"""The microscope's figures: bars are contributions, the map is what was measured, the page says all causes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from composer_nb.labs.microscope import view
from composer_nb.labs.microscope.microscope import CauseStep, Examination, Figures, Finding, Streams, Where
from composer_nb.labs.microscope.numerics import CAUSES


def figures(k3: float, p99: float) -> Figures:
    return Figures(p50=p99 / 10, p99=p99, most=2 * p99, k1=0.0, k3=k3, kl=k3)


def report() -> Examination:
    random = np.random.default_rng(0)
    left = [1e-2, 3e-2, 1e-3, 1e-3, 1e-4, 0.0, 0.0]
    places = ((-1, "embedding"), (0, "attention"), (0, "experts"))
    return Examination(
        start=figures(1e-2, 0.3),
        steps=tuple(
            CauseStep(
                cause=cause.name,
                change="a → b" if k3 == 0.0 else "",
                figures=figures(k3, 30 * k3),
                alone=k3,
            )
            for cause, k3 in zip(CAUSES, left, strict=True)
        ),
        findings=(Finding(cause="GEMM", text="numerics <b>", where=Where(row=1, token=2, layer=0, experts=(3,))),),
        first=Where(row=1, token=2, layer=0, experts=(3,)),
        first_in="experts",
        versions={3: figures(0.0, 0.0)},
        streams=Streams(places=places, apart_PN=random.random((3, 9)).astype(np.float32), lengths=(4, 5)),
        tokens=20,
        tolerance=1e-4,
    )


def test_bars_are_the_contributions():
    seen = report()
    picture = view.waterfall(seen)
    for ax, name in zip(picture.axes, ("p99", "k3"), strict=True):
        bars = [each[0] for each in ax.containers]
        assert len(bars) == len(CAUSES) + 2
        values = [getattr(figures, name) for figures in (seen.start, *(step.figures for step in seen.steps))]
        contributions = [before - after for before, after in itertools.pairwise(values)]
        for bar, contribution in zip(bars[1:-1], contributions, strict=True):
            assert bar.get_width() == pytest.approx(abs(contribution), abs=2 * view.FLOORS[name])
        grown = [bar.get_facecolor() != bars[1].get_facecolor() for bar in bars[1:-1]]
        assert grown == [contribution < 0 for contribution in contributions]
    labels = [label.get_text() for label in picture.axes[0].get_yticklabels()]
    assert "● GEMM" in labels and sum("●" in label for label in labels) == 1 and picture.png()


def test_the_map_shows_a_row_and_rings_the_first_difference():
    seen = report()
    picture = view.apart(seen)
    ax = picture.axes[0]
    assert np.allclose(ax.images[0].get_array(), np.log10(seen.streams.apart_PN[:, 4:]))
    assert [list(x) for x in ax.lines[0].get_data()] == [[2], [2]] and picture.png()
    other = view.apart(seen, row=0).axes[0]
    assert other.images[0].get_array().shape == (3, 4) and not other.lines
