"""Fixtures of the harness: a small tokenizer, a task, and a policy that writes given tokens."""

from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.models.tokenizer import train_tokenizer

BUGGY = "def f(xs, k):\n    out = []\n    for x in xs:\n        if x < k:\n            out.append(x)\n    return out\n"
RIGHT = BUGGY.replace("x < k", "x > k")
VISIBLE = [(([1, 5, 3], 2), [5, 3]), (([], 1), [])]
HIDDEN = [(([4, 4, 9], 4), [9]), (([2, 8], 1), [2, 8]), (([-1, 0, 7], -5), [-1, 0, 7])]


@pytest.fixture(scope="session")
def renderer() -> CompactRenderer:
    tokenizer: Tokenizer = train_tokenizer([RIGHT, BUGGY, "fix f.py: list of items more than k", "read edit test"], 400)
    return CompactRenderer(tokenizer)


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(
        id="keep",
        instruction="fix f.py: list of items for items more than k",
        files={"f.py": BUGGY, "test_f.py": render_tests("f", "f", VISIBLE)},
        tests={"test_hidden.py": render_tests("f", "f", HIDDEN)},
        solution={"f.py": RIGHT},
        source_scope=("f.py",),
        metadata={"family": "loop"},
    )


class Boxes:
    """Sandboxes that run nothing: `answer` returns the result of a request. They keep the batches that they were sent."""

    def __init__(self, answer: Callable[[CallRequest], tuple[CallOutcome, ...]]) -> None:
        self.answer = answer
        self.batches: list[list[CallRequest]] = []

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        self.batches.append(list(requests))
        return [self.answer(request) for request in requests]


def returns(text: str) -> Callable[[CallRequest], tuple[CallOutcome, ...]]:
    """Return the answer that every call returned `text`."""
    return lambda request: (CallOutcome(status="returned", text=text),) * len(request.arguments)


class Typist:
    """A policy that writes what `write(rollout, turn)` says, cut where a policy has to stop.

    The log-probability of the n-th token of a rollout is -n, its policy version 100 + turn.
    """

    def __init__(
        self, renderer: CompactRenderer, write: Callable[[int, int], Sequence[int]], capacity: int = 4, slow: int = 1
    ) -> None:
        self.renderer, self.write, self.capacity, self.slow = renderer, write, capacity, slow
        self.requests: list[Request] = []
        self.released: list[int] = []
        self.most = 0
        self._live: dict[int, list[int]] = {}  # rollout -> [turns, tokens]
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self._live.setdefault(request.rollout, [0, 0])
        assert len(self._live) <= self.capacity, "more rollouts alive than capacity"
        self.most = max(self.most, len(self._live))
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Answer the first `slow`-th part of the waiting requests, so that rollouts fall out of step."""
        self._waiting.sort(key=lambda request: request.rollout)
        count = -(-len(self._waiting) // self.slow)
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return [self._complete(request) for request in batch]

    def release(self, rollout: int) -> Trace:
        self._waiting = [request for request in self._waiting if request.rollout != rollout]
        del self._live[rollout]
        self.released.append(rollout)
        return Trace()

    def _complete(self, request: Request) -> Completion:
        turn, before = self._live[request.rollout]
        token_ids: list[int] = []
        for token in list(self.write(request.rollout, turn))[: request.max_tokens]:
            token_ids.append(token)
            if token in self.renderer.stop:
                break
        self._live[request.rollout] = [turn + 1, before + len(token_ids)]
        logprobs = [-float(before + n) for n in range(1, len(token_ids) + 1)]
        versions = [100 + turn] * len(token_ids)
        return Completion(rollout=request.rollout, token_ids=token_ids, logprobs=logprobs, policy_versions=versions)


@pytest.fixture(scope="session")
def typist(renderer: CompactRenderer) -> Callable[..., Typist]:
    """Return a function that makes a `Typist`: `typist(write, capacity=…)`."""
    return lambda write, **options: Typist(renderer, write, **options)


@pytest.fixture(scope="session")
def boxes() -> Callable[..., Boxes]:
    """Return a function that makes `Boxes`: `boxes(answer)`, or `boxes("7")` where every call returns 7."""
    return lambda answer: Boxes(returns(answer) if isinstance(answer, str) else answer)


@pytest.fixture(scope="session")
def agent(renderer: CompactRenderer) -> Agent:
    return Agent(renderer, limits=Limits(turns=6, turn_tokens=48, tokens=600))
