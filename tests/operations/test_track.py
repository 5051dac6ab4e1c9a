"""Trackers, against the real libraries, all of them on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb import cli
from composer_nb.harness.files import write_json
from composer_nb.operations import track
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.records.rundir import RunDir

LINES = [
    {"stage": "sft", "step": 1, "loss": 0.5, "name": "x"},
    {"stage": "rl", "step": 1, "reward": 0.25, "time": {"wall_s": 3.0}},
    {"stage": "rl", "step": 2, "reward": 0.5, "best": None},
    {"stage": "rl", "step": 2, "reward": 0.5},  # made again after a crash
    {"stage": "rl", "step": 3, "reward": 0.75, "done": True},
]
WANTED = {"sft/loss": [(1, 0.5)], "rl/reward": [(1, 0.25), (2, 0.5), (3, 0.75)]}


def line(row: Any) -> str:
    return json.dumps(row) + "\n"


@pytest.fixture
def run(copy_of: Callable[[Any], Any]) -> Path:
    path: Path = copy_of(example_run()).path
    path = path.rename(path.parent / "a user's run")
    (path / "excerpt.json").unlink()
    (path / "metrics.jsonl").write_text("".join(map(line, LINES[:3])) + line(LINES[3])[:9])
    return path


@given(st.lists(st.integers(0, 400), max_size=4), st.integers(1, 6))
def test_each_step_is_sent_once_wherever_reading_stops_also_when_steps_are_made_again(
    cuts: list[int], lost: int
) -> None:
    """A run that is resumed writes its metrics anew, without the steps that it lost, and then makes these again."""
    rows = [line({"stage": stage, "step": step, "x": step}) for stage in "ab" for step in range(1, 8)]
    text, figures_sent = "".join(rows), list[tuple[str, int]]()
    tracker = {"mlflow": lambda *_: (lambda figures, step: figures_sent.append((*figures, step)), lambda: None)}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(track, "TRACKERS", tracker)
        run = RunDir(Path(folder))
        write_json(run.path / "settings.json", {})
        for metrics in (*(text[:end] for end in sorted(cuts)), "".join(rows[:-lost]), text):
            (run.path / "metrics.jsonl").write_text(metrics)
            track.follow(run.path, "mlflow", lambda: True)
    assert figures_sent == [(f"{stage}/x", step) for stage in "ab" for step in range(1, 8)]


def board(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow(run: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent}/mlflow.db")
    [experiment] = [candidate for candidate in client.search_experiments() if candidate.name == track.PROJECT]
    [recorded] = client.search_runs([experiment.experiment_id])
    assert recorded.data.params["rl.group"] == "8" and recorded.info.status == "FINISHED"
    assert recorded.data.tags["mlflow.runName"] == run.name
    names = recorded.data.metrics
    return {name: [(m.step, m.value) for m in client.get_metric_history(recorded.info.run_id, name)] for name in names}


def trackio(run: Path) -> dict[str, list[tuple[int, float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(track.PROJECT, run.name)
    return {name: [(row["step"], row[name]) for row in logs if name in row] for name in ("sft/loss", "rl/reward")}


def records(raw: bytes) -> Iterator[bytes]:
    """Yield the records of a file of W&B: LevelDB's log format after a header of 7 bytes."""
    at, record = 7, b""
    while at < len(raw):
        room = 32_768 - at % 32_768
        if room < 7:  # no header fits into the rest of a block
            at += room
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        record += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb(run: Path) -> dict[str, list[tuple[int, float]]]:
    from wandb.proto import wandb_internal_pb2

    series: dict[str, list[tuple[int, float]]] = {}
    for file in (run / "trackers").glob("wandb/offline-run-*/run-*.wandb"):
        for data in records(file.read_bytes()):
            items = wandb_internal_pb2.Record.FromString(data).history.item
            row = {field.key or field.nested_key[0]: json.loads(field.value_json) for field in items}
            for name in row:
                if "/" in name and not name.endswith("/step"):
                    series.setdefault(name, []).append((row[f"{name.partition('/')[0]}/step"], row[name]))
    return series


PROGRAM = """\
import json, sys
from pathlib import Path
from composer_nb.operations.track import follow
run, name, here, rest = Path(sys.argv[1]), *sys.argv[2:]
follow(run, name, lambda: True)
with (run / "metrics.jsonl").open("a") as file:
    file.write(rest)
follow(run, name, lambda: True)
sys.path.insert(0, here)
import test_track
print("found", json.dumps(test_track.READ[name](run)))
"""
READ = {"tensorboard": board, "mlflow": mlflow, "trackio": trackio, "wandb": wandb}


@pytest.mark.parametrize("name", READ)
def test_what_was_sent_is_there_once_also_after_an_end_in_between(run: Path, name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed; the extra trackers brings it")
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    quiet["TRACKIO_DIR"] = str(tmp_path / "trackio")
    remaining_lines = line(LINES[3])[9:] + line(LINES[4])
    command = [sys.executable, "-c", PROGRAM, str(run), name, str(Path(__file__).parent), remaining_lines]
    process = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=True)
    [series] = [json.loads(text[6:]) for text in process.stdout.splitlines() if text.startswith("found ")]
    assert {key: sorted(map(tuple, rows)) for key, rows in series.items()} == WANTED


def test_a_service_that_fails_is_named_once_and_gets_everything_later(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(track, "EVERY_S", 0.01)
    received: list[tuple[int, float]] = []
    tries = 0

    def log(figures: Any, step: int) -> None:
        nonlocal tries
        tries += 1
        if tries in (2, 3, 4):
            raise ConnectionError("no route")
        received.extend((step, value) for value in figures.values())

    monkeypatch.setattr(track, "TRACKERS", {"mlflow": lambda *_: (log, lambda: None)})
    track.follow(run, "mlflow", lambda: len(received) >= 3)
    assert received == [(1, 0.5), (1, 0.25), (2, 0.5)]
    assert [record.getMessage() for record in caplog.records] == ["mlflow: no route; what is missing is sent later"]
    (run / "trackers" / "mlflow.json").unlink()
    tries = 1
    with pytest.raises(ConnectionError):
        track.follow(run, "mlflow", lambda: True)
    with track.tracking(run, ["mlflow"]):
        tries = 1
    assert "composer-nb track" in caplog.records[-1].getMessage()


def test_an_unknown_tracker_is_named_and_nothing_is_written_into_an_excerpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    stored = example_run().path

    def state() -> list[tuple[Path, int]]:
        return sorted((path, path.stat().st_mtime_ns) for path in (stored, stored.parent, *stored.rglob("*")))

    before = state()
    assert cli.main(["track", str(stored), "--to", "tensorboard,neptune"]) == 2
    assert "--track neptune: there are tensorboard, wandb, trackio, mlflow" in capsys.readouterr().err
    assert cli.main(["track", str(stored), "--to", "tensorboard"]) == 0
    assert state() == before
    [home] = (tmp_path / "runs" / "tracked").iterdir()
    assert home.name.startswith("example-") and {path.name for path in home.iterdir()} == {"tensorboard", "trackers"}
    assert board(home)["rl/reward"]
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    assert cli.main(["track", str(stored), "--to", "wandb"]) == 2
    assert "pip install -e '.[trackers]'" in capsys.readouterr().err
