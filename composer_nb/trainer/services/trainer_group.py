"""The ranks of the trainer as one service: every call goes to all ranks, and they live and die together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from composer_nb.trainer.services.actors import ActorDied, RayActors
from composer_nb.trainer.services.trainer_rank import TrainerRank
from composer_nb.trainer.settings import Settings

HEARD_S = 20.0
"""Seconds to wait for the report of a rank's death: when one dies, the others fail too, and may report first."""


class TrainerGroup:
    """A `Remote` whose calls are executed by all ranks, in the order of the calls."""

    def __init__(self, actors: RayActors, run: Path, settings: Settings) -> None:
        ranks, gpus = settings.trainers, settings.mesh.gpus
        self._members = actors.make_ranks(TrainerRank, ranks, run, settings, name="trainer", threads=8, gpus=gpus)
        self._numbers = count(1)  # "begin" is the first, whenever it comes
        self._begun: Future[Any] = Future()
        self._members[0].call("meet").add_done_callback(self._met)

    def _met(self, meeting: Future[str]) -> None:
        if (error := meeting.exception()) is not None:
            self._begun.set_exception(error)
        else:
            begun = together([member.call("turn", 0, "begin", meeting.result()) for member in self._members])
            _chain(begun, self._begun.set_result, self._begun)

    def call(self, method: str, *values: Any) -> Future[Any]:
        """Return the first rank's result once all ranks have returned. Raises ActorDied if a rank is gone. `state` returns once
        the checkpoint is written; `tensors` returns those of all ranks."""
        if self._begun.done():
            self._begun.result()
        outer: Future[Any] = Future()
        inner = self._turn(method, *values)
        if method == "state":
            _chain(inner, lambda begun: self._when_saved(begun[0], outer), outer)
        elif method == "tensors":
            _chain(inner, lambda results: outer.set_result(_joined(results)), outer)
        else:
            _chain(inner, lambda results: outer.set_result(results[0]), outer)
        return outer

    def wait(self, method: str, *values: Any) -> Any:
        """Call a method and return its result."""
        self._begun.result()
        return self.call(method, *values).result()

    def kill(self) -> None:
        """End all ranks at once."""
        for member in self._members:
            member.kill()

    def _turn(self, method: str, *values: Any) -> Future[list[Any]]:
        number = next(self._numbers)
        return together([member.call("turn", number, method, *values) for member in self._members])

    def _when_saved(self, begun: Any, outer: Future[Any]) -> None:
        saved = together([member.call("saved") for member in self._members])
        _chain(saved, lambda _: outer.set_result(begun), outer)


def together(futures: Sequence[Future[Any]], patience_s: float = HEARD_S) -> Future[list[Any]]:
    """Return a future of all results. It raises as soon as a rank is known to be dead. Another failure may be the first sign of a
    death, so it raises once all have ended or after `patience_s`."""
    outer: Future[list[Any]] = Future()
    lock, left, failed = threading.Lock(), len(futures), list[BaseException]()

    def settle(error: BaseException | None) -> None:
        with lock:
            if outer.done():
                return
            if error is None:
                outer.set_result([future.result() for future in futures])
            else:
                outer.set_exception(error)

    def ended(future: Future[Any]) -> None:
        nonlocal left
        error = future.exception()
        with lock:
            left -= 1
            last, first = left == 0, error is not None and not failed
            if error is not None:
                failed.append(error)
        if isinstance(error, ActorDied) or (last and failed):
            settle(error if isinstance(error, ActorDied) else failed[0])
        elif last:
            settle(None)
        elif first:
            timer = threading.Timer(patience_s, settle, (error,))
            timer.daemon = True
            timer.start()

    for future in futures:
        future.add_done_callback(ended)
    return outer


def _chain(inner: Future[Any], then: Callable[[Any], None], outer: Future[Any]) -> None:
    """Call `then` with the result of `inner`, or pass its exception to `outer`."""

    def done(future: Future[Any]) -> None:
        if (error := future.exception()) is not None:
            outer.set_exception(error)
        else:
            then(future.result())

    inner.add_done_callback(done)


def _joined(parts: list[tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    """Return the common version of all ranks, and its parts from each."""
    return parts[0][0], {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
