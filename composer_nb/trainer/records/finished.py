"""Rollouts that are graded and not trained yet: `rollouts/finished/<slot>-<attempt>-<place>.safetensors`.

An environment worker packs a rollout and writes it before it reports its end, so a process that is killed loses none that was
reported. A batch takes over the packed rollouts as they are (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

from composer_nb.harness.files import write_atomic
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task

# Slot, attempt and place of a rollout of the services.
RolloutName = tuple[int, int, int]


class FinishedRollouts:
    """The finished rollouts of a run. Workers write them, the coordinator reads and removes them."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "rollouts" / "finished"
        self._folder.mkdir(exist_ok=True)

    def _file(self, name: RolloutName) -> Path:
        return self._folder / f"{'-'.join(map(str, name))}.safetensors"

    def save(self, name: RolloutName, attempt: Attempt) -> None:
        write_atomic(self._file(name), pack_attempt(attempt), sync=True)

    def packed(self, names: Iterable[RolloutName]) -> list[bytes]:
        return [self._file(name).read_bytes() for name in names]

    def load(self, name: RolloutName, task: Task) -> Attempt:
        """Return a rollout at `task`. Raises ValueError, which names the file, if it is damaged."""
        try:
            return unpack_attempt(self._file(name).read_bytes(), task)
        except ValueError as error:
            raise ValueError(f"{self._file(name)}: {error}; without this file a resumed run samples it again") from None

    def names(self) -> set[RolloutName]:
        names = [file.stem.split("-") for file in self._folder.glob("*.safetensors")]
        return {(int(slot), int(attempt), int(place)) for slot, attempt, place in names}

    def remove_others(self, slots: Container[int]) -> None:
        """Remove the rollouts of all other slots, which are trained, and in the file of their step, replaced,
        or left over at the end."""
        for name in self.names():
            if name[0] not in slots:
                self._file(name).unlink()
