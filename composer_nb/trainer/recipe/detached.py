"""Detached runs, which do not depend on a notebook kernel.

    run = start_detached(settings=settings)     its launcher is a process in a session of its own
    follow(run.path)                            prints its log until it ends; Ctrl-C stops the printing, not the run
    stop(run.path)                              ends it, ready to resume

Every run can be followed, however it was launched: its log is `said.log`.
"""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Literal

from composer_nb.harness.sandbox.reap import reap
from composer_nb.trainer.recipe.launch import COMPLETE, LOCK, SAID, RunFailed, new_run, settle, start_or_resume
from composer_nb.trainer.recipe.reader import whole_lines
from composer_nb.trainer.records.rundir import RunDir, open_run
from composer_nb.trainer.services.head import begin, end, holder
from composer_nb.trainer.settings import Settings

START_S = 120.0
POLL_S = 0.5
END_S = 60.0


def start_detached(
    run_dir: Path | None = None, settings: Settings | None = None, *, runs: Path = Path("runs"), name: str = "tour"
) -> RunDir:
    """Call `start_or_resume` in a process that outlives this one, and return once it runs. A live run is left alone.

    Raises ValueError if `settings` differ from those that the run was started with, and RunFailed if the launcher does not start.
    """
    run = new_run(runs, name, settings or Settings()) if run_dir is None else open_run(run_dir)
    settle(run, settings)
    lock, words = run.path / LOCK, ("composer_nb.trainer.recipe.detached", str(run.path))
    if holder(lock) is None:

        def ready(process: Popen[bytes]) -> bool:
            return holder(lock) is not None or process.poll() == 0

        if why := begin(words, run.path / "launcher.log", lock, ready, START_S):
            raise RunFailed(f"the launcher of {run.path.name} {why}")
    return run


def follow(run_dir: Path, say: Callable[[str], None] = print, *, lines: int = 20) -> Literal["complete", "dead"]:
    """Print a run's log from its last `lines` lines on until the run ends. Return how it ended: a dead run can be resumed.

    An interrupt (Ctrl-C) does not affect the run.
    """
    run = open_run(run_dir)
    log_file = run.path / SAID
    count: int | None = None  # lines that are printed
    while True:
        live = holder(run.path / LOCK) is not None
        text = whole_lines(log_file.read_bytes()) if log_file.is_file() else []
        for line in text[max(0, len(text) - lines) if count is None else count :]:
            say(line)
        count = len(text)
        if not live:
            return "complete" if text and text[-1].startswith(COMPLETE) else "dead"
        time.sleep(POLL_S)


def stop(run_dir: Path, say: Callable[[str], None] = lambda line: None) -> bool:
    """End a live run as Ctrl-C does, or kill it, and what it leaves, if that takes longer than END_S; it can be resumed. Say what
    is waited for. Return whether it was live. Raises TimeoutError if it cannot be killed."""
    run = open_run(run_dir)
    while (pid := holder(run.path / LOCK)) == 0:  # it has the lock and is about to write its id
        time.sleep(0.02)
    if pid is not None:
        say(f"{run.path.name}: process {pid} is asked to end its ranks, services and sandboxes")
        end(run.path / LOCK, pid, signal.SIGINT, END_S, say)
        reap(run.path)
    return pid is not None


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    try:
        start_or_resume(Path(arguments[0]), say=lambda line: None)
    except (RunFailed, ValueError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("it was stopped")


if __name__ == "__main__":
    main(sys.argv[1:])
