"""Policy: anything that continues token prompts. The vocabulary that the agent loop, the engine and scripts share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

ATTEMPT_STRIDE = 1 << 40
"""Rollouts whose numbers are a multiple of this apart are attempts at the same one: they draw the same random numbers."""
SEGMENT_STRIDE = 1 << 32
"""Numbers of a rollout's segments are this far apart: each draws random numbers of its own."""


def first_segment(rollout: int) -> int:
    """Return the number of the first segment of a rollout from that of any."""
    return rollout - rollout % ATTEMPT_STRIDE // SEGMENT_STRIDE * SEGMENT_STRIDE


class Drawn(NamedTuple):
    """A token as it was drawn."""

    token: int
    logprob: float
    version: int
    top: Sequence[tuple[int, float]] = ()
    """The most probable tokens with their log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The next turn of one rollout. Tokens of earlier turns are not sent again: the policy keeps what it has seen."""

    rollout: int
    """Names the rollout for as long as it lives."""
    token_ids: Sequence[int]
    """Tokens between the last turn and the next one: first the prompt, then an observation."""
    max_tokens: int
    """The turn is cut after so many tokens."""
    temperature: float | None = None
    """Temperature of this turn; None: the policy's own."""
    top_p: float = 1.0
    """Tokens are drawn from the smallest set with this total probability."""
    top_k: int = 0
    """Tokens are drawn from so many of the most probable ones; 0: from all."""
    min_p: float = 0.0
    """Tokens are drawn from those with at least this share of the highest probability."""
    priority: int = 1
    """Lower ones go first, at the next step: a user's is 0, a rollout's 1."""
    user: str = ""
    """Name of who asks, which decides who has a new version of the weights first."""
    heard: Callable[[Drawn], None] | None = None
    """Called with every token as it is drawn, by a policy that can do so."""
    top: int = 0
    """Number of the most probable tokens told beside the drawn one."""
    allowed: Callable[[Sequence[int]], NDArray[np.bool_]] | None = None
    """Returns [V] which tokens may follow those of the turn so far: it is drawn from these alone. None: all may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One turn as sampled."""

    rollout: int
    token_ids: list[int]
    """Ends with a stop token unless it was cut."""
    logprobs: list[float]
    """Log-probability of each token under the distribution that it was drawn from."""
    policy_versions: list[int]
    """Policy version of each token; -1 where no policy acted (a script)."""


class TimeIsUp(Exception):
    """A time limit passed before an answer came."""


class ProviderFailure(RuntimeError):
    """The provider of a policy failed for good in a turn (ProviderError): this says nothing about the agent."""

    rollout: int = -1
    """Rollout of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Records of a policy for a rollout of T tokens. Arrays are empty for a policy without experts."""

    routes: NDArray[np.unsignedinteger[Any]] = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    """[T, L, K], of `route_dtype`; the last token was never forwarded: its row is meaningless, its `route_valid` false."""
    gates: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    margins: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    route_valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    checks: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """`route_checks` of every forwarded token, computed where it was forwarded; 0 elsewhere."""

    def head(self, count: int) -> Trace:
        """Return the trace of the first tokens."""
        return Trace(**{each.name: getattr(self, each.name)[:count] for each in fields(self)})

    def split(self, sizes: Sequence[int]) -> list[Trace]:
        """Return the traces of token sequences of these sizes, one after another. A trace of nothing splits into such traces."""
        cuts = np.cumsum(sizes)[:-1]
        parts = {each.name: np.split(getattr(self, each.name), cuts) for each in fields(self)}
        return [Trace(**{name: part[n] for name, part in parts.items()}) for n in range(len(sizes))]


def route_dtype(experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the dtype of stored routes: uint8, or uint16 for more than 256 experts (Kimi K2 has 384)."""
    return np.uint8 if experts <= 256 else np.uint16


def route_checks(position: NDArray[Any], token_ids: NDArray[Any], routes: NDArray[Any]) -> NDArray[np.uint64]:
    """Return checks [N] that tie each row of `routes` [N, L, K] to its token and position, so that a consumer detects rows that
    were moved, with their checks or without.

    A chain of SplitMix64's mixing function (Steele, Lea, Flood 2014) over (position, token id) and the routes, eight bytes at
    a time. Mixing is a bijection, so a row never has the check of another token or place, and one of up to eight bytes never
    that of other routes; longer ones do so once in 2^64.
    """
    row_NB = np.ascontiguousarray(routes).reshape(len(routes), math.prod(routes.shape[1:])).view(np.uint8)
    padded_NB = np.zeros((len(row_NB), -(-row_NB.shape[1] // 8) * 8), np.uint8)
    padded_NB[:, : row_NB.shape[1]] = row_NB
    start = position.astype(np.uint64) << np.uint64(32) | token_ids.astype(np.uint64)
    mixed = _mix(start + np.uint64(0x9E3779B97F4A7C15))
    for word in padded_NB.view(np.uint64).T:
        mixed = _mix(mixed ^ word)
    return mixed


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


class Policy(Protocol):
    """Takes requests in, gives completions out as they finish, forgets rollouts that have ended."""

    @property
    def capacity(self) -> int:
        """Rollouts that can be alive at a time."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> Sequence[Completion | ProviderFailure]:
        """Work on everything submitted, and return the turns that ended in this step, in order of rollout."""

    def release(self, rollout: int) -> Trace | Future[Trace]:
        """Forget a rollout, also in the middle of a turn or before its first, and return its records, or what will hold them."""
