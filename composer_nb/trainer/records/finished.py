"""Rollouts that are graded and not trained yet: `finished/<slot>-<attempt>-<place>.safetensors` below the run's `rollouts`, or
below its folder in `services.store`.

An environment worker packs a rollout and writes it before it reports its end, so a process that is killed loses none that was
reported. A batch takes over the packed rollouts as they are (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from composer_nb.harness.files import WAITS_S, patiently, write_atomic
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task

# Slot, attempt and place of a rollout of the services.
RolloutName = tuple[int, int, int]


class FinishedRollouts:
    """The finished rollouts of a run. Workers write them, the coordinator reads and removes them."""

    def __init__(self, run: Path, store: str = "") -> None:
        url = f"{store.rstrip('/')}/{run.name}/finished" if store else str(run / "rollouts" / "finished")
        self._fs, self._folder = url_to_fs(url, use_listings_cache=False)
        self._waits_s = () if isinstance(self._fs, LocalFileSystem) else WAITS_S
        self._fs.makedirs(self._folder, exist_ok=True)

    def _file(self, name: RolloutName) -> str:
        return f"{self._folder}/{'-'.join(map(str, name))}.safetensors"

    def save(self, name: RolloutName, attempt: Attempt) -> None:
        if isinstance(self._fs, LocalFileSystem):
            write_atomic(Path(self._file(name)), pack_attempt(attempt), sync=True)
        else:
            data = pack_attempt(attempt)
            patiently(lambda: self._fs.pipe_file(self._file(name), data), self._waits_s)

    def _read(self, name: RolloutName) -> bytes:
        return bytes(patiently(lambda: self._fs.cat_file(self._file(name)), self._waits_s))

    def packed(self, names: Iterable[RolloutName]) -> list[bytes]:
        return [self._read(name) for name in names]

    def load(self, name: RolloutName, task: Task) -> Attempt:
        """Return a rollout at `task`. Raises ValueError, which names the file, if it is damaged."""
        try:
            return unpack_attempt(self._read(name), task)
        except ValueError as error:
            raise ValueError(f"{self._file(name)}: {error}; without this file a resumed run samples it again") from None

    def names(self) -> set[RolloutName]:
        try:
            listing = patiently(lambda: self._fs.ls(self._folder, detail=False), self._waits_s)
            files = [PurePosixPath(file) for file in listing]
        except FileNotFoundError:  # an object store has no empty folders
            files = []
        names = [file.stem.split("-") for file in files if file.suffix == ".safetensors"]
        return {(int(slot), int(attempt), int(place)) for slot, attempt, place in names}

    def remove_others(self, slots: Container[int]) -> None:
        """Remove the rollouts of all other slots, which are trained, and in the file of their step, replaced,
        or left over at the end."""
        for name in self.names():
            if name[0] not in slots:
                with suppress(FileNotFoundError):  # the listing was old
                    patiently(partial(self._fs.rm_file, self._file(name)), self._waits_s)
