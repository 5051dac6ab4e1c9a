"""A scripted expert that repairs tasks in the real harness, with mistakes at a given rate, and the policy that plays scripts.

Scripts know the solution; what they write becomes demonstrations. They act only through tools, so that a demonstration is
token for token what a rollout of a model looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from random import Random

from composer_nb.harness.policy import Completion, Request, Trace
from composer_nb.harness.render import CompactRenderer
from composer_nb.harness.repairs import bugs
from composer_nb.harness.task import Task
from composer_nb.harness.tools import ToolCall

Script = Generator[ToolCall, str, None]
"""Yields calls and is sent the text of each observation."""

_TEST = ToolCall(name="run_tests", arguments={})


def expert(task: Task, rng: Random, mistake_rate: float) -> Script:
    """Read, perhaps test, perhaps up to two wrong edits that the tests find out, the right edit, test, finish.

    A wrong edit is a random change of the program as it stands, or of the line that needs the fix. An expert who makes no
    mistakes tests its edit in 7 of 10 tasks; one who has just failed always does.
    """
    path = task.source_scope[0]
    now, wanted = task.files[path].rstrip("\n"), task.solution[path].rstrip("\n")
    yield ToolCall(name="read_file", arguments={"path": path})
    if rng.random() < 0.3:
        yield _TEST
    mistakes, passed = 0, False
    while mistakes < 2 and rng.random() < mistake_rate:
        wrong = _mistake(now, wanted, rng)
        if wrong is None:
            continue
        yield _edit(path, now, wrong)
        now, mistakes = wrong, mistakes + 1
        passed = (yield _TEST).startswith("pass")
        if passed:
            break
    if not passed:
        while now != wanted:
            fixed = _fix_first_line(now, wanted)
            yield _edit(path, now, fixed)
            now = fixed
        if mistakes or rng.random() < 0.7:
            yield _TEST
    yield ToolCall(name="finish", arguments={})


def _fix_first_line(now: str, wanted: str) -> str:
    lines, right = now.split("\n"), wanted.split("\n")
    place = next(place for place in range(len(lines)) if lines[place] != right[place])
    return "\n".join([*lines[:place], right[place], *lines[place + 1 :]])


def _mistake(now: str, wanted: str, rng: Random) -> str | None:
    """A wrong version of the program: `now` with a random change, or with the right line wrongly written."""
    base = now if rng.random() < 0.5 else wanted
    drawn = bugs(base, rng)
    if drawn is None or drawn[1] in (now, wanted):
        return None
    return drawn[1] if sum(a != b for a, b in zip(now.split("\n"), drawn[1].split("\n"), strict=True)) == 1 else None


def _edit(path: str, before: str, after: str) -> ToolCall:
    pairs = list(zip(before.split("\n"), after.split("\n"), strict=True))
    [place] = [number for number, (old, new) in enumerate(pairs, 1) if old != new]
    return ToolCall(name="edit_line", arguments={"path": path, "line": place, "text": pairs[place - 1][1].strip()})


class ScriptedPolicy:
    """Plays one script a rollout. Deterministic, so tests and demonstrations need no model."""

    def __init__(self, renderer: CompactRenderer, script: Callable[[int], Script], capacity: int = 256) -> None:
        self.renderer, self.script, self.capacity = renderer, script, capacity
        self._scripts: dict[int, Script] = {}
        self._requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def step(self) -> list[Completion]:
        requests, self._requests = self._requests, []
        return [self._answer(request) for request in sorted(requests, key=lambda request: request.rollout)]

    def release(self, rollout: int) -> Trace:
        self._scripts.pop(rollout).close()
        return Trace()

    def _answer(self, request: Request) -> Completion:
        if request.rollout in self._scripts:
            call = self._scripts[request.rollout].send(self._observed(request))
        else:
            script = self._scripts[request.rollout] = self.script(request.rollout)
            call = next(script)
        token_ids = self.renderer.render_call(call)
        return Completion(
            rollout=request.rollout,
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            policy_versions=[-1] * len(token_ids),
        )

    def _observed(self, request: Request) -> str:
        _, *text, _, _ = request.token_ids  # <|out|> text <|end|> <|call|>
        return self.renderer.tokenizer.decode(list(text), skip_special_tokens=False)
