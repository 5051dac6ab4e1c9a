"""A turn of a policy on its way to a client: its text in parts, what ends it, and its calls.

A call is shown once its name is known, with its arguments as JSON so far. What is shown only grows, since a stream cannot take
anything back. The JSON of a call is complete if, and only if, the call can be read: one that was cut off, or is malformed, has
its arguments up to there, in a stream and in a whole answer. A turn whose first call has no name is a text.
"""

import json
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.chat import ChatRenderer, Said
from composer_nb.harness.agent.endpoint import call_on_wire
from composer_nb.harness.policy import Completion, SampledToken
from composer_nb.harness.tools.tool_call import ToolError
from composer_nb.production.wire import Calls, Choice, Logprobs, RequestBody, wire_of


class StreamedTurn:
    """A turn while it is written, and at its end. `told` takes the next part of its text, its calls so far, and the next
    part of its log-probabilities."""

    def __init__(
        self, renderer: ChatRenderer, body: RequestBody, report: Callable[[str, Calls, Logprobs], None]
    ) -> None:
        self.renderer, self.asked, self.told = renderer, body, report
        self.drawn: list[SampledToken] = []
        # Text, tokens and calls that were told.
        self._text, self._count, self._called = "", 0, list[dict[str, Any]]()

    @property
    def token_ids(self) -> list[int]:
        return [token.token for token in self.drawn]

    @property
    def completion(self) -> Completion:
        tokens, logprobs, versions = ([token[column] for token in self.drawn] for column in range(3))
        return Completion(rollout=-1, token_ids=tokens, logprobs=logprobs, policy_versions=versions)  # type: ignore[arg-type]

    def hear(self, what: SampledToken | Future[Completion]) -> bool:
        """Take the next token, or the whole turn at its end. Return whether this is the end."""
        if isinstance(what, SampledToken):
            self.drawn.append(what)
            return False
        what.result()  # raises what else ended it
        return True

    def tell(self) -> bool:
        """Tell what is new and cannot change any more. Return whether a stop text ends the turn."""
        body, token_ids = self.asked, self.token_ids
        if body.stops and self._stop(self._spelled(token_ids)):
            return True
        if body.stream:
            turn, late = self._said(token_ids), max(map(len, body.stops), default=1) - 1
            calls = self._calls(self._up_to(token_ids, len(self._spelled(token_ids)) - late) if late else token_ids)
            sure = len(turn.text.rstrip("\ufffd")) - late
            text = self._lead(token_ids) if calls else "" if turn.calls else turn.text[: max(sure, 0)].rstrip()
            new = text[len(self._text) :] if text.startswith(self._text) else ""
            if new or calls != self._called:
                self.told(new, calls, self._logprobs(self.drawn[self._count :]) if body.logprobs else ())
                self._text, self._count, self._called = self._text + new, len(self.drawn), calls
        return False

    def _calls(self, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        if self.asked.tool_choice == "none":
            return []
        return [call_on_wire(*call) for call in self.renderer.calls_so_far(token_ids)]

    def _lead(self, token_ids: Sequence[int]) -> str:
        """Return the text before the first call."""
        special = self.renderer.special
        before = next((n for n, token in enumerate(token_ids) if token in special), len(token_ids))
        return self._said(token_ids[:before]).text

    def _up_to(self, token_ids: Sequence[int], letters: int) -> Sequence[int]:
        """Return the tokens that have at most so many letters."""
        count = bisect_left(range(len(token_ids)), letters + 1, key=lambda n: len(self._spelled(token_ids[: n + 1])))
        return token_ids[:count]

    def _said(self, token_ids: Sequence[int]) -> Said:
        return self.renderer.parse([*token_ids, self.renderer.end])

    def choice(self) -> tuple[Choice, bool]:
        """Return the turn, and whether it is all that was written: a stop text hides itself and the rest."""
        token_ids = self.token_ids
        message, length = self._message(token_ids)
        stop = self._stop(self._spelled(token_ids))
        if not message["content"].startswith(self._text):  # a turn that is shown as a text because of what came later
            bare = message["content"].lstrip()
            message["content"] = bare if bare.startswith(self._text) else self._text
        choice = Choice(
            message=message,
            lead=len(self._lead(token_ids)) if "tool_calls" in message else None,
            written=len(token_ids[:length]),
            cut=length is None and not self.renderer.stop.issuperset(token_ids[-1:] or [-1]),
            stopped=self._spelled(token_ids)[slice(*stop[::-1])] if stop else "",
            logprobs=self._logprobs(self.drawn[:length]) if self.asked.logprobs else None,
            versions=[token.version for token in self.drawn[:length]],
            turn=self._unreadable(token_ids) if length is None and self.asked.tools else None,
        )
        return choice, length is None

    def _unreadable(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """Return a turn with an unreadable call as the renderer parses it; None for any other."""
        parsed = self.renderer.parse(token_ids)
        calls = [
            {"id": written.id, "text": written.text, "error": str(written.call)}
            if isinstance(written.call, ToolError)
            else {"id": written.id, "name": written.call.name, "arguments": json.dumps(dict(written.call.arguments))}
            for written in parsed.calls
        ]
        return {"text": parsed.text, "calls": calls} if any("error" in call for call in calls) else None

    def tokens(self, logprobs: bool, routes: NDArray[Any] | None) -> Choice:
        """Return the turn as tokens, as vLLM writes them."""
        file = BytesIO()
        if routes is not None:
            np.save(file, routes[:-1])
        return Choice(
            message={},
            written=len(self.drawn),
            cut=not self.renderer.stop.issuperset(self.token_ids[-1:]),
            logprobs=_logprobs(self.drawn, _numbered) if logprobs else None,
            versions=[token.version for token in self.drawn],
            token_ids=self.token_ids,
            routes=None if routes is None else b64encode(file.getvalue()).decode(),
        )

    def _message(self, token_ids: Sequence[int]) -> tuple[dict[str, Any], int | None]:
        """Return a turn as an endpoint's message. If it holds a stop text, the message ends before it, and the number of tokens
        up to the end of the stop text is returned too."""
        renderer, whole, length = self.renderer, self._spelled(token_ids), None
        if stop := self._stop(whole):
            end, at = stop
            length = len(self._up_to(token_ids, end - 1)) + 1
            whole, token_ids = whole[:at], self._up_to(token_ids, at)
        parsed, calls = renderer.parse(token_ids), self._calls(token_ids)
        offered = self.asked.tools and self.asked.tool_choice != "none"
        if not calls and offered and (unknown := renderer.unknown_call(parsed)):
            calls = [call_on_wire(*unknown)]
        if calls:
            return {"role": "assistant", "content": parsed.text, "tool_calls": calls}, length
        if length is not None or renderer.stop.isdisjoint(token_ids[-1:]):
            parsed = renderer.parse([*token_ids, renderer.end])
        if length is not None and not parsed.calls:
            parsed = renderer.parse(renderer.spell(whole))
        return wire_of(Said(text=whole) if parsed.calls else parsed), length

    def _stop(self, text: str) -> tuple[int, int] | None:
        """Return the end and the beginning of the stop text that was complete first."""
        matches = [(start + len(stop), start) for stop in self.asked.stops if (start := text.find(stop)) >= 0]
        return min(matches, default=None)

    def _spelled(self, token_ids: Sequence[int]) -> str:
        plain = [token for token in token_ids if token not in self.renderer.stop]
        return str(self.renderer.tokenizer.decode(plain, skip_special_tokens=False))

    def _logprobs(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        return _logprobs([token for token in tokens if token.token not in self.renderer.stop], self._named)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.renderer.tokenizer.decode([token], skip_special_tokens=False)
        part = "\ufffd" in text  # a token of part of a character: the text does not tell its bytes
        return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode())}


class Continuation(StreamedTurn):
    """A text while it is written: there are no calls in it."""

    def _said(self, token_ids: Sequence[int]) -> Said:
        return Said(text=self._spelled(token_ids))

    def _calls(self, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        return []

    def _message(self, token_ids: Sequence[int]) -> tuple[dict[str, Any], int | None]:
        message, length = super()._message([*token_ids, self.renderer.end])
        whole, match = self._spelled(token_ids), self._stop(self._spelled(token_ids))
        return {**message, "content": whole[: match[1]] if match else whole}, length


def _numbered(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}


def _logprobs(tokens: Sequence[SampledToken], named: Callable[[int, float], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**named(*token[:2]), "top_logprobs": [named(*other) for other in token.top]} for token in tokens]
