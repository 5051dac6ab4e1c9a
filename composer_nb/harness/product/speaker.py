"""Who takes an agent's turns in one conversation: a script, an endpoint, or a policy that continues tokens.

A conversation goes on by its news: the user's text at first, afterwards the results of the calls of the turn before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from composer_nb.harness.agent import Limits
from composer_nb.harness.chat import ChatRenderer, Message, Result, Said, User, Written
from composer_nb.harness.deadline import TimeIsUp
from composer_nb.harness.openai_policy import Endpoint, spoken
from composer_nb.harness.policy import ProviderFailure, Request, Trace
from composer_nb.harness.product.shared import Shared
from composer_nb.harness.rollout import Kind, Segment, Transcript

News = Sequence[User | Result]
Script = Callable[[Sequence[Message]], Said]
"""The next turn of a conversation, of which its messages until now decide everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One turn, and how many tokens were read for it (all that came before it) and written, where somebody counted."""

    said: Said
    read: int = 0
    written: int = 0


class Speaker(Protocol):
    """Of one conversation. Used by one thread, and closed at its end."""

    def say(self, news: News, until: float) -> Spoken | None:
        """The next turn; None where no token more has room. Raises ProviderFailure, and TimeIsUp where it would be later than
        `until` on the clock `time.monotonic`."""
        ...

    def close(self) -> Segment:
        """Forgets the conversation, and returns what was read and written as tokens: none where nobody has them."""
        ...


class ScriptSpeaker:
    """Plays a script: deterministic, for tests and demonstrations."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._talk: list[Message] = []

    def say(self, news: News, until: float) -> Spoken:
        self._talk += news
        said = self.script(self._talk)
        self._talk.append(said)
        return Spoken(said=said)

    def close(self) -> Segment:
        return Transcript().segment(Trace())


class EndpointSpeaker:
    """Asks an OpenAI-compatible endpoint. For evaluation and use: it tells nothing that could be trained on."""

    def __init__(self, endpoint: Endpoint, system: str, tools: Sequence[Mapping[str, Any]], limits: Limits) -> None:
        """`tools`: schemas in OpenAI's form."""
        self.endpoint, self.tools, self.limits = endpoint, tools, limits
        self._talk: list[dict[str, Any]] = [{"role": "system", "content": system}]

    def say(self, news: News, until: float) -> Spoken:
        for message in news:
            if isinstance(message, Result):
                self._talk.append({"role": "tool", "tool_call_id": message.id, "content": message.text})
            else:
                self._talk.append({"role": "user", "content": message.text})
        try:
            answer = self.endpoint.complete(self._talk, self.tools, self.limits.turn_tokens, parallel=True, until=until)
        except TimeIsUp:
            if any(message["role"] == "assistant" for message in self._talk):
                raise
            # Nothing ever came: that says something about the endpoint, and nothing about an agent.
            raise ProviderFailure(f"{self.endpoint.url}: not one answer within {self.limits.seconds:g} s") from None
        said, calls = spoken(answer.message)
        self._talk.append(said)
        ids = [call["id"] for call in said.get("tool_calls", ())]
        written = tuple(Written(id=name, call=call) for name, call in zip(ids, calls, strict=True))
        return Spoken(said=Said(text=said["content"].strip(), calls=written), read=answer.read, written=answer.written)

    def close(self) -> Segment:
        return Transcript().segment(Trace())


class TokenSpeaker:
    """A policy that continues tokens, and the format that it was trained on. Keeps every token as it was sampled."""

    def __init__(self, policy: Shared, renderer: ChatRenderer, rollout: int, system: str, limits: Limits) -> None:
        """`rollout` names the conversation to the policy, and is what it draws by."""
        self.policy, self.renderer, self.rollout = policy, renderer, rollout
        self.system, self.limits = system, limits
        self._transcript = Transcript()

    def say(self, news: News, until: float) -> Spoken | None:
        held = self._transcript
        users = [message.text for message in news if isinstance(message, User)]
        if users:
            read = [*self.renderer.open(self.system), *self.renderer.user(*users)]
        else:
            read = self.renderer.results([message for message in news if isinstance(message, Result)])
        room = min(self.limits.turn_tokens, self.limits.tokens - len(held.token_ids) - len(read))
        if room < 1:
            return None
        held.read(read, Kind.PROMPT if users else Kind.OBSERVATION)
        completion = self.policy.ask(Request(rollout=self.rollout, token_ids=read, max_tokens=room), until)
        said = self.renderer.parse(completion.token_ids)
        before = len(held.token_ids)
        held.wrote(completion, self.renderer.kinds(completion.token_ids))
        return Spoken(said=said, read=before, written=len(completion.token_ids))

    def close(self) -> Segment:
        trace = self.policy.release(self.rollout)
        return self._transcript.segment(
            trace.head(len(self._transcript.token_ids))
        )  # without a turn that was broken off
