#!/usr/bin/env python3
"""Cuts a complete run down to what a notebook can look at in a checkout: `scripts/data/make_example.py RUN OUT`.

Kept whole: the metrics of every step, the ledger, stages, settings, the tokenizer, and report.json as the full run has it. Kept
in part: rollouts of three RL steps (the first, one at a third, the last that trained on something) with their routes, the
attempts at some held-out tasks, the tasks that these name, the first demonstrations, and the weights that RL began with, that
its last step started from, and that it ended with. With `--scores` only what a comparison of runs needs is kept: no rollouts of
RL, no weights. `excerpt.json` counts what is left, and makes the result read-only for the package. Paths and names of the
machine are removed. RUN is only read; an OUT that is itself an excerpt is replaced.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from composer_nb.harness.files import write_json
from composer_nb.harness.store import load_attempts, save_attempts
from composer_nb.harness.tasks.task import load_tasks, save_tasks
from composer_nb.trainer.learning.data import load_rows, save_rows
from composer_nb.trainer.recipe.reader import open_run, telling_step
from composer_nb.trainer.recipe.report import POLICIES, build_report
from composer_nb.trainer.records.rundir import EXCERPT, RunDir
from composer_nb.views.report import pictures

HELDOUT_TASKS, STRUCTURE_TASKS, DEMONSTRATIONS = 48, 16, 64
WEIGHTS = ("start", "before_final", "final")
LIMIT = 20_000_000
"""Bytes; a larger result is refused."""
LEFT_OVER = ("rollout", "checkpoint", "orchestrator", "service")
"""Tables of what a run works with and no reader needs."""
TEXTS = ("*.json", "*.jsonl", "run.db")


def excerpt(run: RunDir, out: Path, scores_only: bool = False) -> dict[str, Any]:
    """Make `out` from `run` and return what it contains. Raises ValueError for a run that is not complete, for an `out` that is
    something else than an excerpt, and when the result is too large or names the machine."""
    report = build_report(run)
    report.pop("hosts", None)
    if not report["complete"]:
        raise ValueError(f"{run.path} is not complete; resume it first")
    if out.exists() and not (out / EXCERPT).is_file():
        raise ValueError(f"{out} is there already and is no excerpt of a run")
    staging = out.with_name(out.name + ".part")
    shutil.rmtree(staging, ignore_errors=True)
    for folder in ("data", "rollouts", "weights"):
        (staging / folder).mkdir(parents=True)
    last = telling_step(run)
    steps = [] if scores_only else sorted({1, max(1, round(last / 3)), last})
    contents = {
        "run": report["run"],
        "rollouts_of_rl_steps": steps,
        "of_rl_steps": report["train"]["steps"],
        **keep_heldout(run, staging),
        **keep_batches(run, staging, steps),
        **({} if scores_only else keep_demonstrations(run, staging)),
    }
    shutil.copyfile(run.path / "data" / "tokenizer.json", staging / "data" / "tokenizer.json")
    shutil.copyfile(run.path / "metrics.jsonl", staging / "metrics.jsonl")
    keep_database(run, staging, steps)
    contents["weights"] = [] if scores_only else keep_weights(run, staging)
    report |= {name: impersonal(report[name]) for name in ("settings", "provenance")}
    for name, value in {"report": report | {"excerpt": contents}, "excerpt": contents}.items():
        write_json(staging / f"{name}.json", value)
    for name in ("settings", "provenance"):
        write_json(staging / f"{name}.json", report[name])
    check(staging, run)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)
    return contents


def keep_heldout(run: RunDir, staging: Path) -> dict[str, int]:
    """Copy some held-out tasks, chosen by the hash of their names, with every policy's attempts; some tasks of new structures."""
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "heldout.jsonl")}
    chosen = set(sorted(tasks, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:HELDOUT_TASKS])
    save_tasks([task for name, task in tasks.items() if name in chosen], staging / "data" / "heldout.jsonl")
    save_tasks(
        load_tasks(run.path / "data" / "structures.jsonl")[:STRUCTURE_TASKS], staging / "data" / "structures.jsonl"
    )
    for policy in POLICIES:
        name = f"rollouts/eval_{policy}.parquet"
        attempts = [attempt for attempt in load_attempts(run.path / name, tasks) if attempt.task.id in chosen]
        save_attempts(staging / name, attempts)
    return {"heldout_tasks": len(chosen), "of_heldout_tasks": len(tasks)}


