"""The agent loop: a turn, the replies to its calls, the next turn, until the agent has no more calls to make.

The same loop in training, in evaluation and in the product. What an agent reads is the system text, the user's text and the
replies of the tools; `fidelity.py` compares them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_nb.harness.agent import Limits
from composer_nb.harness.chat import Result, Said, User, Written
from composer_nb.harness.cursor.session import Session
from composer_nb.harness.cursor.toolset import CursorTools, Reply
from composer_nb.harness.deadline import TimeIsUp
from composer_nb.harness.policy import ProviderFailure
from composer_nb.harness.product.speaker import News, Speaker
from composer_nb.harness.rollout import Turn
from composer_nb.harness.sandboxes.contract import SandboxDied
from composer_nb.harness.tool_call import ToolCall, ToolError

LIMITS = Limits(turns=64, turn_tokens=8192, tokens=131_072, seconds=1800.0)
"""Of one conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What an agent did, and why it ended (`Rollout.stop`)."""

    turns: tuple[Turn, ...]
    stop: str
    read: int = 0
    """Tokens, of all turns together, where somebody counted."""
    written: int = 0
    seconds: float = 0.0

    @property
    def why(self) -> str:
        """For `infrastructure`: what failed."""
        return self.turns[-1].observation if self.turns and self.turns[-1].error == "ProviderError" else ""


Told = Callable[[Said | Turn], None]
"""Hears of every turn as it comes: what was said, then each answer."""


def converse(
    instruction: str,
    speaker: Speaker,
    tools: CursorTools,
    session: Session,
    limits: Limits = LIMITS,
    told: Told = lambda event: None,
) -> Conversation:
    """Runs to the end of a conversation. At its limit of time calls that run are ended, others not begun, and a turn that is not
    there yet is not waited for, but for the step that an engine is in. Raises SandboxFailure; Ctrl-C stops what runs and
    ends it as `interrupted`."""
    turns: list[Turn] = []
    began, read, written = time.monotonic(), 0, 0
    news: News = [User(text=instruction)]
    stop = "turns"
    bell = threading.Timer(min(limits.seconds, threading.TIMEOUT_MAX), session.abort)
    bell.daemon = True
    try:
        bell.start()
        for _ in range(limits.turns):
            spoken = speaker.say(news, began + limits.seconds)
            if spoken is None:
                stop = "tokens"
                break
            read, written = read + spoken.read, written + spoken.written
            told(spoken.said)
            replies = answer(tools, session, spoken.said.calls)
            answered = turns_of(spoken.said, replies)
            turns += answered
            for turn in answered:
                told(turn)
            if not replies:
                stop = "finished"
                break
            if spoken.read + spoken.written >= limits.tokens:
                stop = "tokens"
                break
            if time.monotonic() - began > limits.seconds:
                stop = "time"
                break
            news = [
                Result(id=call.id, text=text_of(reply)) for call, reply in zip(spoken.said.calls, replies, strict=True)
            ]
    except TimeIsUp:
        stop = "time"
    except ProviderFailure as failure:
        stop = "infrastructure"
        turns.append(Turn(call="", observation=str(failure), error="ProviderError"))
    except SandboxDied:
        stop = "died"
    except KeyboardInterrupt:
        stop = "interrupted"
    finally:
        bell.cancel()
    seconds = time.monotonic() - began
    return Conversation(turns=tuple(turns), stop=stop, read=read, written=written, seconds=seconds)


def answer(tools: CursorTools, session: Session, calls: Sequence[Written]) -> list[Reply]:
    """A reply to each call of a turn, in their order; those that could not be read are answered why."""
    valid = [written.call for written in calls if isinstance(written.call, ToolCall)]
    replies = iter(tools.run(session, valid))
    return [next(replies) if isinstance(written.call, ToolCall) else _refused(written.call) for written in calls]


def _refused(error: ToolError) -> Reply:
    return Reply(call=ToolCall(name="", arguments={}), text=str(error), error=error.kind)


def text_of(reply: Reply) -> str:
    """What the agent reads."""
    return f"error ({reply.error}): {reply.text}" if reply.error else reply.text


def turns_of(said: Said, replies: Sequence[Reply]) -> list[Turn]:
    """As they are kept with a rollout."""
    if not replies:
        return [Turn(call="", observation="", said=said.text)]
    return [
        Turn(
            call=json.dumps({"name": reply.call.name, "arguments": dict(reply.call.arguments)})
            if reply.call.name
            else "",
            observation=text_of(reply),
            error=reply.error,
            said="" if place else said.text,
            beside=place > 0,
            seconds=reply.seconds,
        )
        for place, reply in enumerate(replies)
    ]
