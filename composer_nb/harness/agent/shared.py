"""One policy for agents in their own threads: simultaneous requests share its steps."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

from composer_nb.harness.policy import Completion, Policy, ProviderFailure, Request, TimeIsUp, Trace


class Answering(Protocol):
    """An object that answers the turns of many conversations: an engine behind a `Shared`, or several of them."""

    @property
    def capacity(self) -> int:
        """Maximum number of live conversations."""

    def start(self, *requests: Request) -> list[Future[Completion]]: ...

    def release(self, rollout: int) -> Trace: ...


class Shared:
    """A policy shared by threads, with at most `policy.capacity` live rollouts. This is a context manager; at its end, waiting
    requests get a ProviderFailure.

    Turns that `start` begins are answered as they end. Turns in lockstep begin with `advance`: they pause between two calls."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # Seconds without work.
        self.idle_s = 0.0
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._asked: dict[int, Future[Completion]] = {}
        # Turns in lockstep that have ended.
        self._ended: list[Completion | ProviderFailure] = []
        self._over: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="policy", daemon=True)

    @property
    def capacity(self) -> int:
        return self.policy.capacity

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """End the policy's work and all waiting requests."""
        self._orders.put(None)

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Return the next turn of a rollout.

        Raises ProviderFailure, the policy's exceptions, and TimeIsUp if the turn would come later than `until`; the rollout can
        then only be released."""
        try:
            [answer] = self.start(request)
            return answer.result(None if until == math.inf else max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise TimeIsUp from None

    def start(self, *requests: Request) -> list[Future[Completion]]:
        """Begin turns in the same step, so that tokens common to several rollouts are forwarded once."""
        answers = [Future[Completion]() for _ in requests]

        def over(order: Future[Any]) -> None:
            if (error := order.exception()) is not None:
                for answer in answers:
                    settle(answer, error)

        self._order(lambda: self._submit(requests, answers)).add_done_callback(over)
        return answers

    def advance(self, *requests: Request) -> list[Completion | ProviderFailure]:
        """Begin turns, step until at least one turn that began so has ended, and return all that have. There must be one.

        Between two calls, these rollouts pause, so that every run steps the same ones. Raises the policy's exceptions."""

        def advance() -> list[Completion | ProviderFailure]:
            for request in requests:
                self.policy.submit(request)
            while not self._ended:
                self._step()
            ended, self._ended = self._ended, []
            return ended

        ended: list[Completion | ProviderFailure] = self.between(advance)
        return ended

    def release(self, rollout: int) -> Trace:
        """Forget a rollout, and return its records."""

        def forget() -> Any:
            if answer := self._asked.pop(rollout, None):
                answer.cancel()
            return self.policy.release(rollout)

        trace: Trace | Future[Trace] = self.between(forget)
        return trace.result() if isinstance(trace, Future) else trace

    def check(self) -> None:
        """Raise ProviderFailure if the policy is closed or has failed."""
        if self._over is not None:
            raise ProviderFailure(f"the policy has ended: {self._over!r}")

    def between(self, task: Callable[[], Any]) -> Any:
        """Run a task between two steps of the policy, and return its result."""
        return self._order(task).result()

    def _submit(self, requests: Sequence[Request], answers: Sequence[Future[Completion]]) -> None:
        for request, answer in zip(requests, answers, strict=True):
            try:
                self.policy.submit(request)
            except Exception as refused:  # the policy is unchanged
                settle(answer, refused)
            else:
                self._asked[request.rollout] = answer

    def _order(self, what: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._over is not None:
                raise self._over
            self._orders.put((what, answer))
        return answer

    def _work(self) -> None:
        over: BaseException = ProviderFailure("the policy was closed")
        try:
            while self._obey():
                self._step()
        except BaseException as error:  # of the policy: all waiting requests get it
            over = error
        with self._lock:
            self._over = over
        while not self._orders.empty():
            if order := self._orders.get():
                order[1].set_exception(over)
        for answer in self._asked.values():
            settle(answer, over)

    def _step(self) -> None:
        for turn in self.policy.step():
            if answer := self._asked.pop(turn.rollout, None):
                settle(answer, turn)
            else:
                self._ended.append(turn)

    def _obey(self) -> bool:
        """Carry out all waiting orders; if idle, wait for one. Return False at the end."""
        while True:
            waits, began = not self._asked, time.perf_counter()
            try:
                order = self._orders.get(block=waits)
            except queue.Empty:
                return True
            self.idle_s += time.perf_counter() - began if waits else 0.0
            if order is None:
                return False
            what, answer = order
            try:
                answer.set_result(what())
            except Exception as error:  # from the order, not from the policy
                answer.set_exception(error)


def settle(answer: Future[Completion], turn: Completion | BaseException) -> None:
    """Set the result of a turn, unless nobody waits for it any longer."""
    if not answer.set_running_or_notify_cancel():
        return
    if isinstance(turn, BaseException):
        answer.set_exception(turn)
    else:
        answer.set_result(turn)
