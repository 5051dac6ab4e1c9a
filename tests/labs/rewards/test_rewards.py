"""The reward lab: settings by name, and sliders that only weigh what was computed."""

import pytest
import torch

from composer_nb.harness.rewards import Effort, RewardSettings
from composer_nb.labs.rewards import view as rewards
from composer_nb.labs.rewards.rescore import judge, open_lab
from composer_nb.trainer.recipe.reader import example_run


def test_settings_by_dotted_name():
    base = RewardSettings()
    changed = rewards.with_values(base, {"weights.unfinished": -0.5, "weights.solved": 2, "effort.q": 1.5})
    assert changed.weights == {"solved": 2.0, "invalid_calls": -0.2, "unfinished": -0.5}
    assert changed.effort == Effort(q=1.5)
    assert rewards.with_values(base, {}) == base
    for name in rewards.ranges():
        assert rewards.value_of(rewards.with_values(base, {name: 0.75}), name) == 0.75
    with pytest.raises(ValueError, match="no reward term 'brevity'; registered terms: agent_failed, "):
        rewards.with_values(base, {"weights.brevity": 1.0})


def test_a_slider_runs_no_model(monkeypatch: pytest.MonkeyPatch):
    """Gradients are computed once, when the lab is opened: a slider only weighs them."""
    lab = open_lab(example_run())

    def refuse(*given: object, **more: object) -> None:
        raise AssertionError("a model runs")

    monkeypatch.setattr(torch.nn.Module, "__call__", refuse)
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    found = judge(lab, rewards.with_values(lab.batch.settings.reward, {"effort.weight": 0.1}))
    assert rewards.drawn(lab, found).png()
