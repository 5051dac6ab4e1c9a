"""A rollout: one complete attempt at a task, as token streams that can be trained on, scored again and replayed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
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
    """One trainable sequence of T tokens. Raises ValueError if its streams differ in length.

    Attributes:
        logprob: Log-probability at sampling time; 0 for tokens that the agent did not write.
        policy_version: Policy version of each token; -1 where no policy acted.
        parent: Index, within the rollout, of the segment that this one continues; -1 for a segment that begins with the task.
    """

    token_ids: NDArray[np.int32]
    kind: NDArray[np.uint8]
    logprob: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    trace: Trace = field(default_factory=Trace)
    parent: int = -1

    def __post_init__(self) -> None:
        streams = {len(self.token_ids), len(self.kind), len(self.logprob), len(self.policy_version)}
        if len(streams) > 1 or len(self.trace.route_valid) not in (0, *streams):
            raise ValueError(f"streams of {sorted(streams)} tokens with a trace of {len(self.trace.route_valid)}")

    @property
    def acted(self) -> NDArray[np.bool_]:
        """Mask of the tokens that the agent wrote, which are the trainable ones."""
        return (self.kind >= Kind.THINKING) & (self.kind <= Kind.SUMMARY)

    @property
    def messages(self) -> list[NDArray[np.int64]]:
        """Token positions of each message that the agent wrote, including a summary at the end."""
        places = np.flatnonzero(self.acted)
        return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []

    @property
    def reused(self) -> int:
        """Number of tokens whose keys and values were cached when the summary was requested; 0 without a summary."""
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

    def _add(self, ids: Sequence[int], kinds: Sequence[Kind], logprob: Sequence[float], version: Sequence[int]) -> None:
        self.token_ids += ids
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
    """One call and the observation that answered it, with the model's text before it.

    Attributes:
        call: JSON of the call in OpenAI's form, or the original text if it could not be parsed; empty if there is no call.
        said: Text beside the calls of a message, stored with its first call.
        beside: Whether this call belongs to the same message as the one before.
        seconds: Time from the message to the answer, if measured.
        sampling: How a request had the tokens sampled, if not from the policy's own distribution (`temperature=0.7,
            top_p=0.9`).
    """

    call: str
    observation: str
    error: str | None = None
    tests_passed: int | None = None
    tests_run: int | None = None
    said: str = ""
    beside: bool = False
    seconds: float = 0.0
    sampling: str = ""


class Hint(NamedTuple):
    """A text for the policy to read before one turn of a segment.

    Attributes:
        start: Position of the turn's first token.
        stop: Position after its last token.
        at: Position at which the hint is inserted, before the cue for the turn.
    """

    start: int
    stop: int
    at: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt: tokens, calls with their answers, and the files left in the workspace.

    Attributes:
        segments: Segments, which form a tree: each comes after its parent.
        files: The workspace at the end, and the artifacts outside it by absolute path.
        stop: Reason of the end: `finished`, a limit (`turns`, `tokens`, `time`), `interrupted` by the user, or
            `infrastructure`, which is no fault of the agent.
        counted: Tokens read and written as counted by an endpoint, which returns no token streams.
        seconds: Time from the first message to the last, if measured.
        before: The workspace at the start: the task's files.
        egress: A line for each connection from the sandbox to a listed host (`sandbox/egress.py`).
    """

    task_id: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    files: dict[str, str]
    stop: str
    counted: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    before: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    egress: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens, read and written."""
        return sum(len(segment.token_ids) for segment in self.segments) or sum(self.counted)

    @property
    def sampled(self) -> int:
        """Number of tokens that the agent wrote."""
        return sum(int(segment.acted.sum()) for segment in self.segments) or self.counted[1]

    @property
    def versions(self) -> NDArray[np.int32]:
        """Policy version of each token that the agent wrote."""
        return np.concatenate([np.zeros(0, np.int32), *(s.policy_version[s.acted] for s in self.segments)])

    @property
    def messages(self) -> int:
        """Number of the model's messages, without summaries."""
        return sum(not turn.beside for turn in self.turns)

    @property
    def turns_by_message(self) -> list[list[Turn]]:
        """The turns of each of the model's messages, without summaries."""
        starts = [number for number, turn in enumerate(self.turns) if not turn.beside]
        return [[*self.turns[start:end]] for start, end in pairwise([*starts, len(self.turns)])]

    @property
    def calls(self) -> int:
        """Number of calls, including invalid ones."""
        return sum(bool(turn.call) or turn.error not in (None, "ProviderError") for turn in self.turns)

    @property
    def invalid_calls(self) -> int:
        return sum(turn.error == "InvalidArguments" for turn in self.turns)
