"""The run directory: what is durable, what a killed run leaves, and what cleaning up after it keeps."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from composer_nb.trainer.records.rundir import RunDir, create, provenance, versions
from composer_nb.trainer.services.finished import FinishedRollouts


def state(value: float) -> dict[str, Tensor]:
    return {"master": torch.full((5,), float(value)), "step": torch.tensor(float(value))}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def files(run: RunDir) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


# Stages and steps


def test_a_damaged_finished_rollout_is_named(run: RunDir):
    (run.path / "rollouts").mkdir(exist_ok=True)
    finished = FinishedRollouts(run.path)
    (run.path / "rollouts" / "finished").mkdir()
    (run.path / "rollouts" / "finished" / "3-1-0.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"finished/3-1-0\.safetensors: a stored attempt is damaged"):
        finished.load((3, 1, 0), SimpleNamespace(id="t"))  # type: ignore[arg-type]
    finished.remove_others((), below=3)  # of a later slot: another coordinator's
    assert finished.names() == {(3, 1, 0)}
    finished.remove_others(())
    assert not finished.names()


def test_a_damaged_database_and_damaged_settings_are_named(run: RunDir):
    for text, says in ((None, "settings.json is not there"), ("{", "settings.json: damaged"), ("[]", "no JSON object")):
        if text is not None:
            (run.path / "settings.json").write_text(text)
        with pytest.raises(ValueError, match=says):
            run.settings()
    for file in run.path.glob("run.db*"):
        file.unlink()
    (run.path / "run.db").write_bytes(b"not a database" * 99)
    with pytest.raises(ValueError, match=r"run.db: .*not a database"):
        run.query("SELECT 1")


# Interruptions


KILLED = """
import sys, os, signal, torch
from pathlib import Path
from composer_nb.trainer.records.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
for step in range(1, 10_000):
    run.log("rl", step, {"x": step})
    run.commit("rl", step, {"master": torch.full((200_000,), float(step))}, [(step, {"x": step})], [(step, {"t": 1})])
    print(step, flush=True)
"""


def test_a_run_that_is_killed_at_any_moment_has_a_checkpoint_that_fits_its_books(run: RunDir):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 5:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    reopened = RunDir(run.path)
    reopened.clean()
    step, tensors, _ = reopened.checkpoint("rl")
    assert step >= 5 and bool((tensors["master"] == step).all())
    assert [row["step"] for row in reopened.steps("rl")] == list(range(1, step + 1))
    assert reopened.ledger() == {"t": step} and len(files(reopened)) == 1
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == step


def test_cleaning_removes_what_is_half_written_and_rebuilds_the_metrics(run: RunDir):
    run.commit("rl", 2, state(2), [(1, {"x": 1}), (2, {"x": 2})])
    run.log("rl", 2, {"x": 2})
    run.log("rl", 3, {"x": 3})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    half = run.path / "weights" / "final.part"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    whole = run.path / "weights" / "final"
    whole.mkdir()
    (whole / "model.safetensors").write_text("whole")
    for name in ("data/a.npz.part.npz", "rollouts/b.parquet.part"):
        (run.path / name).write_text("half")
    for name in ("data/a.npz", "rollouts/b.parquet", "figures/parts.png"):
        (run.path / name).write_text("whole")
    run.clean()
    run.clean()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"stage": "rl", "step": 1, "x": 1}, {"stage": "rl", "step": 2, "x": 2}]
    assert not half.exists() and (whole / "model.safetensors").read_text() == "whole"
    names = sorted(path.name for folder in ("data", "rollouts", "figures") for path in (run.path / folder).iterdir())
    assert names == ["a.npz", "b.parquet", "parts.png"]


@pytest.mark.parametrize("keep", [0, 20, -3, None], ids=["empty", "header", "tail", "missing"])
def test_a_damaged_checkpoint_is_named(run: RunDir, keep: int | None):
    run.commit("rl", 1, state(1), [])
    file = run.path / "checkpoints" / "rl-000001.safetensors"
    if keep is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"rl-000001.safetensors: the checkpoint is damaged or missing"):
        run.checkpoint("rl")


# Where runs lie


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="run name"):
        create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_provenance_names_code_and_machine(monkeypatch):
    facts = provenance()
    assert facts["versions"] == versions() and facts["versions"]["torch"] == torch.__version__
    assert len(facts["package_digest"]) == 64 and facts["package_digest"] == provenance()["package_digest"]
    assert facts["cores"] >= 1 and json.loads(json.dumps(facts)) == facts
    monkeypatch.setattr("composer_nb.trainer.records.provenance._git", lambda *_: None)
    without = provenance()
    assert without["commit"] is None and without["changed"] is None, "unknown is not unchanged"
