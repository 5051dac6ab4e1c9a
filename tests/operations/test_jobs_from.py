"""A job file made from a run trains with the run's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_nb import cli
from composer_nb.jobs.file import load_job
from composer_nb.settings import Settings, override
from composer_nb.trainer.recipe.launch import settle
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.services.journal import Journal, request_change


def test_a_job_file_has_the_settings_of_a_run_and_what_was_changed_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").touch()
    given = {"seed": 3, "rl.steps": 20, "env.tasks": "tasks.jsonl", "sft.sharpness": [1.0, 1.5], "data.rl_turns": 5}
    run = create(tmp_path / "runs", "tour")
    settle(run, override(Settings(), given))
    journal = Journal(run)
    for number, (name, value, step) in enumerate(
        [("services.bound", 4, 6), ("services.ahead", 3, None), ("reward.weights", {"solved": 2.0}, 9)], 1
    ):
        request_change(run, name, value)
        journal.judge(number, step)
    journal.close()

    assert cli.main(["jobs", "from", str(run.path), "--out", "made/again.yml"]) == 0
    [node] = load_job(Path("made/again.yml")).nodes.values()
    assert node.notebook.name == "01_tour.ipynb" and node.notebook.is_file()
    again = override(Settings(), {**node.parameters["overrides"], "seed": node.parameters["seed"]})
    live = {"services.bound": 4, "reward.weights": {"solved": 2.0}, "env.tasks": str(tmp_path / "tasks.jsonl")}
    assert again == override(Settings(), given | live), "a refused change is left out, and paths hold everywhere"
    text = Path("made/again.yml").read_text()
    assert "# services.bound was set to 4 before step 7" in text and "services.ahead" not in text


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
