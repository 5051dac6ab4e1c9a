"""A job file made from a run trains with the run's settings."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from composer_nb import cli
from composer_nb.jobs.file import load_job
from composer_nb.trainer.recipe.launch import settle
from composer_nb.trainer.recipe.replay import settings_after
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.services.journal import Journal
from composer_nb.trainer.settings import Settings, override


def began(tmp_path: Path, **settings: Any) -> RunDir:
    run = create(tmp_path / "runs", "tour")
    settle(run, override(Settings(), settings))
    return run


def taken_up(run: RunDir, changes: list[tuple[str, Any, int | None]]) -> None:
    with closing(Journal(run)) as journal:
        for number, (name, value, step) in enumerate(changes, 1):
            journal.ask(name, value)
            journal.judge(number, step)


def test_a_job_file_has_the_settings_of_a_run_and_what_was_changed_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").touch()
    Path("code").mkdir()
    settings = {"seed": 3, "rl.steps": 20, "sft.sharpness": [1.0, 1.5], "data.rl_turns": 5}
    named = {"env.tasks": "tasks.jsonl", "data.code": "code", "services.store": "made/later"}
    run = began(tmp_path, **settings, **named, **{"services.changes": {"9": {"rl.group": 4}}})
    live = [("services.bound", "3", 0), ("services.bound", 4, 6), ("services.ahead", 3, None), ("rl.group", 4, 8)]
    taken_up(run, [*live, ("reward.effort.weight", 0.1, 8)])

    monkeypatch.chdir("/")
    out = tmp_path / "made" / "the second try.yml"
    assert cli.main(["jobs", "from", str(run.path), "--out", str(out), "--json"]) == 0
    job = load_job(out)
    [node] = job.nodes.values()
    assert job.name == "the-second-try" and node.notebook.name == "01_tour.ipynb" and node.notebook.is_file()
    settings_of_job = override(Settings(), {**node.parameters["overrides"], "seed": node.parameters["seed"]})
    everywhere = {name: str(tmp_path / value) for name, value in named.items()}
    timed = {"7": {"services.bound": 4}, "9": {"rl.group": 4, "reward.effort.weight": 0.1}}
    # A refused change is left out; one before the first step is a setting.
    expected = settings | everywhere | {"services.bound": 3, "services.changes": timed}
    assert settings_of_job == override(Settings(), expected)
    assert "# services.changes: " in out.read_text()
    assert json.loads(capsys.readouterr().out)["live"] == {"1": {"services.bound": "3"}} | timed


def test_a_fork_repeats_no_change_of_the_steps_before_it(tmp_path: Path) -> None:
    """Otherwise a planned change would come again, over a later one and over the fork's own settings."""
    run = began(tmp_path, **{"services.changes": {"3": {"services.bound": 4}, "9": {"services.bound": 3}}})
    taken_up(run, [("services.bound", 4, 2), ("services.bound", 6, 4)])
    expected = {2: (2, ["3", "9"]), 3: (4, ["9"]), 8: (6, ["9"])}
    for step, (bound, planned) in expected.items():
        settings = settings_after(run, step)
        assert (settings.services.bound, [*settings.services.changes]) == (bound, planned)


def test_changes_are_checked_against_the_settings_of_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = began(tmp_path, **{"services.ahead": 1, "services.bound": 2})
    assert cli.main(["set", str(run.path), "services.ahead=3"]) == 2
    assert "services.bound=2: must be at least services.ahead (3)" in capsys.readouterr().err
    taken_up(run, [("services.bound", 4, 6)])
    assert cli.main(["set", str(run.path), "services.ahead=3", 'reward.weights={"solved": 2}', "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"services.ahead": 3, "reward.weights": {"solved": 2.0}}
    assert run.query("SELECT value FROM change WHERE name = 'services.ahead'") == [("3",)], "a number, not its text"


def test_changes_that_a_run_could_not_make_are_refused_before_it_starts() -> None:
    wrong = {
        "rl.lr cannot be changed while a run is live": {"5": {"rl.lr": 1e-3}},
        "must be at least services.ahead": {"5": {"services.ahead": 3}},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            override(Settings(), {"services.changes": changes})
    with pytest.raises(ValueError, match=r"services\.changes: needs services\.on=true"):
        override(Settings(), {"services.changes": {"2": {"rl.group": 4}}, "services.on": False})


def test_what_a_job_could_not_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class Mine: ...\n")
    run = began(tmp_path, **{"env.tasks": "mine:Mine"})
    assert cli.main(["jobs", "from", str(run.path)]) == 2
    assert "env.tasks='mine:Mine'" in (error := capsys.readouterr().err) and "PYTHONPATH" in error
    Path("kept.yml").write_text("mine")
    assert cli.main(["jobs", "from", str(began(tmp_path / "other").path), "--out", "kept.yml"]) == 2
    assert "kept.yml: is there already" in capsys.readouterr().err and Path("kept.yml").read_text() == "mine"


@pytest.mark.slow
def test_the_job_of_a_run_without_services_ends_with_its_weights(tiny_run: RunDir, tmp_path: Path) -> None:
    assert cli.main(["jobs", "from", str(tiny_run.path), "--out", str(tmp_path / "again.yml")]) == 0
    assert cli.main(["jobs", "run", str(tmp_path / "again.yml"), "--runs", str(tmp_path / "jobs")]) == 0
    weights = tmp_path / "jobs/again/runs/tour/weights"
    names = [path.name for path in (tiny_run.path / "weights").iterdir()]
    assert {"midtrained", "start", "final"} <= set(names)
    for name in names:
        file = f"{name}/model.safetensors"
        assert (weights / file).read_bytes() == (tiny_run.path / "weights" / file).read_bytes(), name
