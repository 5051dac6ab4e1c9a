"""Figures of the loss bench: the numbers that they show are those of its rows."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from composer_nb.trainer.loss_bench import EXACT, OURS, REASONS, Bench, Row
from composer_nb.views import losses
from composer_nb.views.style import Picture

NAMES = (OURS, "grpo", "icepop", EXACT)


def row(name: str, seed: int) -> Row:
    random = np.random.default_rng(seed)
    share = float(random.uniform(0.2, 0.8))
    return Row(
        loss=name,
        masked=float(random.uniform(0, 0.3)),
        reasons=dict.fromkeys(REASONS, 0.2),
        ess=float(random.uniform(0.3, 1)),
        norm=1.0,
        cosine=float(random.uniform(-0.5, 1)),
        cosine_exact=float(random.uniform(-0.5, 1)),
        variance=share,
        noise=share / (1 - share),
        noise_interval=(0.5 * share, 4 * share),
        noise_share=share,
        excess=0.1,
        excess_interval=(-0.05, 0.2),
    )


def made(seed: int = 0) -> Bench:
    rows = [row(name, seed + number) for number, name in enumerate(NAMES)]
    rows[2] = replace(rows[2], noise=math.inf, noise_interval=(0.4, math.inf), excess_interval=(0.02, 0.2))
    cosines = np.eye(len(NAMES)) * 0.5 + 0.5
    cosines[3, 0] = cosines[0, 3] = np.nan
    cosines[1, 0] = cosines[0, 1] = -0.25
    return Bench(rows=tuple(rows), cosines=cosines, groups=8, live=6, tokens=100, gap={})


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


def test_masks_and_weights_are_mapped_by_loss_and_stage():
    found = {"own weights": made(0), "4 versions later": made(7)}
    picture = losses.masks(found)
    for ax, field in zip(picture.axes, ("masked", "ess"), strict=True):
        wanted = [100 * getattr(bench.row(name), field) for name in NAMES for bench in found.values()]
        assert written(ax) == [f"{value:.1f}" for value in wanted]
        assert np.asarray(ax.images[0].get_array()).ravel() == pytest.approx(wanted)
    assert [x.get_text().replace("\n", " ") for x in picture.axes[1].get_xticklabels()] == list(found)
    exact = losses.against_the_exact(found)
    wanted = [f"{bench.row(name).cosine_exact:.2f}" for name in NAMES for bench in found.values()]
    assert written(exact.axes[0]) == wanted and shows_something(picture) and shows_something(exact)


def test_numbers_stay_readable_on_either_end_of_the_colours():
    [ax] = losses.cosines(made()).axes
    shades = {text.get_text(): text.get_color() for text in ax.texts}
    assert shades["1.00"] != "white" and shades["-0.25"] == "white"


def test_noise_has_bars_intervals_and_an_arrow_where_no_signal_is_left():
    found = made()
    picture = losses.noise(found)
    ratio, excess = picture.axes
    assert [bar.get_width() for bar in ratio.patches] == [min(r.noise, losses.FAR) for r in found.rows]
    spans = [tuple(line.get_xdata()) for line in ratio.lines if len(line.get_xdata()) == 2]
    assert spans == [tuple(min(x, losses.FAR) for x in r.noise_interval) for r in found.rows]
    assert [line.get_ydata()[0] for line in ratio.lines if line.get_marker() == ">"] == [2]
    assert written(ratio)[2] == "no signal left" and "6 teach" in ratio.get_title(loc="left")
    markers = [line.get_marker() for line in excess.lines if line.get_marker() in ("D", "o")]
    assert markers == ["o", "o", "D", "o"] and shows_something(picture)


def test_a_loss_without_a_gradient_has_no_bar():
    found = made()
    nothing = replace(found.rows[1], noise=math.nan, noise_interval=(math.nan, math.nan))
    ratio, _ = losses.noise(replace(found, rows=(found.rows[0], nothing, *found.rows[2:]))).axes
    assert [label.get_text() for label in ratio.get_yticklabels()] == [OURS, "icepop", EXACT]
