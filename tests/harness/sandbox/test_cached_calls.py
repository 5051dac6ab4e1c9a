"""The memory in front of the sandboxes: it answers exactly as they would."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.sandbox.calls import CachedExecutor
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest

STATUSES = ("returned", "returned", "raised", "timeout", "died", "unreadable", "not_run")


def hashed(request: CallRequest) -> tuple[CallOutcome, ...]:
    """Outcomes that follow from everything in a request, each from all arguments before it, as with code that keeps state."""
    outcomes = []
    state = hashlib.sha256(repr([sorted(request.files.items()), request.module, request.function]).encode())
    for argument in request.arguments:
        state.update(argument.encode())
        digest = state.hexdigest()
        outcomes.append(CallOutcome(status=STATUSES[int(digest[0], 16) % 7], text=digest))  # type: ignore[arg-type]
    return tuple(outcomes)


class Unreliable:
    """Deterministic sandboxes, but for every `every`-th run, which fails."""

    def __init__(self, every: int) -> None:
        self.every, self.runs, self.requests = every, 0, 0

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        self.runs += 1
        if self.every and self.runs % self.every == 0:
            raise SandboxFailure("gone")
        self.requests += len(requests)
        return [hashed(request) for request in requests]


REQUESTS = st.builds(
    CallRequest,
    files=st.dictionaries(
        st.sampled_from(["f.py", "g.py", "test_f.py", "a/b.py"]),
        st.sampled_from(["", "x", "\0g.py\0x", "x\0g.py\0", "é\ud800"]),
        max_size=2,
    ),
    module=st.sampled_from(["f", "g"]),
    function=st.sampled_from(["f", "g"]),
    arguments=st.lists(st.sampled_from(["()", "(1,)", "(2,)"]), max_size=3).map(tuple),
)


@settings(max_examples=120)
@given(
    batches=st.lists(st.lists(REQUESTS, max_size=5), max_size=6),
    size=st.sampled_from([1, 3, 1000]),
    every=st.integers(0, 3),
)
def test_the_memory_answers_as_the_sandboxes_would(batches: list[list[CallRequest]], size: int, every: int) -> None:
    inside = Unreliable(every)
    memory = CachedExecutor(inside, size=size)
    asked = 0
    for batch in batches:
        before = memory.executed
        try:
            answers = memory.run(batch)
        except SandboxFailure:
            assert memory.executed == before
            continue
        asked += len(batch)
        assert answers == [hashed(request) for request in batch]
        assert len(memory._known) <= size
    assert memory.asked == asked and memory.executed == inside.requests <= asked
    if size == 1000 and not every:  # nothing is forgotten, and nothing known is executed again
        asked_for = [request for batch in batches for request in batch]
        distinct = {repr((sorted(r.files.items()), r.module, r.function, r.arguments)) for r in asked_for}
        assert memory.executed == len(distinct) and inside.runs <= len(distinct)


def request(text: str, *arguments: str) -> CallRequest:
    return CallRequest(files={"f.py": text}, module="f", function="f", arguments=arguments)


def test_a_request_that_a_limit_cut_is_known_as_a_whole() -> None:
    cut = (CallOutcome(status="returned", text="1"), CallOutcome(status="timeout"), CallOutcome(status="not_run"))

    class Cut(Unreliable):
        def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
            self.requests += len(requests)
            return [cut[: len(each.arguments)] for each in requests]

    inside = Cut(0)
    memory = CachedExecutor(inside)
    whole, part = request("x", "(1,)", "(2,)", "(3,)"), request("x", "(3,)")
    assert memory.run([whole, part]) == [cut, cut[:1]]  # what was not run before may well run first
    assert memory.run([part, whole]) == [cut[:1], cut]
    assert inside.requests == 2
