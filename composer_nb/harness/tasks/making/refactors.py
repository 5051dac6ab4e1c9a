"""Refactors of a repository: the behaviour stays, and the host checks the structure (`grading/structure.py`).

A function is renamed where its name stands for it alone, so that every occurrence in code is one of the function: no other
definition, variable, attribute or parameter has it, no string but those of `__all__`, and no file that an answer may not change.
A function is moved to a new module where it needs nothing of its old one but imports. Statements of a function become one of
their own where they give at most one variable back, or end it.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import libcst as cst

from composer_nb.harness import syntax
from composer_nb.harness.grading.source import Function
from composer_nb.harness.tasks.making.assignments import NEAR, behaving, hidden_of, hollow, task_of
from composer_nb.harness.tasks.making.changes import Change, Unit, text_of
from composer_nb.harness.tasks.making.pieces import Piece, pieces, with_function
from composer_nb.harness.tasks.making.trial import NoTask, Subject
from composer_nb.harness.tasks.scope import in_scope, is_test_module
from composer_nb.harness.tasks.task import RULES, Task

_TYPES = (str, bytes, list, dict, set, int, float, Path, re.Pattern, re.Match, Exception)
BUILT_IN = {name for kind in _TYPES for name in dir(kind)}
SHORTEST = 4  # Characters of a name that is renamed.
STRUCTURAL = "test_the_new_structure"


def renameable(subject: Subject) -> Iterator[Unit]:
    """Yield the functions that tests reach whose names stand for them alone."""
    files = subject.repository.files
    tops = {path.removeprefix("src/").split("/")[0].removesuffix(".py") for path in subject.repository.sources}
    changeable = {path for path in files if path.endswith(".py") and _changeable(subject, path)}
    defined, bound_names = Counter[str](), set[str]()
    for path, text in files.items():
        if path in changeable:
            for name, is_function in bound(text, tops):
                defined[name] += is_function
                bound_names |= set() if is_function else {name}
        elif path.endswith((".py", ".pyi", ".toml", ".cfg", ".ini")):
            bound_names |= {*re.findall(r"\w+", text)}
    for unit in subject.reached:
        name = unit.name.rpartition(".")[2]
        short = len(name) < SHORTEST or name.startswith("__")
        if defined[name] == 1 and not short and name not in bound_names | BUILT_IN and unit.path in changeable:
            yield unit


def _changeable(subject: Subject, path: str) -> bool:
    return is_test_module(path) or in_scope(path, subject.repository.scope)


def bound(text: str, tops: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the names that a module binds, mentions in strings, or imports or looks up in packages other than `tops`, each with
    whether it is a function's."""
    nodes = syntax.nodes_of(text)
    foreign = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            pairs = ((item.asname or item.name, getattr(node, "module", "") or item.name) for item in node.names)
            foreign |= {name.split(".")[0] for name, origin in pairs if origin.split(".")[0] not in tops}
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    prose |= {id(item) for node in nodes if _exports(node) for item in ast.walk(node)}
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, True
            case ast.ClassDef(name=str(name)) | ast.arg(arg=str(name)) | ast.keyword(arg=str(name)):
                yield name, False
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                yield name, False
            case ast.Import(names=names):
                yield from ((part, False) for alias in names for part in alias.name.split("."))
            case ast.ImportFrom(names=names):
                yield from ((alias.name, False) for alias in names if (alias.asname or alias.name) in foreign)
            case ast.Attribute(attr=name) if ast.unparse(node).split(".")[0] in foreign:
                yield name, False
            case ast.Constant(value=str(value)) if id(node) not in prose:
                yield from ((word, False) for word in re.findall(r"\w+", value))
        if isinstance(node, ast.alias) and node.asname:
            yield node.asname, False


