"""The rules of the speedrun, each broken once, and the row of an entry."""

from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.settings import Settings, override, to_dict
from scripts.bench import speedrun as module


@pytest.fixture
def task() -> Task:
    files, hidden = (
        {"f.py": "def f(x):\n    return 2 + x\n"},
        "from f import f\n\n\ndef test_0():\n    assert f(3) == 6\n",
    )
    solution = {"f.py": files["f.py"].replace("+", "*")}
    more: dict[str, Any] = {"tests": {"hidden.py": hidden}, "solution": solution, "source_scope": ("f.py",)}
    return Task(id="t", instruction="fix the tests", files=files, **more)


def run_of(tmp_path: Path, scored: list[Task], changed: dict[str, Any]) -> RunDir:
    run = create(tmp_path, "run")
    settings = to_dict(override(Settings(), {name: value for name, value in changed.items() if name != "model.start"}))
    settings["model"]["start"] = changed.get("model.start", "")
    write_json(run.path / "settings.json", settings)
    write_json(run.path / "provenance.json", {"package_digest": "one"})
    save_tasks(scored, run.path / "data" / "heldout.jsonl")
    return run


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"limits.tokens": 500, "eval.samples": 8}, None),
        ({"limits.turns": 17}, "limits above"),
        ({"eval.samples": 3}, "eval.samples below 4"),
        ({"model.start": "elsewhere"}, "begins with a checkpoint"),
        ({"env.tools": "cursor", "env.renderer": "qwen"}, "another environment"),
    ],
)
def test_settings_break_rules(
    monkeypatch: pytest.MonkeyPatch, task: Task, tmp_path: Path, changed: dict[str, Any], why: str | None
) -> None:
    monkeypatch.setattr(module, "FEWEST", 2)
    tasks = [task.model_copy(update={"id": f"t{number}"}) for number in range(3)]
    official = {scored.id: scored for scored in tasks}
    broken = module.broken_rules(run_of(tmp_path, tasks, changed), official)
    assert (not broken) if why is None else (len(broken) == 1 and why in broken[0])
    if not changed:  # scored tasks are the official ones, and enough
        easier = task.model_copy(update={"id": "t2", "instruction": "fix f: double it"})
        for scored in ([*tasks[:2], easier], tasks[:1]):
            [rule] = module.broken_rules(run_of(tmp_path / str(len(scored)), scored, {}), official)
            assert "held-out tasks are not at least 2" in rule


@pytest.fixture
def complete(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run whose two held-out tasks have five attempts each; two of eight samples solve theirs in one call."""
    monkeypatch.setattr(module, "build_report", lambda run: {"eval": {"final": {"pass_within": {"12": 0.25}}}})
    tasks = [task.model_copy(update={"id": f"t{number}"}) for number in range(2)]
    run = run_of(tmp_path, tasks, {})
    call = Turn(call='{"name": "finish", "arguments": {}}', observation="")
    attempts = []
    for number, owner in enumerate([*[tasks[0]] * 4, *[tasks[1]] * 4, *tasks]):
        rollout = Rollout(task_id=owner.id, segments=(), turns=(call,), files={}, stop="finished")
        grade = Grade(status="graded", tests={"t": number in (0, 5, 8, 9)})
        attempts.append(Attempt(task=owner, rollout=rollout, grade=grade))
    save_attempts(run.path / "rollouts" / "eval_final.parquet", attempts)
    return run


def test_scores_are_counted_from_the_rollouts(complete: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.within(complete) == 0.25
    monkeypatch.setattr(module, "build_report", lambda run: {"eval": {"final": {"pass_within": {"12": 0.9}}}})
    with pytest.raises(ValueError, match=r"solve 0\.250 in 12 calls, and its report says otherwise"):
        module.within(complete)


INTERVALS = [
    ((0, 1, 2), (0.514, 0.571, 0.464), "0.516 (0.383 to 0.649)", "open"),
    ((3, 4, 5), (0.60, 0.61, 0.62), "0.610 (0.585 to 0.635)", "reached"),
    (range(6), (0.30, 0.32, 0.34, 0.40, 0.42, 0.44), "0.370 (0.310 to 0.430)", "missed"),
]
"""Seeds, the share that each solves, its mean with scipy's interval by Student's t, and the verdict."""


@pytest.mark.parametrize(("seeds", "solved", "interval", "verdict"), INTERVALS)
def test_a_row_has_intervals_over_seeds_and_the_times_of_the_last_three(
    monkeypatch: pytest.MonkeyPatch, seeds: Any, solved: tuple[float, ...], interval: str, verdict: str
) -> None:
    monkeypatch.setattr(module, "within", lambda seed: solved[list(seeds).index(seed)])
    monkeypatch.setattr(module, "seconds", lambda seed: 100.0 * seed)
    cells = [cell.strip() for cell in module.row(list(seeds)).strip("|").split("|")]
    assert cells[2] == interval and cells[4] == verdict
    last = list(seeds)[-3:]
    assert cells[0].startswith(f"{100 * last[1]} (") and cells[1] == " ".join(str(100 * seed) for seed in last)


@pytest.mark.parametrize(("seeds", "fault"), [((0, 1), "seeds"), ((0, 1, 3), "seeds"), ((3, 4, 5), "more settings")])
def test_an_entry_is_of_one_set_of_seeds_or_both(tmp_path: Path, task: Task, seeds: Any, fault: str) -> None:
    runs = [run_of(tmp_path / str(seed), [task], {"seed": seed, "rl.lr": 1e-4 * (1 + seed)}) for seed in seeds]
    with pytest.raises(ValueError, match=fault):
        module.judge(runs)
