"""Trackers: the figures of a run's steps in TensorBoard, Weights & Biases, trackio or MLflow.

    follow(run.path, "mlflow", until=lambda: False)     send new figures every few seconds

A tracker reads the run's `metrics.jsonl`, so it cannot stop or slow the training. A run may be sent while it is live, later, or
to several trackers. `trackers/NAME.json` in the run's folder (`home_of`) records the steps sent, from which the same command
continues. Each step of a stage is sent once, under the stage's name, as `rl/reward`. Addresses and credentials come from each
service's own variables: WANDB_MODE and WANDB_API_KEY, TRACKIO_DIR, MLFLOW_TRACKING_URI (default: mlflow.db beside the run).
"""

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe.reader import ReadOnly, logged_steps
from composer_nb.trainer.recipe.report import flat

log = logging.getLogger(__name__)
PROJECT = "composer_nb"
# Seconds between two reads; after a failure, the wait doubles up to the second number.
EVERY_S, LATEST_S = 3.0, 300.0


# Logs the figures of a step, whose names begin with its stage. It may raise any exception of its library.
Log = Callable[[Mapping[str, float], int], object]
# A destination for figures: logs them, and sends the remaining ones at the end.
Tracker = tuple[Log, Callable[[], object]]


def home_of(run: ReadOnly) -> Path:
    """Return the folder in which trackers of a run write: its own, or one under runs/ for an excerpt or a read-only run."""
    if run.excerpt is None and os.access(run.path, os.W_OK):
        return run.path
    return Path("runs/tracked", f"{run.path.name}-{sha256(os.fsencode(run.path.resolve())).hexdigest()[:8]}").resolve()


def tensorboard(run: ReadOnly, settings: Mapping[str, Any]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(home_of(run) / "tensorboard"))

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def wandb(run: ReadOnly, settings: Mapping[str, Any]) -> Tracker:
    import wandb

    key, folder = re.sub(r"[^\w.-]", "-", run.path.name), str(home_of(run) / "trackers")
    session = wandb.init(project=PROJECT, name=run.path.name, id=key, resume="allow", dir=folder, config=dict(settings))

    def log(figures: Mapping[str, float], step: int) -> None:
        stage = next(iter(figures)).partition("/")[0]
        session.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        session.log({**figures, f"{stage}/step": step})

    return log, session.finish


def trackio(run: ReadOnly, settings: Mapping[str, Any]) -> Tracker:
    import trackio

    session = trackio.init(project=PROJECT, name=run.path.name, resume="allow", config=dict(settings), embed=False)
    return lambda figures, step: session.log(dict(figures), step=step), session.finish


def mlflow(run: ReadOnly, settings: Mapping[str, Any]) -> Tracker:
    """Open the run of this name in MLflow, or create it with its settings."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    name = run.path.name
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home_of(run).parent}/mlflow.db")
    experiment = client.get_experiment_by_name(PROJECT)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    quote = '"' if "'" in name else "'"
    runs = client.search_runs([experiment_id], f"tags.mlflow.runName = {quote}{name}{quote}")
    key = (runs[0] if runs else client.create_run(experiment_id, run_name=name)).info.run_id
    params = [Param(setting, str(value)[:500]) for setting, value in settings.items()]
    for start in () if runs else range(0, len(params), 100):  # the server refuses more
        client.log_batch(key, params=params[start : start + 100])

    def log(figures: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(key, metrics=[Metric(figure, value, now, step) for figure, value in figures.items()])

    return log, lambda: client.set_terminated(key)


TRACKERS = {tracker.__name__: tracker for tracker in (tensorboard, wandb, trackio, mlflow)}


def parse(names: str) -> list[str]:
    """Return the trackers of a comma-separated list. Raises ValueError for one that does not exist or is not installed."""
    trackers = [name for name in names.split(",") if name]
    for name in trackers:
        if name not in TRACKERS:
            raise ValueError(f"--track {name}: there are {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f"--track {name}: it is not installed; pip install -e '.[trackers]' brings it")
    return trackers


def follow(path: Path, name: str, until: Callable[[], bool]) -> None:
    """Send a run's figures to the tracker `name` until `until` returns true. A failure is logged once and retried at growing
    intervals; at the end it is raised. Raises FileNotFoundError if there is no run."""
    run = ReadOnly(path)
    sent_file = home_of(run) / "trackers" / f"{name}.json"
    sent_file.parent.mkdir(parents=True, exist_ok=True)
    sent_steps: dict[str, int] = json.loads(sent_file.read_text())["steps"] if sent_file.is_file() else {}
    tracker, wait_s, is_last = None, EVERY_S, False
    try:
        while not is_last:
            is_last = until()
            try:
                tracker = tracker or TRACKERS[name](run, flat(run.settings()))
                for stage, points in logged_steps(run.path / "metrics.jsonl").items():
                    for step in sorted(step for step in points if step > sent_steps.get(stage, 0)):
                        numbers = {k: x for k, x in points[step].items() if k != "step" and type(x) in (int, float)}
                        figures = {f"{stage}/{key}": float(x) for key, x in numbers.items() if math.isfinite(x)}
                        if figures:
                            tracker[0](figures, step)
                        sent_steps[stage] = step
                wait_s = EVERY_S
            except Exception as error:  # of any of the four libraries
                if is_last:
                    raise
                if wait_s == EVERY_S:
                    log.warning("%s: %s; what is missing is sent later", name, error)
                wait_s = min(2 * wait_s, LATEST_S)
            write_json(sent_file, {"steps": sent_steps})
            wake_s = time.monotonic() + wait_s
            while not is_last and time.monotonic() < wake_s and not until():
                time.sleep(0.2)
    finally:
        if tracker is not None:
            tracker[1]()


@contextmanager
def tracking(path: Path, names: Sequence[str]) -> Iterator[None]:
    """Have trackers follow a run while this context is open, each in its own thread. A failure at the end is logged."""
    ended = threading.Event()

    def send(name: str) -> None:
        try:
            follow(path, name, ended.is_set)
        except Exception as error:  # the library's
            log.warning("%s: %s; composer-nb track %s --to %s goes on", name, error, path, name)

    threads = [threading.Thread(target=send, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
