"""Changes of a repository that make a task: a planted bug, several at once, or a feature that is gone.

Bugs are drawn function by function: each round over all functions plants one bug in each, of the kind that was used least so far,
so that a few candidates already are of many kinds and in many places. Only the lines of one function or class are parsed by
libcst at a time; the rest of a file stays as it is, to the letter.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import libcst as cst

from composer_nb.harness.grading.box import Place
from composer_nb.harness.making import expressions, statements
from composer_nb.harness.making.expressions import Maker

MIN_LINES, MAX_LINES = 3, 160
"""Of a function in which a bug is planted."""
MAX_CLASS_LINES = 600
MAX_CHANGED = 24
"""Lines that one bug may add and take away, together."""
FEATURE_LINES = (6, 120)
ROUNDS = 8
Kinds = Mapping[str, tuple[Maker, tuple[type[cst.CSTNode], ...]]]
"""Kind -> what makes it, and the nodes that it looks at."""
KINDS: Kinds = {**expressions.KINDS, **statements.KINDS}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A function or method that is in no other, or a class: whole lines of a file."""

    path: str
    name: str
    """As `Class.method`."""
    start: int
    """First line, decorators included, from 1."""
    end: int
    is_class: bool
    places: tuple[Place, ...]
    """Itself, or all methods of a class: which tests reach it is told by these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines `start` to `end` of a file become `text`, which ends with its last line; empty: they are gone."""

    path: str
    name: str
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What turns a right repository into a task's workspace."""

    kind: str
    edits: tuple[Edit, ...]
    places: tuple[Place, ...]
    parts: tuple[str, ...] = ()
    """Of a combined one, the keys of those that it is made of."""

    def apply(self, files: Mapping[str, str]) -> dict[str, str]:
        """Only the changed files."""
        changed: dict[str, str] = {}
        for edit in sorted(self.edits, key=lambda edit: (edit.path, -edit.start)):
            lines = changed.get(edit.path, files[edit.path]).split("\n")
            lines[edit.start - 1 : edit.end] = edit.text.split("\n") if edit.text else []
            changed[edit.path] = "\n".join(lines)
        return changed

    @property
    def key(self) -> str:
        """The same for changes that make the same programs, whatever their layout and comments."""
        parts = sorted((edit.path, edit.name, normalised(edit.text)) for edit in self.edits)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def normalised(text: str) -> str:
    """A function's or class's text without layout, comments and docstrings."""
    lines = text.split("\n")
    tree = ast.parse(f"if 1:\n{text}" if lines[0][:1].isspace() else text)
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def units(path: str, text: str) -> list[Unit]:
    """Raises SyntaxError, ValueError for what is not Python. Files with other line ends than `\\n` have none."""
    if "\r" in text or "\f" in text:
        return []
    return list(_units(path, ast.parse(text).body, ""))


def _units(path: str, body: Iterable[ast.AST], base: str) -> Iterator[Unit]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            assert node.end_lineno is not None
            inner = list(_units(path, node.body, f"{base}{node.name}.")) if isinstance(node, ast.ClassDef) else []
            places = tuple(place for each in inner if not each.is_class for place in each.places)
            yield Unit(
                path=path,
                name=base + node.name,
                start=start,
                end=node.end_lineno,
                is_class=isinstance(node, ast.ClassDef),
                places=places if isinstance(node, ast.ClassDef) else ((path, start),),
            )
            yield from inner
        elif isinstance(node, ast.If | ast.Try):
            yield from _units(path, ast.iter_child_nodes(node), base)


def text_of(unit: Unit, files: Mapping[str, str]) -> str:
    return "\n".join(files[unit.path].split("\n")[unit.start - 1 : unit.end])


def bugs(files: Mapping[str, str], where: Sequence[Unit], seed: str) -> Iterator[Change]:
    """Distinct bugs in these units, one after the other; the same for the same seed. Ends after ROUNDS rounds."""
    used: Counter[str] = Counter()
    seen: set[str] = set()
    order = list(where)
    Random(f"bugs {seed}").shuffle(order)
    for number in range(ROUNDS):
        for unit in order:
            lot = Random(f"bugs {seed} {number} {unit.path} {unit.name}")
            for change in _drawn(unit, text_of(unit, files), lot, used):
                if change.key not in seen:
                    seen.add(change.key)
                    used[change.kind] += 1
                    yield change
                    break


def _drawn(unit: Unit, text: str, lot: Random, used: Counter[str]) -> Iterator[Change]:
    """Fit changes of one unit, of the kinds that were used least first."""
    lines = text.count("\n") + 1
    if not MIN_LINES <= lines <= (MAX_CLASS_LINES if unit.is_class else MAX_LINES):
        return
    for kind, new_text in rewritten(text, unit.is_class, lot, statements.OF_CLASSES if unit.is_class else KINDS, used):
        if _fits(text, new_text):
            edit = Edit(path=unit.path, name=unit.name, start=unit.start, end=unit.end, text=new_text)
            yield Change(kind=kind, edits=(edit,), places=unit.places)


def rewritten(text: str, is_class: bool, lot: Random, kinds: Kinds, used: Counter[str]) -> Iterator[tuple[str, str]]:
    """(kind, text) of a unit with one place changed, those of the kinds that were used least first."""
    header = "if 1:\n" if text[:1].isspace() else ""
    try:
        tree = cst.parse_module(f"{header}{text}\n")
    except (cst.ParserSyntaxError, RecursionError):
        return
    found = _sites(tree, bool(header), is_class, lot, kinds)
    lot.shuffle(found)
    found.sort(key=lambda site: used[site[0]])  # stable
    for kind, old, new in found:
        replaced = tree.deep_replace(old, new)
        assert isinstance(replaced, cst.Module)
        yield kind, replaced.code.removeprefix(header).removesuffix("\n")


