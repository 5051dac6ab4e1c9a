"""Which tasks score which policy, gains over what both were scored on, and the sharpness of a start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import MakeModel
from torch import nn

from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.recipe import evaluate, finish, report
from composer_nb.trainer.settings import Settings, override

NO_ROUTES = np.zeros((0, 0, 0), np.uint8)


def test_a_gain_is_over_the_tasks_of_both_and_over_the_better_by_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = {"midtrained": {"a": 0.5}, "start": {"a": 0.25, "b": 0.75, "c": 0.0}}
    sampled["final"] = {"a": 0.75, "b": 0.5, "c": 0.25}

    def solved(run: Any, policy: str, within: int | None = None, *, greedy: bool = False) -> dict[str, float]:
        return {task: round(share) if greedy else share for task, share in sampled[policy].items()}

    monkeypatch.setattr(report, "solved_by_task", solved)
    score = {"pass_within": {"12": 0.0}}
    gain = report.gained(SimpleNamespace(), {name: score for name in sampled})  # type: ignore[arg-type]
    assert (gain["pass_at_1"], gain["pass_greedy"], gain["best_of_k"]) == (0.25, 1.0, 0.0)
    over = {"pass_at_1": np.mean([0.5, -0.25, 0.25]), "pass_greedy": 0.0, "best_of_k": 0.0}
    assert gain["over_stronger"] == pytest.approx(over)
    within = gain["within_12"]["heldout"]
    assert (within["over"], within["gain"], within["n_tasks"]) == ("start", over["pass_at_1"], 3)
    sampled["midtrained"] = sampled["start"]  # as where no stage is before RL
    assert report.within_12(SimpleNamespace(), {name: score for name in sampled}, "heldout")["over"] == "start"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("solved", "factors", "best"),
    [
        ({1.0: 0, 1.5: 2, 2.0: 1}, (1.0, 1.5, 2.0), 1.5),
        ({1.0: 1, 1.5: 1, 2.0: 1}, (2.0, 1.5, 1.0), 1.0),  # as it is, where nothing is gained
        ({}, (0.8,), 0.8),  # the only one is not tried
        ({}, (), None),
    ],
)
def test_the_best_factor_is_kept(
    monkeypatch: pytest.MonkeyPatch, solved: dict[float, int], factors: tuple[float, ...], best: float | None
) -> None:
    model = Model(ModelConfig(vocab_size=264))
    with torch.no_grad():
        model.final_norm.fill_(0.5)

    def attempts(s: Any, candidate: Model, tasks: Any, samples: int, temperature: float) -> list[Any]:
        assert temperature == 1.0
        count = solved[float(candidate.final_norm[0].detach()) / 0.5]
        return [SimpleNamespace(grade=SimpleNamespace(passed=n < count)) for n in range(samples)]

    monkeypatch.setattr(evaluate, "evaluate_model", attempts)
    lines: list[str] = []
    s: Any = SimpleNamespace(ranks=SimpleNamespace(first=True), tasks={"tune": ["a task"]}.get, say=lines.append)
    s.settings = Settings()
    info: dict[str, Any] = {}
    evaluate.calibrate(s, model, factors, info)
    assert info.get("sharpness") == best and len(lines) == bool(solved)
    share = solved.get(best or 0.0, 0) / 2
    assert info.get("sharpness_ci95", {}).get(str(best)) == ([share, share] if solved else None), "of one task"
    assert torch.equal(model.final_norm, torch.full_like(model.final_norm, 0.5 * (best or 1.0)))


@pytest.mark.parametrize(
    ("values", "final"),
    [
        ({"rl.sharpness": [0.5], "rl.start_weight": 0.0}, 1.5),
        ({"rl.sharpness": [], "rl.start_weight": 0.25}, 3.25),  # 3/4 of 3, and 1/4 of 4
        (
            {"rl.uncalibrated": True, "rl.sharpness": [1, 2], "rl.start_weight": 0.25},
            5.5,
        ),  # RL began at 4 / 2, so 2 × 2.75
    ],
)
def test_rl_ends_with_the_mean_and_the_sharpness_that_settings_ask_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, values: dict[str, Any], final: float
) -> None:
    """A stage that is killed before its record, after its weights, begins from the policy as RL left it."""
    published = {"final": 3.0, "start": 4.0}

    def publish(policy: nn.Module, name: str) -> None:
        published[name] = float(policy.final_norm.detach())
        (tmp_path / name).mkdir(exist_ok=True)

    def load(name: str) -> nn.Module:
        policy = nn.Module()
        policy.final_norm = nn.Parameter(torch.tensor(published[name]))
        return policy

    def attempts(s: Any, policy: nn.Module, *others: Any) -> list[Any]:
        return [SimpleNamespace(grade=SimpleNamespace(passed=bool(policy.final_norm > 5.0)))] * evaluate.TUNING_TRIES

    monkeypatch.setattr(evaluate, "evaluate_model", attempts)
    run = SimpleNamespace(sharpness=2.0, finished=lambda name: None, finish=lambda name, seconds, info: None)
    run.steps = lambda name: []  # no rollouts to measure entropy on
    s: Any = SimpleNamespace(
        ranks=Ranks(), weights=tmp_path.joinpath, say=lambda line: None, tasks={"tune": ["a task"]}.get
    )
    s.settings, s.run, s.load, s.publish = override(Settings(), values), run, load, publish
    for _ in range(2):
        finish.finish(s)
        assert published == {"final": final, "trained": 3.0, "start": 4.0}


@pytest.mark.parametrize(("factor", "expected"), [(1.25, 0.8), (0.7, 1 / 0.7), (8.0, 0.5)])
def test_a_policy_becomes_as_unsure_as_its_start(make_model: MakeModel, factor: float, expected: float) -> None:
    """The start's own logits times a factor get it taken back, where it is within the bounds."""
    start, model = make_model(), make_model()
    with torch.no_grad():
        model.final_norm.mul_(factor)
    acted, none = np.arange(12) > 3, np.zeros(12, np.float32)
    rows = np.random.default_rng(0).integers(3, 60, (3, 12)).astype(np.int32)
    streams = [Stream(token_ids=row, acted=acted, logprob=none, advantage=none, routes=NO_ROUTES) for row in rows]
    assert finish.match_entropy(model, start, [streams[:1], streams[1:]]) == pytest.approx(expected, rel=0.02)
    torch.testing.assert_close(model.final_norm, start.final_norm * factor * expected, rtol=0.02, atol=0)
