"""What carries out executions: a fleet of sandboxes, and the memory in front of it that spares identical ones."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from composer_nb.harness.sandbox import CallOutcome, CallRequest


class Executor(Protocol):
    """Carries out requests, each in a fresh sandbox of its own, and answers in their order."""

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]: ...


class CachedExecutor:
    """Remembers what code returned: a request for the same files, function and arguments gets the same answer.

    Requests are known as wholes, because code may keep state from one argument to the next and a limit may end it part of
    the way. Failures of the infrastructure are never remembered. Beyond `size` requests the oldest are dropped.
    """

    def __init__(self, sandboxes: Executor, size: int = 1 << 17) -> None:
        self.sandboxes, self.size = sandboxes, size
        self.asked = 0
        self.executed = 0
        self._known: OrderedDict[bytes, tuple[CallOutcome, ...]] = OrderedDict()

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        keys = [_key(request) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._known}
        outcomes = self.sandboxes.run(list(missing.values())) if missing else []
        self.asked += len(requests)
        self.executed += len(missing)
        self._known.update(zip(missing, outcomes, strict=True))
        answers = [self._known[key] for key in keys]
        self._forget()
        return answers

    def remember(self, request: CallRequest, outcomes: Sequence[CallOutcome]) -> None:
        """Notes outcomes that are known already: of a batch in one sandbox, or of a reference program of ours."""
        self._known[_key(request)] = tuple(outcomes)
        self._forget()

    def _forget(self) -> None:
        while len(self._known) > self.size:
            self._known.popitem(last=False)


def _key(request: CallRequest) -> bytes:
    parts = [request.module, request.function, sorted(request.files.items()), request.arguments]
    return hashlib.sha256(json.dumps(parts).encode()).digest()
