"""Which tests a change of a test touches besides its own: those that inherit it, and those that call it.

Told by names alone, over all hidden modules, so rather too many than too few: of a test that is thought to be touched and is not,
the runs that have the change tell nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from composer_nb.harness.grading.plan import plain_lines
from composer_nb.harness.grading.scope import is_test_module
from composer_nb.harness.grading.twins import Candidate, Function, candidates


def all_candidates(tests: Mapping[str, str]) -> list[Candidate]:
    """All changes proposed for a task's test modules, with all tests that they touch."""
    modules = {path: ast.parse(plain_lines(text)) for path, text in sorted(tests.items()) if path.endswith(".py")}
    callers = {path: _callers(tree) for path, tree in modules.items()}
    classes = Classes(modules)
    found = [each for path in modules if is_test_module(path) for each in candidates(path, tests[path])]
    return [replace(each, bases=_touched(each, callers, classes)) for each in found]


def _callers(tree: ast.Module) -> dict[str, set[str]]:
    """Names -> the functions and methods of a module that mention them, `f` or `Class::f`."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        inside = [(f"{node.name}::", each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for place, function in inside:
            if isinstance(function, Function):
                for each in ast.walk(function):
                    name = each.id if isinstance(each, ast.Name) else getattr(each, "attr", "")
                    found.setdefault(name, set()).add(place + function.name)
    return found


def _touched(candidate: Candidate, callers: Mapping[str, Mapping[str, set[str]]], classes: Classes) -> tuple[str, ...]:
    bases, row = list(candidate.bases), candidate.row
    for base in bases:  # grows
        path, *place = base.split("::")
        new = classes.heirs(place[0], place[1]) if len(place) == 2 else []
        if row is None:
            for other in callers if len(place) == 1 else (path,):
                imported = other == path or place[-1] in callers[other]
                new += [f"{other}::{name}" for name in sorted(callers[other].get(place[-1], ())) if imported]
        bases += [each for each in dict.fromkeys(new) if each not in bases]
    return tuple(bases)


class Classes:
    """The test modules' classes, and who inherits from whom."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self.methods: list[tuple[str, str, set[str]]] = []
        self.below: dict[str, set[str]] = {}
        for path, tree in modules.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    own = {each.name for each in node.body if isinstance(each, Function)}
                    self.methods.append((path, node.name, own))
                    for base in node.bases:
                        self.below.setdefault(ast.unparse(base).rpartition(".")[2], set()).add(node.name)

    def heirs(self, name: str, method: str) -> list[str]:
        """The same method in the classes below its own, wherever they stand."""
        names = [name]
        for each in names:  # grows
            names += sorted(self.below.get(each, set()) - set(names))
        return [f"{path}::{each}::{method}" for path, each, own in self.methods if each in names and method not in own]
