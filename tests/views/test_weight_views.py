"""Figures of weight versions: drawn from plain numbers, also from few and from odd ones."""

from __future__ import annotations

import numpy as np

from composer_nb.trainer.region_simulation import Happened
from composer_nb.views import weights
from composer_nb.views.style import Picture


def shown(picture: Picture) -> list[str]:
    """Headings, when it could be drawn."""
    assert picture.png().startswith(b"\x89PNG")
    return [ax.get_title(loc="left") for ax in picture.axes]


def test_every_figure_is_drawn():
    some = np.array([0.0, 10, 200, 3]), np.array([0.0, 10, 4, 0]), np.array([0.0, 9.5, 4.2, 0.1])
    assert shown(weights.shares({"norm": 0.0, "down_proj": 0.01}, "by kind")) == ["by kind"]
    assert shown(weights.by_exponent(*map(list, some)))[0] == "weights by size"
    assert shown(weights.foretold([1e-6, 1e-5], [0.01, 0.05], [0.0101, 0.049]))
    assert shown(weights.warming([0.0, 0.001], np.linspace(0, 0.01, 50), 0.01))
    assert shown(weights.sizes({"raw": [800.0, 90.0], "rans": [8.0, 6.0]}, ["1e-6", "1e-5"]))


def test_regions_are_drawn_with_what_befell_them():
    found = [
        Happened(0.0, "published", "", 0),
        Happened(20.0, "running", "a", 0, 1e12),
        Happened(60.0, "published", "", 1),
        Happened(70.0, "down", "a", -1, 1e12),
        Happened(80.0, "refused", "b", 1, 2e10),
    ]
    picture = weights.regions(found, ["a", "b"])
    assert shown(picture) == ["versions behind the trainer", "bytes read over the line"]
    marks = [line for line in picture.axes[0].lines if line.get_marker() in ("v", "X")]
    assert sorted(len(line.get_xdata()) for line in marks) == [0, 0, 1, 1]
