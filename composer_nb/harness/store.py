"""Rollouts on disk: one Parquet table that pandas reads, and the tensors beside it in safetensors.

A row is an attempt; token streams are list columns. Routes, gates and margins of all rows lie one after another in the tensor
file, in the order of the rows. Both files are renamed into place when complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.grade import Grade
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Rollout, Segment, Turn

_TENSORS = ("routes", "gates", "margins", "route_valid")


def save_attempts(path: Path, attempts: Sequence[Attempt], columns: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Writes `path` (.parquet) and the tensors beside it. `columns` adds further columns, one value an attempt."""
    segments = [segment for done in attempts for segment in done.rollout.segments]
    rows = [_row(done) for done in attempts]
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]} | dict(columns or {}))
    tensors = {name: np.concatenate([getattr(segment.trace, name) for segment in segments]) for name in _TENSORS}
    for target, write in (
        (path.with_suffix(".safetensors"), lambda part: save_file(tensors, part)),
        (path, lambda part: pq.write_table(table, part, compression="zstd")),
    ):
        part = target.with_name(target.name + ".part")
        write(part)
        os.replace(part, target)


def load_attempts(path: Path, tasks: Mapping[str, Any]) -> list[Attempt]:
    """Reads what `save_attempts` wrote; `tasks` maps ids to tasks. Raises ValueError that names a damaged file."""
    try:
        rows = pq.read_table(path).to_pylist()
        tensors = load_file(path.with_suffix(".safetensors"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged or incomplete ({error}); the step it holds can be run again") from None
    attempts, place = [], 0
    for row in rows:
        size = len(row["token_ids"])
        trace = Trace()
        if len(tensors["routes"]):
            trace = Trace(**{name: tensors[name][place : place + size] for name in _TENSORS})
        place += size
        attempts.append(_attempt(row, trace, tasks))
    return attempts


def _row(done: Attempt) -> dict[str, Any]:
    [segment] = done.rollout.segments
    return {
        "task_id": done.task.id,
        "stop": done.rollout.stop,
        "status": done.grade.status,
        "passed": done.grade.passed,
        "tests": json.dumps(done.grade.tests),
        "flags": list(done.grade.flags),
        "turns": json.dumps([asdict(turn) for turn in done.rollout.turns]),
        "files": json.dumps(done.rollout.files),
        "token_ids": segment.token_ids,
        "kind": segment.kind,
        "logprob": segment.logprob,
        "policy_version": segment.policy_version,
    }


def _attempt(row: Mapping[str, Any], trace: Trace, tasks: Mapping[str, Any]) -> Attempt:
    segment = Segment(
        token_ids=np.array(row["token_ids"], np.int32),
        kind=np.array(row["kind"], np.uint8),
        logprob=np.array(row["logprob"], np.float32),
        policy_version=np.array(row["policy_version"], np.int32),
        trace=trace,
    )
    rollout = Rollout(
        task_id=row["task_id"],
        segments=(segment,),
        turns=tuple(Turn(**turn) for turn in json.loads(row["turns"])),
        files=json.loads(row["files"]),
        stop=row["stop"],
    )
    grade = Grade(status=row["status"], tests=json.loads(row["tests"]), flags=tuple(row["flags"]))
    return Attempt(task=tasks[row["task_id"]], rollout=rollout, grade=grade)
