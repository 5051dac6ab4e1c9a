"""The launcher, which starts the ranks of a run as processes, shows their output, and leaves no process behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.reap import FOLDER, ResourceJournal, reap
from composer_nb.trainer.headroom import refusal
from composer_nb.trainer.recipe.prepare import check_inputs
from composer_nb.trainer.records.provenance import CAPSULE, capsule, require_harness
from composer_nb.trainer.records.rundir import RunDir, create, open_run, provenance
from composer_nb.trainer.services import LOST
from composer_nb.trainer.services.capacity import require_room, require_room_for_rl, this_machine
from composer_nb.trainer.services.head import PROCESS, SILENT, claim, held, holder, last_words
from composer_nb.trainer.settings import Settings, changed, from_dict, override, to_dict, to_flat

# Files in a run directory: the lock of its launcher, and the launcher's log.
LOCK, SAID = "launch.lock", "said.log"
COMPLETE = "the run is complete"
# Stages of a complete run, in the order of the recipe.
STAGES = (
    *("tokenizer", "data", "midtrain", "sft", "eval_base", "eval_midtrained", "eval_start"),
    *("rl", "finish", "eval_final", "draft", "numerics"),
)


class RunFailed(RuntimeError):
    """A process of the run ended with an error. The message is its last line, and `code` is its exit status."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class RunBusy(ValueError):
    """Another launcher is working on the run."""


def stages_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stages of a complete run with these settings, which may end before RL or have a control instead of it."""
    if (until := settings.get("until", "rl")) != "rl":
        return STAGES[: STAGES.index(until) + 1]
    if settings.get("control_steps"):
        return (*STAGES[: STAGES.index("rl")], "control", "eval_control")
    rl, midtrain = settings.get("rl", {}), settings.get("midtrain", {})
    optional = {
        "finish": rl.get("start_weight") or rl.get("sharpness", [1.0]) != [1.0],
        "draft": midtrain.get("draft_steps"),
    }
    return tuple(name for name in STAGES if optional.get(name, True))


def start_or_resume(
    run_dir: Path | None = None,
    settings: Settings | None = None,
    *,
    runs: Path = Path("runs"),
    name: str = "tour",
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> RunDir:
    """Run the recipe to its end, in a new directory under `runs` or in `run_dir`, from its present state.

    The call is idempotent. A complete run is returned at once, and so is an excerpt of one. An interrupted run continues from its
    last checkpoint with the same numbers. With `resume`, the newest run under `runs` is resumed instead of beginning a new one,
    if this version of the package began it with these settings, so that a batch job that is cut off can simply be called again.
    Ctrl-C ends the ranks and leaves the run ready to resume.

    Raises ValueError if `settings` differ from those that the run was started with, or do not fit this machine; RunBusy if
    another launcher works on the run; and RunFailed if a rank ends with an error.
    """
    run = open_run(run_dir) if run_dir else begin_run(settings or Settings(), runs, name, resume=resume, say=say)
    if run.excerpt is not None:
        settle(run, settings)
        say(f"{run.path} is an excerpt of a complete run: it is shown, not resumed")
        return run
    with _only_launcher(run), _noted(run, say) as say:
        _launch(run, settle(run, settings), say)
    return run


def begin_run(
    settings: Settings, runs: Path, name: str, *, resume: bool = False, say: Callable[[str], None] = print
) -> RunDir:
    """Return a run with stored settings, ready to be resumed: a new one or, with `resume`, the newest if it has them."""
    begun_run, reason = _begun(runs / name, settings) if resume else (None, "")
    run = begun_run or new_run(runs, name, settings)
    settle(run, settings)
    if reason:  # now that there is a new run
        say(f"{reason}; {runs / name} is now the new run {run.path.name}")
    return run


def new_run(runs: Path, name: str, settings: Settings) -> RunDir:
    """Create the directory of a run with these settings. Raises ValueError, without creating one, if its code, checkpoint or
    tasks are unfit."""
    check_inputs(settings)
    return create(runs, name)


def _begun(newest: Path, settings: Settings) -> tuple[RunDir | None, str]:
    """Return the run that `newest` links to, if this version of the package began it with these settings; else None, and why not
    if there is a run."""
    run_path = newest.resolve()
    if not (run_path / "settings.json").is_file():
        return None, ""  # there is no run, or it was cut off before it had settings
    run = RunDir(run_path)
    run_settings = from_dict(run.settings())
    package = json.loads((run_path / "provenance.json").read_text(encoding="utf-8"))["package_digest"]
    if differences := _differences(run_settings, settings):
        return None, f"{run_path} was begun with {differences}"
    if package != provenance()["package_digest"]:
        return None, f"{run_path} was begun by another version of this package"
    return run, ""


@contextmanager
def _noted(run: RunDir, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a `say` that also writes the run's log, and log the final error, so that others can follow the run."""
    with (run.path / SAID).open("a", encoding="utf-8", buffering=1) as file:

        def both(line: str) -> None:
            file.write(line + "\n")
            say(line)

        try:
            yield both
        except BaseException as error:
            file.write(f"{str(error) or type(error).__name__}\n")
            raise


