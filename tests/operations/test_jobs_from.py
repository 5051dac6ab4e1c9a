"""A job file made from a run trains with the run's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_nb import cli
from composer_nb.jobs.file import load_job
from composer_nb.settings import Settings, override
from composer_nb.trainer.recipe.launch import settle
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.services.journal import Journal, request_change


def began(tmp_path: Path, **given: Any) -> RunDir:
    run = create(tmp_path / "runs", "tour")
    settle(run, override(Settings(), given))
    return run


def test_a_job_file_has_the_settings_of_a_run_and_what_was_changed_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").touch()
    Path("code").mkdir()
    given = {"seed": 3, "rl.steps": 20, "sft.sharpness": [1.0, 1.5], "data.rl_turns": 5}
    named = {"env.tasks": "tasks.jsonl", "data.code": "code", "services.store": "made/later"}
    run = began(tmp_path, **given, **named)
    journal = Journal(run)
    live = [("services.bound", "3", 0), ("services.bound", 4, 6), ("services.ahead", 3, None), ("rl.lr", 1e-3, 9)]
    for number, (name, value, step) in enumerate(live, 1):
        request_change(run, name, value)
        journal.judge(number, step)
    journal.close()

    monkeypatch.chdir("/")
    out = tmp_path / "made" / "the second try.yml"
    assert cli.main(["jobs", "from", str(run.path), "--out", str(out), "--json"]) == 0
    job = load_job(out)
    [node] = job.nodes.values()
    assert job.name == "the-second-try" and node.notebook.name == "01_tour.ipynb" and node.notebook.is_file()
    again = override(Settings(), {**node.parameters["overrides"], "seed": node.parameters["seed"]})
    everywhere = {name: str(tmp_path / value) for name, value in named.items()}
    assert again == override(Settings(), given | everywhere | {"services.bound": 4, "rl.lr": 1e-3})
    assert "# services.bound was changed live to 3 before step 1, 4 before step 7; here" in out.read_text()
    assert "services.ahead" not in out.read_text(), "a refused change is left out"
    told = json.loads(capsys.readouterr().out)["live"]
    assert told[1] == {"name": "services.bound", "value": 4, "step": 7} and len(told) == 3


def test_what_a_job_could_not_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class Mine: ...\n")
    run = began(tmp_path, **{"env.tasks": "mine:Mine"})
    assert cli.main(["jobs", "from", str(run.path)]) == 2
    assert "env.tasks='mine:Mine'" in (said := capsys.readouterr().err) and "PYTHONPATH" in said
    Path("kept.yml").write_text("mine")
    assert cli.main(["jobs", "from", str(began(tmp_path / "other").path), "--out", "kept.yml"]) == 2
    assert "kept.yml: is there already" in capsys.readouterr().err and Path("kept.yml").read_text() == "mine"


@pytest.mark.slow
def test_the_job_of_a_run_without_services_ends_with_its_weights(tiny_run: RunDir, tmp_path: Path) -> None:
    assert cli.main(["jobs", "from", str(tiny_run.path), "--out", str(tmp_path / "again.yml")]) == 0
    assert cli.main(["jobs", "run", str(tmp_path / "again.yml"), "--runs", str(tmp_path / "jobs")]) == 0
    again = tmp_path / "jobs/again/runs/tour/weights"
    names = [path.name for path in (tiny_run.path / "weights").iterdir()]
    assert {"midtrained", "start", "final"} <= set(names)
    for name in names:
        file = f"{name}/model.safetensors"
        assert (again / file).read_bytes() == (tiny_run.path / "weights" / file).read_bytes(), name