def keep_batches(run: RunDir, staging: Path, steps: Sequence[int]) -> dict[str, int]:
    """Copy the rollouts of RL steps, counted from 1, unchanged, and their tasks."""
    named: set[str] = set()
    for step in steps:
        for file in (run.path / "rollouts").glob(f"rl_{step - 1:05d}_*"):
            shutil.copyfile(file, staging / "rollouts" / file.name)
            if file.suffix == ".parquet":
                named |= set(pc.unique(pq.read_table(file, columns=["task_id"])["task_id"]).to_pylist())
    tasks = load_tasks(run.path / "data" / "rl.jsonl")
    save_tasks([task for task in tasks if task.id in named], staging / "data" / "rl.jsonl")
    return {"rl_tasks": len(named), "of_rl_tasks": len(tasks)}


def keep_demonstrations(run: RunDir, staging: Path) -> dict[str, int]:
    """Copy the first demonstrations of each kind."""
    counts = {}
    for kind in ("clean", "mistaken"):
        rows = load_rows(run.path / "data" / f"{kind}-000.npz")[:DEMONSTRATIONS]
        save_rows(rows, staging / "data" / f"{kind}-000.npz")
        counts[f"{kind}_demonstrations"] = len(rows)
    return counts


def keep_database(run: RunDir, staging: Path, steps: Sequence[int]) -> None:
    """Copy `run.db` into one file that needs no journal, without what only a running process needs."""
    with closing(sqlite3.connect(staging / "run.db")) as db:
        with closing(run.connect()) as source:
            source.backup(db)
        db.execute("PRAGMA journal_mode=DELETE")
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        with db:
            for table in tables.intersection(LEFT_OVER):
                db.execute(f"DELETE FROM {table}")
            if "batch" in tables:
                logged = ", ".join(str(step - 1) for step in steps)
                db.execute(f"DELETE FROM batch WHERE step NOT IN ({logged})")
        db.execute("VACUUM")


def keep_weights(run: RunDir, staging: Path) -> list[str]:
    """Copy the versions that RL began with, that its last step started from, and that it ended with."""
    for name in WEIGHTS:
        shutil.copytree(run.path / "weights" / name, staging / "weights" / name)
    return list(WEIGHTS)


def picture(run: RunDir, file: Path) -> None:
    """Draw the scores of every policy, and RL below them."""
    drawings = pictures(run)
    panels = [Image.open(BytesIO(drawings[name][1].png())).convert("RGBA") for name in ("policies", "rl")]
    image = Image.new("RGB", (max(panel.width for panel in panels), sum(panel.height for panel in panels)), "white")
    at = 0
    for panel in panels:
        image.paste(panel, ((image.width - panel.width) // 2, at), panel)
        at += panel.height
    image.save(file, optimize=True)


def impersonal(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of settings or of provenance without paths, and with no more of the system than its name."""
    cleaned: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            value = impersonal(value)
        elif isinstance(value, str) and ("/" in value or "\\" in value):
            value = ""
        cleaned[name] = value.split("-")[0] if name == "system" else value
    return cleaned


def check(staging: Path, run: RunDir) -> None:
    """Raise ValueError if the result is too large, or if one of its files names this machine or a path on it."""
    if size(staging) > LIMIT:
        sizes = sorted(((file.stat().st_size, file.name) for file in files(staging)), reverse=True)
        raise ValueError(f"{size(staging):,} bytes, more than {LIMIT:,}; the largest: {sizes[:5]}")
    names = {str(run.path), str(Path.home()), str(Path.cwd()), socket.gethostname()} - {"/", ""}
    pattern = re.compile(rb"(?<!\w)(?:" + b"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")(?!\w)")
    for file in (file for text in TEXTS for file in staging.glob(text)):
        if match := pattern.search(file.read_bytes()):
            raise ValueError(f"{file.name} names the machine: {match[0].decode()}")


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in files(folder))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scores", action="store_true", help="keep only what a comparison of runs needs")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="also draw the run's scores and its RL")
    args = parser.parse_args(arguments)
    try:
        contents = excerpt(open_run(args.run), args.out.absolute(), args.scores)
        if args.picture:
            picture(open_run(args.run), args.picture)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(contents, indent=2))
    print(f"{size(args.out):,} bytes in {args.out}")


if __name__ == "__main__":
    main()
