"""Figures of the loss bench: the numbers that they show are those of its rows."""

from __future__ import annotations

import io
import math

import matplotlib.image
import numpy as np
import torch

from composer_nb.labs import losses
from composer_nb.labs.losses import EXACT, OURS, REASONS, Bench, LossRow
from composer_nb.views.style import Picture

NAMES = (OURS, "grpo", "icepop", EXACT)


def row(name: str, seed: int) -> LossRow:
    random = np.random.default_rng(seed)
    return LossRow(
        loss=name,
        masked=float(random.uniform(0, 0.3)),
        reasons=dict.fromkeys(REASONS, 0.2),
        ess=float(random.uniform(0.3, 1)),
        norm=1.0,
    )


def made(seed: int = 0) -> Bench:
    rows = [row(name, seed + number) for number, name in enumerate(NAMES)]
    cosines = np.eye(len(NAMES)) * 0.5 + 0.5
    cosines[3, 0] = cosines[0, 3] = np.nan
    cosines[1, 0] = cosines[0, 1] = -0.25
    return Bench(rows=tuple(rows), gradients_LW=torch.zeros(len(NAMES), 1), cosines=cosines)


def written(ax) -> list[str]:  # type: ignore[no-untyped-def]
    return [text.get_text() for text in ax.texts]


def shows_something(picture: Picture) -> bool:
    image = matplotlib.image.imread(io.BytesIO(picture.png()))
    return bool((image[..., :3] < 0.9).any(-1).mean() > 0.005)


def test_the_map_of_cosines_has_its_numbers_and_gaps():
    found = made()
    picture = losses.cosines(found, "own weights")
    [ax] = picture.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == list(NAMES)
    assert written(ax) == ["–" if math.isnan(x) else f"{x:.2f}" for x in found.cosines.ravel()]
    image = ax.images[0]
    assert image.get_clim() == (-0.25, 1.0) and image.get_array().mask.sum() == 2
    assert ax.get_title(loc="left") == "own weights" and shows_something(picture)
