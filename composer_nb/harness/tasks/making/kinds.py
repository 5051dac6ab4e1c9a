"""Kinds of work besides planted bugs and missing features: `composer-nb tasks make --kinds`.

Each kind draws candidates from the functions that tests reach, and builds the task of one by execution: the solution must pass
without a flag every time, and the start must not.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from random import Random
from typing import NamedTuple

from composer_nb.harness import syntax
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import GradePlan, digest, gold_files, modules_of, with_plan
from composer_nb.harness.grading.source import Function
from composer_nb.harness.grading.validate import IDS
from composer_nb.harness.tasks.making.assignments import NEAR, assignments, behaving, rewritten, task_of
from composer_nb.harness.tasks.making.changes import ROUNDS, Change, Unit, bugs, function_of, header_of, text_of
from composer_nb.harness.tasks.making.instructions import without_tests
from composer_nb.harness.tasks.making.questions import questions
from composer_nb.harness.tasks.making.refactors import movable, moved, renameable, renamed
from composer_nb.harness.tasks.making.trial import (
    MOST_BROKEN,
    Assignment,
    NoTask,
    Subject,
    failing_keys,
    job_on,
    needed,
    run_jobs,
)
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.task import Task

MUTANTS = (2, 3)  # Fewest and most mutants of a task of the kind `tests`.
LINTS = 3  # Most lints of a task.
UNUSED = ("os", "re", "json", "math", "itertools", "functools"), ("spare", "extra", "draft", "pending")


class Kind(NamedTuple):
    """A kind of work.

    Attributes:
        doing: What the progress line says.
        needs: Why a repository has no candidate.
    """

    doing: str
    needs: str
    candidates: Callable[[Subject], Iterator[Assignment]]


# Tests to write.


def _tests_to_write(subject: Subject, unit: Unit) -> Task:
    """Return the task to write the tests of a function, which the workspace lacks: those that notice the mutants."""
    files, baseline, hidden = subject.repository.files, subject.baseline, subject.repository.hidden
    keys = baseline.nearest([unit.place])
    seconds = 6.0 + 4 * sum(baseline.reach[key].seconds for key in keys)
    tried: list[tuple[Mapping[str, str], set[str]]] = []
    for change in islice(bugs(files, [unit], subject.seed), ROUNDS):
        with suppress(NoTask):  # a mutant that does not end
            mutant = change.apply(files)
            [ran] = run_jobs(subject, [job_on(subject, mutant, keys)], seconds)
            tried.append((mutant, failing_keys(ran, keys)))
    counts = Counter(key.partition("::")[0] for _, failing in tried for key in failing)
    module = counts.most_common(1)[0][0] if counts else ""
    noticed = [pair for pair in tried if any(key.startswith(f"{module}::") for key in pair[1])]
    noticed = sorted(noticed, key=lambda pair: -len(pair[1]))[: MUTANTS[1]]
    if len(noticed) < MUTANTS[0]:
        raise NoTask("unseen")
    removed = set[str]().union(*(failing for _, failing in noticed))
    if len(removed) > max(8, MOST_BROKEN * len(baseline.plan.tests)):
        raise NoTask("too much")
    gone = {key.rpartition("#")[0] for key in removed}
    in_module = {key: name for key, name in baseline.plan.tests.items() if key.startswith(f"{module}::")}
    required = {key: name for key, name in in_module.items() if key.rpartition("#")[0] not in gone}
    visible = {
        path: without_tests(files[path], [key for key in removed if key.startswith(f"{path}::")])
        for path in modules_of(removed)
    }
    in_other_words = unit.becoming(rewritten(text_of(unit, files), reworded))
    equivalent = Change(kind="tests", edits=(in_other_words,), places=(unit.place,)).apply(files)
    wordings = (
        f"`{unit.name}` in {unit.path} has no tests. Write some in {module}, next to those that are there. Wrong versions of "
        "it have to fail them.",
        f"please add tests of `{unit.name}` ({unit.path}) to {module}. they should notice when somebody breaks it",
        f"Cover `{unit.name}` from {unit.path} with tests in {module}, and keep the tests that are there. We will run yours "
        "on versions with bugs; each has to fail.",
    )
    facts = {"mutants": [mutant for mutant, _ in noticed], "equivalents": [equivalent], "fail_to_pass": []}
    task = task_of(
        subject,
        "tests",
        unit,
        wordings,
        {name: json.dumps(value) for name, value in (facts | {IDS: sorted(required.values())}).items()},
        files={**files, **visible},
        tests={path: hidden[path] for path in needed(hidden, [module])},
        solution={module: files[module]},
        source_scope=(module,),
    )
    task = with_plan(task, GradePlan(digest=digest(task), tests=required))
    solved, again, start = (
        grade(task, content, subject.backend, anew=True) for content in (*[gold_files(task)] * 2, workspace(task))
    )
    refusals = [name for name in start.tests if name.startswith("refuses")]
    if (
        not (solved.passed and again.passed and [*start.failed] == refusals)
        or solved.flags
        or again.flags
        or start.flags
    ):
        raise NoTask("ungraded")
    return task


def reworded(node: Function) -> None:
    """Let a function keep each of its results in a variable, and begin with a variable that is unused."""

    class Results(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
            kept = ast.Assign([ast.Name("outcome_", ast.Store())], node.value or ast.Constant(None))
            return [kept, ast.Return(ast.Name("outcome_", ast.Load()))]

    documented = ast.get_docstring(node) is not None
    Results().visit(node)
    node.body.insert(int(documented), ast.Assign([ast.Name("spare_", ast.Store())], ast.Constant(0)))


# Lints to mend.


def _lints(subject: Subject, unit: Unit) -> Task:
    """Return the task to mend lints in a function and in others, of other files if there are some."""
    files, hidden = subject.repository.files, subject.repository.hidden
    rng = Random(f"lint {subject.seed} {unit.path} {unit.name}")
    others = rng.sample(subject.reached, len(subject.reached))
    others.sort(key=lambda other: other.path == unit.path)  # stable
    edits = []
    for candidate in (unit, *(other for other in others if other != unit)):
        if len(edits) < LINTS and (text := littered(candidate, files, rng)):
            edits.append(candidate.becoming(text))
        elif not edits:
            raise NoTask("unseen")
    change = Change(kind="lint", edits=tuple(edits), places=tuple(edit.place for edit in edits))
    stubs = [edit.becoming(rewritten(text_of(edit, files), _hollow)) for edit in edits]
    keys = [key for edit in edits for key in subject.baseline.nearest([edit.place])[: NEAR // LINTS]]
    tests = {key: subject.baseline.plan.tests[key] for key in keys}
    changed = change.apply(files)
    paths = " and ".join(sorted(changed))
    wordings = (
        f"fix the lints in {paths}",
        f"Our linter complains about {paths}: there are unused names, or names that do not exist. Please clean that up; the "
        "code should do what it did before.",
        f"Somebody left unfinished edits in {paths} ({len(edits)} lints). Mend them without a change of behaviour.",
    )
    task = task_of(
        subject,
        "lint",
        unit,
        wordings,
        {},
        files={**files, **changed},
        tests={path: hidden[path] for path in needed(hidden, modules_of(tests))},
        solution={path: files[path] for path in changed},
        source_scope=subject.repository.scope,
        strictness="lints",
    )
    return behaving(subject, task, tests, Change(kind="lint", edits=tuple(stubs), places=()).apply(files))


def _hollow(node: Function) -> None:
    node.body = [ast.Raise(ast.Name("NotImplementedError", ast.Load()))]


def littered(unit: Unit, files: Mapping[str, str], rng: Random) -> str:
    """Return a function's text with an unused import or variable, or a name that does not exist; empty where none fits."""
    text, before = text_of(unit, files), files[unit.path]
    node = function_of(text)
    words = {*re.findall(r"\w+", before)}
    shift = 1 + header_of(text).count("\n")  # from the tree's lines to those of the text
    lines = text.split("\n")
    options: list[tuple[int, str]] = []  # Lines to replace, and the new text.
    documented = ast.get_docstring(node) is not None if node else False
    first = node.body[documented] if node and len(node.body) > documented else None
    if node and first and not (line := lines[first.lineno - shift])[: first.col_offset].strip():
        added = [f"import {name}" for name in UNUSED[0]] + [f"{name} = {rng.randrange(10)}" for name in UNUSED[1]]
        start = min([first.lineno, *(item.lineno for item in getattr(first, "decorator_list", ()))]) - shift
        options += [
            (start, f"{line[: first.col_offset]}{new}\n{lines[start]}") for new in added if new.split()[-1] not in words
        ]
    for name in ast.walk(node) if node else ():
        if (
            isinstance(name, ast.Name)
            and isinstance(name.ctx, ast.Load)
            and len(name.id) > 2
            and f"{name.id}s" not in words
        ):
            data = lines[name.lineno - shift].encode()
            if data[name.col_offset : name.end_col_offset] == name.id.encode():
                new_line = data[: name.end_col_offset] + b"s" + data[name.end_col_offset :]
                options.append((name.lineno - shift, new_line.decode()))
    known = Counter(syntax.lints(before))
    for number, new_text in rng.sample(options, len(options)):
        littered_text = "\n".join([*lines[:number], new_text, *lines[number + 1 :]])
        change = Change(kind="lint", edits=(unit.becoming(littered_text),), places=())
        if len([*(Counter(syntax.lints(change.apply(files)[unit.path])) - known).elements()]) == 1:
            return littered_text
    return ""


KINDS: Mapping[str, Kind] = {
    "tests": Kind(
        "taking tests away",
        "as tests reach no function",
        lambda subject: assignments("tests", subject, _tests_to_write, subject.reached),
    ),
    "lint": Kind(
        "littering functions",
        "as no function that tests reach has a line for a lint",
        lambda subject: assignments("lint", subject, _lints, subject.reached),
    ),
    "rename": Kind(
        "renaming functions",
        "as no function that tests reach has a name that stands for it alone",
        lambda subject: assignments("rename", subject, renamed, renameable(subject)),
    ),
    "move": Kind(
        "moving functions",
        "as every function that tests reach needs more of its module than imports",
        lambda subject: assignments("move", subject, moved, movable(subject)),
    ),
    "question": Kind(
        "asking questions",
        "as no function that tests reach calls, or is called by, two to eight others whose names stand for them alone",
        questions,
    ),
}
