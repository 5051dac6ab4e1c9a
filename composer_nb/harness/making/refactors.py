"""Refactorings as chores: a private name gets another, or a function moves to another module.

Only what no test mentions is renamed or moved, so that the suite stays as it is. What names mean is told by their spelling: one
is taken if it is defined once in all sources, and is nobody's parameter, keyword or text. What breaks all the same does not pass
the suite, and is dropped.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor

from composer_nb.harness.making.changes import Function, Unit, text_of
from composer_nb.harness.making.chores import CHECK, Chore, Renaming, finding
from composer_nb.harness.making.instructions import write_chore
from composer_nb.harness.making.trial import Subject

OTHER_WORDS = {
    "get": "fetch", "make": "build", "build": "make", "parse": "read", "check": "verify", "find": "locate", "is": "looks",
    "set": "assign", "add": "append", "remove": "drop", "to": "into", "format": "render", "default": "fallback",
    "compute": "calc", "max": "largest", "min": "smallest", "name": "label", "convert": "turn", "process": "handle",
}  # fmt: skip
NEW_MODULES = ("_helpers", "_support", "_common", "helpers")
MOVED_LINES = (3, 60)


def refactors(subject: Subject, where: Sequence[Unit]) -> Iterator[Chore]:
    """Renamings and moves by turns, in an order by lot."""
    found = [_renamings(subject, where), _moves(subject, where)]
    while found:
        for each in list(found):
            chore = next(each, None)
            if chore is None:
                found.remove(each)
            else:
                yield chore


class Names:
    """What the sources define and mention."""

    def __init__(self, subject: Subject) -> None:
        self.files = subject.repository.files
        self.sources = subject.repository.sources
        self.trees = {path: tree for path in self.sources if (tree := _parsed(self.files[path])) is not None}
        self.bound: Counter[str] = Counter()
        self.texts: set[str] = set()
        for tree in self.trees.values():
            for node in ast.walk(tree):
                self._note(node)
        others = (text for path, text in self.files.items() if path.endswith(".py") and path not in self.trees)
        self.elsewhere = set(re.findall(r"\w+", "\n".join(others)))
        self.words = set(re.findall(r"\w+", "\n".join(self.files.values())))

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.bound[name] += 1
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                self.bound[name] += 1
            case ast.arg(arg=name):
                self.bound[name] += 2
            case ast.keyword(arg=str(name)):
                self.bound[name] += 2
            case ast.Constant(value=str(text)):
                self.texts.add(text)

    def single(self, name: str) -> bool:
        return self.bound[name] == 1 and name not in self.texts and name not in self.elsewhere


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _tops(subject: Subject) -> list[str]:
    return [top.removesuffix("/**") for top in subject.repository.scope]


def _check(subject: Subject, probe: str, *asked: str) -> str:
    skip = [*subject.repository.hidden, f"{CHECK}/test_refactor.py"]
    return finding("refactor", f"{probe}({_tops(subject)!r}, {skip!r}, {', '.join(map(repr, asked))})")


def _renamings(subject: Subject, where: Sequence[Unit]) -> Iterator[Chore]:
    names, lot = Names(subject), Random(f"rename {subject.seed}")
    found = [(path, *each) for path, tree in names.trees.items() for each in _private(tree.body)]
    lot.shuffle(found)
    for path, name, kind in found:
        word = re.compile(rf"\b{name}\b")
        users = [unit for unit in where if not unit.is_class and word.search(text_of(unit, names.files))]
        mentions = sum(len(word.findall(names.files[each])) for each in names.trees)
        new = other_name(name, lot)
        if not names.single(name) or not users or mentions < 2 or new in names.words:
            continue
        changed = {}
        for each in names.trees:
            if word.search(names.files[each]):
                changed[each] = cst.parse_module(names.files[each]).visit(Renaming(name, new, attributes=True)).code
        yield Chore(
            kind="refactor",
            places=tuple(place for unit in users for place in unit.places),
            solution=changed,
            scope=subject.repository.scope,
            instruction=write_chore("rename", f"{subject.seed} {path} {name}", path=path, name=name, new=new),
            check=_check(subject, "renamed", path, name, new, kind),
            cases=("test_refactor#0 test_refactor",),
        )


def _private(body: Sequence[ast.stmt], inside: bool = False) -> Iterator[tuple[str, str]]:
    """Names and kinds of statement: private functions and methods, and constants of a module."""
    for node in body:
        if isinstance(node, Function) and re.match(r"_[a-z]", node.name):
            yield node.name, type(node).__name__
        elif isinstance(node, ast.ClassDef) and not inside:
            yield from _private(node.body, inside=True)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not inside:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            alias = isinstance(node.value, ast.Name | ast.Attribute | None)
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]{2,}", target.id) and not alias:
                yield target.id, type(node).__name__


def other_name(name: str, lot: Random) -> str:
    """Of the same style."""
    parts = name.lower().strip("_").split("_")
    known = [place for place, part in enumerate(parts) if part in OTHER_WORDS]
    if known:
        place = lot.choice(known)
        parts[place] = OTHER_WORDS[parts[place]]
    elif name.isupper() and len(parts) > 1 and parts[1][:1].isalpha():
        parts = [*parts[1:], parts[0]]
    elif name.isupper():
        parts.insert(0, lot.choice(("default", "known")))
    else:
        parts.insert(0, lot.choice(("do", "inner", "plain")))
    new = "_" * name.startswith("_") + "_".join(parts)
    return new.upper() if name.isupper() else new


def _moves(subject: Subject, where: Sequence[Unit]) -> Iterator[Chore]:
    names, lot = Names(subject), Random(f"move {subject.seed}")
    order = [unit for unit in where if not unit.is_class and "." not in unit.name and unit.path in names.trees]
    lot.shuffle(order)
    for unit in order:
        folder, _, _ = unit.path.rpartition("/")
        text, tree = text_of(unit, names.files), names.trees[unit.path]
        node = next((each for each in tree.body if isinstance(each, Function) and each.name == unit.name), None)
        word = re.compile(rf"\b{unit.name}\b")
        users = [path for path in names.trees if word.search(names.files[path])]
        needed = None if node is None else _imports_of(node, tree)
        target = _target(names, folder, unit.path, lot)
        alone = users == [unit.path] and len(word.findall(names.files[unit.path])) > len(word.findall(text))
        fits = MOVED_LINES[0] <= text.count("\n") + 1 <= MOVED_LINES[1] and f"{folder}/__init__.py" in names.files
        if not (fits and alone and names.single(unit.name) and needed is not None and target and folder):
            continue
        yield Chore(
            kind="refactor",
            places=unit.places,
            solution=_moved(names, unit, node, needed, target),
            scope=subject.repository.scope,
            instruction=write_chore(
                "move", f"{subject.seed} {unit.path} {unit.name}", path=unit.path, name=unit.name, new=target
            ),
            check=_check(subject, "moved", unit.name, unit.path, target),
            cases=("test_refactor#0 test_refactor",),
        )


Import = tuple[str, str | None, str | None, int]
"""Module, name in it, other name, dots before it."""


def _imports_of(node: ast.FunctionDef | ast.AsyncFunctionDef, tree: ast.Module) -> list[Import] | None:
    """The imports that a function needs; None if it needs anything else of its module."""
    inner = [each for each in ast.walk(node)]
    own = {each.arg for each in inner if isinstance(each, ast.arg)}
    own |= {each.id for each in inner if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    own |= {each.name for each in inner if isinstance(each, Function | ast.ClassDef | ast.ExceptHandler) and each.name}
    free = {each.id for each in inner if isinstance(each, ast.Name)} - own - set(dir(builtins))
    known: dict[str, Import] = {}
    for each in tree.body:
        if isinstance(each, ast.Import):
            known |= {
                alias.asname or alias.name.split(".")[0]: (alias.name, None, alias.asname, 0) for alias in each.names
            }
        elif isinstance(each, ast.ImportFrom):
            known |= {
                alias.asname or alias.name: (each.module or "", alias.name, alias.asname, each.level)
                for alias in each.names
            }
    if any(isinstance(each, ast.Global | ast.Import | ast.ImportFrom) for each in inner) or not free <= set(known):
        return None
    return [known[name] for name in sorted(free)]


def _target(names: Names, folder: str, path: str, lot: Random) -> str | None:
    """A module beside it that imports nothing of the package, or a new one."""
    top = path.split("/")[-2] if folder else ""
    leaves = [
        each
        for each in names.trees
        if each.rpartition("/")[0] == folder
        and each != path
        and not each.endswith("__init__.py")
        and not re.search(rf"^\s*(from\s+(\.|{top}\b)|import\s+{top}\b)", names.files[each], re.M)
    ]
    new = [f"{folder}/{name}.py" for name in NEW_MODULES if f"{folder}/{name}.py" not in names.files]
    return lot.choice(leaves + new[:1]) if leaves or new else None


def _moved(names: Names, unit: Unit, node: ast.stmt | None, needed: Sequence[Import], target: str) -> dict[str, str]:
    stem = target.rpartition("/")[2].removesuffix(".py")
    lines = names.files[unit.path].split("\n")
    rest = "\n".join([*lines[: unit.start - 1], *lines[unit.end :]])
    context = CodemodContext()
    AddImportsVisitor.add_needed_import(context, stem, unit.name, relative=1)
    left = AddImportsVisitor(context).transform_module(cst.parse_module(rest))
    context = CodemodContext()
    for module, name, other, dots in needed:
        if dots == 0:
            RemoveImportsVisitor.remove_unused_import(context, module, name, other)
    left = RemoveImportsVisitor(context).transform_module(left)
    context = CodemodContext()
    for module, name, other, dots in needed:
        AddImportsVisitor.add_needed_import(context, module, name, other, dots)
    there = names.files.get(target, "").rstrip("\n")
    text = (f"{there}\n\n\n" if there else "") + text_of(unit, names.files) + "\n"
    right = AddImportsVisitor(context).transform_module(cst.parse_module(text))
    return {unit.path: left.code, target: right.code}
