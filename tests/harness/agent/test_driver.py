"""The driver: agents that work beside each other, and what becomes of one that is no longer wanted."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from composer_nb.harness.agent.driver import Driver, Seat
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallRequest


class Echo:
    """A policy that answers at once, and records the order of everything."""

    capacity = 4

    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []
        self._waiting: list[int] = []
        self.threads = set[int]()

    def submit(self, request: Request) -> None:
        self.noted.append(("asked", request.rollout))
        self._waiting.append(request.rollout)

    def step(self) -> list[Completion]:
        self.threads.add(threading.get_ident())
        ready, self._waiting = self._waiting, []
        return [Completion(rollout=n, token_ids=[n], logprobs=[0.0], policy_versions=[0]) for n in ready]

    def release(self, rollout: int) -> Trace:
        self.noted.append(("released", rollout))
        self.threads.add(threading.get_ident())
        return Trace()


class Nothing:
    def run(self, requests: Any) -> Any:
        raise AssertionError("nothing is executed here")


def ask(seat: Seat[Any], rollout: int) -> list[int]:
    return seat.ask(Request(rollout=rollout, token_ids=[1], max_tokens=1)).token_ids


def test_in_lockstep_turns_begin_in_order_whoever_is_first_and_however_often_the_caller_looks() -> None:
    """A wait ends early where an agent works for long, so that its caller can report that it is alive."""

    def run(seconds: float) -> tuple[list[Any], list[Any], int]:
        policy = Echo()
        driver: Driver[int] = Driver(policy, Nothing())

        def job(number: int) -> Callable[[Seat[Any]], int]:
            def work(seat: Seat[Any]) -> int:
                for turn in range(1 + number % 4):
                    threading.Event().wait(0.04 * ((number + turn) % 3))
                    assert ask(seat, number) == [number]
                if number % 2:
                    seat.release(number)
                return number

            return work

        endings, waiting, rounds = list[Any](), list(range(8)), 0
        while waiting or driver.alive:
            while waiting and driver.room:
                driver.add(number := waiting.pop(0), job(number))
            endings.append(driver.wait(seconds))
            rounds += 1
        # An engine's device and number of threads are its thread's own.
        assert policy.threads == {threading.get_ident()}
        return policy.noted, [ended for ended in endings if ended], rounds

    long_waits, short_waits = run(math.inf), run(0.01)
    assert long_waits[0][:7] == [("asked", number) for number in (0, 1, 2, 3, 1, 2, 3)]
    assert long_waits[1][:2] == [[(0, 0)], [(1, 1), (4, 4)]]
    assert long_waits[:2] == short_waits[:2] and long_waits[2] < short_waits[2]


@pytest.mark.parametrize("at", ["work", "the policy", "a request that nobody took"])
def test_an_agent_that_is_dropped_ends_and_is_released(at: str) -> None:
    policy, stopped, reached = Echo(), threading.Event(), threading.Event()
    driver: Driver[None] = Driver(policy, Nothing(), lockstep=False)

    def job(seat: Seat[Any]) -> None:
        seat.at_drop.append(stopped.set)
        try:
            if at == "work":
                reached.set()
                assert stopped.wait(120)
            else:
                ask(seat, 7)
                reached.set()
            while True:
                ask(seat, 7)
        finally:
            seat.release(7)

    driver.add(0, job)
    if at == "the policy":
        while not reached.is_set():
            driver.wait(0.01)
    assert at == "a request that nobody took" or reached.wait(120)
    driver.drop(0)
    assert stopped.is_set() and not driver.alive and driver.room == policy.capacity
    assert policy.noted[-1] == ("released", 7)
    assert driver.wait(0) == []
    driver.drop(0)


def test_a_policy_that_fails_wakes_all_others_of_a_turn_that_was_cancelled() -> None:
    cancelled = threading.Event()

    class Failing(Echo):
        def submit(self, request: Request) -> None:
            assert cancelled.wait(120)
            if request.rollout == 0:
                raise ValueError("refused")

        def step(self) -> list[Completion]:
            raise KeyError("broken")

    with Shared(Failing()) as shared:
        refused, withdrawn, waiting = shared.start(*(Request(rollout=n, token_ids=[1], max_tokens=1) for n in range(3)))
        assert refused.cancel() and withdrawn.cancel()
        cancelled.set()
        with pytest.raises(KeyError, match="broken"):
            waiting.result(60)


def test_without_lockstep_neither_calls_nor_work_hold_up_another() -> None:
    """Calls that end only when another agent has had its turns, and an agent at work. What calls raise, `wait` raises."""
    turns = threading.Event()

    class Slow:
        def run(self, requests: Any) -> Any:
            assert turns.wait(120)
            return [(outcome,) for outcome in range(len(requests))]

    def calling(seat: Seat[Any]) -> Any:
        return seat.run([CallRequest(files={}, module="m", function="f", arguments=("()",))])

    def working(seat: Seat[Any]) -> str:
        assert turns.wait(120)
        return "worked"

    def talking(seat: Seat[Any]) -> str:
        for _ in range(20):
            ask(seat, 2)
        turns.set()
        return "talked"

    driver: Driver[Any] = Driver(Echo(), Slow(), lockstep=False)
    for position, job in enumerate((calling, working, talking)):
        driver.add(position, job)
    endings: list[tuple[int, Any]] = []
    while driver.alive:
        endings += driver.wait()
    assert dict([*endings, *driver.wait()]) == {0: [(0,)], 1: "worked", 2: "talked"}
    driver.close()

    driver = Driver(Echo(), Nothing(), lockstep=False)
    driver.add(0, calling)
    with pytest.raises(AssertionError, match="nothing is executed here"):
        while True:
            driver.wait()


def test_in_lockstep_the_calls_of_all_run_together_and_a_failure_is_that_of_its_agent() -> None:
    batches: list[int] = []

    class Executes:
        def run(self, requests: Any) -> Any:
            batches.append(len(requests))
            if "bad" in requests:
                raise SandboxFailure("gone")
            return [(request,) for request in requests]

    driver: Driver[Any] = Driver(Echo(), Executes())

    def job(number: int) -> Callable[[Seat[Any]], Any]:
        def work(seat: Seat[Any]) -> Any:
            assert ask(seat, number) == [number]
            try:
                return seat.run([number, "bad"] if number == 2 else [number] * number)  # type: ignore[list-item]
            except SandboxFailure as failure:
                return str(failure)

        return work

    for number in range(4):
        driver.add(number, job(number))
    assert driver.wait() == [(0, []), (1, [(1,)]), (2, "gone"), (3, [(3,)] * 3)]
    assert batches == [6, 0, 1, 2, 3]
