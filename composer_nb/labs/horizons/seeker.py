"""A policy without a model that knows nothing but its context, to see what a rollout loses where a segment ends.

It tests, searches the function that failed, reads its module, and tries the single changes of that function one after another,
leaving out those that its context says it has tried. What a summary or a cut has lost it looks up, or tries, again.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer, Said
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.agent.summary import PROMPTED
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Request, Trace
from composer_nb.harness.rollout import Kind, Rollout
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.tour.expert import TINY, WithoutModel, substitution
from composer_nb.tour.miniatures import ENUMERABLE
from composer_nb.tour.repairs import neighbours, split_at

_TEST, _UNDO, _FINISH = (ToolCall(name=name, arguments={}) for name in ("run_tests", "undo", "finish"))
_DONE = "left: finish"
_FAILS, _TRIED = re.compile(r"fail \d+/\d+: (\w+)\(.*"), re.compile(r"sub \S+<\|to\|>(.*?)<\|to\|>(.*?)<\|", re.S)

Order = Callable[[tuple[str, str]], float]


def seek(context: str, order: Order = lambda change: 0) -> Said:
    """Return the next turn, which depends on nothing but the text of the context. `order`: key by which changes are tried."""
    observations = re.findall(r"<\|out\|>(.*?)<\|end\|>", context, re.S)
    if (observations and observations[-1].startswith("pass")) or f"\n{_DONE}" in context:
        return turn([_FINISH])
    if (failing_call := _FAILS.search(context)) is None:
        return turn([_TEST])
    if (definition := re.search(rf"([\w/]+\.py):\d+def {failing_call[1]}\b", context)) is None:
        return turn([ToolCall(name="grep", arguments={"pattern": f"def {failing_call[1]}"})])
    if not (read_files := [text for text in observations if text.startswith("1")]):
        return turn([_UNDO, ToolCall(name="read_file", arguments={"path": definition[1]})])
    module = "\n".join(line[len(str(n)) :] for n, line in enumerate(read_files[-1].split("\n"), 1))
    before, function, after = split_at(module, failing_call[1])
    for _, variant in sorted(neighbours(function, ENUMERABLE), key=order):
        old, new = substitution(module, before + variant + after)
        if _line(old, new) not in tried(context):
            return turn([_UNDO, TINY.change(definition[1], old, new), _TEST])
    return turn([_FINISH])


def tried(context: str) -> list[str]:
    """Return a line about each change that the context says was tried, in a call or in a summary."""
    lines = re.findall(r"^tried .*$", context, re.M)
    return list(dict.fromkeys([*lines, *(_line(old, new) for old, new in _TRIED.findall(context))]))


def _line(old: str, new: str) -> str:
    return f"tried {old.strip()} > {new.strip()}"


def summarise(context: str, is_long: bool) -> str:
    """Return a summary of the context: what fails, where, and what was tried; or all that a long instruction asks for."""
    failing_call, definition = (re.search(pattern, context) for pattern in (_FAILS, r"[\w/]+\.py:\d+def .*"))
    fails, where = (match[0].partition("<|")[0] if match else "" for match in (failing_call, definition))
    attempts, last_result = "\n".join(tried(context)), re.findall(r"<\|out\|>(\w+)", context)[-1:]
    next_step = _DONE if last_result == ["pass"] else "left: try another change"
    if not is_long:
        return "\n".join(line for line in (fails, where, attempts, next_step) if line)
    request = context.partition("<|user|>")[2].partition("\n")[0].partition("<|")[0]
    sections = {1: request, 4: where, 7: fails, 8: attempts, 9: fails, 11: next_step}
    titles = re.findall(r"^\d+\. [\w ]+", PROMPTED, re.M)
    return "\n".join(f"{title}\n{sections.get(number) or 'none'}" for number, title in enumerate(titles, 1))


class Seeker(WithoutModel):
    """The policy: `seek` as tokens of a chat format, and `summarise` where it is asked for a summary."""

    def __init__(self, renderer: ChatRenderer, order: Order = lambda change: 0) -> None:
        super().__init__(renderer)
        self._contexts, self.order = dict[int, list[int]](), order
        self._queries = {kind: self.renderer.ask(text) for kind, text in renderer.queries.items()}

    def release(self, rollout: int) -> Trace:
        self._contexts.pop(rollout, None)
        return super().release(rollout)

    def written(self, request: Request) -> list[int]:
        ids = self._contexts.setdefault(request.rollout, [])
        ids += request.token_ids
        context = self.renderer.tokenizer.decode(ids, skip_special_tokens=False)
        kind = next((kind for kind, query in self._queries.items() if ids[-len(query) :] == query), "")
        summary = self.renderer.encoded([summarise(context, kind == "prompted"), self.renderer.end]) if kind else None
        token_ids = (summary or self.renderer.turn(seek(context, self.order)))[: request.max_tokens]
        ids += token_ids
        return token_ids


def figures(attempts: Sequence[Attempt], tokenizer: Tokenizer) -> dict[str, float]:
    """Return how many attempts there are, the share solved, and means over them: segments, tokens of summaries, tokens whose keys
    and values a call for a summary found in the cache (`reused`), all tokens, tries that were forgotten at the end of a segment,
    and tries made twice."""
    rollouts = [attempt.rollout for attempt in attempts]
    means = {
        "segments": [len(rollout.segments) for rollout in rollouts],
        "summary tokens": [sum(int((s.kind == Kind.SUMMARY).sum()) for s in rollout.segments) for rollout in rollouts],
        "reused": [sum(segment.reused for segment in rollout.segments) for rollout in rollouts],
        "tokens": [rollout.tokens for rollout in rollouts],
        "forgotten": [len(forgotten(rollout, tokenizer)) for rollout in rollouts],
        "tried twice": [sum(turn.observation == "tried" for turn in rollout.turns) for rollout in rollouts],
    }
    solved = float(np.mean([attempt.grade.passed for attempt in attempts]))
    averages = {name: float(np.mean(values)) for name, values in means.items()}
    return {"rollouts": len(rollouts), "solved": solved} | averages


def forgotten(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """Return the tries that a segment knew of when it ended and the next one did not when it began."""
    lines = []
    for segment, successor in zip(rollout.segments, rollout.segments[1:], strict=False):
        prompt_length = int(successor.acted.argmax())
        tried_before, remembered = (
            tried(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
            for ids in (segment.token_ids, successor.token_ids[:prompt_length])
        )
        lines += [line for line in tried_before if line not in remembered]
    return lines
