"""Summaries, with which a conversation continues beyond its context.

    segment 1   system, task, turn, turn, …, query → summary
    segment 2   system, task, summary, to-dos, path of the history → turn, turn, …, query → summary
    segment 3   …

At a trigger, the policy is asked for a summary within the conversation, so the cache is reused for all tokens before the query.
The summary is sampled, and trains like any other message. The whole conversation so far is stored in a file of the workspace,
which tools can read and grading ignores. Reference: Cursor's post on self-summarization (March 2026).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from composer_nb.harness.rollout import Turn
from composer_nb.harness.tools.arguments import Todo

Compaction = Literal["self", "prompted", "truncate"]
# Mark that a model writes before its summary; text before the mark is thinking.
OPENS = "<summary>"
SELF = f"""\
Please summarize the conversation so far. Think first if that helps, then write {OPENS} and all that you need to go on: the goal,
what was done, what failed and why, and what is left to do. You will see nothing else of it."""
PROMPTED = f"""\
Your context is nearly full and will be replaced by a summary that you write now. Follow these instructions exactly. First check,
in a few sentences, that you have left nothing out. Then write {OPENS} and a summary with all of these sections, in this order,
each with its title on a line of its own, and “none” where there is nothing to say:
1. Request: everything that the user asked for, in full and in the user's own words, with each later correction.
2. Constraints: rules, conventions and limits that the work has to respect, and where they were stated.
3. Environment: languages, versions, commands to build, run and test, and anything unusual about the workspace.
4. Files read: the path of every file that was read, with the names, signatures and line numbers that matter in it.
5. Files changed: the path of every file that was changed, with the exact old and new text of each change.
6. Decisions: each choice that was made, what else was considered, and the reason for the choice.
7. Errors: the exact text of every error and failed test, what caused it, and how it was dealt with.
8. Attempts that failed: what was tried without success, and why it must not be tried again.
9. Current state: what works now, what does not, and how that was checked.
10. Open tasks: every step that is left, the most urgent first, with the file and the function it concerns.
11. Next step: the very next call to make, with its arguments, and why.
12. Quotations: code, names, paths and numbers that will be needed word for word.
Be complete rather than short: whatever is missing from this summary is lost."""
QUERIES = {"self": SELF, "prompted": PROMPTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarySettings:
    """Settings for conversations that grow past a trigger."""

    kind: Compaction = "self"
    """self: the policy answers a short query. prompted: it follows a long instruction. truncate: the oldest turns are dropped."""
    trigger: Annotated[int, Field(ge=0)] = 0
    """Number of tokens of a segment, of two turns or more, from which on the next turn begins another segment; 0: never.
    `limits.tokens` must leave room for a turn and a summary beyond it."""
    tokens: Annotated[int, Field(ge=1)] = 1024
    """Maximum tokens of a summary, including the thinking before it."""

    def reached(self, tokens: int, turns: int) -> bool:
        """Return whether a segment of so many tokens and turns is at its end. After one turn it would end where it began."""
        return 0 < self.trigger <= tokens and turns >= 2


NO_SUMMARIES = SummarySettings()


def resumed(task: str, summary: str, number: int, todos: Iterable[Todo], path: str, terse: bool) -> str:
    """Return the user's text at the start of a segment after `number` summaries. `path`: path of the history, if stored. `terse`:
    the form for tiny models."""
    if terse:
        return "\n".join(part for part in (task, summary, path) if part)
    parts = [task, f"This is summary {number} of your work so far, written by you:\n{summary}"]
    if plan := [f"- [{todo.status}] {todo.content}" for todo in todos]:
        parts.append("\n".join(["Your to-dos:", *plan]))
    if path:
        parts.append(f"The whole conversation so far is in {path}: search it for what the summary leaves out.")
    return "\n\n".join(parts)


def history(task: str, turns: Sequence[Turn]) -> str:
    """Return a conversation as searchable lines: texts, calls and observations."""
    parts = [task]
    for number, turn in enumerate(turns, 1):
        parts += [f"[{number}] {turn.said}".rstrip(), turn.call, turn.observation]
    return "\n".join(part for part in parts if part) + "\n"
