"""Build tasks that are no planted bug and no missing feature: what their kinds share (`kinds.py`)."""

import ast
import hashlib
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from composer_nb.harness.grading import plan as plans
from composer_nb.harness.grading.plan import GradePlan, modules_of
from composer_nb.harness.grading.source import Function
from composer_nb.harness.grading.validate import IDS, with_twins
from composer_nb.harness.tasks.making.changes import Change, Unit, function_of, normalised, text_of
from composer_nb.harness.tasks.making.instructions import passing_modules
from composer_nb.harness.tasks.making.trial import Assignment, NoTask, Subject, graded, needed, plan_on, repeated
from composer_nb.harness.tasks.task import Task

NEAR = 40  # Maximum tests that hold the behaviour of code whose structure or form changes; the nearest are chosen.


def assignments(
    kind: str, subject: Subject, build: Callable[[Subject, Unit], Task], units: Iterable[Unit]
) -> Iterator[Assignment]:
    """Yield one candidate for each of these functions, in an order drawn by the seed."""
    shuffled = list(units)
    Random(f"{kind} {subject.seed}").shuffle(shuffled)
    for unit in shuffled:
        with suppress(SyntaxError, ValueError):
            text = normalised(text_of(unit, subject.repository.files))
            key = hashlib.sha256(repr((kind, subject.seed, unit.path, unit.name, text)).encode()).hexdigest()[:12]
            yield Assignment(kind=kind, key=key, build=partial(build, subject, unit))


def task_of(
    subject: Subject, kind: str, unit: Unit, wordings: Sequence[str], facts: dict[str, str] | None = None, **fields: Any
) -> Task:
    """Return a task about a function, without a plan, with one of several requests. `fields`: those of the task that are not the
    repository's. Raises NoTask where they make no task."""
    repository = subject.repository
    digest = hashlib.sha256(repr((kind, unit, sorted(fields["solution"].items()))).encode()).hexdigest()[:12]
    about = {"kind": kind, "repository": repository.name, "places": json.dumps([f"{unit.path}::{unit.name}"])}
    values: dict[str, Any] = {"files": repository.files, "source_scope": repository.scope, "grader": "pytest"}
    values |= {"id": f"{repository.name}-{kind}-{digest}", "metadata": repository.settings | about | (facts or {})}
    values["instruction"] = Random(f"{subject.seed} {digest}").choice(wordings)
    try:
        return Task.model_validate(values | fields)
    except ValueError as error:  # such as a test that imports `my-tool.py` by its name
        raise NoTask("unfit", str(error)[:200]) from None


def hidden_of(subject: Subject, keys: Iterable[str]) -> dict[str, str]:
    """Return the hidden modules that the tests of these keys need."""
    hidden = subject.repository.hidden
    return {path: hidden[path] for path in needed(hidden, modules_of(keys))}


def rewritten(text: str, change: Callable[[Function], None]) -> str:
    """Return a function's lines as `ast` writes it after a change of its tree. Raises SyntaxError and ValueError."""
    node = function_of(text)
    assert node is not None
    change(node)
    plain = text.lstrip("\f")
    indent = plain[: len(plain) - len(plain.lstrip())]
    return textwrap.indent(ast.unparse(ast.fix_missing_locations(node)), indent)


def hollow(subject: Subject, units: Iterable[Unit]) -> dict[str, str]:
    """Return the files of these functions, in which they do nothing."""

    def emptied(node: Function) -> None:
        node.body = [ast.Raise(ast.Name("NotImplementedError", ast.Load()))]

    files = subject.repository.files
    edits = tuple(unit.becoming(rewritten(text_of(unit, files), emptied)) for unit in units)
    return Change(kind="hollow", edits=edits, places=()).apply(files)


def behaving(
    subject: Subject, task: Task, tests: Mapping[str, str], stub: dict[str, str] | None = None, *, hide: bool = True
) -> Task:
    """Return a task whose solution passes these tests, ids by key, every time, and whose start does not do what is asked.

    To `hide` is to take the tests that fail in the workspace away from it, if the solution does not change them. `stub`: files in
    which the functions do nothing. Raises NoTask.
    """
    steady, varying = repeated(subject, task, frozenset(tests))
    counted = sorted(tests.keys() - varying)
    failing = [tests[key] for key in sorted(steady)]
    unchanged = {path: text for path, text in task.files.items() if path not in task.solution}
    visible = passing_modules(unchanged, steady) if hide else {}
    facts = {IDS: json.dumps([tests[key] for key in counted]), "fail_to_pass": json.dumps(failing)}
    task = task.model_copy(update={"files": task.files | visible, "metadata": task.metadata | facts})
    if all(task.tests.get(path) == subject.repository.hidden.get(path) for path in modules_of(counted)):
        plan = plan_on(subject, task, counted)
    else:  # positions of twins are those of the repository's own tests
        plan = GradePlan(digest=plans.digest(task), tests={key: tests[key] for key in counted})
        plan, problems = with_twins(task, plan, subject.boxes(20.0 + subject.baseline.suite_s))
        if problems:
            raise NoTask("ungraded")
    return graded(subject, task, plan, failing, task.model_copy(update={"files": task.files | stub}) if stub else None)
