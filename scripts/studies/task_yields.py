"""Measure what `composer-nb tasks make` yields for many repositories, and print a table for docs/benchmarks.md.

    python scripts/studies/task_yields.py FOLDER… --out OUT [--limit N] [--seconds S]     FOLDER: unpacked source distributions
    python scripts/studies/task_yields.py --out OUT                                       the table of what OUT holds
    python scripts/studies/task_yields.py --out OUT --gold 200   grade right answers

The libraries of the table: `pip download --no-binary :all: --no-deps NAME`, then `tar xzf`, for NAME in `LIBRARIES`. Tests that
need packages are left as they are: the error says which. A repository whose row OUT holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from composer_nb.harness.grading.plan import gold_files
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.recorded import guard_of
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.tasks.making.make import SUMMARY, TASKS
from composer_nb.harness.tasks.task import load_tasks

LIBRARIES = (
    "inflection semver humanize toolz more-itertools boltons sortedcontainers tabulate python-slugify parse pyparsing jmespath "
    "wcwidth isodate cachetools natsort titlecase mistune tomli glom voluptuous schema zipp sqlparse"
).split()
ROW = "yield.json"


def measure(folder: Path, out: Path, limit: int, seconds: float) -> dict[str, Any]:
    """Return a repository's row. After `seconds` its command is interrupted, which keeps what it has made."""
    began = time.monotonic()
    command = [sys.executable, "-m", "composer_nb.cli", "tasks", "make"]
    command += [str(folder), "--out", str(out), "--limit", str(limit)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, output = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _, output = process.communicate()
    spent = time.monotonic() - began
    row: dict[str, Any] = {"name": folder.name, "seconds": round(spent), "load": round(os.getloadavg()[0], 1)}
    if not (out / SUMMARY).exists():
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return row | {
            "why": f"stopped while {last[0] if last else 'starting'}" if spent > seconds else (last or [""])[0][:300]
        }
    summary = json.loads((out / SUMMARY).read_text())
    verdicts = Counter[str]()
    for kind in summary["kinds"]:
        verdicts.update(kind["verdicts"])
    accepted = verdicts.pop("kept", 0)
    guards = Counter(guard["by"] for guard in summary["guards"].values())
    return row | {
        "tests": summary["tests"], "left out": sum(summary["left_out"].values()),
        "tried": accepted + verdicts.total(), "kept": accepted,
        **{by: guards[by] for by in ("calls", "twins", "none")},
        "why": ", ".join(f"{count} {why}" for why, count in verdicts.most_common()) + ("; stopped" if spent > seconds else ""),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("name", "tests", "left out", "tried", "kept", "calls", "twins", "none", "seconds", "load", "why")
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * 9 + "---|"]
    lines += [f"| {' | '.join(str(row.get(name, '')).replace('|', '/') for name in columns)} |" for row in rows]
    trainable = sum(bool(row.get("calls", 0) + row.get("twins", 0)) for row in rows)
    return "\n".join([*lines, "", f"{trainable} of {len(rows)} libraries gave tasks that can be trained on."])


def gold(out: Path, count: int) -> dict[str, Any]:
    """Grade the right answers of tasks, one of each library in turn, and return how many were accepted without a flag, and the
    median of the seconds of a grade, by guard."""
    libraries = [load_tasks(path) for path in sorted(out.glob(f"*/{TASKS}"))]
    tasks = [task for turn in zip_longest(*libraries) for task in turn if task is not None]
    seconds: dict[str, list[float]] = {}
    refused: list[str] = []
    with open_backend("bwrap") as backend:
        for task in islice(cycle(tasks), count):
            grade = grade_pytest(task, gold_files(task), backend)
            seconds.setdefault(guard_of(task).by, []).append(grade.cost["wall_s"])
            if not grade.passed or grade.flags:
                refused.append(f"{task.id}: {grade.status} {grade.flags} {grade.failed}")
    medians = {by: [len(durations), round(median(durations), 3)] for by, durations in seconds.items()}
    return {
        "accepted": count - len(refused),
        "of": count,
        "libraries": len(libraries),
        "median_s": medians,
        "refused": refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--gold", type=int, default=0)
    args = parser.parse_args()
    if args.gold:
        print(json.dumps(gold(args.out, args.gold)))
        return
    for folder in args.folders:
        row_file = args.out / folder.name / ROW
        if not row_file.exists():
            row_file.parent.mkdir(parents=True, exist_ok=True)
            row_file.write_text(json.dumps(measure(folder, row_file.parent, args.limit, args.seconds)))
        print(row_file.read_text(), flush=True)
    print(table([json.loads(path.read_text()) for path in sorted(args.out.glob(f"*/{ROW}"))]))


if __name__ == "__main__":
    main()
