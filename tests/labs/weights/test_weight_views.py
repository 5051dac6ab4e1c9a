"""Figures of weight versions: drawn from plain numbers, also from few and from odd ones."""

from __future__ import annotations

from composer_nb.labs import weights
from composer_nb.views.style import Picture


def shown(picture: Picture) -> list[str]:
    """Headings, when it could be drawn."""
    assert picture.png().startswith(b"\x89PNG")
    return [ax.get_title(loc="left") for ax in picture.axes]


def test_every_figure_is_drawn():
    assert shown(weights.shares({"norm": 0.0, "down_proj": 0.01}, "by kind")) == ["by kind"]
    assert shown(weights.sizes({"raw": [800.0, 90.0], "rans": [8.0, 6.0]}, ["1e-6", "1e-5"]))
