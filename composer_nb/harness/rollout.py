"""Rollout: one whole attempt at a task, as token streams that can be trained on, re-scored and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.policy import Completion, Trace


class Kind(IntEnum):
    """Kinds of tokens. The agent writes those from THINKING to SUMMARY."""

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
    """Log-probability as sampled; 0 for tokens that the agent did not write."""
    policy_version: NDArray[np.int32]
    """-1 where no policy acted."""
    trace: Trace = field(default_factory=Trace)
    parent: int = -1
    """Number, within the rollout, of the segment that this one goes on from; -1 for one that begins with the task."""

    def __post_init__(self) -> None:
        streams = {len(self.token_ids), len(self.kind), len(self.logprob), len(self.policy_version)}
        if len(streams) > 1 or len(self.trace.route_valid) not in (0, *streams):
            raise ValueError(f"streams of {sorted(streams)} tokens with a trace of {len(self.trace.route_valid)}")

    @property
    def acted(self) -> NDArray[np.bool_]:
        """Tokens that the agent wrote, the trainable ones."""
        return (self.kind >= Kind.THINKING) & (self.kind <= Kind.SUMMARY)

    @property
    def messages(self) -> list[NDArray[np.int64]]:
        """Places of the tokens of each message that the agent wrote, a summary at the end among them."""
        places = np.flatnonzero(self.acted)
        return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []

    @property
    def reused(self) -> int:
        """Tokens whose keys and values the call for the summary found in the cache; 0 for a segment without one."""
        summed = bool((self.kind == Kind.SUMMARY).any()) and len(self.messages) > 1
        return int(self.messages[-2][-1]) if summed else 0


@dataclass(slots=True)
class Transcript:
    """Token streams under construction."""

    token_ids: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)

    def read(self, token_ids: Sequence[int], kind: Kind) -> None:
        self._add(token_ids, [kind] * len(token_ids), [0.0] * len(token_ids), [-1] * len(token_ids))

    def wrote(self, completion: Completion, kinds: Sequence[Kind]) -> None:
        self._add(completion.token_ids, kinds, completion.logprobs, completion.policy_versions)

    def _add(
        self, token_ids: Sequence[int], kinds: Sequence[Kind], logprob: Sequence[float], version: Sequence[int]
    ) -> None:
        self.token_ids += token_ids
        self.kind += map(int, kinds)
        self.logprob += logprob
        self.version += version

    def segment(self, trace: Trace, parent: int = -1) -> Segment:
        return Segment(
            token_ids=np.array(self.token_ids, np.int32),
            kind=np.array(self.kind, np.uint8),
            logprob=np.array(self.logprob, np.float32),
            policy_version=np.array(self.version, np.int32),
            trace=trace,
            parent=parent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call and the observation that answered it, with what the model said before it."""

    call: str
    """JSON of the call in OpenAI's form, or the text as written where it could not be parsed; empty where there is none."""
    observation: str
    error: str | None = None
    tests_passed: int | None = None
    tests_run: int | None = None
    said: str = ""
    """Text beside the calls of a message, kept with its first call."""
    beside: bool = False
    """This call belongs to the same message as the one before."""
    seconds: float = 0.0
    """From the message to the answer, where it was measured."""


class Hint(NamedTuple):
    """A text that the policy is to read before one turn of a segment."""

    start: int
    """First token of the turn."""
    stop: int
    """Place after its last token."""
    at: int
    """Place at which the hint is put in, before the cue for the turn."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt: tokens, calls with their answers, and the files left in the workspace."""

    task_id: str
    segments: tuple[Segment, ...]
    """A tree: each comes after its parent."""
    turns: tuple[Turn, ...]
    files: dict[str, str]
    """The workspace at the end."""
    stop: str
    """`finished`, the limit that ended it (`turns`, `tokens`, `time`), `interrupted` by its user, or `infrastructure`: no
    fault of the agent."""
    counted: tuple[int, int] = (0, 0)
    """Tokens read and written, as counted by an endpoint, which gives no token streams."""
    seconds: float = 0.0
    """From its first message to its last, where it was measured."""
    before: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The workspace at the start: the task's files."""

    @property
    def tokens(self) -> int:
        """All tokens, read and written."""
        return sum(len(segment.token_ids) for segment in self.segments) or sum(self.counted)

    @property
    def sampled(self) -> int:
        """Tokens that the agent wrote."""
        return sum(int(segment.acted.sum()) for segment in self.segments) or self.counted[1]

    @property
    def versions(self) -> NDArray[np.int32]:
        """Policy version of each token that the agent wrote."""
        return np.concatenate([np.zeros(0, np.int32), *(s.policy_version[s.acted] for s in self.segments)])

    @property
    def messages(self) -> int:
        """Messages of the model, summaries left out."""
        return sum(not turn.beside for turn in self.turns)

    @property
    def calls(self) -> int:
        """Calls, invalid ones included."""
        return sum(bool(turn.call) or turn.error not in (None, "ProviderError") for turn in self.turns)

    @property
    def invalid_calls(self) -> int:
        return sum(turn.error == "InvalidArguments" for turn in self.turns)
