"""Questions about a code base whose answers are facts: who calls a function, whom it calls, and what a long program prints.

Calls are read off syntax trees, for functions whose names stand for them alone (`refactors.renameable`). The program takes longer
than a terminal waits by default, so it has to run in the background, or with a longer timeout. The agent writes an answer to a
file, which the hidden test compares word by word; no code of the agent runs.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random

from composer_nb.harness.grading.source import last_name
from composer_nb.harness.tasks.making.assignments import assignments, behaving, task_of
from composer_nb.harness.tasks.making.changes import Unit, function_of, text_of
from composer_nb.harness.tasks.making.refactors import renameable
from composer_nb.harness.tasks.making.trial import Assignment, Subject
from composer_nb.harness.tasks.task import Task

ANSWER = "ANSWER.txt"
FEWEST, MOST = 2, 8  # Names in an answer.
TEST = r"""import re
from pathlib import Path


def test_answer():
    words = re.split(r"[\s,;]+", Path({path!r}).read_text(encoding="utf-8"))
    assert sorted({{word.strip("`*-.()[]'\"") for word in words}} - {{""}}) == {names!r}
"""
PROGRAM, STEPS, PAUSE_S = "fingerprint.py", 14, 10.0  # The long program, its steps, and seconds between them.
LONG = '''\
"""Print the fingerprint of a release. It reads some sources at a time, and waits, so that the disk is free for others."""

import hashlib
import time
from pathlib import Path

SOURCES = {paths!r}
mark = {salt!r}
for step in range({steps}):
    for path in SOURCES[step::{steps}]:
        mark = hashlib.sha256((mark + Path(path).read_text(encoding="utf-8")).encode()).hexdigest()[:12]
    mark = hashlib.sha256(mark.encode()).hexdigest()[:12]
    print("step", step + 1, "of {steps}", flush=True)
    time.sleep({pause})
print(mark)
'''


def questions(subject: Subject) -> Iterator[Assignment]:
    """Yield the questions about functions that tests reach."""
    named = {unit.name.rpartition(".")[2]: unit for unit in renameable(subject)}
    called = {unit: called_names(text_of(unit, subject.repository.files)) for unit in subject.units}
    counts = Counter(unit.name for unit in subject.units)
    # Also classes: whether who makes an object calls a method is a matter of taste, as whether a function calls itself is.
    ambiguous = {part for unit in subject.units for part in unit.name.split(".")} - named.keys()
    answers: dict[Unit, list[tuple[str, set[str]]]] = {}
    for name, unit in named.items():
        if name in called[unit]:
            continue
        callers = {other.name for other in subject.units if name in called[other]}
        callees = {named[other].name for other in called[unit] & named.keys() if not called[unit] & ambiguous}
        options = [
            (f"Which functions and methods of the package call `{unit.name}` ({unit.path})?", callers),
            (f"Which of the package's functions and methods does `{unit.name}` ({unit.path}) call?", callees),
        ]
        # A name that two functions have would answer for both.
        answers[unit] = [
            (text, names)
            for text, names in options
            if FEWEST <= len(names) <= MOST and all(counts[other] == 1 for other in names)
        ]

    def build(subject: Subject, unit: Unit) -> Task:
        return _question(subject, unit, *Random(f"question {subject.seed} {unit.name}").choice(answers[unit]))

    return assignments("question", subject, build, [unit for unit in answers if answers[unit]])


def called_names(text: str) -> set[str]:
    """Return the last names of what the body of a function calls."""
    with suppress(SyntaxError, ValueError):
        nodes = (node for part in getattr(function_of(text), "body", ()) for node in ast.walk(part))
        return {last_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    return set()


def _question(subject: Subject, unit: Unit, text: str, names: set[str]) -> Task:
    wordings = [
        f"{text} Write their names to {ANSWER}, separated by commas, those of methods as `Class.method`.",
        f"I need to know for a review: {text[0].lower()}{text[1:]} Put the names into {ANSWER} (`a, Class.b`), nothing else.",
    ]
    return _answered(subject, "question", unit, wordings, sorted(names))


def _answered(
    subject: Subject, kind: str, unit: Unit, wordings: Sequence[str], answer: Sequence[str], **fields: dict[str, str]
) -> Task:
    """Return the task to write an answer, some words, into its file."""
    path = "test_answer.py"
    tests, solution = {path: TEST.format(path=ANSWER, names=answer)}, {ANSWER: ", ".join(answer) + "\n"}
    task = task_of(subject, kind, unit, wordings, tests=tests, solution=solution, source_scope=(ANSWER,), **fields)
    return behaving(subject, task, {f"{path}::test_answer#0": f"{path}::test_answer"})


def long_run(subject: Subject, unit: Unit) -> Task:
    """Return the task to run a program that takes minutes, and to write down what it prints last."""
    files = subject.repository.files
    words = {"paths": subject.repository.sources, "salt": f"{subject.seed} {unit.path} {unit.name}", "steps": STEPS}
    quick, program = (LONG.format(**words, pause=pause) for pause in (0, PAUSE_S))
    with subject.backend.create(subject.spec) as box:
        box.upload({path: files[path].encode() for path in subject.repository.sources} | {PROGRAM: quick.encode()})
        mark = box.exec(["python3", PROGRAM]).stdout.decode().split()[-1]
    wordings = (
        f"run {PROGRAM} as it is, it takes some minutes, and write the fingerprint that it prints at the end to {ANSWER}",
        f"For the release notes I need the last line that `python {PROGRAM}` prints. It takes {STEPS * PAUSE_S / 60:.0f} minutes "
        f"or so. Please run it unchanged and put that line into {ANSWER}, nothing else.",
    )
    return _answered(subject, "long", unit, wordings, [mark], files={**files, PROGRAM: program})
