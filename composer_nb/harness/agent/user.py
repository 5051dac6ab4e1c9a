"""Simulated users, who answer an agent that asks: by the facts of a task, or as a model plays them.

    message without a call → asks something, and answers are left? → answer → next turn
                             otherwise → the conversation has ended

A user knows the request and the facts that it leaves out (`Task.answers`), and neither files, tests nor solution, so it cannot
give the work away. Reference: tau-bench (arXiv 2406.12045), where a model with hidden instructions plays the user.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.terms.conduct import asks

# Answers a message without a call, before a time of `time.monotonic`; with nothing where the conversation has ended.
Answers = Callable[[str, float], str]
# Makes the user of a task's conversation.
UserOf = Callable[[Task], Answers]
UNKNOWN = "I do not know; decide yourself."
LAST = "I will answer no more questions."
# Answers of a user whose task does not limit them; tokens, characters and seconds of one that a model writes.
ANSWERS, ANSWER_TOKENS, ANSWER_LENGTH, ANSWER_S = 3, 512, 1000, 60.0
PERSONA = """\
You are the user of a coding agent. You asked it for this:

{request}

What you know besides:
{facts}

The agent asks you something. Answer in one or two short sentences, from what you know alone. If that does not answer it, write
exactly: {unknown} Never write code, and never say how to do the work."""


def nobody(message: str, until: float) -> str:
    """Answer nothing."""
    return ""


@dataclass(slots=True)
class SimulatedUser:
    """The user of one conversation, who answers the first messages that ask something.

    Attributes:
        endpoint: The model that plays the user; None: the facts whose words the message has are the answer.
    """

    task: Task
    endpoint: Endpoint | None = None
    answered: int = 0
    talk: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, message: str, until: float) -> str:
        """Return an answer. Raises ProviderFailure, also for one that does not come, and TimeIsUp at `until`."""
        most = int(self.task.metadata.get("max_answers", ANSWERS))
        if self.answered == most or not asks(message):
            return ""
        self.answered += 1
        answer = (self._play(message, until) if self.endpoint else self._recall(message)) or UNKNOWN
        return f"{answer} {LAST}" if self.answered == most else answer

    def _recall(self, message: str) -> str:
        words = _words(message)
        return " ".join(fact for keys, fact in self.task.answers.items() if words & _words(keys))

    def _play(self, message: str, until: float) -> str:
        assert self.endpoint is not None
        facts = "\n".join(f"- {fact}" for fact in self.task.answers.values()) or "- nothing"
        persona = PERSONA.format(request=self.task.instruction, facts=facts, unknown=UNKNOWN)
        self.talk += [] if self.talk else [{"role": "system", "content": persona}]
        self.talk.append({"role": "user", "content": message})
        patience = time.monotonic() + ANSWER_S  # nobody can drop an agent that waits
        try:
            spoken = self.endpoint.complete(self.talk, (), ANSWER_TOKENS, until=min(until, patience))
        except TimeIsUp:
            if until < patience:
                raise
            raise ProviderFailure(f"{self.endpoint.url}: no answer of the user within {ANSWER_S:g} s") from None
        content = spoken.message.get("content")
        text = content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""  # no half a pair
        answer = " ".join(text.split())[:ANSWER_LENGTH]
        self.talk.append({"role": "assistant", "content": answer})
        return answer


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.casefold())}


def open_user(name: str) -> UserOf | None:
    """Return what makes the user of a task's conversation: `scripted` or `openai:URL[#MODEL]`; None for an empty name. Raises
    ValueError for another name, ProviderFailure for an endpoint without a named model that does not list any."""
    if not name:
        return None
    kind, _, address = name.partition(":")
    if name != "scripted" and (kind != "openai" or not address):
        raise ValueError(f"{name!r} is no user; give scripted or openai:URL[#MODEL]")
    if name == "scripted":
        return SimulatedUser
    url, _, model = address.partition("#")
    if not (model := model or next(iter(Endpoint(url=url).models()), "")):
        raise ValueError(f"{name!r}: the server lists no model; write openai:URL#MODEL")
    endpoint = Endpoint(url=url, model=model, temperature=0.0)
    return lambda task: SimulatedUser(task, endpoint)
