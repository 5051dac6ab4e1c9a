"""Rollouts on disk: one Parquet table that pandas reads, and the tensors beside it in safetensors.

An attempt is packed into bytes once (`pack_attempt`), where it ends, and files are made from these. A row is an attempt. Token
streams are list columns with the concatenated segments of a rollout. The tensor file has the concatenated routes, gates and
margins of all rows, in the order of the rows. Both files are renamed into place when complete.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save, save_file

from composer_nb.harness.files import replacing
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Rollout, Segment, Transcript, Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import parquet

_TENSORS = ("routes", "gates", "margins", "route_valid", "checks")
_STREAMS = {
    "token_ids": (np.int32, pa.int32()),
    "kind": (np.uint8, pa.uint8()),
    "logprob": (np.float32, pa.float32()),
    "policy_version": (np.int32, pa.int32()),
}
# Columns that older files lack, with 0 in their place. The tokens are an endpoint's counts; rewards and egress are JSON.
_COUNTS = {
    **dict.fromkeys(("read_tokens", "written_tokens"), pa.int64()),
    "seconds": pa.float64(),
    **dict.fromkeys(("calls", "calls_failed", "timeouts"), pa.int64()),
    **dict.fromkeys(("rewards", "egress"), pa.string()),
}
# Columns that are fields of the grade as they are.
_GRADE = "status", "calls", "calls_failed", "timeouts"
# Number of tokens and parent of each segment. Older files lack these columns: their rollouts have one segment.
_CHAIN = {name: pa.list_(pa.int64()) for name in ("segments", "parents")}
# `tests`, `turns` and `files` are JSON. `files` has the changes of the task's files, with null for a deleted one.
_COLUMNS = {
    **dict.fromkeys(("task_id", "stop", "status"), pa.string()),
    "passed": pa.bool_(),
    "tests": pa.string(),
    "flags": pa.list_(pa.string()),
    **dict.fromkeys(("turns", "files"), pa.string()),
    **{name: pa.list_(kind) for name, (_, kind) in _STREAMS.items()},
    **_COUNTS,
    **_CHAIN,
}


def save_attempts(path: Path, attempts: Sequence[Attempt], columns: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Write `path` (.parquet) and the tensors beside it. `columns`: additional columns, with one value per attempt.

    Raises ValueError if some attempts have a trace and others have none.
    """
    save_packed(path, [pack_attempt(attempt) for attempt in attempts], columns)


def save_packed(path: Path, packed: Sequence[bytes], columns: Mapping[str, Sequence[Any]] | None = None) -> None:
    """Write attempts packed by `pack_attempt`, as `save_attempts` does."""
    attempts = [load(data) for data in packed]
    rows = [attempt | json.loads(attempt["row"].tobytes()) for attempt in attempts]
    traced = [attempt for attempt in attempts if len(attempt["route_valid"])]
    if traced and any(len(attempt["token_ids"]) > len(attempt["route_valid"]) for attempt in attempts):
        raise ValueError(f"{path}: some of these rollouts have a trace and some have none; store them apart")
    own_columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in _COLUMNS.items()}
    table = pa.table(own_columns | dict(columns or {}))
    empty = Trace()
    tensors = {
        name: np.concatenate([attempt[name] for attempt in traced] or [getattr(empty, name)]) for name in _TENSORS
    }
    with replacing(path.with_suffix(".safetensors"), sync=True) as part:
        save_file(tensors, part)
    with replacing(path, sync=True) as part:
        pq.write_table(table, part, compression="zstd")


