"""The agent loop: a turn, the results of its calls, the next turn, until the agent finishes or reaches a limit.

The same loop runs in training, in evaluation and in the product, with one thread per rollout. A turn policy takes the turns, and
tools execute the calls. Both may wait for a policy or a sandbox that many rollouts share (`driver.Driver`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_nb.harness.agent.chat import CallResult, Said, User, Written
from composer_nb.harness.agent.summary import history, resumed
from composer_nb.harness.agent.turns import Limits, News, TurnPolicy
from composer_nb.harness.agent.user import Answers, nobody
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.harness.rollout import Rollout, Segment, Turn
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.tools.session import Session
from composer_nb.harness.tools.tool_call import Reply
from composer_nb.harness.tools.toolset import ToolSet

# Limits of a conversation with the product's tools.
LIMITS = Limits(turns=64, turn_tokens=8192, tokens=131_072, seconds=1800.0)
# System text of every conversation, the same in training, in evaluation and in the product.
SYSTEM = """\
You are a coding agent. Work in {root}, a copy of the user's repository in a sandbox {network}, and change it with
your tools until the user's request is done. {ends}

Read the code before you change it, and change only what the request needs. A message may have several calls: those that only
read run side by side, and results come in the order of the calls. Check your work: run the code or its tests. When you are done,
describe your changes in a few sentences, without a call."""
# What a message without a call does, where nobody answers and where a user does.
ENDS = "A message without a call ends your work and is shown to the user."
ASKS = """\
A message without a call ends your work and is shown to the user,
unless it asks a question: then the user answers, and you continue. If the request leaves something open that only the user can
know, ask before you change anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The turns of an agent, and the reason of its end (`Rollout.stop`).

    Attributes:
        read: Tokens read, summed over all turns, if counted.
        why: Explanation of the stop `infrastructure`, and of `tokens` before the first turn.
    """

    turns: tuple[Turn, ...]
    stop: str
    read: int = 0
    written: int = 0
    seconds: float = 0.0
    why: str = ""

    def rollout(
        self, task_id: str, segments: tuple[Segment, ...], files: dict[str, str], before: dict[str, str]
    ) -> Rollout:
        """Return the conversation as a rollout whose workspace had the files `before` at the start and `files` at the end."""
        return Rollout(
            task_id=task_id,
            segments=segments,
            turns=self.turns,
            files=files,
            before=before,
            stop=self.stop,
            counted=(self.read, self.written),
            seconds=self.seconds,
        )


# Called with every turn as it happens: the model's message, then each result.
Told = Callable[[Said | Turn], None]


def silent(event: Said | Turn) -> None:
    """Tell nobody."""


def converse(
    instruction: str,
    turn_policy: TurnPolicy,
    tools: ToolSet,
    session: Session,
    limits: Limits = LIMITS,
    report: Told = silent,
    clock: Callable[[], float] = time.monotonic,
    user: Answers = nobody,
) -> Conversation:
    """Run an agent to the end of its conversation. An invalid call is answered with an error and stays; a message without
    a call ends the conversation unless `user` answers.

    When a segment has reached its trigger, the next one begins with the task, the summary, the to-dos and the path of the whole
    conversation. An infrastructure failure ends it with the turns so far; a sandbox out of memory answers calls with errors.

    At the time limit, running calls in a sandbox are stopped, waiting ones are not started, and the loop does not wait for the
    next turn, except for the engine step under way. Ctrl-C stops running calls and ends the conversation as `interrupted`.
    """
    turns: list[Turn] = []
    began, read, written, used, summaries = clock(), 0, 0, 0, 0
    deadline, over = began + limits.seconds, threading.Event()
    news: News = [User(text=instruction)]
    stop, why = "turns", ""
    session.left = lambda: deadline - clock()
    if session.concurrent:
        threading.Thread(target=_abort_in_time, args=(session, over), name="bell", daemon=True).start()
    try:
        for _ in range(limits.turns):
            if turns and (brief := turn_policy.condense(news, deadline)):
                read, written, summaries = read + brief.read, written + brief.written, summaries + 1
                report(brief.message)
                path, todos = session.remember(history(instruction, turns)), session.todos.values()
                news = [User(text=resumed(instruction, brief.message.text, summaries, todos, path, tools.terse))]
            spoken = turn_policy.say(news, deadline) if used < limits.tokens else None
            if spoken is None:
                stop = "tokens"
                if not turns:
                    why = f"the prompt leaves no room for an answer: raise limits.tokens={limits.tokens}, or use a longer context"
                break
            read, written, used = read + spoken.read, written + spoken.written, spoken.read + spoken.written
            report(spoken.message)
            calls = spoken.message.calls
            replies = tools.run(session, [written.call for written in calls])
            answer = "" if replies else user(spoken.message.text, time.monotonic() + session.left())
            turns += (new_turns := _turns(spoken.message, replies, tools, answer))
            for turn in new_turns:
                report(turn)
            if not answer and (not replies or replies[-1].ends):
                stop = "finished"
                break
            if session.left() < 0:
                stop = "time"
                break
            news = _news(calls, new_turns)
    except TimeIsUp:
        stop = "time"
    except ProviderFailure as failure:
        stop, why = "infrastructure", str(failure)
        turns.append(Turn(call="", observation=why, error="ProviderError"))
    except SandboxFailure as failure:
        stop, why = "infrastructure", str(failure)
    except KeyboardInterrupt:
        stop = "interrupted"
    finally:
        over.set()
    return Conversation(turns=tuple(turns), stop=stop, read=read, written=written, seconds=clock() - began, why=why)


def _abort_in_time(session: Session, over: threading.Event) -> None:
    """Abort a session when its time is over, unless its conversation is before."""
    while (left := session.left()) > 0:
        if over.wait(min(left, threading.TIMEOUT_MAX)):
            return
    session.abort()


def _turns(message: Said, replies: Sequence[Reply], tools: ToolSet, answer: str) -> list[Turn]:
    """Return the turns of a message, one per call, as stored with a rollout; one without a call has the user's answer."""
    if not replies:
        return [Turn(call="", observation=answer, said=message.text)]
    return [
        Turn(
            call=reply.call.json if reply.call.name else written.text,
            observation=tools.observation(reply),
            error=reply.error,
            tests_passed=reply.tests_passed,
            tests_run=reply.tests_run,
            said="" if number else message.text,
            beside=number > 0,
            seconds=reply.seconds,
        )
        for number, (written, reply) in enumerate(zip(message.calls, replies, strict=False))
    ]


def _news(calls: Sequence[Written], turns: Sequence[Turn]) -> News:
    """Return what the next turn reads: the results of the calls, or the user's answer to a message without any."""
    if not calls:
        return [User(text=turn.observation) for turn in turns]
    return [CallResult(id=call.id, text=turn.observation) for call, turn in zip(calls, turns, strict=True)]


def system_text(root: str, answered: bool = False, egress: str = "") -> str:
    """Return the system text. `root`: path of the workspace in the sandbox. `answered`: a user answers questions. `egress`: hosts
    that the sandbox of a task that needs a network reaches."""
    network = f"that reaches no host but {egress}, if the task needs any" if egress else "without network access"
    return SYSTEM.format(root=root, ends=ASKS if answered else ENDS, network=network)
