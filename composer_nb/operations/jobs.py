"""Commands for notebooks as jobs: jobs run, render, status, cancel, log, sweep."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_nb.harness.untrusted import visible_lines
from composer_nb.operations import JSON, arg, command, console, overrides

SETTINGS = "PARAMETER=VALUE, {}:PARAMETER=VALUE, or a dotted setting for `overrides`; may be given again"
RUNS = arg("--runs DIR", "folder of runs of job files", Path("runs/jobs"))
NEWEST = arg("path RUN", "a run's directory, or a job's name for its newest run; default: the newest", nargs="?")
FOLLOW_S = 0.5


@command(
    "jobs run",
    "run the notebooks of a job file",
    arg("file FILE", "a job file, as papermill_jobs/tour.yml", type=Path),
    arg("--set KEY=VALUE", SETTINGS.format("NODE"), [], action="append"),
    arg("--ray CLUSTER", "run on Ray: the folder of `composer-nb up`, HOST:PORT or auto"),
    arg("--resume", "resume the newest run of that name, if there is one"),
    RUNS,
    lines=True,
)
def run(given: argparse.Namespace) -> int:
    """Return the exit status of the run's state."""
    from composer_nb.jobs.records import ENDED
    from composer_nb.jobs.runner import run_job

    told = run_job(given.file, overrides(given.set), runs=given.runs, ray=given.ray, resume=given.resume, say=_print)
    _print(told["dir"])
    return ENDED[told["state"]]


@command(
    "jobs render",
    "run notebooks and write the results as pages, with an index",
    arg("notebooks NOTEBOOK", "notebooks; default: all that ship", nargs="*", type=Path),
    arg("--out DIR", "folder for the pages", Path("build/render")),
    arg("--set KEY=VALUE", SETTINGS.format("NOTEBOOK"), [], action="append"),
    RUNS,
    lines=True,
)
def render(given: argparse.Namespace) -> int:
    from composer_nb.jobs.records import ENDED

    try:
        from composer_nb.jobs.render import render, shipped
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pages need it: pip install 'composer_nb[lab]'") from None
    entries, told = render(given.notebooks or shipped(), given.out, overrides(given.set), runs=given.runs, say=_print)
    for entry in entries:
        _print(f"{entry.name}: {entry.state}{': ' * bool(entry.error)}{entry.error}")
    _print(str(given.out / "index.html"))
    return ENDED[told["state"]]


@command("jobs status", "show the state of a run", NEWEST, JSON, RUNS, lines=True)
def status(given: argparse.Namespace) -> int:
    from composer_nb.jobs import directory

    return _show(given, directory.status(directory.find(given.runs, given.path)))


@command("jobs cancel", "end a run, or what is left of one", NEWEST, JSON, RUNS, lines=True)
def cancel(given: argparse.Namespace) -> int:
    from composer_nb.jobs import directory

    return _show(given, directory.cancel(directory.find(given.runs, given.path)))


def _show(given: argparse.Namespace, told: Mapping[str, Any]) -> int:
    from composer_nb.views.page import text_table

    if given.json:
        print(json.dumps(told, indent=2))
        return 0
    rows = []
    for name, node in told["nodes"].items():
        seconds = f"{node['seconds']:.1f} s" if node.get("seconds") else ""
        notes = ["kept"] * bool(node.get("kept")) + [node["error"]] * bool(node.get("error"))
        rows.append((name, node["state"], str(node["attempt"] or ""), seconds, "; ".join(notes)))
    _print(f"{told['id']}  {told['state']}")
    console().print(text_table(rows, ("node", "state", "attempt", "time", "")))
    return 0


@command(
    "jobs log",
    "print the output of a run or of one of its notebooks",
    NEWEST,
    arg("node NODE", "one of its nodes", nargs="?"),
    (("--follow", "-f"), {"action": "store_true", "help": "continue until it ends"}),
    RUNS,
    lines=True,
)
def log(given: argparse.Namespace) -> int:
    """Raise ValueError for a node that the run does not have, or that has not begun."""
    from composer_nb.jobs import directory

    folder = directory.find(given.runs, given.path)
    path = folder / "log.txt"
    if given.node is not None:
        nodes = directory.status(folder)["nodes"]
        if given.node not in nodes:
            raise ValueError(f"{folder.name} has no node {given.node!r}; it has {', '.join(nodes)}")
        if not (numbers := directory.attempts(folder, given.node)):
            raise ValueError(f"{folder.name}: {given.node} has not begun")
        path = directory.attempt_dir(folder, given.node, numbers[-1]) / "log.txt"
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = not (given.follow and directory.alive(folder))
            print(file.read(), end="", flush=True)
            if over:
                return 0
            time.sleep(FOLLOW_S)


@command("jobs sweep", "end what killed runs left running, and correct their records", RUNS, lines=True)
def sweep(given: argparse.Namespace) -> int:
    from composer_nb.jobs import directory

    for folder in sorted(path.parent.resolve() for path in given.runs.glob("*-*/job.json")):
        try:
            for ended in [] if directory.alive(folder) else directory.sweep(folder):
                _print(f"{folder.name}: ended {ended['name']} ({ended['pid']})")
        except ValueError as error:  # sweep the others all the same
            _print(f"{folder.name}: {error}")
    return 0


def _print(text: str) -> None:
    print(visible_lines(text), flush=True)
