"""A turn of a policy on its way to a client: its text in parts, what ends it, and its calls."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.chat import ChatRenderer, Said
from composer_nb.harness.policy import Completion, Drawn
from composer_nb.harness.product.wire import Asked, Choice, wire_of
from composer_nb.harness.tools.tool_call import ToolError


class Turn:
    """A turn while it is written, and at its end. `told` takes the next part of its text and of its log-probabilities."""

    def __init__(
        self, renderer: ChatRenderer, asked: Asked, told: Callable[[str, Sequence[Mapping[str, Any]]], None]
    ) -> None:
        self.renderer, self.asked, self.told = renderer, asked, told
        self.drawn: list[Drawn] = []
        self._text, self._count = "", 0
        """Text, and tokens, that were told."""

    @property
    def token_ids(self) -> list[int]:
        return [each.token for each in self.drawn]

    @property
    def completion(self) -> Completion:
        tokens, logprobs, versions = ([each[place] for each in self.drawn] for place in range(3))
        return Completion(rollout=-1, token_ids=tokens, logprobs=logprobs, policy_versions=versions)  # type: ignore[arg-type]

    def hear(self, what: Drawn | Future[Completion]) -> bool:
        """Take the next token, or the whole turn at its end. Return whether this is the end."""
        if isinstance(what, Drawn):
            self.drawn.append(what)
            return False
        done = what.result()
        if not self.drawn:  # the policy does not tell tokens as it draws them
            self.drawn = [
                Drawn(*each) for each in zip(done.token_ids, done.logprobs, done.policy_versions, strict=True)
            ]
        return True

    def tell(self) -> bool:
        """Tell what is new and cannot change any more: text before the first call. Return whether a stop text ends the turn."""
        asked, token_ids = self.asked, self.token_ids
        if asked.stops and self._stop(self._spelled(token_ids)):
            return True
        if asked.stream:
            said = self._said(token_ids)
            sure = len(said.text.rstrip("\ufffd")) - max(map(len, asked.stops), default=1) + 1
            new = said.text[: max(sure, 0)].rstrip()[len(self._text) :]
            if new and not said.calls and said.text.startswith(self._text):
                self.told(new, self._logprobs(self.drawn[self._count :]) if asked.logprobs else ())
                self._text, self._count = self._text + new, len(self.drawn)
        return False

    def _said(self, token_ids: Sequence[int]) -> Said:
        return self.renderer.parse([*token_ids, self.renderer.end])

    def choice(self) -> tuple[Choice, bool]:
        """Return the turn, and whether it is all that was written: a stop text hides itself and the rest."""
        token_ids = self.token_ids
        message, kept = self._message(token_ids)
        found = self._stop(self._spelled(token_ids))
        if not message["content"].startswith(self._text):  # a turn that is shown as a text because of what came later
            bare = message["content"].lstrip()
            message["content"] = bare if bare.startswith(self._text) else self._text
        made = Choice(
            message=message,
            written=len(token_ids[:kept]),
            cut=kept is None and not self.renderer.stop.issuperset(token_ids[-1:] or [-1]),
            stopped=self._spelled(token_ids)[slice(*found[::-1])] if found else "",
            logprobs=self._logprobs(self.drawn[:kept]) if self.asked.logprobs else None,
            versions=[each.version for each in self.drawn[:kept]],
        )
        return made, kept is None

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
            versions=[each.version for each in self.drawn],
            token_ids=self.token_ids,
            routes=None if routes is None else b64encode(file.getvalue()).decode(),
        )

    def _message(self, token_ids: Sequence[int]) -> tuple[dict[str, Any], int | None]:
        """Return a turn as an endpoint's message. If it holds a stop text, the message ends before it, and the number of tokens
        up to the end of the stop text is returned too."""
        renderer, whole, kept = self.renderer, self._spelled(token_ids), None
        if found := self._stop(whole):
            end, at = found
            before, kept = (
                bisect_left(range(len(token_ids)), place, key=lambda count: len(self._spelled(token_ids[:count])))
                for place in (at + 1, end)
            )
            whole, token_ids = whole[:at], [*token_ids[: before - 1], renderer.end]
        said = renderer.parse(token_ids)
        hidden = said.calls and self.asked.tool_choice == "none"
        if hidden or any(isinstance(written.call, ToolError) for written in said.calls):
            return {"role": "assistant", "content": whole}, kept
        return wire_of(said if said.calls or kept is None else renderer.parse(renderer.spell(whole))), kept

    def _stop(self, text: str) -> tuple[int, int] | None:
        """Return the end and the beginning of the stop text that was complete first."""
        found = [(place + len(stop), place) for stop in self.asked.stops if (place := text.find(stop)) >= 0]
        return min(found, default=None)

    def _spelled(self, token_ids: Sequence[int]) -> str:
        plain = [token for token in token_ids if token not in self.renderer.stop]
        return str(self.renderer.tokenizer.decode(plain, skip_special_tokens=False))

    def _logprobs(self, drawn: Sequence[Drawn]) -> list[dict[str, Any]]:
        return _logprobs([each for each in drawn if each.token not in self.renderer.stop], self._named)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.renderer.tokenizer.decode([token], skip_special_tokens=False)
        part = "\ufffd" in text  # a token of part of a character: the text does not tell its bytes
        return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode())}


class Continuation(Turn):
    """A text while it is written: there are no calls in it."""

    def _said(self, token_ids: Sequence[int]) -> Said:
        return Said(text=self._spelled(token_ids))

    def _message(self, token_ids: Sequence[int]) -> tuple[dict[str, Any], int | None]:
        message, kept = super()._message([*token_ids, self.renderer.end])
        whole, found = self._spelled(token_ids), self._stop(self._spelled(token_ids))
        return {**message, "content": whole[: found[1]] if found else whole}, kept


def _numbered(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}


def _logprobs(drawn: Sequence[Drawn], named: Callable[[int, float], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**named(*each[:2]), "top_logprobs": [named(*other) for other in each.top]} for each in drawn]