@contextmanager
def _only_launcher(run: RunDir) -> Iterator[None]:
    """Hold the run's lock, which is released with this process at the latest. Raises RunBusy if another launcher holds it."""
    if (fd := claim(run.path / LOCK, tries=5)) is None:
        pid = holder(run.path / LOCK) or "(it does not say which)"
        raise RunBusy(f"{run.path.name} is being run by process {pid} ({run.path}); wait for it, or end it first")
    try:
        yield
    finally:
        os.close(fd)


def absolute(settings: Settings) -> Settings:
    """Return the settings with absolute paths, so that they mean the same from any folder. What names no file stays."""
    names = ("data.code", "model.start", "env.tasks", "services.address", "services.store")
    paths = {name: Path(value).expanduser() for name, value in to_flat(settings).items() if name in names and value}
    absolute_paths = {
        name: str(path.resolve())
        for name, path in paths.items()
        if (path.exists() and str(path) not in ("stdlib", "generated"))
        or (name == "services.store" and "://" not in settings.services.store)  # it may not be there yet
    }
    return override(settings, absolute_paths)


def _differences(saved: Settings, settings: Settings) -> str:
    """Return how settings differ from those of a run, as `seed=1, now 2`; "" if the run may go on with them. A run that its gate
    refused may go on without it."""
    old, new = to_flat(saved), min((changed(saved, tree) for tree in (settings, absolute(settings))), key=len)
    differences = [f"{name}={old[name]}, now {value}" for name, value in new.items() if name != "rl.gate"]
    return "; ".join(differences[:3]) + f" and {len(differences) - 3} more" * (len(differences) > 3)


def settle(run: RunDir, settings: Settings | None) -> Settings:
    """Return the settings that a run was started with. A new run stores `settings`, with absolute paths. Raises ValueError if
    `settings` are given and differ from those of the run, except in `rl.gate`, which is stored again unless RL has begun."""
    settings_file = run.path / "settings.json"
    if settings_file.is_file():
        run_settings = from_dict(run.settings())
        if settings in (None, run_settings):
            return run_settings
        assert settings is not None
        if differences := _differences(run_settings, settings):
            reason = f"{run.path} was started with other settings (settings.json): {differences}"
            raise ValueError(f"{reason}; resume it without any, or start a new run")
        if run.excerpt is not None or run.pointer("rl") or run.finished("rl") is not None:
            return run_settings
        settings = absolute(settings)
        write_json(settings_file, to_dict(settings))
        return settings
    settings = absolute(settings or Settings())
    write_json(run.path / "provenance.json", provenance())
    write_json(settings_file, to_dict(settings))
    return settings


def _launch(run: RunDir, settings: Settings, say: Callable[[str], None]) -> None:
    """Run what is left of a run. Raises ValueError for settings that do not fit this machine and if the gate refuses RL, and
    RunFailed if a process fails or the run is not complete afterwards."""
    start_s = time.perf_counter()
    require_harness(settings.eval.harness)
    _reap(run, say)
    run.clean()
    if run.finished("midtrain") is None:
        settings.resolve()
    if run.finished("sft") is None or settings.mesh.gpus:
        require_room(settings, this_machine())
    is_rl_due = settings.until == "rl" and not settings.control_steps and run.finished("rl") is None
    if is_rl_due and not settings.services.address:  # the nodes of a cluster are checked once the run is attached to it
        require_room_for_rl(settings, [this_machine()])
    last_stage = stages_of(to_dict(settings))[-1]
    if run.finished(last_stage) is None:
        _run_ranks(run, settings.ranks, say)
    if last_stage == "numerics" and settings.rl.gate and (reason := refusal(run)):
        raise ValueError(reason)
    if settings.services.on and is_rl_due and run.finished("rl") is None:
        if not (run.path / CAPSULE).is_file():
            write_json(run.path / CAPSULE, capsule(run.path, settings.env, settings.user_code))
        with held(settings.services.address):
            _run_services(run, say)
        _run_ranks(run, settings.ranks, say)
    if run.finished(last_stage) is None:
        raise RunFailed(
            f"its processes ended with 0 before the run was complete: code of its tasks or rewards exits ({run.path / SAID})"
        )
    say(f"{COMPLETE} after {time.perf_counter() - start_s:.0f} s: {run.path}")


def _reap(run: RunDir, say: Callable[[str], None]) -> None:
    """Clean up after dead processes of this run."""
    for line in reap(run.path).failed:
        say(f"could not be ended: {line}")


# The stages before RL (`extend` only if its steps are above 0), and the files and folders that each makes.
BEFORE_RL = {
    "tokenizer": ("data/tokenizer.json", "data/corpus.json"),
    "data": ("data/*",),
    "midtrain": ("weights/base", "weights/midtrained"),
    "extend": ("weights/extended",),
    "sft": ("weights/start",),
    "eval_base": ("rollouts/eval_base*",),
    "eval_midtrained": ("rollouts/eval_midtrained*",),
    "eval_start": ("rollouts/eval_start*",),
}


