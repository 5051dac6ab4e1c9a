"""What `composer-nb jobs run|render|status|log|cancel|sweep` print, and their exit status."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_nb.jobs import directory
from composer_nb.jobs.records import ENDED
from composer_nb.jobs.runner import run_job

FOLLOW_S = 0.5


def act(given: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Does what the command line says; returns the exit status: that of the run's state for `run`, else 0."""
    match given.action:
        case "run":
            told = run_job(given.file, settings, runs=given.runs, ray=given.ray, resume=given.resume, say=_print)
            _print(f"{told['dir']}")
            return ENDED[told["state"]]
        case "render":
            return _render(given, settings)
        case "log":
            for line in log(directory.find(given.runs, given.path), given.node, follow=given.follow):
                print(line, end="", flush=True)
        case "sweep":
            for folder in sorted(path.parent.resolve() for path in given.runs.glob("*-*/job.json")):
                try:
                    for ended in [] if directory.alive(folder) else directory.sweep(folder):
                        _print(f"{folder.name}: ended {ended['name']} ({ended['pid']})")
                except ValueError as error:  # the others are swept all the same
                    _print(f"{folder.name}: {error}")
        case action:
            folder = directory.find(given.runs, given.path)
            told = directory.cancel(folder) if action == "cancel" else directory.status(folder)
            _print(json.dumps(told, indent=2) if given.json else table(told))
    return 0


def _render(given: argparse.Namespace, settings: Mapping[str, str]) -> int:
    try:
        from composer_nb.jobs.render import render, shipped
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pages need it: pip install 'composer_nb[lab]'") from None
    entries, told = render(given.notebooks or shipped(), given.out, settings, runs=given.runs, say=_print)
    for entry in entries:
        spent = "" if entry.seconds is None else f", {entry.seconds:.1f} s"
        _print(f"{entry.name}: {entry.state}{spent}{': ' * bool(entry.error)}{entry.error}")
    _print(f"{given.out / 'index.html'}")
    return ENDED[told["state"]]


def table(told: Mapping[str, Any]) -> str:
    """A run and its nodes, a line each."""
    rows = [
        (name, node["state"], str(node["attempt"] or ""), f"{node['seconds']:.1f} s" if node.get("seconds") else "")
        for name, node in told["nodes"].items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = [f"{told['id']}  {told['state']}"]
    for row, node in zip(rows, told["nodes"].values(), strict=True):
        notes = [*(["kept"] if node.get("kept") else []), *([node["error"]] if node.get("error") else [])]
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join([*cells, "; ".join(notes)]).rstrip())
    return "\n".join(lines)


def log(folder: Path, node: str | None, *, follow: bool = False) -> Iterator[str]:
    """Text of the runner's log, or of the log of a node's last attempt; with `follow` until the run is over. Raises
    ValueError for a node that the run has not, or that has not begun."""
    path = folder / "log.txt"
    if node is not None:
        nodes = directory.status(folder)["nodes"]
        if node not in nodes:
            raise ValueError(f"{folder.name} has no node {node!r}; it has {', '.join(nodes)}")
        numbers = directory.attempts(folder, node)
        if not numbers:
            raise ValueError(f"{folder.name}: {node} has not begun")
        path = directory.attempt_dir(folder, node, numbers[-1]) / "log.txt"
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = not (follow and directory.alive(folder))
            yield file.read()
            if over:
                return
            time.sleep(FOLLOW_S)


def _print(text: str) -> None:
    print(text, flush=True)
