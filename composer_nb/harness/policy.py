"""The interface of a policy, which continues token prompts. The agent loop, the engine and scripts share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# Rollouts whose numbers differ by a multiple of this are repeats of one rollout and draw the same random numbers.
ATTEMPT_STRIDE = 1 << 40
# Distance between the numbers of a rollout's segments. Each segment draws its own random numbers.
SEGMENT_STRIDE = 1 << 32


def first_segment(rollout: int) -> int:
    """Return the number of a rollout's first segment, given the number of any segment."""
    return rollout - rollout % ATTEMPT_STRIDE // SEGMENT_STRIDE * SEGMENT_STRIDE


class SampledToken(NamedTuple):
    """A token as it was drawn.

    Attributes:
        top: The most probable tokens and their log-probabilities.
    """

    token: int
    logprob: float
    version: int
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for the next turn of a rollout. Tokens of earlier turns are not sent again: the policy keeps them.

    Attributes:
        rollout: Number of the rollout, unique during its life.
        token_ids: Tokens between the last turn and the next: the prompt at first, then an observation.
        max_tokens: Number of tokens after which the turn is cut.
        temperature: Temperature of this turn; None: that of the policy.
        top_p: Tokens are drawn from the smallest set with this total probability.
        top_k: Tokens are drawn from this number of the most probable ones; 0: from all.
        min_p: Tokens are drawn from those with at least this fraction of the highest probability.
        priority: Lower values go first, from the next step on: 0 for users, 1 for rollouts.
        user: Name of the user, which decides who gets a new version of the weights first.
        on_token: Called with every token as it is drawn, if the policy supports this.
        top: Number of most probable tokens to report beside the drawn one.
        allowed: Returns a mask [V] of the tokens that may follow the turn so far; only these are drawn. None: all may follow.
    """

    rollout: int
    token_ids: Sequence[int]
    max_tokens: int
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    priority: int = 1
    user: str = ""
    on_token: Callable[[SampledToken], None] | None = None
    top: int = 0
    allowed: Callable[[Sequence[int]], NDArray[np.bool_]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled turn.

    Attributes:
        token_ids: Tokens of the turn, ending with a stop token unless it was cut.
        logprobs: Log-probability of each token under the distribution that it was drawn from.
        policy_versions: Policy version of each token; -1 where no policy acted (a script).
    """

    rollout: int
    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]


class TimeIsUp(Exception):
    """A time limit passed before an answer came."""


class ProviderFailure(RuntimeError):
    """The provider of a policy failed permanently in a turn (ProviderError). This says nothing about the agent.

    Attributes:
        rollout: Number of the rollout.
    """

    rollout: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Records of a policy for a rollout of T tokens. Arrays are empty for a policy without experts.

    Attributes:
        routes: [T, L, K], of `route_dtype`. The last token was never forwarded: its row has no meaning, and its `route_valid`
            is false.
        checks: `route_checks` of every forwarded token, computed where the token was forwarded; 0 for other tokens.
    """

    routes: NDArray[np.unsignedinteger[Any]] = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    gates: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    margins: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    route_valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    checks: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def head(self, count: int) -> Trace:
        """Return the trace of the first `count` tokens."""
        return Trace(**{column.name: getattr(self, column.name)[:count] for column in fields(self)})

    def split(self, sizes: Sequence[int]) -> list[Trace]:
        """Return the traces of consecutive token sequences of these sizes. An empty trace splits into empty traces."""
        cuts = np.cumsum(sizes)[:-1]
        parts = {column.name: np.split(getattr(self, column.name), cuts) for column in fields(self)}
        return [Trace(**{name: part[n] for name, part in parts.items()}) for n in range(len(sizes))]


def route_dtype(experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the dtype of stored routes: uint8, or uint16 for more than 256 experts (Kimi K2 has 384)."""
    return np.uint8 if experts <= 256 else np.uint16


def route_checks(position: NDArray[Any], token_ids: NDArray[Any], routes: NDArray[Any]) -> NDArray[np.uint64]:
    """Return checks [N] that bind each row of `routes` [N, L, K] to its token and position, so that a consumer detects rows that
    were moved, with or without their checks.

    A check chains SplitMix64's mixing function (Steele, Lea, Flood 2014) over (position, token id) and the routes, eight bytes
    at a time. Mixing is a bijection, so a row never has the check of the same routes at another token or position. Rows of up to
    eight bytes never share a check with other routes at their position; longer ones do with probability 2^-64.
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
    """Accepts requests, returns completions as they finish, and forgets rollouts that have ended."""

    @property
    def capacity(self) -> int:
        """Maximum number of live rollouts."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> Sequence[Completion | ProviderFailure]:
        """Advance all submitted turns, and return those that ended in this step, in order of rollout."""

    def release(self, rollout: int) -> Trace | Future[Trace]:
        """Forget a rollout, at any time, and return its records or a future of them."""
