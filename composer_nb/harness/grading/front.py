"""Grade a task by its own grader. The grade of a tree that was graded before in this process is looked up, where chance and the
machine had no part in it.

Only clean grades of the grader `pytest` are remembered: status `graded`, and no flag but those of what the agent changed. A grade
with any other flag, a tampered one and one of a broken sandbox are made anew each time. A remembered grade's `cost` counts it:
`repeats` is 1, and `wall_s` is the time of the look. Code that guesses gets one guess for each tree, not one for each attempt.
"""

import ast
import hashlib
import marshal
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from composer_nb.harness.grading.diff import Changes, changes
from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.grading.plan import conftests
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.script_grader import grade_script
from composer_nb.harness.grading.structure import names_of, structure
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.syntax import lints, nodes_of
from composer_nb.harness.tasks.history import history
from composer_nb.harness.tasks.scope import in_scope, is_test_module
from composer_nb.harness.tasks.task import Task

KEPT = 4096
Files = Mapping[str, str | bytes]
_known: OrderedDict[bytes, Grade] = OrderedDict()


def grade(task: Task, files: Files, sandbox: Executor | Backend | None = None, *, anew: bool = False) -> Grade:
    """Grade `files`, a whole workspace, by the task's own grader, or look up the clean grade by `pytest` of the same tree.

    Args:
        sandbox: what runs the tests: an `Executor` for the grader `functions`, a `Backend` for `pytest` and `script`. By default
            one on bubblewrap is opened and closed here.
        anew: run the tests also of a tree that was graded before.

    Raises SandboxUnavailable if no sandbox can be made here, and ValueError for a task that asks for what no sandbox has.
    """
    type_name, needed = ("Executor", "run") if task.grader == "functions" else ("Backend", "create")
    if sandbox is not None and not hasattr(sandbox, needed):
        raise TypeError(f"task {task.id}: its grader {task.grader!r} needs sandbox to be of type {type_name}")
    with ExitStack() as stack:
        if task.grader == "functions":
            texts = {path: _text(data) for path, data in files.items()}
            result = grade_functions(task, texts, cast(Executor, sandbox or stack.enter_context(SandboxExecutor())))
            return strictly(task, files, result)
        backend = cast(Backend, sandbox or stack.enter_context(open_backend("bwrap")))
        contents = {path: _bytes(data) for path, data in files.items()}
        run = grade_script if task.grader == "script" else grade_pytest if anew else grade_once
        return strictly(task, contents, run(task, contents, backend))


def _text(data: str | bytes) -> str:
    return data if isinstance(data, str) else data.decode("utf-8", "replace")


def _bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape")


def strictly(task: Task, files: Files, result: Grade) -> Grade:
    """Return the grade with what the task's structure and strictness ask for besides its tests, as tests of their own. A lint
    counts if the solution lacks it."""
    if result.status != "graded":
        return result
    ran: Files = files
    if task.grader == "pytest":  # without the changes that are dropped
        ran = changes(task, {path: _bytes(data) for path, data in files.items()}).files
    modules = {
        path: _text(data)
        for path, data in sorted(ran.items())
        if path.endswith((".py", ".pyi")) and in_scope(path, task.source_scope)
    }
    sources = {path: text for path, text in modules.items() if not is_test_module(path)}
    more = structure(task, modules) | history(task, files)
    more |= {"no flag": not result.flags} if task.strictness in ("scope", "lints") else {}
    for path, text in sources.items() if task.strictness == "lints" else ():
        right = task.solution.get(path, task.files.get(path, ""))
        littered = {lint.split(" in ")[0].rpartition(" ")[2] for lint in lints(task.files.get(path, ""))}
        gone = littered - _names(right)  # a name that nobody needs is taken away, and not used for nothing
        mended = set(lints(text)) <= set(lints(right)) and _feigned_uses(text) <= _feigned_uses(right)
        more[f"{path}: no lint"] = text == right or (mended and not gone & _names(text))
    return replace(result, tests={**result.tests, **more})


def _names(text: str) -> set[str]:
    """Return the names in a module; none if it cannot be parsed."""
    return {name for module in nodes_of(text)[:1] for name in names_of(module)}


def _feigned_uses(text: str) -> Counter[str]:
    """Return how often a module names what it does nothing with, or declares it global: what keeps linters silent about an unused
    name."""
    uses = Counter[str]()
    for node in nodes_of(text):
        match node:
            case ast.Expr(value=ast.Name(id=name)):
                uses[name] += 1
            case ast.Expr(value=ast.Tuple(elts=parts) | ast.List(elts=parts)):
                uses.update(part.id for part in parts if isinstance(part, ast.Name))
            case ast.Global(names=names):
                uses.update(names)
    return uses


def grade_once(task: Task, files: Mapping[str, bytes], backend: Backend) -> Grade:
    """Grade `files` as `grade_pytest` does, or return the clean grade that the same tree of the same task got before."""
    began = time.monotonic()
    edits = changes(task, files)
    key = _key(task, edits, backend)
    if earlier := _known.get(key):
        return replace(earlier, cost={"repeats": 1.0, "wall_s": time.monotonic() - began})
    result = grade_pytest(task, files, backend)
    if result.status == "graded" and result.flags == edits.flags:
        _known[key] = result
        while len(_known) > KEPT:
            _known.popitem(last=False)
    return result


def _key(task: Task, edits: Changes, backend: Backend) -> bytes:
    """Return the digest of all that decides a clean grade."""
    texts = [sorted(table.items()) for table in (task.tests, conftests(task), task.metadata, edits.files)]
    return hashlib.sha256(marshal.dumps([backend.name, task.id, task.strictness, *texts, edits.flags], 1)).digest()