def _exports(node: ast.AST) -> bool:
    """Return whether a statement says what a module exports."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def new_name(old: str, words: set[str], rng: Random) -> str:
    """Return another name for a function: its words the other way round, or with a verb. Raises NoTask where all are in use."""
    core = old.strip("_")
    names = [f"{verb}_{core}" for verb in ("compute", "run", "make", "apply")] + ["_".join(reversed(core.split("_")))]
    names = [old.replace(core, name) for name in names]
    if not (free := [name for name in names if name.isidentifier() and name not in words | {old}]):
        raise NoTask("unfit", f"all new names for {old} are in use")
    return rng.choice(free)


class _Renamer(cst.CSTTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        if isinstance(updated_node, cst.Name) and updated_node.value == self.old:
            return updated_node.with_changes(value=self.new)
        if isinstance(updated_node, cst.SimpleString) and updated_node.raw_value == self.old:  # only in `__all__`
            return updated_node.with_changes(value=updated_node.value.replace(self.old, self.new))
        return updated_node


def with_name(text: str, old: str, new: str) -> str:
    """Return a module in which a function has another name, also where a comment or docstring calls it. Raises NoTask."""
    layout = syntax.TextFormat.of(text)
    try:
        code = cst.parse_module(layout.plain(text)).visit(_Renamer(old, new)).code
    except (cst.ParserSyntaxError, RecursionError):
        raise NoTask("ungraded") from None
    return layout.restore(re.sub(rf"\b{old}(?=\()", new, code))


def _refactor(
    subject: Subject,
    kind: str,
    unit: Unit,
    gold: dict[str, str],
    imports: str,
    assertion: str,
    rules: list[tuple[str, str, str]],
    *wordings: str,
    stub: dict[str, str] | None = None,
) -> Task:
    """Return the task to make the files of `gold`. Its hidden tests are those near the function as they are in `gold`, and one
    that asserts how the structure shows at run time."""
    keys, scope = subject.baseline.nearest([unit.place])[:NEAR], subject.repository.scope
    path = f"{keys[0].partition('::')[0].rpartition('/')[0]}/{STRUCTURAL}.py".lstrip("/")
    hidden = {name: gold.get(name, text) for name, text in hidden_of(subject, keys).items()}
    hidden[path] = f"{imports}\n\n\ndef {STRUCTURAL}():\n    assert {assertion}\n"
    scope = (*scope, *(name for name in gold if is_test_module(name) or not in_scope(name, scope)))
    facts = {RULES: json.dumps(rules)}
    task = task_of(subject, kind, unit, wordings, facts, tests=hidden, solution=gold, source_scope=scope)
    ids = {key: subject.baseline.plan.tests[key] for key in keys}
    return behaving(subject, task, ids | {f"{path}::{STRUCTURAL}#0": f"{path}::{STRUCTURAL}"}, stub)


def module_of(path: str) -> str:
    """Return the name by which tests import a file."""
    return path.removesuffix(".py").removeprefix("src/").replace("/", ".").removesuffix(".__init__")


def _import_of(unit: Unit) -> str:
    """Return the line by which a test imports a function's class, or its module as `module`."""
    module, owner = module_of(unit.path), unit.name.partition(".")[0]
    return f"from {module} import {owner}" if "." in unit.name else f"import {module} as module"


def renamed(subject: Subject, unit: Unit) -> Task:
    """Return the task to rename a function in sources and tests."""
    files = subject.repository.files
    holder, _, old = unit.name.rpartition(".")
    words = {word for text in files.values() for word in re.findall(r"\w+", text)}
    new = new_name(old, words, Random(f"rename {subject.seed} {unit.path} {unit.name}"))
    word = re.compile(rf"\b{old}\b")
    paths = [path for path in files if path.endswith(".py") and _changeable(subject, path) and word.search(files[path])]
    return _refactor(
        subject,
        "rename",
        unit,
        {path: with_name(files[path], old, new) for path in paths},
        _import_of(unit),
        f"[hasattr({holder or 'module'}, name) for name in ({old!r}, {new!r})] == [False, True]",
        [("absent", "", old), ("defined", unit.path, f"{holder}.{new}".lstrip("."))],
        f"rename `{unit.name}` to `{new}`, everywhere",
        f"`{unit.name}` in {unit.path} should be called `{new}`, in code and tests. No alias for the old name, please.",
    )


def movable(subject: Subject) -> Iterator[Unit]:
    """Yield the functions of modules that tests reach and that need nothing of their module but what it imports."""
    for unit in subject.reached:
        if "." not in unit.name and _needs(subject, unit) is not None:
            yield unit


