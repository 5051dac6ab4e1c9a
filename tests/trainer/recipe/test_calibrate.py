"""The sharpness of a start is the one at which it solves most tuning tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.recipe import recipe
from composer_nb.trainer.settings import Settings, override

TASK = Task(
    id="a",
    instruction="x",
    files={},
    tests={"t.py": "from f import f\n\n\ndef test_0():\n    assert f(1) == 1\n"},
    source_scope=("f.py",),
)


@pytest.mark.parametrize(
    ("solved", "factors", "best"),
    [
        ({1.0: 0, 1.5: 2, 2.0: 1}, (1.0, 1.5, 2.0), 1.5),
        ({1.0: 1, 1.5: 1, 2.0: 1}, (2.0, 1.5, 1.0), 1.0),  # as it is, where nothing is gained
        ({}, (), None),
    ],
)
def test_the_best_factor_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    solved: dict[float, int],
    factors: tuple[float, ...],
    best: float | None,
) -> None:
    model = Model(ModelConfig(vocab_size=264))
    with torch.no_grad():
        model.final_norm.fill_(0.5)

    def attempts(s: Any, given: Model, tasks: list[Task], samples: int, temperature: float) -> list[Any]:
        assert tasks == [TASK] and temperature == 1.0
        count = solved[float(given.final_norm[0].detach()) / 0.5]
        return [SimpleNamespace(grade=SimpleNamespace(passed=n < count)) for n in range(samples)]

    monkeypatch.setattr(recipe, "evaluate_model", attempts)
    told: list[str] = []
    s: Any = SimpleNamespace(
        settings=override(Settings(), {"sft.sharpness": factors}),
        tasks={"tune": [TASK]}.get,
        ranks=SimpleNamespace(first=True),
        say=told.append,
    )
    info: dict[str, Any] = {}
    recipe.calibrate(s, model, info)
    assert info.get("sharpness") == best and len(told) == (best is not None)
    share = solved.get(best or 0.0, 0) / 2
    assert info.get("sharpness_ci95", {}).get(str(best)) == (None if best is None else [share, share]), "of one task"
    assert torch.equal(model.final_norm, torch.full_like(model.final_norm, 0.5 * (best or 1.0)))
