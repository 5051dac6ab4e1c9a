"""Turn policies: scripted, HTTP endpoint, policies that continue tokens.

Each turn answers the news: first the text of the user, then the results of the calls of the turn before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from composer_nb.harness.agent.chat import ChatRenderer, Message, Result, Said, User
from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.harness.rollout import Kind, Segment, Transcript

News = Sequence[User | Result]
Script = Callable[[Sequence[Message]], Said]
"""Returns the next turn of a conversation, which depends on nothing but its messages so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a rollout. Raises ValueError for a limit that is not above 0."""

    turns: int = 16
    """Maximum turns; the last one ends the rollout."""
    turn_tokens: int = 64
    """Maximum tokens per turn; a longer turn is cut, and its cut call counts as invalid."""
    tokens: int = 512
    """Maximum tokens per rollout, read and written."""
    seconds: float = 300.0
    """Wall-clock time per rollout."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} must be above 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One turn, with the tokens read for it (everything before it) and written, where they are counted."""

    said: Said
    read: int = 0
    written: int = 0


class Speaker(Protocol):
    """Takes the turns of one conversation. Used by one thread, and closed at its end."""

    def say(self, news: News, until: float) -> Spoken | None:
        """Return the next turn, or None if the limit of tokens leaves no room for one.

        Raises ProviderFailure, and TimeIsUp if the turn would be later than `until` on the clock `time.monotonic`.
        """
        ...

    def close(self) -> tuple[Segment, ...]:
        """Forget the conversation. Returns its tokens, none if the speaker has no tokens."""
        ...


class Silent:
    """A speaker without tokens."""

    def close(self) -> tuple[Segment, ...]:
        return (Transcript().segment(Trace()),)


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


class TokenSpeaker:
    """Asks a policy that continues tokens. Keeps every token as it was sampled."""

    def __init__(
        self,
        renderer: ChatRenderer,
        rollout: int,
        limits: Limits,
        ask: Callable[[Request, float], Completion],
        release: Callable[[int], Trace],
        system: str = "",
    ) -> None:
        """`rollout` names the conversation to the policy and decides its random draws. `ask` and `release` are methods of
        `shared.Shared`, or of `driver.Seat`."""
        self.renderer, self.rollout, self.limits, self.system = renderer, rollout, limits, system
        self.ask, self.release = ask, release
        self._transcript = Transcript()

    def prompt_size(self, instruction: str) -> int:
        """Return the tokens that a conversation begins with."""
        return len(self.renderer.read([User(text=instruction)], self.system))

    def say(self, news: News, until: float) -> Spoken | None:
        held = self._transcript.token_ids
        read = self.renderer.read(news, self.system)
        room = min(self.limits.turn_tokens, self.limits.tokens - len(held) - len(read))
        if room < 1:
            return None
        self._transcript.read(read, Kind.OBSERVATION if held else Kind.PROMPT)
        before = len(self._transcript.token_ids)
        completion = self.ask(Request(rollout=self.rollout, token_ids=read, max_tokens=room), until)
        assert len(completion.token_ids) <= room
        self._transcript.wrote(completion, self.renderer.kinds(completion.token_ids))
        return Spoken(said=self.renderer.parse(completion.token_ids), read=before, written=len(completion.token_ids))

    def close(self) -> tuple[Segment, ...]:
        trace = self.release(self.rollout)
        return (self._transcript.segment(trace.head(len(self._transcript.token_ids))),)  # without an unfinished turn