def fork(source: RunDir, settings: Settings, *, runs: Path = Path("runs"), name: str = "fork") -> RunDir:
    """Return a new run that takes over all stages of `source` before RL and continues with other settings.

    Raises ValueError if `source` has not finished these stages, or if the settings differ in a group that they use.
    """
    if source.excerpt is not None:
        raise ValueError(f"{source.path} is an excerpt of a run and cannot be forked; start a new run instead")
    original, settings = absolute(from_dict(source.settings())), absolute(settings)
    fixed = ("seed", "data", "env", "tokenizer", "model", "optimizer", "midtrain", "extend", "sft", "limits", "eval")
    if changed_groups := [group for group in fixed if getattr(original, group) != getattr(settings, group)]:
        raise ValueError(f"a fork cannot change {', '.join(changed_groups)}: the stages before RL depend on it")
    finished = {stage: source.finished(stage) for stage in BEFORE_RL if stage != "extend" or original.extend.steps}
    if unfinished := [stage for stage, info in finished.items() if info is None]:
        raise ValueError(f"{source.path} has not finished {', '.join(unfinished)}; resume it first")
    run = create(runs, name)
    for item in {item for patterns in BEFORE_RL.values() for pattern in patterns for item in source.path.glob(pattern)}:
        copy = shutil.copytree if item.is_dir() else shutil.copyfile
        copy(item, run.path / item.relative_to(source.path))
    for stage, info in finished.items():
        assert info is not None
        run.finish(stage, info.pop("seconds"), info)
        run.take_steps(stage, source.steps(stage))
    write_json(run.path / "settings.json", to_dict(settings))
    write_json(run.path / "provenance.json", provenance() | {"forked_from": source.path.name})
    return run


def _run_ranks(run: RunDir, world: int, say: Callable[[str], None]) -> None:
    """Run the stages on `world` ranks, as processes. Raises ValueError for fewer than one, and RunFailed if a rank fails."""
    if world < 1:
        raise ValueError(f"ranks={world}: at least 1 is needed")
    journal = ResourceJournal(run.path / FOLDER, run.path.name)
    with tempfile.TemporaryDirectory(prefix="composer_nb-") as folder:
        resource = journal.made("directory", folder)
        args = (str(run.path), str(world), f"{folder}/rendezvous")
        programs = {f"rank{rank}": ("composer_nb.trainer.recipe.worker", *args, str(rank)) for rank in range(world)}
        _run_processes(run, programs, say)
    journal.gone(resource)


# Maximum restarts of the services in a row, without a step in between, after the loss of their cluster.
RESTARTS = 3


def _run_services(run: RunDir, say: Callable[[str], None]) -> None:
    """Run RL as services. The run survives the loss of its cluster, because all of its state is in the run directory. Raises
    RunFailed if the services fail otherwise, or again after RESTARTS restarts without a step in between."""
    restarts_left = RESTARTS
    while True:
        steps_before = len(run.steps("rl"))
        try:
            _run_processes(run, {"services": ("composer_nb.trainer.services.run", str(run.path))}, say)
            return
        except RunFailed as error:
            restarts_left = RESTARTS if len(run.steps("rl")) > steps_before else restarts_left - 1
            # If its raylet is gone before we notice, Ray ends our process with 1 and no message; we never do so.
            lost = error.code in (LOST, -signal.SIGKILL, -signal.SIGABRT) or (error.code == 1 and SILENT in str(error))
            if not lost or restarts_left < 0:
                raise
            say(f"{error}; started again")


def _run_processes(run: RunDir, programs: Mapping[str, tuple[str, ...]], say: Callable[[str], None]) -> None:
    """Run named modules side by side until all have ended, and show the output of the first. If one fails, end the others and
    raise RunFailed."""
    journal = ResourceJournal(run.path / FOLDER, run.path.name)
    command = [sys.executable, "-P", "-m", "composer_nb.trainer.recipe.child", str(os.getpid())]
    with ExitStack() as stack:
        logs = [stack.enter_context((run.path / f"{name}.log").open("ab")) for name in programs]
        log_starts = [log.tell() for log in logs]
        processes = [
            subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE if log is logs[0] else log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | PROCESS,
                text=True,
            )
            for arguments, log in zip(programs.values(), logs, strict=True)
        ]
        resources = [journal.made("process", process.pid) for process in processes]
        assert processes[0].stdout is not None
        listener = threading.Thread(target=_relay, args=(processes[0].stdout, say), daemon=True)
        try:
            listener.start()
            codes = [process.poll() for process in processes]
            while None in codes and not any(codes):
                time.sleep(0.02)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + 5
            for process in processes:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for resource in resources:
                journal.gone(resource)
            _reap(run, say)  # a container outlives the process that made it
            listener.join(timeout=10)
    for (name, code), log_start in zip(zip(programs, codes, strict=True), log_starts, strict=True):
        if code:
            last_line = last_words(run.path / f"{name}.log", log_start)
            # The rank goes without saying.
            if value_error := re.fullmatch(r"(?:\[rank\d+\]: )?ValueError: (.*)", last_line):
                raise RunFailed(value_error[1], code)
            raise RunFailed(f"{name.replace('rank', 'rank ')} ended with {code}: {last_line}", code)


def _relay(lines: IO[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line.rstrip())
