"""The driver: agents that work beside each other, and what becomes of one that is no longer wanted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from composer_nb.harness.agent.driver import Driver, Seat, drive
from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.harness.sandbox.requests import CallRequest


class Echo:
    """A policy that answers at once, and notes the order of everything."""

    capacity = 4

    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []
        self._waiting: list[int] = []

    def submit(self, request: Request) -> None:
        self.noted.append(("asked", request.rollout))
        self._waiting.append(request.rollout)

    def step(self) -> list[Completion]:
        done, self._waiting = self._waiting, []
        return [Completion(rollout=n, token_ids=[n], logprobs=[0.0], policy_versions=[0]) for n in done]

    def release(self, rollout: int) -> Trace:
        self.noted.append(("released", rollout))
        return Trace()


class Nothing:
    def run(self, requests: Any) -> Any:
        raise AssertionError("nothing is executed here")


def ask(seat: Seat[Any], rollout: int) -> list[int]:
    return seat.ask(Request(rollout=rollout, token_ids=[1], max_tokens=1)).token_ids


def test_traces_of_rollouts_that_end_together_are_fetched_together() -> None:
    """The policy, which is elsewhere, gives none of them before it was asked for all."""
    asked: list[Future[Trace]] = []

    class Far(Echo):
        def release(self, rollout: int) -> Future[Trace]:  # type: ignore[override]
            asked.append(Future())
            if len(asked) == 3:
                for trace in asked:
                    trace.set_result(Trace(margins=np.ones((1, 1), np.float32)))
            return asked[-1]

    def job(number: int) -> Callable[[Seat[Any]], Trace]:
        return lambda seat: [ask(seat, number), seat.release(number)][1]  # type: ignore[return-value]

    assert [len(trace.margins) for _, trace in drive(map(job, range(3)), Far(), Nothing())] == [1, 1, 1]


def test_in_lockstep_agents_are_served_in_order_whoever_is_first() -> None:
    """The first agents are the slowest."""
    policy = Echo()

    def job(number: int) -> Callable[[Seat[Any]], int]:
        def work(seat: Seat[Any]) -> int:
            for turn in range(3):
                threading.Event().wait(0.01 * ((number + turn) % 4))
                assert ask(seat, number) == [number]
            seat.release(number)
            return number

        return work

    done = list(drive([job(number) for number in range(4)], policy, Nothing()))
    assert done == [(number, number) for number in range(4)]
    asked = [("asked", number) for number in range(4)]
    assert policy.noted == asked * 3 + [("released", number) for number in range(4)]


def test_in_lockstep_a_round_that_is_broken_off_goes_on_as_if_it_had_not_been() -> None:
    """It ends early where an agent works for long, so that whoever calls it can say that it lives."""

    def run(seconds: float) -> tuple[list[Any], list[Any], int]:
        policy = Echo()
        driver: Driver[int] = Driver(policy, Nothing())

        def job(number: int) -> Callable[[Seat[Any]], int]:
            def work(seat: Seat[Any]) -> int:
                for turn in range(1 + number % 4):
                    threading.Event().wait(0.04 * ((number + turn) % 3))
                    ask(seat, number)
                if number % 2:
                    seat.release(number)
                return number

            return work

        done, waiting, rounds = list[Any](), list(range(8)), 0
        while waiting or driver.alive:
            while waiting and driver.room:
                driver.add(number := waiting.pop(0), job(number))
            done.append(driver.round(seconds))
            rounds += 1
        return policy.noted, [ended for ended in done if ended], rounds

    whole, broken = run(math.inf), run(0.01)
    assert whole[:2] == broken[:2] and whole[2] < broken[2]


def test_without_lockstep_an_agent_at_work_holds_up_no_other() -> None:
    policy, go_on = Echo(), threading.Event()
    driver: Driver[str] = Driver(policy, Nothing(), lockstep=False)

    def slow(seat: Seat[Any]) -> str:
        assert go_on.wait(120)
        return "slow"

    def quick(seat: Seat[Any]) -> str:
        for _ in range(20):
            ask(seat, 1)
        return "quick"

    driver.add(0, slow)
    driver.add(1, quick)
    done: list[tuple[int, str]] = []
    while not done:
        done = driver.round()
    assert done == [(1, "quick")] and driver.alive == [0]
    go_on.set()
    while driver.alive:
        done += driver.round()
    assert [*done, *driver.round()] == [(1, "quick"), (0, "slow")]


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
            driver.round()
    assert at == "a request that nobody took" or reached.wait(120)
    driver.drop(0)
    assert stopped.is_set() and not driver.alive and driver.room == policy.capacity
    assert policy.noted[-1] == ("released", 7)
    assert driver.round() == []
    driver.drop(0)


def test_an_error_of_an_agent_is_raised_where_it_is_driven() -> None:
    def job(seat: Seat[Any]) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        list(drive([job], Echo(), Nothing()))


def test_calls_of_one_round_are_one_batch_in_order() -> None:
    batches: list[list[str]] = []

    class Calls:
        def run(self, requests: Any) -> Any:
            batches.append([request.function for request in requests])
            return [()] * len(requests)

    def job(number: int) -> Callable[[Seat[Any]], None]:
        request = CallRequest(files={}, module="m", function=f"f{number}", arguments=())
        return lambda seat: None if seat.run([request]) == [()] else pytest.fail("no answer")

    assert [place for place, _ in drive([job(number) for number in range(4)], Echo(), Calls())] == [0, 1, 2, 3]
    assert batches == [["f0", "f1", "f2", "f3"]]


def test_without_lockstep_the_policy_goes_on_while_calls_run() -> None:
    """A call that ends only when another agent has had its turns holds up nobody. What calls raise, `round` raises."""
    turns = threading.Event()

    class Slow:
        def run(self, requests: Any) -> Any:
            assert turns.wait(120)
            return [(outcome,) for outcome in range(len(requests))]

    def calling(seat: Seat[Any]) -> Any:
        return seat.run([CallRequest(files={}, module="m", function="f", arguments=("()",))])

    def talking(seat: Seat[Any]) -> str:
        for _ in range(20):
            ask(seat, 1)
        turns.set()
        return "talked"

    driver: Driver[Any] = Driver(Echo(), Slow(), lockstep=False)
    for position, job in enumerate((calling, talking)):
        driver.add(position, job)
    done: list[tuple[int, Any]] = []
    while driver.alive:
        done += driver.round()
    assert dict([*done, *driver.round()]) == {0: [(0,)], 1: "talked"}
    driver.close()

    driver = Driver(Echo(), Nothing(), lockstep=False)
    driver.add(0, calling)
    with pytest.raises(AssertionError, match="nothing is executed here"):
        while True:
            driver.round()
