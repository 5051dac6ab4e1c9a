"""Turn policies: scripted, HTTP endpoint, policies that continue tokens.

A conversation goes on by its news: the user's text at first, afterwards the results of the calls of the turn before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from composer_nb.harness.agent.chat import Message, Result, Said, User
from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.harness.rollout import Kind, Segment, Transcript

News = Sequence[User | Result]
Script = Callable[[Sequence[Message]], Said]
"""Returns the next turn of a conversation, which depends on nothing but its messages so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a rollout. Raises ValueError for a limit that is not above 0."""

    turns: int = 12
    """Maximum turns; the last one ends the rollout."""
    turn_tokens: int = 64
    """Maximum tokens per turn; a longer turn is cut, and its cut call counts as invalid."""
    tokens: int = 384
    """Maximum tokens per rollout, read and written."""
    seconds: float = 300.0
    """Wall-clock time per rollout."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} must be above 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One turn, and how many tokens were read for it (everything before it) and written, where they are counted."""

    said: Said
    read: int = 0
    written: int = 0


class Speaker(Protocol):
    """Takes the turns of one conversation. Used by one thread, and closed at its end."""

    def say(self, news: News, until: float) -> Spoken | Request | None:
        """Return the next turn, or None if the limit of tokens leaves no room for one.

        A Request is for the caller's policy; `hear` turns the completion into the turn. Raises ProviderFailure, and TimeIsUp if
        the turn would be later than `until` on the clock `time.monotonic`.
        """
        ...

    def hear(self, completion: Completion) -> Spoken: ...

    def close(self) -> Segment:
        """Forget the conversation. Returns its tokens, none if the speaker has no tokens."""
        ...


class Silent:
    """A speaker without tokens."""

    def hear(self, completion: Completion) -> Spoken:
        raise AssertionError("this speaker makes no request")

    def close(self) -> Segment:
        return Transcript().segment(Trace())


class ScriptSpeaker(Silent):
    """Plays a script: deterministic, for tests and demonstrations."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._talk: list[Message] = []

    def say(self, news: News, until: float) -> Spoken:
        self._talk += news
        said = self.script(self._talk)
        self._talk.append(said)
        return Spoken(said=said)


class Format(Protocol):
    """A wire format of conversations (`chat.ChatRenderer`, `compact.CompactRenderer`)."""

    def read(self, news: News, system: str = "") -> list[int]: ...

    def parse(self, token_ids: Sequence[int]) -> Said: ...

    def kinds(self, token_ids: Sequence[int]) -> Sequence[Kind]: ...


class TokenTurns:
    """Turns of a policy that continues tokens, as requests to it. Keeps every token as it was sampled."""

    def __init__(
        self, renderer: Format, rollout: int, limits: Limits, release: Callable[[int], Trace], system: str = ""
    ) -> None:
        """`rollout` names the conversation to the policy and decides its random draws."""
        self.renderer, self.rollout, self.limits, self.release = renderer, rollout, limits, release
        self.system = system
        self._transcript, self._room = Transcript(), 0

    def say(self, news: News, until: float) -> Spoken | Request | None:
        held = self._transcript.token_ids
        read = self.renderer.read(news, self.system)
        self._room = min(self.limits.turn_tokens, self.limits.tokens - len(held) - len(read))
        if self._room < 1:
            return None
        self._transcript.read(read, Kind.OBSERVATION if held else Kind.PROMPT)
        return Request(rollout=self.rollout, token_ids=read, max_tokens=self._room)

    def hear(self, completion: Completion) -> Spoken:
        assert len(completion.token_ids) <= self._room
        before = len(self._transcript.token_ids)
        self._transcript.wrote(completion, self.renderer.kinds(completion.token_ids))
        return Spoken(said=self.renderer.parse(completion.token_ids), read=before, written=len(completion.token_ids))

    def close(self) -> Segment:
        trace = self.release(self.rollout)
        return self._transcript.segment(trace.head(len(self._transcript.token_ids)))  # without an unfinished turn
