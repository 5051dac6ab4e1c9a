"""Hints for turns with failed calls: advice written by rules, as tokens to read before the turn."""

from collections.abc import Sequence

from composer_nb.harness.agent.chat import CallResult, ChatRenderer
from composer_nb.harness.rollout import Hint, Kind, Rollout, Turn
from composer_nb.harness.terms.registry import called
from composer_nb.harness.tools.toolset import ToolSet


def hint_for(turns: Sequence[Turn], tools: ToolSet) -> str:
    """Return the hint for one message from its calls; empty if none of them failed through the agent's fault."""
    for turn in turns:
        if turn.error in ("InvalidArguments", "UnexpectedEnvironment"):
            name = called(turn)[0]
            if name not in tools.tools:
                return f"Reminder: available tools: {', '.join(tools.tools)}"
            return f"Reminder: the next call of {name} fails: {turn.observation.partition(chr(10))[0][:200]}"
    return ""


def hints_of(rollout: Rollout, renderer: ChatRenderer, tools: ToolSet) -> list[list[Hint]]:
    """Return the hints of each segment, from `hint_for`."""
    rest, hints = iter(rollout.turns_by_message), list[list[Hint]]()
    for segment in rollout.segments:
        hints.append([])
        for places in segment.messages:
            if segment.kind[places[-1]] != Kind.SUMMARY and (text := hint_for(next(rest, []), tools)):
                hints[-1].append(hint_at(int(places[0]), int(places[-1]) + 1, text, renderer))
    return hints


def hint_at(start: int, stop: int, text: str, renderer: ChatRenderer) -> Hint:
    """Return a hint for the turn from `start` to `stop`: a user's text before the cue."""
    empty = [CallResult(id="", text="")]
    cue = len(renderer.read(empty)) - len(renderer.answers(empty))
    return Hint(start, stop, start - cue, tuple(renderer.ask(text)[:-cue]))
