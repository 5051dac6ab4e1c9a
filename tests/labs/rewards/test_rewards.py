"""The reward lab: its figure shows the numbers, its sliders show its figure."""

import html
import json
from typing import Any

import numpy as np
import pytest
import torch

from composer_nb.harness.rewards import Effort, RewardSettings
from composer_nb.labs.rewards import view as rewards
from composer_nb.labs.rewards.rescore import Lab, judge, open_lab
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override


@pytest.fixture(scope="module")
def lab(tiny_run: RunDir) -> Lab:
    return open_lab(tiny_run)


@pytest.fixture(scope="module")
def example() -> Lab:
    return open_lab(example_run())


def test_settings_by_dotted_name():
    base = RewardSettings()
    changed = rewards.with_values(base, {"weights.unfinished": -0.5, "weights.solved": 2, "effort.q": 1.5})
    assert changed.weights == {"solved": 2.0, "invalid_calls": -0.2, "unfinished": -0.5}
    assert changed.effort == Effort(q=1.5)
    assert rewards.with_values(base, {}) == base
    for name in rewards.ranges():
        assert rewards.value_of(rewards.with_values(base, {name: 0.75}), name) == 0.75
    with pytest.raises(
        ValueError, match="no reward term 'brevity'; registered terms: agent_failed, asked_back, .*given"
    ):
        rewards.with_values(base, {"weights.brevity": 1.0})
    with pytest.raises(ValueError, match=r"unknown setting 'effort\.weigth'; did you mean 'effort\.weight'"):
        rewards.with_values(base, {"effort.weigth": 1.0})
    with pytest.raises(ValueError, match="k=0"):
        rewards.with_values(base, {"effort.k": 0.0})


def test_the_figure_shows_the_advantages(lab: Lab):
    other = rewards.with_values(lab.batch.settings.reward, {"effort.weight": 0.3})
    found = judge(lab, other)
    rollouts, groups, turn = rewards.look(lab, other).axes
    dots = [line.get_xydata() for line in rollouts.lines if line.get_linestyle() == "None"]
    pairs = np.stack([lab.stored.advantage_R, found.scores.advantage_R], 1)
    assert sorted(map(tuple, np.concatenate(dots))) == sorted(map(tuple, pairs))
    shown = np.concatenate([line.get_xdata() for line in groups.lines if line.get_linestyle() == "None"])
    assert sorted(shown) == sorted(found.scores.advantage_R)
    assert f"{found.scores.live_P.sum()} of 4 teach" in groups.get_title(loc="left")
    assert f"cosine {found.cosine:+.3f}" in [text.get_text() for text in turn.texts]


def parts(box: Any) -> tuple[dict[str, Any], Any, Any, Any]:
    grid, image, line = box.children
    *moved, again = grid.children
    return {slider.description: slider for slider in moved}, again, image, line


def test_sliders_begin_where_training_was_and_show_the_figure(lab: Lab):
    trained = lab.batch.settings.reward
    moved, again, image, line = parts(rewards.sliders(lab))
    assert set(moved) == set(rewards.ranges())
    assert {name: slider.value for name, slider in moved.items()} == {
        name: rewards.value_of(trained, name) for name in moved
    }
    assert image.value == rewards.look(lab, trained).png() and "cosine +1.0000" in line.value
    moved["weights.unfinished"].value = 1.5
    changed = rewards.with_values(trained, {"weights.unfinished": 1.5})
    assert image.value == rewards.look(lab, changed).png()
    assert rewards.summary(judge(lab, changed)) in line.value
    overrides = json.loads(html.unescape(line.value).partition("overrides = ")[2].removesuffix("</code>"))
    assert override(Settings(), overrides).reward == changed, "a run with these overrides trains on the chosen reward"
    again.click()
    assert image.value == rewards.look(lab, trained).png()


def test_a_slider_runs_no_model(example: Lab, monkeypatch: pytest.MonkeyPatch):
    """Gradients are computed once, when the lab is opened: a slider only weighs them."""

    def refuse(*given: object, **more: object) -> None:
        raise AssertionError("a model runs")

    monkeypatch.setattr(torch.nn.Module, "__call__", refuse)
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    found = judge(example, rewards.with_values(example.batch.settings.reward, {"effort.weight": 0.1}))
    assert rewards.drawn(example, found).png()
