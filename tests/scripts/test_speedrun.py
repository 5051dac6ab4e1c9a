"""The rules of the speedrun, each broken once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.files import write_json
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.settings import Settings, override, to_dict
from composer_nb.trainer.records.rundir import RunDir, create
from scripts import speedrun as module


@pytest.fixture
def task() -> Task:
    solution = {"f.py": "def f(x):\n    return 2 * x\n"}
    hidden = "from f import f\n\n\ndef test_0():\n    assert f(2) == 4\n"
    wrong = {"f.py": solution["f.py"].replace("*", "+")}
    return Task(
        id="t",
        instruction="fix the tests",
        files=wrong,
        tests={"hidden.py": hidden},
        solution=solution,
        source_scope=("f.py",),
    )


@pytest.fixture
def speedrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "FEWEST", 2)
    return module


def run_of(tmp_path: Path, scored: list[Task], changed: dict[str, Any]) -> RunDir:
    run = create(tmp_path, "run")
    settings = to_dict(override(Settings(), {name: value for name, value in changed.items() if name != "model.start"}))
    settings["model"]["start"] = changed.get("model.start", "")
    write_json(run.path / "settings.json", settings)
    save_tasks(scored, run.path / "data" / "heldout.jsonl")
    return run


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"rl.lr": 1e-3, "midtrain.steps": 10}, None),
        ({"limits.tokens": 500, "eval.samples": 8}, None),
        ({"limits.turns": 17}, "limits above"),
        ({"limits.turn_tokens": 65}, "limits above"),
        ({"eval.samples": 3}, "eval.samples below 4"),
        ({"model.start": "elsewhere"}, "begins with a checkpoint"),
    ],
)
def test_settings_break_rules(
    speedrun: Any, task: Task, tmp_path: Path, changed: dict[str, Any], why: str | None
) -> None:
    tasks = [task.model_copy(update={"id": f"t{number}"}) for number in range(3)]
    found = speedrun.broken_rules(run_of(tmp_path, tasks, changed), {each.id: each for each in tasks})
    assert (not found) if why is None else (len(found) == 1 and why in found[0])


def test_scored_tasks_are_the_official_ones_and_enough(speedrun: Any, task: Task, tmp_path: Path) -> None:
    tasks = [task.model_copy(update={"id": f"t{number}"}) for number in range(3)]
    official = {each.id: each for each in tasks}
    easier = task.model_copy(update={"id": "t2", "instruction": "fix f: double it"})
    for scored in ([*tasks[:2], easier], tasks[:1]):
        [found] = speedrun.broken_rules(run_of(tmp_path / str(len(scored)), scored, {}), official)
        assert "held-out tasks are not at least 2" in found
