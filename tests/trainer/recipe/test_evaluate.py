"""Which tasks score which policy, and gains over what both were scored on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from composer_nb.trainer.recipe import recipe, report
from composer_nb.trainer.settings import Settings, override


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("base", {}, (100, 1)),
        ("midtrained", {}, (100, 4)),
        ("start", {}, (300, 4)),
        ("final", {}, (300, 4)),
        ("midtrained", {"sft.steps": 0}, (300, 4)),  # the start is the same policy
        ("base", {"midtrain.steps": 0}, (300, 4)),
    ],
)
def test_weak_policies_are_scored_on_fewer_tasks(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], wanted: tuple[int, int]
) -> None:
    asked: list[tuple[int, int, float]] = []

    def attempts(s: Any, model: Any, tasks: Any, samples: int, temperature: float) -> list[Any]:
        asked.append((len(tasks), samples, temperature))
        return []

    monkeypatch.setattr(recipe, "evaluate_model", attempts)
    s: Any = SimpleNamespace(
        settings=override(Settings(), changes),
        tasks={"heldout": list(range(300))}.get,
        policy=lambda name: None,
        ranks=SimpleNamespace(first=False),
    )
    assert recipe._score(s, name, "heldout") == ([], [])
    assert asked == [(*wanted, 1.0), (wanted[0], 1, 0.0)]


def test_a_gain_is_over_the_tasks_of_both_and_over_the_better_by_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = {
        "midtrained": {"a": 0.5},
        "start": {"a": 0.25, "b": 0.75, "c": 0.0},
        "final": {"a": 0.75, "b": 0.5, "c": 0.25},
    }

    def solved(run: Any, policy: str, within: int | None = None, *, greedy: bool = False) -> dict[str, float]:
        return {task: round(share) if greedy else share for task, share in sampled[policy].items()}

    monkeypatch.setattr(report, "solved_by_task", solved)
    score = {"pass_within": {"12": 0.0}}
    found = report.gained(SimpleNamespace(), {name: score for name in sampled})  # type: ignore[arg-type]
    assert (found["pass_at_1"], found["pass_greedy"], found["best_of_k"]) == (0.25, 1.0, 0.0)
    over = {"pass_at_1": np.mean([0.5, -0.25, 0.25]), "pass_greedy": 0.0, "best_of_k": 0.0}
    assert found["over_stronger"] == pytest.approx(over)
    within = found["within_12"]["heldout"]
    assert (within["over"], within["gain"], within["n_tasks"]) == ("start", over["pass_at_1"], 3)
