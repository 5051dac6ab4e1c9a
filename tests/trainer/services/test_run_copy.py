"""A run's copy in a store is that of one moment, whatever happens while it is brought up to date."""

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.run_copy import RunCopy, RunMoved, restore
from composer_nb.trainer.services.services import store_url
from composer_nb.trainer.settings import Settings, override
from composer_nb.trainer.versions.manifest import DamagedVersion
from composer_nb.trainer.versions.store import StoreError, VersionStore


def contents(run: RunDir) -> dict[str, Any]:
    files = {path.relative_to(run.path).as_posix(): path for path in run.path.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if "run.db" not in name} | {
        "steps": run.steps("rl")
    }


def advance(run: RunDir, step: int) -> None:
    (run.path / "rollouts" / f"rl_{step:05d}_0.parquet").write_text(f"batch {step}")
    (run.path / "settings.json").write_text(f'{{"seed": {step}}}')
    run.commit("rl", step, {"w": torch.full((3,), float(step))}, [(step, {"solved": step})])


def test_a_copy_is_restored_as_it_was_and_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = RunDir(tmp_path / "here" / "tour-20260101-120000"), f"{tmp_path}/store"
    copy, source = RunCopy(run.path, store), f"{store}/{run.path.name}"
    for step in (1, 2):
        advance(run, step)
        copy.push()
    before, blobs = contents(run), {*VersionStore(f"{source}/run").names()}
    # A push that is cut off at any of its writes leaves the copy as it was.
    advance(run, 3)
    put = VersionStore.put
    for last in range(5):
        writes = [put] * min(last, 1)  # each goes on where the last was cut off
        with monkeypatch.context() as patch:
            patch.setattr(
                VersionStore, "put", lambda store, *values, writes=writes: (writes or [refuse]).pop()(store, *values)
            )
            with pytest.raises(StoreError):
                copy.push()
        elsewhere = RunDir(restore(source, tmp_path / f"there{last}"))
        assert contents(elsewhere) == before and elsewhere.checkpoint("rl")[0] == 2
    assert (tmp_path / "there0" / "tour").resolve() == tmp_path / "there0" / run.path.name
    copy.push()
    after = {*VersionStore(f"{source}/run").names()}
    assert len(after) == len(blobs) + 1, "what is no longer needed is removed"
    with pytest.raises(ValueError, match="is there: resume it"):
        restore(source, tmp_path / "there0")
    RunCopy(elsewhere.path, store).push()
    with pytest.raises(RunMoved, match="goes on elsewhere"):
        copy.push()
    blob = next(name for name in VersionStore(f"{source}/run").names() if name != "index.json")
    VersionStore(f"{source}/run").write(blob, b"damaged")
    with pytest.raises(DamagedVersion):
        restore(source, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere" / run.path.name).exists()


def refuse(*values: Any) -> None:
    raise StoreError("try again later")


def test_two_runs_may_share_a_store(tmp_path: Path):
    shared = override(Settings(), {"services.store": str(tmp_path)})
    assert store_url(Path("runs/a"), shared) != store_url(Path("runs/b"), shared)