def _fits(old: str, new: str) -> bool:
    """Whether a change is Python, changes the program, and is small."""
    try:
        if normalised(old) == normalised(new):
            return False
    except (SyntaxError, ValueError):
        return False
    return changed_lines(old, new) <= MAX_CHANGED


def changed_lines(old: str, new: str) -> int:
    diff = difflib.unified_diff(old.split("\n"), new.split("\n"), lineterm="", n=0)
    return sum(line.startswith(("+", "-")) for line in list(diff)[2:])


def _sites(
    tree: cst.Module, nested: bool, is_class: bool, lot: Random, kinds: Kinds
) -> list[tuple[str, cst.CSTNode, cst.CSTNode]]:
    """(kind, node, what may stand in its place)."""
    root: cst.CSTNode = tree.body[0]
    if nested:
        assert isinstance(root, cst.If)
        root = root.body.body[0]
    finder = _Finder(lot, kinds, root if is_class else None)
    names = _Names()
    root.visit(names)
    finder.names = sorted(names.found)
    root.visit(finder)
    return finder.found


class _Names(cst.CSTVisitor):
    """The parameters and variables of a function."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Param(self, node: cst.Param) -> None:
        self.found.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if isinstance(node.target, cst.Name):
            self.found.add(node.target.value)


class _Finder(cst.CSTVisitor):
    def __init__(self, lot: Random, kinds: Kinds, only: cst.CSTNode | None) -> None:
        self.lot, self.only = lot, only
        self.kinds = kinds
        self.names: list[str] = []
        self.found: list[tuple[str, cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        for kind, (make, types) in self.kinds.items():
            if isinstance(node, types):
                self.found += [(kind, node, new) for new in make(node, self.lot, self.names)]
        return not isinstance(node, cst.Annotation) and node is not self.only


def features(files: Mapping[str, str], where: Sequence[Unit], seed: str) -> Iterator[Change]:
    """Public functions whose bodies are gone, with the private functions that only they use."""
    order = [unit for unit in where if not unit.is_class and is_public(unit.name)]
    Random(f"features {seed}").shuffle(order)
    for unit in order:
        text = text_of(unit, files)
        node = _function(text)
        if (
            not FEATURE_LINES[0] <= text.count("\n") + 1 <= FEATURE_LINES[1]
            or node is None
            or not ast.get_docstring(node)
        ):
            continue
        first = node.body[0].lineno - 1 - text[:1].isspace()
        lines = text.split("\n")
        indent = re.match(r"\s*", lines[first])
        if first == 0 or indent is None or _head_line(node) > first + text[:1].isspace():
            continue  # all on one line
        gone = "\n".join([*lines[:first], f"{indent[0]}raise NotImplementedError"])
        edits = [Edit(path=unit.path, name=unit.name, start=unit.start, end=unit.end, text=gone)]
        helpers = [each for each in where if each.path == unit.path and _only_helps(each, text, files)]
        edits += [Edit(path=each.path, name=each.name, start=each.start, end=each.end, text="") for each in helpers]
        if not any(each.start <= unit.end and unit.start <= each.end for each in helpers):
            yield Change(kind="feature", edits=tuple(edits), places=unit.places)


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def _head_line(node: Function) -> int:
    """The last line before the body, as far as the tree tells."""
    ends = [each.end_lineno or 0 for each in ast.walk(node.args) if hasattr(each, "end_lineno")]
    return max([node.lineno, *ends, node.returns.end_lineno or 0 if node.returns else 0])


def _function(text: str) -> Function | None:
    try:
        body = ast.parse(f"if 1:\n{text}" if text[:1].isspace() else text).body
    except SyntaxError:
        return None
    node = body[0].body[0] if isinstance(body[0], ast.If) else body[0]
    return node if isinstance(node, Function) else None


def _only_helps(unit: Unit, text: str, files: Mapping[str, str]) -> bool:
    """Whether a private function is mentioned nowhere but in itself and in `text`."""
    if unit.is_class or "." in unit.name or not unit.name.startswith("_") or unit.name.startswith("__"):
        return False
    word = re.compile(rf"\b{re.escape(unit.name)}\b")
    inside = len(word.findall(text))
    everywhere = sum(len(word.findall(each)) for each in files.values() if unit.name in each)
    return inside > 0 and everywhere == inside + len(word.findall(text_of(unit, files)))


def combined(changes: Sequence[Change], seed: str) -> Iterator[Change]:
    """Two or three of these changes at once: of one file where possible, never of one function, none used twice."""
    lot = Random(f"combined {seed}")
    left = list(changes)
    lot.shuffle(left)
    while len(left) > 1:
        first = left.pop(0)
        size = lot.choice((2, 2, 3))
        chosen = [first]
        left.sort(key=lambda each: each.edits[0].path != first.edits[0].path)  # stable
        for each in list(left):
            if len(chosen) < size and not any(_overlap(each, other) for other in chosen):
                chosen.append(each)
                left.remove(each)
        if len(chosen) > 1:
            yield Change(
                kind="combined",
                edits=tuple(edit for each in chosen for edit in each.edits),
                places=tuple(dict.fromkeys(place for each in chosen for place in each.places)),
                parts=tuple(each.key for each in chosen),
            )


def _overlap(one: Change, other: Change) -> bool:
    return any(a.path == b.path and a.start <= b.end and b.start <= a.end for a in one.edits for b in other.edits)