def _needs(subject: Subject, unit: Unit) -> list[str] | None:
    """Return the imports that a function needs; None where it needs more of its module, or the module binds its name again."""
    text = subject.repository.files[unit.path]
    body = syntax.parse(syntax.TextFormat.of(text).plain(text)).body
    node = next((item for item in body if isinstance(item, Function) and item.name == unit.name), None)
    if node is None or any(isinstance(inner, ast.Global) for inner in ast.walk(node)):
        return None
    used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    imports: dict[str, str] = {}
    others = set[str]()
    for item in body:
        if isinstance(item, ast.Import | ast.ImportFrom):
            for alias in item.names:
                line: ast.stmt = ast.Import([alias])
                if isinstance(item, ast.ImportFrom):
                    line = ast.ImportFrom(item.module, [alias], item.level)
                imports[(alias.asname or alias.name).partition(".")[0]] = ast.unparse(line)
        elif item is not node:
            inside = [item] if isinstance(item, Function | ast.ClassDef) else ast.walk(item)
            others |= {name for inner in inside for name in _bindings(inner)}
    if used & others or unit.name in others or "*" in imports:
        return None
    return [line for name, line in imports.items() if name in used or "__future__" in line]


def _bindings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]


def moved(subject: Subject, unit: Unit) -> Task:
    """Return the task to move a function to a new module, from which its old one imports it."""
    files, folder = subject.repository.files, unit.path.rpartition("/")[0]
    names = ("helpers", "shared", "common", "basics", f"only_{unit.name.strip('_')}")
    stems = [stem for stem in names if f"{folder}/{stem}".lstrip("/") not in "\n".join(files)]
    stem = Random(f"move {subject.seed} {unit.path} {unit.name}").choice(stems)
    target = f"{folder}/{stem}.py".lstrip("/")
    reference = f"from {'.' if f'{folder}/__init__.py' in files else ''}{stem} import {unit.name}"
    change = Change(kind="move", edits=(unit.becoming(reference),), places=(unit.place,))
    head = "\n".join(_needs(subject, unit) or [])
    return _refactor(
        subject,
        "move",
        unit,
        change.apply(files) | {target: f"{head}\n\n\n{text_of(unit, files)}\n".lstrip("\n")},
        f"import {module_of(unit.path)} as before\nimport {module_of(target)} as after",
        f"(before.{unit.name} is after.{unit.name}) is True",
        [("undefined", unit.path, unit.name), ("reduced", unit.path, ""), ("defined", target, unit.name)],
        f"move `{unit.name}` from {unit.path} to a new module {target}. importing it from the old place must still work",
        f"{unit.path} is too long. Put `{unit.name}` into {target} (new), and import it in {unit.path} for its users.",
    )


def extractable(subject: Subject) -> Iterator[Unit]:
    """Yield the functions that tests reach, and methods of instances, that hold a piece which can be a function of its own."""
    counts = Counter((unit.path, unit.name) for unit in subject.units)
    for unit in subject.reached:
        if counts[unit.path, unit.name] == 1 and _pieces_of(subject, unit):
            yield unit


def _pieces_of(subject: Subject, unit: Unit) -> list[Piece]:
    with suppress(SyntaxError, ValueError):
        return [*pieces(text_of(unit, subject.repository.files), method="." in unit.name)]
    return []


def extracted(subject: Subject, unit: Unit) -> Task:
    """Return the task to make a function or method of some lines of another."""
    files, rng = subject.repository.files, Random(f"extract {subject.seed} {unit.path} {unit.name}")
    piece, text = rng.choice(_pieces_of(subject, unit)), text_of(unit, files)
    holder, _, name = unit.name.rpartition(".")
    words = {word for source in files.values() for word in re.findall(r"\w+", source)}
    verbs = (f"_compute_{piece.output.strip('_')}",) if piece.output else (f"_finish_{name}",) if piece.ends else ()
    new = next(new for new in (*verbs, f"_step_of_{name}", f"_part_of_{name}", f"_x_of_{name}") if new not in words)
    after = with_function(text, piece, new, method=bool(holder))
    lines = f"lines {unit.start + piece.start} to {unit.start + piece.end - 1}"
    what, quote = "method" if holder else "function", text.split("\n")[piece.start].strip()
    return _refactor(
        subject,
        "extract",
        unit,
        Change(kind="extract", edits=(unit.becoming(after),), places=(unit.place,)).apply(files),
        _import_of(unit),
        f"callable({holder or 'module'}.{new})",
        [("reduced", unit.path, unit.name), ("defined", unit.path, f"{holder}.{new}".lstrip("."))],
        f"extract {lines} of {unit.path} (in `{unit.name}`) into a {what} `{new}`",
        f"`{unit.name}` in {unit.path} is too long. Make a {what} `{new}` of its {lines} (from `{quote}` on) and call that.",
        stub=hollow(subject, [unit]),
    )
