"""Commands for notebooks as jobs: jobs run, from, status, cancel, log, sweep."""

import argparse
import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_nb.harness.untrusted import visible_lines
from composer_nb.operations import JSON, arg, command, emit, overrides
from composer_nb.views.page import text_table

SETTINGS = "PARAMETER=VALUE, {}:PARAMETER=VALUE, or a dotted setting for `overrides`; may be given again"
RUNS = arg("--runs DIR", "folder of runs of job files", Path("runs/jobs"))
NEWEST = arg("path RUN", "a run's directory, or a job's name for its newest run; default: the newest", nargs="?")
FOLLOW_S = 0.5


@command(
    "jobs run",
    arg("file FILE", "a job file, as papermill_jobs/tour.yml", type=Path),
    arg("--set KEY=VALUE", SETTINGS.format("NODE"), [], action="append"),
    arg("--ray CLUSTER", "run on Ray: the folder of `composer-nb up`, HOST:PORT or auto"),
    arg("--resume", "resume the newest run of that name, if there is one, on its cluster; here with --ray ''"),
    RUNS,
    lines=True,
)
def run(args: argparse.Namespace) -> int:
    """Run the notebooks of a job file.

    Return the exit status of the run's state.
    """
    from composer_nb.jobs.directory import ENDED
    from composer_nb.jobs.runner import run_job

    summary = run_job(args.file, overrides(args.set), runs=args.runs, ray=args.ray, resume=args.resume, say=_print)
    _print(summary["dir"])
    return ENDED[summary["state"]]


@command(
    "jobs from",
    arg("path RUN", "a run of the recipe", type=Path),
    arg("--out FILE", "the job file, a new one (default: the run's name, with .yml)", type=Path),
    JSON,
)
def from_run(args: argparse.Namespace) -> int:
    """Write a job file that trains again with the settings of a run, those that were changed while it was live included.

    Raise ValueError for a file that exists, and for an environment of one's own that other folders cannot import.
    """
    import yaml

    from composer_nb.harness.files import write_atomic
    from composer_nb.jobs.file import load_job
    from composer_nb.operations.runs import tour_notebook
    from composer_nb.trainer.recipe.launch import absolute
    from composer_nb.trainer.recipe.reader import ReadOnly
    from composer_nb.trainer.settings import Settings, changed, from_dict, override

    run = ReadOnly(args.path)
    settings, out = absolute(from_dict(run.settings())), args.out or Path(f"{run.path.name}.yml")
    if out.exists():
        raise ValueError(f"{out}: is there already; give another file as --out")
    module, class_name, _ = (tasks := settings.env.tasks).removeprefix("openenv:").partition(":")
    if class_name and not Path(tasks).exists() and find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"env.tasks={tasks!r}: a job imports it from another folder; put its folder into PYTHONPATH")
    live = run.changed_live()
    planned = settings.services.changes | live
    values = changed(Settings(), override(settings, planned.pop("1", {}) | {"services.changes": planned}))
    parameters = {"runs": "${job.dir}/runs", "resume": True, "seed": values.pop("seed", 0), "overrides": values}
    notebook = os.path.relpath(tour_notebook(), out.resolve().parent)
    node = {"notebook": notebook, "parameters": parameters, "outputs": {"run_dir": "run.path"}}
    lines = [f"# The settings of {run.path.name}: composer-nb jobs run {out}"]
    if planned:
        lines.append("# services.changes: what was changed while it was live, by the step from which it applied.")
    job = {"name": re.sub(r"[^A-Za-z0-9]+", "-", out.stem).strip("-") or "again", "nodes": {"tour": node}}
    lines.append(yaml.safe_dump(job, sort_keys=False, allow_unicode=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines))
    load_job(out)
    report = {"file": str(out), **parameters, "live": live}
    return emit(args, report, lambda: text_table([(name, str(value)) for name, value in report.items()], ("", "")))


@command("jobs status", NEWEST, JSON, RUNS, lines=True)
def status(args: argparse.Namespace) -> int:
    """Show the state of a run."""
    from composer_nb.jobs import directory

    return _show(args, directory.status(directory.find(args.runs, args.path)))


@command("jobs cancel", NEWEST, JSON, RUNS, lines=True)
def cancel(args: argparse.Namespace) -> int:
    """End a run, or what is left of one."""
    from composer_nb.jobs import directory

    return _show(args, directory.cancel(directory.find(args.runs, args.path)))


def _show(args: argparse.Namespace, summary: Mapping[str, Any]) -> int:
    """Show the status of a run, node by node."""
    rows = []
    for name, node in summary["nodes"].items():
        seconds = f"{node['seconds']:.1f} s" if node.get("seconds") else ""
        notes = "; ".join(filter(None, ("kept" if node.get("kept") else "", node.get("error"))))
        rows.append((name, node["state"], str(node["attempt"] or ""), seconds, notes))
    headline = f"{summary['id']}  {summary['state']}"
    return emit(args, summary, lambda: (headline, text_table(rows, ("node", "state", "attempt", "time", ""))))


@command(
    "jobs log",
    NEWEST,
    arg("node NODE", "one of its nodes", nargs="?"),
    (("--follow", "-f"), {"action": "store_true", "help": "continue until it ends"}),
    RUNS,
    lines=True,
)
def log(args: argparse.Namespace) -> int:
    """Print the output of a run or of one of its notebooks.

    Raise ValueError for a node that the run does not have, or that has not begun.
    """
    from composer_nb.jobs import directory

    folder = directory.find(args.runs, args.path)
    path = folder / "log.txt"
    if args.node is not None:
        nodes = directory.status(folder)["nodes"]
        if args.node not in nodes:
            raise ValueError(f"{folder.name} has no node {args.node!r}; it has {', '.join(nodes)}")
        if not (attempts := directory.attempts(folder, args.node)):
            raise ValueError(f"{folder.name}: {args.node} has not begun")
        path = attempts[-1] / "log.txt"
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = not (args.follow and directory.alive(folder))
            print(visible_lines(file.read()), end="", flush=True)
            if over:
                return 0
            time.sleep(FOLLOW_S)


@command("jobs sweep", RUNS, lines=True)
def sweep(args: argparse.Namespace) -> int:
    """End the processes that killed runs left behind, and correct the runs' records.

    Return 1 if a run's records cannot be corrected.
    """
    from composer_nb.jobs import directory

    status = 0
    for folder in sorted(path.parent.resolve() for path in args.runs.glob("*-*/job.json")):
        try:
            for line in [] if directory.alive(folder) else directory.sweep(folder):
                _print(f"{folder.name}: {line}")
        except ValueError as error:  # sweep the others all the same
            _print(f"{folder.name}: {error}")
            status = 1
    return status


def _print(text: str) -> None:
    print(visible_lines(text), flush=True)
