"""Trackers: the figures of a run's steps in TensorBoard, Weights & Biases, trackio or MLflow.

    follow(run.path, "mlflow", until=lambda: False)     send new figures every few seconds

A tracker reads the run's `metrics.jsonl`, so it cannot stop or slow the training. A run may be sent while it is live, later, or
to several trackers. `trackers/NAME.json` in the run's folder records the steps sent, from which the same command continues. Each
step of a stage is sent once, under the stage's name, as `rl/reward`. Addresses and credentials come from each service's own
variables: WANDB_MODE and WANDB_API_KEY, TRACKIO_DIR, MLFLOW_TRACKING_URI (default: mlflow.db beside the run).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe.reader import ReadOnly

log = logging.getLogger(__name__)
PROJECT = "composer_nb"
EVERY_S, LATEST_S = 3.0, 300.0
"""Seconds between two reads; after a failure, the wait doubles up to the second number."""


class Tracker(Protocol):
    """A destination for figures. It may raise any exception of its library."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log the figures of a step, whose names begin with its stage."""

    def close(self) -> None:
        """Send the remaining figures."""


class TensorBoard:
    def __init__(self, run: ReadOnly, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, run: ReadOnly, settings: Mapping[str, Any]) -> None:
        import wandb

        name = run.path.name
        self._run = wandb.init(
            project=PROJECT,
            name=name,
            id=re.sub(r"[^\w.-]", "-", name),
            resume="allow",
            dir=str(run.path / "trackers"),
            config=dict(settings),
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        stage = next(iter(figures)).partition("/")[0]
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({**figures, f"{stage}/step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, run: ReadOnly, settings: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT, name=run.path.name, resume="allow", config=dict(settings), embed=False
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run: ReadOnly, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        name = run.path.name
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.parent}/mlflow.db")
        found = self._client.get_experiment_by_name(PROJECT)
        place = found.experiment_id if found else self._client.create_experiment(PROJECT)
        quote = '"' if "'" in name else "'"
        there = self._client.search_runs([place], f"tags.mlflow.runName = {quote}{name}{quote}")
        made = there[0] if there else self._client.create_run(place, run_name=name)
        self._id = made.info.run_id
        if not there:
            params = [Param(each, str(value)[:500]) for each, value in settings.items()]
            for at in range(0, len(params), 100):  # the server refuses more
                self._client.log_batch(self._id, params=params[at : at + 100])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in figures.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, Callable[[ReadOnly, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def parse(names: str) -> list[str]:
    """Return the trackers of a comma-separated list. Raises ValueError for one that does not exist or is not installed."""
    found = [name for name in names.split(",") if name]
    for name in found:
        if name not in TRACKERS:
            raise ValueError(f"--track {name}: there are {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f"--track {name}: it is not installed; pip install 'composer-nb[trackers]' brings it")
    return found


@dataclass(slots=True)
class Sent:
    """The lines and steps already sent to a tracker."""

    offset: int = 0
    """Number of bytes of metrics.jsonl already sent."""
    steps: dict[str, int] = field(default_factory=dict)
    """Last step of each stage."""

    def rows(self, raw: bytes) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, figures) of the complete lines in `raw`, which begins at the offset. Each counts as sent once the next is
        requested. Steps that are repeated after a crash are skipped."""
        for line in raw.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            row = json.loads(line)
            stage, step = row.pop("stage"), row.pop("step")
            figures = {f"{stage}/{name}": float(value) for name, value in row.items() if _plain(value)}
            if step > self.steps.get(stage, 0) and figures:
                yield step, figures
                self.steps[stage] = step
            self.offset += len(line)


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def follow(path: Path, name: str, until: Callable[[], bool]) -> None:
    """Send a run's figures to the tracker `name` until `until` returns true. A failure is logged once and retried at growing
    intervals; at the end it is raised. Raises FileNotFoundError if there is no run."""
    run, place = ReadOnly(path), path / "trackers" / f"{name}.json"
    place.parent.mkdir(exist_ok=True)
    sent = Sent(**json.loads(place.read_text())) if place.is_file() else Sent()
    tracker, rest = None, EVERY_S
    try:
        while True:
            ended = until()
            try:
                tracker = tracker or TRACKERS[name](run, dict(_dotted(run.settings())))
                _send(run.path / "metrics.jsonl", sent, tracker)
                rest = EVERY_S
            except Exception as error:  # of any of the four libraries
                if ended:
                    raise
                if rest == EVERY_S:
                    log.warning("%s: %s; what is missing is sent later", name, error)
                rest = min(2 * rest, LATEST_S)
            write_json(place, asdict(sent))
            if ended:
                return
            until_then = time.monotonic() + rest
            while time.monotonic() < until_then and not until():
                time.sleep(0.2)
    finally:
        if tracker is not None:
            tracker.close()


def _send(metrics: Path, sent: Sent, tracker: Tracker) -> None:
    if metrics.is_file():
        with metrics.open("rb") as file:
            file.seek(sent.offset)
            for step, figures in sent.rows(file.read()):
                tracker.log(figures, step)


class Tracking:
    """Trackers that follow a run while this context is open, each in its own thread. A failure at the end is logged."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=(path, name), daemon=True) for name in names]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, path: Path, name: str) -> None:
        try:
            follow(path, name, self._ended.is_set)
        except Exception as error:  # the library's
            log.warning("%s: %s; composer-nb track %s --to %s goes on", name, error, path, name)
