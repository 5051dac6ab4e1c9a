"""Check on the host what a request says about the structure of code: a name is gone, a function stands where it should.

`structure.rules` in a task's metadata is a JSON list, each `[rule, path, name]` (`Task.rules`):

    absent     no module in the scope holds the name: as definition, variable, attribute, parameter, import or string
    defined    the module at the path defines the function itself, `name` or `Class.name`
    undefined  the module at the path does not define it, but may import it

Texts are parsed and never executed. Names that are put together when the code runs show only in the ways to do so
(`AT_RUN_TIME`), of which there may be no more than in the solution.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from composer_nb.harness.grading.source import Function
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.scope import in_scope, is_test_module
from composer_nb.harness.tasks.task import Task

AT_RUN_TIME = frozenset(
    "globals locals vars setattr getattr delattr exec eval compile modules import_module __import__ __dict__ __getattr__ "
    "__getattribute__ __setattr__ __builtins__ __class__".split()
)


def structure(task: Task, sources: Mapping[str, str]) -> dict[str, bool]:
    """Return whether the modules in a task's scope follow each of its rules; nothing if it has none."""
    if not (rules := task.rules):
        return {}
    labels = [f"{name} is {rule}{f' in {path}' if path else ''}" for rule, path, name in rules]
    labels.append("no name made at run time")
    right = {
        path: text
        for path, text in {**task.files, **task.solution}.items()
        if path.endswith(".py") and not is_test_module(path) and in_scope(path, task.source_scope)
    }
    try:
        trees = {path: parse(text) for path, text in sources.items()}
        allowed = Counter(name for text in right.values() for name in names_of(parse(text)))
    except (SyntaxError, ValueError):
        return dict.fromkeys(labels, False)
    counts = Counter(name for tree in trees.values() for name in names_of(tree))
    results = []
    for rule, path, name in rules:
        defined = path in trees and name in set(definitions(trees[path].body))
        results.append({"absent": not counts[name], "defined": defined, "undefined": not defined}[rule])
    results.append(all(counts[name] <= allowed[name] for name in AT_RUN_TIME))
    return dict(zip(labels, results, strict=True))


def names_of(tree: ast.AST) -> Iterator[str]:
    """Yield every name in a module, also in strings that are nothing but a dotted name."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and re.fullmatch(r"[\w.]+", text):
                    yield from text.split(".")


def definitions(body: list[ast.stmt], base: str = "") -> Iterator[str]:
    """Yield the qualified names of a module's functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{base}{node.name}.")
        elif isinstance(node, Function):
            yield base + node.name
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)], base)
