"""Turn policies: scripts, HTTP endpoints, and policies that continue tokens.

Each turn answers the news: at first the text of the user, later the results of the calls of the previous turn, or an answer of
the user.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Message, Said, User
from composer_nb.harness.agent.summary import NO_SUMMARIES, SummarySettings
from composer_nb.harness.plain import Positive, Some, require_ranges
from composer_nb.harness.policy import SEGMENT_STRIDE, Completion, Request, Trace
from composer_nb.harness.rollout import Kind, Segment, Transcript

News = Sequence[User | CallResult]
# Returns the next turn of a conversation, which depends only on its messages so far.
Script = Callable[[Sequence[Message]], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a rollout. Raises ValueError for a limit that is not positive."""

    turns: Some = 16
    """Maximum turns; the last one ends the rollout."""
    turn_tokens: Some = 64
    """Maximum tokens per turn; a longer turn is cut, and its cut call counts as invalid."""
    tokens: Some = 512
    """Maximum tokens per segment, read and written: the context. Without summaries, a rollout is one segment."""
    rollout_tokens: Some = 1 << 24
    """Maximum tokens per rollout, over all its segments."""
    seconds: Positive = 300.0
    """Time per rollout: by the clock or, in lockstep, where rollouts wait for each other, of its own calls alone."""

    def __post_init__(self) -> None:
        require_ranges(self, "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One turn, with the numbers of tokens read for it (all before it) and written, if counted."""

    message: Said
    read: int = 0
    written: int = 0


class TurnPolicy(Protocol):
    """Takes the turns of one conversation. Used by one thread, and closed at its end."""

    def say(self, news: News, until: float) -> Spoken | None:
        """Return the next turn, or None if the limit of tokens leaves no room for one.

        Raises ProviderFailure, and TimeIsUp if the turn would come later than `until`, a time of `time.monotonic`.
        """
        ...

    def condense(self, news: News, until: float) -> Spoken | None:
        """Begin another segment if this one has reached its trigger. Return the summary of the ended segment, from which the news
        of the next turn are made; None without a summary, and the conversation continues. Raises like `say`."""
        ...

    def close(self) -> tuple[Segment, ...]:
        """Forget the conversation and return its tokens, which are empty for a policy without tokens."""
        ...


class TokenlessTurnPolicy:
    """A turn policy without tokens."""

    def condense(self, news: News, until: float) -> None:
        return None

    def close(self) -> tuple[Segment, ...]:
        return (Transcript().segment(Trace()),)


class ScriptTurnPolicy(TokenlessTurnPolicy):
    """Plays a script: deterministic, for tests and demonstrations."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._talk: list[Message] = []

    def say(self, news: News, until: float) -> Spoken:
        self._talk += news
        turn = self.script(self._talk)
        self._talk.append(turn)
        return Spoken(message=turn)


class TokenTurnPolicy:
    """Takes turns from a policy that continues tokens, and keeps every token as sampled."""

    def __init__(
        self,
        renderer: ChatRenderer,
        rollout: int,
        limits: Limits,
        ask: Callable[[Request, float], Completion],
        release: Callable[[int], Trace],
        system: str = "",
        summary: SummarySettings = NO_SUMMARIES,
    ) -> None:
        """`rollout` is the number of the conversation at the policy and determines its random draws. `ask` and `release` are
        methods of `shared.Shared` or of `driver.Seat`."""
        self.renderer, self.rollout, self.limits, self.system = renderer, rollout, limits, system
        self.ask, self.release, self.summary = ask, release, summary
        self._segments: list[Segment] = []
        self._transcript = Transcript()
        # Tokens at the start of the conversation.
        self._prompt: list[int] = []
        # Tokens that the next turn reads before its news, after the oldest turns were dropped.
        self._kept: list[int] = []
        # Positions at which the turns of this segment begin, including turns kept from the previous segment.
        self._starts: list[int] = []

    @property
    def _name(self) -> int:
        return self.rollout + len(self._segments) * SEGMENT_STRIDE

    def say(self, news: News, until: float) -> Spoken | None:
        """Take a turn; None if the limits leave no room for one. `until`: a time of `time.monotonic`."""
        has_begun = self._transcript.token_ids or self._kept
        news_ids = self.renderer.render(news, self.system, after=bool(has_begun))
        self._prompt = self._prompt or news_ids
        parts = ((self._kept, Kind.PROMPT), (news_ids, Kind.OBSERVATION if has_begun else Kind.PROMPT))
        completion = self._turn(parts, self.limits.turn_tokens, until)
        if completion is None:
            return None
        self._kept = []
        self._starts.append(before := len(self._transcript.token_ids))
        self._transcript.wrote(completion, self.renderer.kinds(completion.token_ids))
        return Spoken(message=self.renderer.parse(completion.token_ids), read=before, written=len(completion.token_ids))

    def condense(self, news: News, until: float) -> Spoken | None:
        """Return a summary if the segment has reached its trigger, and end the segment; else None, also after `truncate`."""
        results = self.renderer.answers(news)
        if not self.summary.reached(len(self._transcript.token_ids) + len(results), len(self._starts)):
            return None
        if self.summary.kind == "truncate":
            self._truncate()
            return None
        query = self.renderer.ask(self.renderer.queries[self.summary.kind])
        parts = ((results, Kind.OBSERVATION), (query, Kind.PROMPT))
        completion = self._turn(parts, self.summary.tokens, until)
        if completion is None:
            return None
        text, kinds = self.renderer.summary(completion.token_ids)
        read_tokens = len(self._transcript.token_ids)
        self._transcript.wrote(completion, kinds)
        self._starts = []
        self._end()
        return Spoken(message=Said(text=text), read=read_tokens, written=len(completion.token_ids))

    def close(self) -> tuple[Segment, ...]:
        self._end()
        # A segment without a turn teaches nothing.
        return tuple([segment for segment in self._segments if segment.acted.any()] or self._segments)

    def _turn(self, parts: Sequence[tuple[list[int], Kind]], max_tokens: int, until: float) -> Completion | None:
        """Have the policy read the parts and continue. Return None if the limits leave no room for a token."""
        read_ids = [token for token_ids, _ in parts for token in token_ids]
        segment_tokens = len(self._transcript.token_ids) + len(read_ids)
        rollout_tokens = segment_tokens + sum(len(segment.token_ids) for segment in self._segments)
        room_tokens = min(max_tokens, self.limits.tokens - segment_tokens, self.limits.rollout_tokens - rollout_tokens)
        if room_tokens < 1:
            return None
        for token_ids, kind in parts:
            self._transcript.read(token_ids, kind)
        completion = self.ask(Request(rollout=self._name, token_ids=read_ids, max_tokens=room_tokens), until)
        assert len(completion.token_ids) <= room_tokens
        return completion

    def _truncate(self) -> None:
        """End the segment. The next one begins with the start of the conversation and the newest turns (half a trigger)."""
        token_ids = self._transcript.token_ids
        starts = [at for at in self._starts if len(token_ids) - at <= self.summary.trigger // 2] or self._starts[-1:]
        self._kept = [*self._prompt, *token_ids[starts[0] :]]
        self._starts = [start - starts[0] + len(self._prompt) for start in starts]
        self._end()

    def _end(self) -> None:
        """End the segment."""
        size, parent = len(self._transcript.token_ids), len(self._segments) - 1
        trace = self.release(self._name)
        self._segments.append(self._transcript.segment(trace.head(size), parent))  # without an unfinished turn
        self._transcript = Transcript()
