"""What carries out executions: a fleet of sandboxes, and the memory in front of it that spares identical ones."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from composer_nb.harness.sandbox import CallOutcome, CallRequest


class Executor(Protocol):
    """Carries out requests, each in a fresh sandbox of its own, and answers in their order."""

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]: ...


class CachedExecutor:
    """Remembers what code returned: the same files, function and argument give the same text.

    Everything remembered is the outcome of a real execution in a sandbox. Failures of the infrastructure are never
    remembered. Beyond `size` arguments the oldest are dropped.
    """

    def __init__(self, sandboxes: Executor, size: int = 1 << 19) -> None:
        self.sandboxes, self.size = sandboxes, size
        self.asked = 0
        self.executed = 0
        self._known: OrderedDict[tuple[bytes, str], CallOutcome] = OrderedDict()
        self._cut: dict[tuple[tuple[bytes, str], ...], tuple[CallOutcome, ...]] = {}
        """Requests that a limit ended part of the way: known as a whole only."""

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        keys = [_keys(r.files, r.module, r.function, r.arguments) for r in requests]
        missing = {
            tuple(key): request
            for key, request in zip(keys, requests, strict=True)
            if any(part not in self._known for part in key) and tuple(key) not in self._cut
        }
        outcomes = dict(zip(missing, self.sandboxes.run(list(missing.values())), strict=True)) if missing else {}
        self.asked += len(requests)
        self.executed += len(missing)
        for key, calls in outcomes.items():
            if all(call.status in ("returned", "raised", "unreadable") for call in calls):
                self._known.update(zip(key, calls, strict=True))
            else:
                self._cut[key] = calls
        answers = [self._cut.get(tuple(key)) or tuple(self._known[part] for part in key) for key in keys]
        while len(self._known) > self.size:
            self._known.popitem(last=False)
        return answers

    def remember(
        self,
        files: Mapping[str, str],
        module: str,
        function: str,
        arguments: Sequence[str],
        outcomes: Sequence[CallOutcome],
    ) -> None:
        """Notes outcomes that were obtained elsewhere, in a sandbox as well."""
        self._known.update(zip(_keys(files, module, function, arguments), outcomes, strict=True))


def _keys(files: Mapping[str, str], module: str, function: str, arguments: Sequence[str]) -> list[tuple[bytes, str]]:
    digest = hashlib.sha256(f"{module}:{function}".encode())
    for path in sorted(files):
        if not path.startswith("test_"):
            digest.update(f"\0{path}\0{files[path]}".encode())
    code = digest.digest()
    return [(code, argument) for argument in arguments]