def load_attempts(path: Path, tasks: Mapping[str, Task]) -> list[Attempt]:
    """Read what `save_attempts` wrote; `tasks` maps ids to tasks.

    Raises ValueError that names a damaged file or a task that is not among `tasks`.
    """
    try:
        table = pq.read_table(parquet(path))
        columns = [name for name in _COLUMNS if name in table.column_names or name not in _COUNTS | _CHAIN]
        rows = table.select(columns).to_pylist()
        tensors = load_file(path.with_suffix(".safetensors"))
        traces = _traces([len(row["token_ids"]) for row in rows], tensors)
        unknown = sorted({row["task_id"] for row in rows} - set(tasks))
        attempts = [] if unknown else [_attempt(row, trace, tasks) for row, trace in zip(rows, traces, strict=True)]
    except (pa.ArrowException, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged or incomplete ({error}); the step it holds can be run again") from None
    if unknown:
        raise ValueError(f"{path}: task {unknown[0]!r} is not among the {len(tasks)} tasks given")
    return attempts


def pack_attempt(attempt: Attempt) -> bytes:
    """Return one attempt as bytes, for a file: safetensors that include the row of the table as JSON."""
    row, segments = _row(attempt), attempt.rollout.segments or (Transcript().segment(Trace()),)
    streams = {n: np.concatenate([getattr(s, n) for s in segments]).astype(kind) for n, (kind, _) in _STREAMS.items()}
    traces = {name: np.concatenate([getattr(s.trace, name) for s in segments]) for name in _TENSORS}
    text = np.frombuffer(json.dumps(row).encode(), np.uint8)  # no metadata: a header may not be large
    return save(streams | traces | {"row": text})


def unpack_attempt(data: bytes, task: Task) -> Attempt:
    """Read what `pack_attempt` wrote. Raises ValueError for anything else, and for an attempt at another task."""
    try:
        arrays = load(data)
        row = json.loads(arrays.pop("row").tobytes())
        trace = Trace(**{name: arrays.pop(name) for name in _TENSORS})
        if row["task_id"] != task.id:
            raise ValueError(f"an attempt at {row['task_id']!r}, not at {task.id!r}")
        return _attempt(row | arrays, trace, {task.id: task})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a stored attempt is damaged ({error})") from None


def _traces(sizes: Sequence[int], tensors: Mapping[str, NDArray[Any]]) -> list[Trace]:
    """Return the part of the tensors of each row. Raises ValueError when they do not fit the rows."""
    total = len(tensors["route_valid"])
    if any(len(tensors[name]) != total for name in _TENSORS) or total not in (0, sum(sizes)):
        raise ValueError(f"{sum(sizes)} tokens, but tensors of {total}")
    return Trace(**{name: tensors[name] for name in _TENSORS}).split(sizes)


def _row(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt as a row of the store, without its tokens."""
    rollout, grade = attempt.rollout, attempt.grade
    plain = {name: getattr(grade, name) for name in ("passed", *_GRADE)}
    return plain | {
        "task_id": attempt.task.id,
        "stop": rollout.stop,
        "tests": json.dumps(grade.tests),
        "flags": list(grade.flags),
        "rewards": json.dumps(dict(grade.rewards)),
        "turns": json.dumps([asdict(turn) for turn in rollout.turns]),
        "files": json.dumps(_changed(attempt)),
        "read_tokens": rollout.counted[0],
        "written_tokens": rollout.counted[1],
        "seconds": rollout.seconds,
        "egress": json.dumps(rollout.egress),
        "segments": [len(segment.token_ids) for segment in rollout.segments],
        "parents": [segment.parent for segment in rollout.segments],
    }


def _changed(attempt: Attempt) -> dict[str, str | None]:
    """Return the changes of the task's files, None for a deleted one."""
    before, after = attempt.task.files, attempt.rollout.files
    changed = {path: text for path, text in after.items() if before.get(path) != text}
    return dict.fromkeys(sorted(before.keys() - after.keys())) | changed


def _segments(row: Mapping[str, Any], trace: Trace) -> tuple[Segment, ...]:
    sizes, parents = row["segments"], row["parents"]
    if sum(sizes) != len(row["token_ids"]) or len(parents) != len(sizes):
        raise ValueError(f"{len(row['token_ids'])} tokens, but segments of {sizes} with the parents {parents}")
    cuts = np.cumsum(sizes)[:-1]
    streams = {name: np.split(np.array(row[name], kind), cuts) for name, (kind, _) in _STREAMS.items()}
    return tuple(
        Segment(**{name: parts[n] for name, parts in streams.items()}, trace=part, parent=parents[n])
        for n, part in enumerate(trace.split(sizes))
    )


def _attempt(row: Mapping[str, Any], trace: Trace, tasks: Mapping[str, Task]) -> Attempt:
    """Return the attempt that `_row` turned into a row."""
    row = {**dict.fromkeys(_COUNTS, 0), "segments": [len(row["token_ids"])], "parents": [-1], **row}
    before = tasks[row["task_id"]].files
    files: dict[str, str | None] = before | json.loads(row["files"])
    rollout = Rollout(
        task_id=row["task_id"],
        segments=_segments(row, trace),
        turns=tuple(Turn(**turn) for turn in json.loads(row["turns"])),
        files={path: text for path, text in files.items() if text is not None},
        stop=row["stop"],
        counted=(row["read_tokens"], row["written_tokens"]),
        seconds=row["seconds"],
        before=before,
        egress=tuple(json.loads(row["egress"] or "[]")),
    )
    tests, rewards = json.loads(row["tests"]), json.loads(row["rewards"] or "{}")
    plain = {name: row[name] for name in _GRADE}
    grade = Grade(**plain, tests=tests, flags=tuple(row["flags"]), rewards=rewards)
    return Attempt(task=tasks[row["task_id"]], rollout=rollout, grade=grade)
