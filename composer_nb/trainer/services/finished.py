"""Rollouts that are graded and not trained yet: `finished/<slot>-<attempt>-<member>.safetensors` below the run's `rollouts`, or
below its folder in `services.store`.

An environment worker packs a rollout and writes it before it reports its end, so a process that is killed loses none that was
reported. A batch takes over the packed rollouts as they are (`records/batches.py`).
"""

import math
from collections.abc import Container, Iterable
from functools import partial
from pathlib import Path

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.versions.store import VersionStore

# Slot, attempt and member of a rollout of the services.
RolloutName = tuple[int, int, int]
SUFFIX = ".safetensors"


class FinishedRollouts:
    """The finished rollouts of a run. Workers write them, the coordinator reads and removes them."""

    def __init__(self, run: Path, store: str = "") -> None:
        url = f"{store.rstrip('/')}/{run.name}/finished" if store else run / "rollouts" / "finished"
        self._store = VersionStore(url)

    def save(self, name: RolloutName, attempt: Attempt) -> None:
        self._store.patiently(partial(self._store.write, _file(name), pack_attempt(attempt)))

    def packed(self, names: Iterable[RolloutName]) -> list[bytes]:
        return list(map(self._read, names))

    def _read(self, name: RolloutName) -> bytes:
        return self._store.patiently(partial(self._store.read, _file(name)))

    def load(self, name: RolloutName, task: Task) -> Attempt:
        """Return a rollout at `task`. Raises ValueError, which names the file, if it is damaged."""
        try:
            return unpack_attempt(self._read(name), task)
        except ValueError as error:
            file = f"{self._store.url}/{_file(name)}"
            raise ValueError(f"{file}: {error}; without this file a resumed run samples it again") from None

    def names(self) -> set[RolloutName]:
        names = self._store.patiently(self._store.names)
        keys = [name.removesuffix(SUFFIX).split("-") for name in names if name.endswith(SUFFIX)]
        return {(int(slot), int(attempt), int(member)) for slot, attempt, member in keys}

    def remove_others(self, slots: Container[int], below: float = math.inf) -> None:
        """Remove the rollouts of all other slots below a number, which are trained, and in the file of their step, replaced, or
        left over at the end. Slots above are another coordinator's, if the run goes on elsewhere."""
        for name in self.names():
            if name[0] not in slots and name[0] < below:
                self._store.patiently(partial(self._store.remove_file, _file(name)))


def _file(name: RolloutName) -> str:
    return f"{'-'.join(map(str, name))}{SUFFIX}"
