"""Questions about a code base whose answers are facts: who calls a function, and whom it calls.

The answer is computed from syntax trees, for functions whose names stand for them alone (`refactors.renameable`). The agent
writes it to a file, which the hidden test compares word by word; no code of the agent runs.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random

from composer_nb.harness import syntax
from composer_nb.harness.grading.source import last_name
from composer_nb.harness.tasks.making.assignments import assignments, behaving, task_of
from composer_nb.harness.tasks.making.changes import Unit, header_of, text_of
from composer_nb.harness.tasks.making.refactors import renameable
from composer_nb.harness.tasks.making.trial import Assignment, Subject
from composer_nb.harness.tasks.task import Task

ANSWER = "ANSWER.txt"
FEWEST, MOST = 2, 8  # Names in an answer.
TEST = """\
from pathlib import Path


def test_answer():
    words = Path({path!r}).read_text(encoding="utf-8").replace(",", " ").split()
    assert sorted({{word.strip("`*-.()") for word in words}} - {{""}}) == {names!r}
"""


def questions(subject: Subject) -> Iterator[Assignment]:
    """Yield the questions about functions that tests reach."""
    named = {unit.name.rpartition(".")[2]: unit for unit in renameable(subject)}
    called = {unit: _called(text_of(unit, subject.repository.files)) for unit in subject.units}
    counts = Counter(unit.name for unit in subject.units)
    ambiguous = {unit.name.rpartition(".")[2] for unit in subject.units} - named.keys()
    answers: dict[Unit, list[tuple[str, set[str]]]] = {}
    for name, unit in named.items():
        callers = {other for other in subject.units if name in called[other] and other != unit}
        callees = {
            named[other] for other in called[unit] & named.keys() if other != name and not called[unit] & ambiguous
        }
        both = [
            (f"Which functions and methods of the package call `{unit.name}` ({unit.path})?", callers),
            (f"Which of the package's functions and methods does `{unit.name}` ({unit.path}) call?", callees),
        ]
        options = [(text, {other.name for other in others}) for text, others in both]
        # A name that two functions have would answer for both.
        answers[unit] = [
            (text, names)
            for text, names in options
            if FEWEST <= len(names) <= MOST and all(counts[other] == 1 for other in names)
        ]

    def build(subject: Subject, unit: Unit) -> Task:
        return _question(subject, unit, *Random(f"question {subject.seed} {unit.name}").choice(answers[unit]))

    return assignments("question", subject, build, [unit for unit in answers if answers[unit]])


def _called(text: str) -> set[str]:
    """Return the last names of what a function calls."""
    with suppress(SyntaxError, ValueError):
        nodes = ast.walk(syntax.parse(header_of(text) + text))
        return {last_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    return set()


def _question(subject: Subject, unit: Unit, text: str, names: set[str]) -> Task:
    wordings = [
        f"{text} Write their names to {ANSWER}, separated by commas, those of methods as `Class.method`.",
        f"I need to know for a review: {text[0].lower()}{text[1:]} Put the names into {ANSWER} (`a, Class.b`), nothing else.",
    ]
    path, answer = "test_answer.py", sorted(names)
    tests, solution = {path: TEST.format(path=ANSWER, names=answer)}, {ANSWER: ", ".join(answer) + "\n"}
    task = task_of(subject, "question", unit, wordings, tests=tests, solution=solution, source_scope=(ANSWER,))
    return behaving(subject, task, {f"{path}::test_answer#0": f"{path}::test_answer"})
