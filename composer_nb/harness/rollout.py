"""Rollout: one whole attempt at a task, as token streams that can be trained on, re-scored and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.policy import Trace


class Kind(IntEnum):
    """What a token is. The agent wrote those from THINKING to SUMMARY."""

    PROMPT = 0
    THINKING = 1
    TOOL_CALL = 2
    FINAL_MESSAGE = 3
    SUMMARY = 4
    OBSERVATION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One trainable token sequence of T tokens. Raises ValueError for streams that are not aligned."""

    token_ids: NDArray[np.int32]
    kind: NDArray[np.uint8]
    logprob: NDArray[np.float32]
    """As sampled; 0 where the agent did not write."""
    policy_version: NDArray[np.int32]
    """-1 where no policy acted."""
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        streams = {len(self.token_ids), len(self.kind), len(self.logprob), len(self.policy_version)}
        if len(streams) > 1 or len(self.trace.route_valid) not in (0, *streams):
            raise ValueError(f"streams of {sorted(streams)} tokens with a trace of {len(self.trace.route_valid)}")

    @property
    def acted(self) -> NDArray[np.bool_]:
        """Tokens that the agent wrote, the trainable ones."""
        return (self.kind >= Kind.THINKING) & (self.kind <= Kind.SUMMARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model message and the observation that answered it."""

    call: str
    """JSON of the call in OpenAI's form, or the text as written where it could not be parsed."""
    observation: str
    error: str | None = None
    tests_passed: int | None = None
    tests_run: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt: what was written, what was answered, what is left in the workspace."""

    task_id: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    files: dict[str, str]
    """The workspace at the end."""
    stop: str
    """`finished`, the limit that ended it (`turns`, `tokens`, `time`), or `infrastructure`: no fault of the agent."""

    @property
    def tokens(self) -> int:
        """All tokens, read and written."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def sampled(self) -> int:
        """Tokens that the agent wrote."""
        return sum(int(segment.acted.sum()) for segment in self.segments)

    @property
    def invalid_calls(self) -> int:
        return sum(turn.error == "InvalidArguments" for turn in self.turns)
