"""Hints that a model writes: what it is shown, what becomes of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from composer_nb.harness.agent.endpoint import Answer
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.horizons.fork import ADVICE, written


class Says:
    def __init__(self, content: Any) -> None:
        self.content, self.asked = content, list[Any]()

    def complete(self, messages: Sequence[Mapping[str, Any]], tools: Any, max_tokens: int, *, until: float) -> Answer:
        self.asked.append(json.loads(messages[-1]["content"]))
        return Answer(message={"content": self.content}, read=0, written=0)


def done(task: Task) -> Attempt:
    turns = (
        Turn(call="A", observation="a", said="I look."),
        Turn(call="B", observation="b", beside=True),
        Turn(call="C", observation="c", error="InvalidArguments"),
        Turn(call="D", observation="d"),
    )
    rollout = Rollout(task_id=task.id, segments=(), turns=turns, files={}, stop="finished")
    return Attempt(task=task, rollout=rollout, grade=Grade(status="graded", tests={"hidden": False}))


def test_a_model_writes_a_hint_from_what_came_before_a_turn_and_of_it(task: Task) -> None:
    model = Says("  Read f.py\nfirst.  ")
    assert written(model, done(task), 1) == "Read f.py first."
    assert model.asked == [{"task": task.instruction, "before": ["I look.\nA\n→ a", "B\n→ b"], "turn": ["C\n→ c"]}]
    assert len(written(Says("word " * 999), done(task), 0)) == ADVICE
    assert not any(text in json.dumps(model.asked) for text in task.tests.values())
