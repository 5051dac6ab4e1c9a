"""Starts the ranks of a run as processes, shows what they say, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from composer_nb.config import Settings, from_dict, to_dict
from composer_nb.trainer.rundir import RunDir, create, provenance, write_json


class RunFailed(RuntimeError):
    """A rank ended with an error; the message is its last line."""


def start_or_resume(
    run_dir: Path | None = None,
    settings: Settings | None = None,
    *,
    runs: Path = Path("runs"),
    name: str = "tour",
    say: Callable[[str], None] = print,
) -> RunDir:
    """Runs the recipe to its end: in a new directory under `runs`, or on from where `run_dir` stands.

    One idempotent call: a run that is complete returns at once; one that was interrupted continues from its last checkpoint
    to the same numbers. Raises ValueError when `settings` are not those that the run was started with, RunFailed when a rank
    ends with an error. Ctrl-C ends the ranks and leaves the run ready to resume.
    """
    run = create(runs, name) if run_dir is None else RunDir(_existing(run_dir))
    saved = run.path / "settings.json"
    if saved.is_file():
        known = from_dict(json.loads(saved.read_text()))
        if settings is not None and settings != known:
            raise ValueError(
                f"{run.path} was started with other settings (settings.json); resume it without any, or start a new run"
            )
        settings = known
    else:
        settings = settings or Settings()
        write_json(saved, to_dict(settings))
        write_json(run.path / "provenance.json", provenance())
    start = time.perf_counter()
    run.clean()
    _run_ranks(run, settings.ranks, say)
    seconds = time.perf_counter() - start
    say(f"the run is complete after {seconds:.0f} s: {run.path}")
    return run


BEFORE_RL = ("tokenizer", "data", "midtrain", "sft", "eval_base", "eval_midtrained", "eval_start")


def fork(source: RunDir, settings: Settings, *, runs: Path = Path("runs"), name: str = "fork") -> RunDir:
    """A new run that takes over everything that `source` did before RL, with other settings from there on.

    Raises ValueError when `source` has not come so far, or when the settings differ in something that those stages used.
    """
    known = from_dict(json.loads((source.path / "settings.json").read_text()))
    used = ("seed", "data", "tokenizer", "model", "midtrain", "sft", "limits", "eval")
    if changed := [part for part in used if getattr(known, part) != getattr(settings, part)]:
        raise ValueError(f"a fork can not change {', '.join(changed)}: the stages before RL depend on it")
    finished = {stage: source.finished(stage) for stage in BEFORE_RL}
    if missing := [stage for stage, info in finished.items() if info is None]:
        raise ValueError(f"{source.path} has not finished {', '.join(missing)}; resume it first")
    run = create(runs, name)
    for folder in ("data", "weights", "rollouts"):
        for item in (source.path / folder).iterdir():
            if (
                item.name.startswith("rl_")
                or item.name in ("final", "before_final")
                or item.name.startswith("eval_final")
            ):
                continue
            copy = shutil.copytree if item.is_dir() else shutil.copyfile
            copy(item, run.path / folder / item.name)
    for stage, info in finished.items():
        assert info is not None
        run.finish(stage, info.pop("seconds"), info)
    write_json(run.path / "settings.json", to_dict(settings))
    write_json(run.path / "provenance.json", provenance() | {"forked_from": source.path.name})
    return run


def _existing(path: Path) -> Path:
    if not (path / "run.db").is_file():
        raise FileNotFoundError(f"{path}: no run here (run.db is missing)")
    return path


def _run_ranks(run: RunDir, world: int, say: Callable[[str], None]) -> None:
    if world < 1:
        raise ValueError(f"ranks={world}: at least 1 is needed")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory(prefix="composer_nb-") as folder:
        command = [
            sys.executable,
            "-m",
            "composer_nb.trainer.worker",
            str(run.path),
            str(world),
            f"{folder}/rendezvous",
        ]
        logs = [(run.path / f"rank{rank}.log").open("a") for rank in range(world)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(os.getpid())],
                stdout=subprocess.PIPE if rank == 0 else logs[rank],
                stderr=logs[rank],
                stdin=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            for rank in range(world)
        ]
        listener = threading.Thread(target=_relay, args=(ranks[0], say), daemon=True)
        try:
            listener.start()
            failed = _wait(ranks)
        finally:
            _end(ranks)
            listener.join(timeout=10)
            for log in logs:
                log.close()
    if failed is not None:
        log_file = run.path / f"rank{failed}.log"
        raise RunFailed(f"rank {failed} ended with {ranks[failed].returncode}: {_last_line(log_file)}")


def _relay(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip())


def _wait(ranks: list[subprocess.Popen[str]]) -> int | None:
    """The first rank seen to end badly, or None when all have ended well. The others then end of its absence, or of us."""
    while True:
        codes = [process.poll() for process in ranks]
        if bad := [rank for rank, code in enumerate(codes) if code]:
            return bad[0]
        if None not in codes:
            return None
        time.sleep(0.02)


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 5
    for process in ranks:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return f"{lines[-1]} ({log})" if lines else f"it said nothing ({log})"


def die_with(parent: int) -> None:
    """Ends this process when `parent`, which must be its parent, ends: a killed notebook leaves no ranks behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
