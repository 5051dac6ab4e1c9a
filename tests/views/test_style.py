"""Figures show the page through, and their text is readable on light and on dark ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from pixels import PAGES, contrasts
from test_views import DRAWN as OF_RUNS

from composer_nb.labs import formats, weights
from composer_nb.trainer.recipe.reader import read_status
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import dashboard, style

DRAWN: dict[str, Callable[[RunDir, dict[str, Any]], style.Picture]] = {
    **OF_RUNS,
    "board": lambda run, report: dashboard.picture(read_status(run.path)),
    "nothing": lambda run, report: style.empty("there is nothing to draw yet"),
    "bits": lambda run, report: formats.bits({"bf16": [0x3F80, 0x0001], "E8M0": [127]}),
    "codecs": lambda run, report: weights.sizes({"raw": [800.0, 90.0]}, ["1e-6", "1e-5"]),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_text_is_readable_on_any_page(tiny_run: RunDir, draw: Any) -> None:
    picture = draw(tiny_run, build_report(tiny_run))
    corner = matplotlib.image.imread(io.BytesIO(picture.png()))[0, 0]
    assert corner[3] == 0, "the page shows through"
    for page in PAGES:
        found = contrasts(picture, page)
        assert found and {text: value for text, value in found.items() if value < 2.5} == {}, page


def test_an_interval_stands_out_from_every_bar() -> None:
    picture = style.Picture(4, 2)
    [ax] = picture.panels(1, 1)
    for place, color in enumerate(style.POLICY.values()):
        ax.bar(place, 1.0, color=color)
        style.interval(ax, [place, place], [0.4, 0.6])
    image = matplotlib.image.imread(io.BytesIO(picture.png()))
    picture.set_dpi(style.DPI)
    picture.canvas.draw()
    for place in range(len(style.POLICY)):
        column, row = ax.transData.transform((place, 0.5)).astype(int)
        around = image[len(image) - row, column - 8 : column + 9, :3]
        assert (around > 0.95).all(-1).any(), "a light edge"
        assert np.ptp(around.mean(-1)) > 0.25
