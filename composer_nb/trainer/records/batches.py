"""Batches on disk: `rollouts/rl_<step>_<rank>.parquet`, rollouts with rewards and advantages, in training order."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from composer_nb.harness.rewards import Reward
from composer_nb.harness.store import load_attempts, pack_attempt, save_packed
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.rl import Scored


def batch_file(run: Path, step: int, rank: int = 0) -> Path:
    return run / "rollouts" / f"rl_{step:05d}_{rank}.parquet"


def save_batch(
    file: Path,
    groups: Sequence[Sequence[Scored]],
    columns: Mapping[str, Sequence[Any]] | None = None,
    packed: Sequence[bytes] | None = None,
) -> None:
    """Write groups, and the tensors of their traces beside them. `columns`: additional columns, with one value per rollout.
    `packed`: the attempts as bytes, if known."""
    everyone = [scored for group in groups for scored in group]
    save_packed(
        file,
        packed or [pack_attempt(scored.attempt) for scored in everyone],
        {
            "group": [number for number, group in enumerate(groups) for _ in group],
            "reward": [scored.reward.total for scored in everyone],
            "terms": [json.dumps(scored.reward.terms) for scored in everyone],
            "advantage": [scored.advantage for scored in everyone],
            **(columns or {}),
        },
    )


def load_batch(file: Path, tasks: Mapping[str, Task]) -> list[list[Scored]]:
    """Read a file of `save_batch`. `tasks` maps ids to tasks. Raises ValueError, which names the file, if it is damaged."""
    attempts = load_attempts(file, tasks)
    groups: dict[int, list[Scored]] = {}
    names = ["group", "reward", "terms", "advantage"]
    for attempt, c in zip(attempts, pq.read_table(file, columns=names).to_pylist(), strict=True):
        reward = Reward(total=c["reward"], terms=json.loads(c["terms"]))
        groups.setdefault(c["group"], []).append(Scored(attempt=attempt, reward=reward, advantage=c["advantage"]))
    return list(groups.values())
