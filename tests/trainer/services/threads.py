"""Services on threads of this process, in place of Ray's actors."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from composer_nb.trainer.services.actors import ActorDied


class ThreadRemote:
    """An object of this process with a thread of its own a call at a time."""

    def __init__(self, kind: Callable[..., Any], values: tuple[Any, ...], threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._made = self._pool.submit(kind, *values)
        self.dead = False

    def call(self, method: str, *values: Any) -> Future[Any]:
        try:
            return self._pool.submit(self._invoke, method, values)
        except RuntimeError as ended:
            reply: Future[Any] = Future()
            reply.set_exception(ActorDied(str(ended)))
            return reply

    def _invoke(self, method: str, values: tuple[Any, ...]) -> Any:
        if self.dead:
            raise ActorDied("the service was ended")
        result = getattr(self._made.result(), method)(*values)
        if self.dead:
            raise ActorDied("the service was ended")
        return result

    def kill(self) -> None:
        self.dead = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([self._made])  # a thread cannot be ended while it is born: it would go on to write, as no process does
        if not self._made.cancelled() and not self._made.exception() and hasattr(self._made.result(), "stop"):
            self._made.result().stop()


class Threads:
    """Services as objects of this process."""

    def __init__(self) -> None:
        self.made: dict[str, ThreadRemote] = {}

    def make(self, kind: Callable[..., Any], *values: Any, name: str, threads: int = 1, gpus: int = 0) -> ThreadRemote:
        self.made[name] = ThreadRemote(kind, values, threads)
        return self.made[name]

    def make_ranks(
        self, kind: Callable[..., Any], count: int, *values: Any, name: str, threads: int, gpus: int = 0
    ) -> list[ThreadRemote]:
        return [self.make(kind, rank, *values, name=f"{name}-{rank}", threads=threads) for rank in range(count)]

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        for remote in self.made.values():
            remote.kill()
