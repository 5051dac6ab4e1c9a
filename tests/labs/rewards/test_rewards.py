"""The reward lab: settings by name, and sliders that only weigh what was computed."""

import pytest
import torch

from composer_nb.labs.rewards import view as rewards
from composer_nb.labs.rewards.rescore import judge, open_lab
from composer_nb.trainer.recipe.reader import example_run


def test_a_slider_runs_no_model(monkeypatch: pytest.MonkeyPatch):
    """Gradients are computed once, when the lab is opened: a slider only weighs them."""
    lab = open_lab(example_run())

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model runs")

    monkeypatch.setattr(torch.nn.Module, "__call__", refuse)
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    judged = judge(lab, rewards.with_values(lab.batch.settings.reward, {"effort.weight": 0.1}))
    assert rewards.look(lab, judged).png()
