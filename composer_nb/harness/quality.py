"""Quality of a change beside the human's, the axis of the bench beside correctness: size, files and names.

Compared is what is graded: the files of a task's source scope, without caches and without tests, which the human's change has too
but a task hides. Everything follows from the task's files, its solution and the files that the agent left.
"""

import ast
import builtins
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from composer_nb.harness import syntax
from composer_nb.harness.grading.diff import changes
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.grading.source import Function
from composer_nb.harness.tasks.history import GIT_REPORT
from composer_nb.harness.tasks.making.repository import supports_tests
from composer_nb.harness.tasks.scope import is_conftest, is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.terms.style import defined, rewritten
from composer_nb.harness.untrusted import changed_lines

# Names that every program uses: whoever calls `strip` need not mean a method of the repository.
COMMON = {*dir(builtins), *(name for kind in (str, bytes, list, dict, set, int, float) for name in dir(kind))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeQuality:
    """An agent's change beside the human's.

    Attributes:
        lines: Lines that the agent removed and added.
        human_lines: The same of the human.
        extra_files: Files that the agent changed and the human did not.
        new_names: Functions, classes and methods (`Class.method`) that the agent's change defines, and that neither the files
            before nor the human's change have.
        human_names: The same of the human: those that the agent's change lacks too.
        needless_names: New names where one existed. These are functions that the code had already (`style.rewritten`), unless the
            human repeats them too; and all of `new_names`, if the human's change defines no new name, and calls or imports a
            function, class or method of the code that the agent's change does not.
    """

    lines: int
    human_lines: int
    extra_files: tuple[str, ...]
    new_names: tuple[str, ...]
    human_names: tuple[str, ...]
    needless_names: tuple[str, ...]


def change_quality(task: Task, files: Mapping[str, str]) -> ChangeQuality | None:
    """Return the quality of the change that leads from a task's files to `files`; None for a task without a human's change of
    other files than tests."""
    if task.grader == "script" or not (human_paths := _changed_paths(task, human := {**task.files, **task.solution})):
        return None
    contents = {path: text.encode("utf-8", "surrogateescape") for path, text in files.items()}
    graded = changes(task, contents).files
    after = {path: data.decode("utf-8", "surrogateescape") for path, data in graded.items()}
    paths = _changed_paths(task, after)
    old_names = _names(task.files, [*paths, *human_paths])
    names, human_names = _names(after, paths), _names(human, human_paths)
    new_names, needless = names - old_names - human_names, {*rewritten(task.files, after)[0]}
    if needless:
        needless -= {*rewritten(task.files, human)[0]}
    if new_names and not human_names - old_names:
        reused = _uses(human, human_paths) - _uses(task.files, human_paths)
        own_uses = _uses(after, paths) - _uses(task.files, paths)
        if any(_is_defined(name, task) for name in reused.keys() - own_uses.keys() - COMMON):
            needless |= new_names
    return ChangeQuality(
        lines=_line_count(task, after, paths),
        human_lines=_line_count(task, human, human_paths),
        extra_files=tuple(sorted({*paths} - {*human_paths})),
        new_names=tuple(sorted(new_names)),
        human_names=tuple(sorted(human_names - old_names - names)),
        needless_names=tuple(sorted(needless)),
    )


def solution_lines(task: Task) -> int:
    """Return the number of lines that a task's solution removes and adds."""
    return _line_count(task, task.solution, [*task.solution])


def _changed_paths(task: Task, files: Mapping[str, str]) -> list[str]:
    paths = (path for path in {*task.files, *files} - {GIT_REPORT} if files.get(path) != task.files.get(path))
    return sorted(path for path in paths if not (is_test_module(path) or is_conftest(path) or supports_tests(path)))


def _line_count(task: Task, files: Mapping[str, str], paths: Sequence[str]) -> int:
    return sum(changed_lines(task.files.get(path, ""), files.get(path, "")) for path in paths)


def _names(files: Mapping[str, str], paths: Sequence[str]) -> set[str]:
    """Return the qualified names of functions, classes and methods."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                yield prefix + child.name
            if not isinstance(child, Function):
                yield from walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    trees = (node for path in paths for node in _nodes(files, path)[:1])
    return {name for tree in trees for name in walk(tree, "")}


def _uses(files: Mapping[str, str], paths: Sequence[str]) -> Counter[str]:
    """Return how often names are read or imported, each by its last part."""
    counts = Counter[str]()
    for node in (node for path in paths for node in _nodes(files, path)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) | ast.alias(name=name):
                counts[name.rpartition(".")[2]] += 1
    return counts


def _nodes(files: Mapping[str, str], path: str) -> list[ast.AST]:
    """Return the nodes of a Python file, its module first; none of another file, or of one that cannot be parsed."""
    return syntax.nodes_of(files.get(path, "")) if path.endswith(".py") else []


def _is_defined(name: str, task: Task) -> bool:
    """Return whether a function, class or method of the code has this name."""
    texts = (text for path, text in task.files.items() if path.endswith(".py") and not is_test_module(path))
    return any({("function", name), ("class", name)} & defined(text).names for text in texts if f" {name}" in text)


def quality_columns(qualities: Sequence[ChangeQuality | None]) -> dict[str, list[Any]]:
    """Return the qualities of attempts as columns of a table (`store.save_attempts`); none where no task has a human's change."""
    names = [field.name for field in fields(ChangeQuality)] if any(qualities) else []
    return {name: [quality and getattr(quality, name) for quality in qualities] for name in names}


def quality_figures(qualities: Sequence[ChangeQuality | None], attempts: Sequence[Attempt]) -> dict[str, Any] | None:
    """Return medians and means over the `n` attempts that passed, of what `ChangeQuality` lists, each as a number; besides,
    `lines_ratio` and `lines_more`, the lines over the human's and less the human's. None if no such attempt has a quality."""
    pairs = zip(qualities, attempts, strict=True)
    if not (passed := [quality for quality, attempt in pairs if quality and attempt.grade.passed]):
        return None
    values: dict[str, list[float]] = {
        "lines": [quality.lines for quality in passed],
        "human_lines": [quality.human_lines for quality in passed],
        "lines_ratio": [quality.lines / quality.human_lines for quality in passed],
        "lines_more": [quality.lines - quality.human_lines for quality in passed],
    }
    for name in ("extra_files", "new_names", "human_names", "needless_names"):
        values[name] = [len(getattr(quality, name)) for quality in passed]
    means = {name: {"median": float(np.median(some)), "mean": float(np.mean(some))} for name, some in values.items()}
    return {"n": len(passed), **means}
