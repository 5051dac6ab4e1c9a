"""Kinds of work besides planted bugs and missing features: `composer-nb tasks make --kinds`.

Each kind draws candidates from the functions that tests reach, and builds the task of one by execution: the solution must pass
without a flag every time, and the start must not.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from random import Random
from typing import NamedTuple, cast

from composer_nb.harness import syntax
from composer_nb.harness.grading.box import TestJob
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import GradePlan, digest, gold_files, with_plan
from composer_nb.harness.grading.source import RAISES, Function, last_name
from composer_nb.harness.grading.validate import IDS
from composer_nb.harness.grading.written import LEFT_OUT
from composer_nb.harness.tasks.making import changes, trial
from composer_nb.harness.tasks.making.assignments import (
    NEAR,
    assignments,
    behaving,
    hidden_of,
    hollow,
    rewritten,
    task_of,
)
from composer_nb.harness.tasks.making.histories import histories
from composer_nb.harness.tasks.making.instructions import passing_modules
from composer_nb.harness.tasks.making.questions import called_names, long_run, questions
from composer_nb.harness.tasks.making.refactors import extractable, extracted, movable, moved, renameable, renamed
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.task import Task

MUTANTS = (2, 3)  # Fewest and most mutants of a task of the kind `tests`.
MOST_FEATURES = 3  # Functions of a feature over several files.
LINTS = 3  # Most lints of a task.
WANTING = "calls, or is called by, two to eight others whose names stand for them alone"
UNUSED = ("os", "re", "json", "math", "itertools", "functools"), ("spare", "extra", "draft", "pending")


class TaskKind(NamedTuple):
    """A kind of work.

    Attributes:
        needs: Why a repository has no candidate.
    """

    candidates: Callable[[trial.Subject], Iterator[trial.Assignment]]
    needs: str


# Tests to write.


def _tests_to_write(subject: trial.Subject, unit: changes.Unit) -> Task:
    """Return the task to write the tests of a function, which the workspace lacks: those that notice the mutants."""
    files, baseline = subject.repository.files, subject.baseline
    keys = baseline.nearest([unit.place])
    seconds = 6.0 + 4 * sum(baseline.reach[key].seconds for key in keys)
    tried: list[tuple[Mapping[str, str], set[str]]] = []
    for change in islice(changes.bugs(files, [unit], subject.seed), changes.ROUNDS):
        with suppress(trial.NoTask):  # a mutant that does not end
            mutant = change.apply(files)
            [ran] = trial.run_jobs(subject, [trial.job_on(subject, mutant, keys)], seconds)
            tried.append((mutant, trial.failing_keys(ran, keys)))
    counts = Counter(key.partition("::")[0] for _, failing in tried for key in failing)
    module = counts.most_common(1)[0][0] if counts else ""
    noticed = [pair for pair in tried if any(key.startswith(f"{module}::") for key in pair[1])]
    crude = _crude(subject, [mutant for mutant, _ in noticed], keys, seconds)
    order = sorted(range(len(noticed)), key=lambda number: (crude[number], -len(noticed[number][1])))
    noticed = [noticed[number] for number in order[: MUTANTS[1]]]
    if len(noticed) < MUTANTS[0] or all(crude):
        raise trial.NoTask("unseen")
    removed = set[str]().union(*(failing for _, failing in noticed))
    if len(removed) > max(8, trial.MOST_BROKEN * len(baseline.plan.tests)):
        raise trial.NoTask("too much")
    gone = {key.rpartition("#")[0] for key in removed}
    in_module = {key: name for key, name in baseline.plan.tests.items() if key.startswith(f"{module}::")}
    required = {key: name for key, name in in_module.items() if key.rpartition("#")[0] not in gone}
    visible = passing_modules(files, removed)
    in_other_words = unit.becoming(rewritten(changes.text_of(unit, files), reworded))
    equivalent = changes.Change(kind="tests", edits=(in_other_words,), places=(unit.place,)).apply(files)
    wordings = (
        f"`{unit.name}` in {unit.path} has no tests. Write some in {module}, next to those that are there. Wrong versions of "
        "it have to fail them.",
        f"please add tests of `{unit.name}` ({unit.path}) to {module}. they should notice when somebody breaks it",
    )
    facts = {"mutants": [mutant for mutant, _ in noticed], "equivalents": [equivalent], "fail_to_pass": []}
    left_out = [name for name in baseline.left_out if name.startswith(f"{module}::")]
    facts |= {IDS: sorted(required.values()), LEFT_OUT: left_out}
    texts = {name: json.dumps(value) for name, value in facts.items()}
    fields = {"tests": hidden_of(subject, [module]), "solution": {module: files[module]}, "source_scope": (module,)}
    task = task_of(subject, "tests", unit, wordings, texts, files={**files, **visible}, **fields)
    task = with_plan(task, GradePlan(digest=digest(task), tests=required))
    contents = (gold_files(task), gold_files(task), workspace(task))
    grades = [grade(task, content, subject.backend, anew=True) for content in contents]
    solved, again, start = grades
    refusals = [name for name in start.tests if name.startswith("refuses")]
    fits = solved.passed and again.passed and start.failed and (not required or [*start.failed] == refusals)
    if not fits or any(result.flags for result in grades):
        raise trial.NoTask("ungraded")
    return task


def _crude(
    subject: trial.Subject, mutants: Sequence[Mapping[str, str]], keys: Sequence[str], seconds: float
) -> list[bool]:
    """Return whether tests without assertions notice each mutant, as it raises. Raises NoTask if one does not end."""
    jobs = list[TestJob]()
    for changed in ({}, *mutants):
        whole = trial.job_on(subject, changed, keys)
        jobs.append(replace(whole, hidden={path: without_assertions(text) for path, text in whole.hidden.items()}))
    before, *failing = (trial.failing_keys(ran, keys) for ran in trial.run_jobs(subject, jobs, seconds))
    return [not failed <= before for failed in failing]


def without_assertions(text: str) -> str:
    """Return a test module that calls the same, accepts every result, and any exception where it expected one."""

    class WithoutAssertions(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.stmt:
            return ast.Expr(self.visit(node.test))

        def visit_With(self, node: ast.With) -> ast.stmt:
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if not any(last_name(call.func) in RAISES for call in calls):
                return cast(ast.stmt, self.generic_visit(node))
            body = [self.visit(statement) for statement in node.body]
            handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
            return ast.Try(body, [handler], [], [])

        def visit_Call(self, node: ast.Call) -> ast.expr:
            self.generic_visit(node)
            asserts = last_name(node.func).startswith("assert")
            return ast.Tuple(node.args, ast.Load()) if asserts else node

    return ast.unparse(ast.fix_missing_locations(WithoutAssertions().visit(syntax.parse(text)))) + "\n"


def reworded(node: Function) -> None:
    """Let a function keep each of its results in a variable, and begin with a variable that is unused."""

    class Results(ast.NodeTransformer):
        def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
            result = ast.Assign([ast.Name("outcome_", ast.Store())], node.value or ast.Constant(None))
            return [result, ast.Return(ast.Name("outcome_", ast.Load()))]

    documented = ast.get_docstring(node) is not None
    Results().visit(node)
    node.body.insert(int(documented), ast.Assign([ast.Name("spare_", ast.Store())], ast.Constant(0)))


# Features over several files.


def _features(subject: trial.Subject) -> Iterator[trial.Assignment]:
    """Yield candidates: a public function, with those that call it in other files, each of which says what it does."""
    files = subject.repository.files
    edits_of = {unit: changes.without_feature(unit, subject.reached, files) for unit in subject.reached}
    calls = {unit: called_names(changes.text_of(unit, files)) for unit in edits_of if edits_of[unit]}

    def parts_of(unit: changes.Unit) -> list[tuple[changes.Edit, ...]]:
        name = unit.name.rpartition(".")[2]
        callers = [other for other in calls if name in calls[other] and other.path != unit.path]
        return [edits_of[other] for other in (unit, *callers)][:MOST_FEATURES]

    def build(subject: trial.Subject, unit: changes.Unit) -> Task:
        parts = parts_of(unit)
        edits, places = tuple(edit for part in parts for edit in part), tuple(part[0].place for part in parts)
        change = changes.Change(kind="features", edits=edits, places=places)
        trial.look(subject, change)
        return trial.settled(subject, change)

    return assignments("features", subject, build, [unit for unit in calls if len(parts_of(unit)) > 1])


# Lints to mend.


def _lints(subject: trial.Subject, unit: changes.Unit) -> Task:
    """Return the task to mend lints in a function and in others, of other files if there are some."""
    files = subject.repository.files
    rng = Random(f"lint {subject.seed} {unit.path} {unit.name}")
    others = rng.sample(subject.reached, len(subject.reached))
    others.sort(key=lambda other: other.path == unit.path)  # stable
    edits: list[changes.Edit] = []
    for candidate in (unit, *(other for other in others if other != unit)):
        if len(edits) < LINTS and (text := littered(candidate, files, rng)):
            edits.append(candidate.becoming(text))
        elif not edits:
            raise trial.NoTask("unseen")
    change = changes.Change(kind="lint", edits=tuple(edits), places=tuple(edit.place for edit in edits))
    keys = [key for edit in edits for key in subject.baseline.nearest([edit.place])[: NEAR // LINTS]]
    tests = {key: subject.baseline.plan.tests[key] for key in keys}
    changed = change.apply(files)
    paths = " and ".join(sorted(changed))
    wordings = (
        f"fix the lints in {paths}",
        f"Somebody left unfinished edits in {paths}: unused names, or names that do not exist ({len(edits)} lints). Please clean "
        "that up; the code should do what it did before.",
    )
    fields = {"tests": hidden_of(subject, tests), "solution": {path: files[path] for path in changed}}
    task = task_of(subject, "lint", unit, wordings, files={**files, **changed}, strictness="lints", **fields)
    return behaving(subject, task, tests, hollow(subject, edits))


def littered(unit: changes.Unit, files: Mapping[str, str], rng: Random) -> str:
    """Return a function's text with an unused import or variable, or a name that does not exist; empty where none fits."""
    text, before = changes.text_of(unit, files), files[unit.path]
    node = changes.function_of(text)
    assert node is not None
    words, lines = {*re.findall(r"\w+", before)}, text.split("\n")
    shift = 1 + changes.header_of(text).count("\n")  # from the tree's lines to those of the text
    first = node.body[-1 if len(node.body) == 1 else int(ast.get_docstring(node) is not None)]
    indent = lines[first.lineno - shift][: first.col_offset]
    start = min([first.lineno, *(item.lineno for item in getattr(first, "decorator_list", ()))]) - shift
    unused = {name: f"import {name}" for name in UNUSED[0]}
    unused |= {name: f"{name} = {rng.randrange(10)}" for name in UNUSED[1]}
    fresh = unused.keys() - words if not indent.strip() else ()
    # Lines to replace, and their new text.
    options = [(start, f"{indent}{unused[name]}\n{lines[start]}") for name in fresh]
    for use in ast.walk(node):
        if isinstance(use, ast.Name) and isinstance(use.ctx, ast.Load) and f"{use.id}s" not in words:
            data = lines[use.lineno - shift].encode()
            if data[use.col_offset : use.end_col_offset] == use.id.encode():  # not so in f-strings
                changed = data[: use.end_col_offset] + b"s" + data[use.end_col_offset :]
                options.append((use.lineno - shift, changed.decode()))
    options = rng.sample(sorted(options), len(options))
    lints_before = Counter(syntax.lints(before))
    for number, new in options:
        edit = unit.becoming("\n".join([*lines[:number], new, *lines[number + 1 :]]))
        after = changes.Change(kind="lint", edits=(edit,), places=()).apply(files)[unit.path]
        if (Counter(syntax.lints(after)) - lints_before).total() == 1:
            return edit.text
    return ""


def _one_each(
    kind: str,
    build: Callable[[trial.Subject, changes.Unit], Task],
    units: Callable[[trial.Subject], Iterable[changes.Unit]] = lambda subject: subject.reached,
    needs: str = "as tests reach no function",
) -> tuple[str, TaskKind]:
    """Return a kind with one candidate for each of these functions."""
    return kind, TaskKind(lambda subject: assignments(kind, subject, build, units(subject)), needs)


KINDS: Mapping[str, TaskKind] = dict(
    [
        _one_each("tests", _tests_to_write),
        _one_each("lint", _lints),
        _one_each("rename", renamed, renameable, "as no function that tests reach has a name that stands for it alone"),
        _one_each("move", moved, movable, "as every function that tests reach needs more of its module than imports"),
        _one_each("extract", extracted, extractable, "as no function that tests reach has lines that can be one"),
        _one_each("long", long_run),
        ("features", TaskKind(_features, "as no documented function that tests reach calls one of another file")),
        ("git", TaskKind(histories, "as tests reach no function")),
        ("question", TaskKind(questions, f"as no function that tests reach {WANTING}")),
    ]
)
