"""Weight versions by many ranks: each encodes and writes what it holds, the first one makes a version of it.

On a thread of its own in every rank and over a process group of its own, so that versions are written while the next step is
learnt. What goes wrong on one rank is raised on all, and leaves no version behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from composer_nb.trainer.store import StoreError
from composer_nb.trainer.version_store import Plan, Publisher, Writer

T = TypeVar("T")


class SharedPublisher:
    """A `Publisher` on the first rank and a `Writer` on each. `publish`, `prune` and `close` are calls of all ranks."""

    def __init__(self, url: str, group: dist.ProcessGroup, *, owner: str, full_every: int, depth: int = 2) -> None:
        """`group`: of gloo and of all ranks, used for nothing else. At most `depth` versions are on their way."""
        self._group, self._depth = group, depth
        rank = dist.get_rank(group)
        self._writer = Writer(url, rank=f"rank{rank:05d}")
        self._publisher: Publisher | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: deque[Future[None]] = deque()

        def begin() -> None:
            self._publisher = Publisher(url, owner=owner, full_every=full_every)

        self._first(begin)

    def publish(self, version: int, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> Future[str]:
        """Hands this rank's tensors of a version over. The future is the hash of all ranks' tensors together. Raises what went
        wrong with an earlier version instead."""
        self._settle(self._depth - 1)
        hash: Future[str] = Future()
        self._under_way.append(self._pool.submit(self._publish, version, tensors, files, hash))
        return hash

    def acknowledge(self, version: int, hash: str) -> None:
        """As `Publisher.acknowledge`; of the first rank."""
        if self._publisher is not None:
            self._publisher.acknowledge(version, hash)

    def prune(self, keep: int, since: float) -> None:
        """As `Publisher.prune`, between two versions."""
        if (publisher := self._publisher) is not None:
            self._under_way.append(self._pool.submit(self._prune, publisher, keep, since))

    def close(self) -> None:
        """Waits until all is published, gives the store back, and raises what first went wrong."""
        self._pool.shutdown()
        self._settle(0)
        if self._publisher is not None:
            self._publisher.close()

    @staticmethod
    def _prune(publisher: Publisher, keep: int, since: float) -> None:
        publisher.prune(keep, since=since)

    def _publish(
        self, version: int, tensors: Mapping[str, Tensor], files: Mapping[str, bytes], hash: Future[str]
    ) -> None:
        try:
            surveys = self._everyone(lambda: self._writer.survey(version, tensors))
            plan = self._first(lambda: self._lead.begin(version, surveys, files))
        except BaseException as error:
            hash.set_exception(error)
            raise
        hash.set_result(plan.hash)
        if plan.there:
            return
        due = self._carry_out(plan, files)
        if due is not None:
            with suppress(StoreError):  # an anchor is tried again beside the next version
                self._carry_out(due, files)

    def _carry_out(self, plan: Plan, files: Mapping[str, bytes]) -> Plan | None:
        """Makes a version, and returns how an anchor beside it is made, if one is due."""
        try:
            parts = self._everyone(lambda: self._writer.write(plan))
            return self._first(lambda: self._lead.anchor(self._lead.finish(plan, parts, files)))
        except BaseException:
            if self._publisher is not None:
                self._publisher.abandon(plan)
            raise

    @property
    def _lead(self) -> Publisher:
        assert self._publisher is not None, "of the first rank"
        return self._publisher

    def _first(self, act: Callable[[], T]) -> T:
        """What the first rank's `act` returned or raised, on all ranks."""
        told = [_outcome(act) if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(told, group_src=0, group=self._group)
        return _value(told[0])

    def _everyone(self, act: Callable[[], T]) -> list[T]:
        """What each rank's `act` returned, or what the first to fail raised, on all ranks."""
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, _outcome(act), group=self._group)
        return [_value(one) for one in told]

    def _settle(self, most: int) -> None:
        while self._under_way and (len(self._under_way) > most or self._under_way[0].done()):
            self._under_way.popleft().result()


def _outcome(act: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, act()
    except Exception as error:  # it is raised where the others are told
        return False, error


def _value(told: Any) -> Any:
    well, value = told
    if not well:
        raise value
    return value
