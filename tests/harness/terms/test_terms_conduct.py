"""Terms about conduct: what each counts, by cases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.terms.registry import term_named

FAILED = Grade(status="graded", tests={"t": False})
EMPTY = Rollout(task_id="t", segments=(), turns=(), files={}, stop="finished")


def talk(*turns: tuple[Any, ...]) -> Rollout:
    """A rollout of these turns: (tool, arguments), with fields of `Turn` after them; a text alone is the final message."""
    made = []
    for each in turns:
        if len(each) == 1:
            made.append(Turn(call="", observation="", said=each[0]))
            continue
        name, arguments, *rest = each
        fields = {"observation": "", **(rest[0] if rest else {})}
        made.append(Turn(call=json.dumps({"name": name, "arguments": arguments}), **fields))
    return replace(EMPTY, turns=tuple(made))


def todos(merge: bool, **status: str) -> tuple[str, dict[str, Any]]:
    return "todo_write", {"merge": merge, "todos": [{"id": n, "content": n, "status": s} for n, s in status.items()]}


READ, EDIT = ("read_file", {"target_file": "a.py"}), ("search_replace", {"file_path": "./a.py"})
PART = ("read_file", {"target_file": "a.py", "offset": 40})
REFUSED = {"error": "InvalidArguments"}
GREEN, RED = {"tests_run": 2, "tests_passed": 2}, {"tests_run": 2, "tests_passed": 1}
SHELL = ("run_terminal_cmd", {"command": "pytest"})
CONDUCT: list[tuple[str, list[tuple[Any, ...]], float]] = [
    ("unfinished_todos", [todos(False, a="pending", b="completed")], 0.5),
    ("unfinished_todos", [todos(False, a="pending", b="in_progress"), todos(True, a="completed")], 0.5),
    ("unfinished_todos", [(*todos(False, a="pending"), REFUSED)], 0.0),
    ("unfinished_todos", [("todo_write", {"todos": "all of it"})], 0.0),
    ("unread_edits", [READ, EDIT], 0.0),
    ("unread_edits", [EDIT, READ, EDIT], 0.5),
    ("unread_edits", [EDIT, EDIT], 0.5),  # what it wrote itself it knows
    ("unread_edits", [(*READ, REFUSED), EDIT], 1.0),
    ("repeated_reads", [READ, READ], 0.5),
    ("repeated_reads", [READ, PART, ("read_file", {"target_file": "b.py"})], 0.0),
    ("repeated_reads", [READ, EDIT, READ], 0.0),
    ("repeated_reads", [READ, ("grep", {"pattern": "x"}), READ, READ], 2 / 3),
    ("unfounded_claims", [("All tests pass now.",)], 1.0),
    ("unfounded_claims", [EDIT, ("run_tests", {}, GREEN), ("All tests pass.",)], 0.0),
    ("unfounded_claims", [("run_tests", {}, GREEN), EDIT, ("I fixed it. The tests are passing.",)], 1.0),
    ("unfounded_claims", [EDIT, ("run_tests", {}, GREEN), ("run_tests", {}, RED), ("Tests pass.",)], 1.0),
    ("unfounded_claims", [EDIT, (*SHELL, {"observation": "3 passed in 0.1s"}), ("Tests pass.",)], 0.0),
    ("unfounded_claims", [EDIT, ("The tests do not pass yet.",)], 0.0),
    ("unfounded_claims", [EDIT, ("I could not run the tests; they should pass.",)], 0.0),
    ("long_message", [(" ".join(["word"] * 150),)], 0.0),
    ("long_message", [(" ".join(["word"] * 600),)], 0.75),
    ("asked_back", [("Done. Shall I also rename it?",)], 1.0),
    ("asked_back", [("The pattern is `a?b`, and ```is it?```",)], 0.0),
    ("asked_back", [("What next?",), READ], 0.0),  # beside a call: no last word
]


@pytest.mark.parametrize(("name", "turns", "value"), CONDUCT, ids=lambda each: each if isinstance(each, str) else None)
def test_conduct(name: str, turns: list[tuple[Any, ...]], value: float) -> None:
    assert term_named(name)(talk(*turns), FAILED) == pytest.approx(value)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("I fixed the sum in a.py.", 0.0),
        ("I fixed the sum in `src/a.py`.", 0.0),
        ("I fixed it.", 1.0),
        ("Updated data.py.", 1.0),  # another file
        ("The cause is the sign.", 0.0),
        ("", 0.0),
    ],
)
def test_a_claim_names_a_file_that_differs(said: str, value: float) -> None:
    files = {"before": {"src/a.py": "1", "data.py": "x"}, "files": {"src/a.py": "2", "data.py": "x"}}
    assert term_named("vague_claims")(replace(talk((said,)), **files), FAILED) == value
