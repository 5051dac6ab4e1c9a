"""Changes of a repository that make a task: a planted bug, several bugs, or a missing feature.

Bugs are drawn function by function. Each round plants one bug in each function, of the kind that was used least so far, so even a
few candidates cover many kinds and places. libcst parses the lines of one function at a time; the rest of a file stays
byte for byte as it is.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import libcst as cst

from composer_nb.harness import syntax
from composer_nb.harness.grading.box import Place
from composer_nb.harness.grading.source import Function
from composer_nb.harness.tasks.making.mutations import KINDS
from composer_nb.harness.untrusted import changed_lines

MIN_LINES, MAX_LINES = 3, 160  # Lines of a function in which a bug may be planted.
MAX_TOKENS = 8000  # Tokens of such a function: lines can be long.
MAX_CHANGED = 24  # Maximum lines that one bug adds and removes, together.
FEATURE_LINES = (6, 120)
ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Whole lines of a file that hold a function or method that is in no other.

    Attributes:
        name: Qualified, `Class.method`.
        start: First line, decorators included, from 1.
    """

    path: str
    name: str
    start: int
    end: int

    @property
    def place(self) -> Place:
        """The function, by which tests that reach it are found."""
        return self.path, self.start

    def becoming(self, text: str) -> Edit:
        """Return the edit that puts a text in its place."""
        return Edit(path=self.path, name=self.name, start=self.start, end=self.end, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(Unit):
    """Lines that become `text`, without a final newline; an empty text removes them."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that turns the repository into a task's workspace.

    Attributes:
        parts: Keys of the component bugs, for a combined bug.
    """

    kind: str
    edits: tuple[Edit, ...]
    places: tuple[Place, ...]
    parts: tuple[str, ...] = ()

    def apply(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the changed files."""
        changed: dict[str, str] = {}
        for edit in sorted(self.edits, key=lambda edit: (edit.path, -edit.start)):
            text = changed.get(edit.path, files[edit.path])
            layout = syntax.TextFormat.of(text)
            lines = layout.plain(text).split("\n")
            lines[edit.start - 1 : edit.end] = edit.text.split("\n") if edit.text else []
            changed[edit.path] = layout.restore("\n".join(lines))
        return changed

    @property
    def key(self) -> str:
        """A digest that ignores layout and comments."""
        parts = sorted((edit.path, edit.name, normalised(edit.text)) for edit in self.edits)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def header_of(text: str) -> str:
    """Return the line that must stand before the lines of a function to make them a module. A form feed does not indent."""
    return "if 1:\n" if text.lstrip("\f")[:1].isspace() else ""


def normalised(text: str) -> str:
    """Return a function's text without layout, comments and docstrings."""
    tree = syntax.parse(header_of(text) + text)
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def units(path: str, text: str) -> list[Unit]:
    """Return the units of a file. Raises ValueError, with the reason, if no bug can be planted in it."""
    plain = syntax.TextFormat.of(text).plain(text)
    if "\r" in plain:
        raise ValueError("its lines end in several ways")
    try:
        return list(_units(path, syntax.parse(plain).body, ""))
    except SyntaxError as error:  # a template, or for another Python
        raise ValueError(f"not Python: {error.msg}, line {error.lineno}") from None


def _units(path: str, body: Iterable[ast.AST], base: str) -> Iterator[Unit]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _units(path, node.body, f"{base}{node.name}.")
        elif isinstance(node, Function):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            yield Unit(path=path, name=base + node.name, start=start, end=node.end_lineno)
        elif isinstance(node, ast.If | ast.Try):
            yield from _units(path, ast.iter_child_nodes(node), base)


def text_of(unit: Unit, files: Mapping[str, str]) -> str:
    """Return the lines of a unit, with plain line ends."""
    text = files[unit.path]
    return "\n".join(syntax.TextFormat.of(text).plain(text).split("\n")[unit.start - 1 : unit.end])


def bugs(files: Mapping[str, str], candidates: Sequence[Unit], seed: str) -> Iterator[Change]:
    """Yield distinct bugs in these units, for ROUNDS rounds. The same seed gives the same bugs."""
    used: Counter[str] = Counter()
    keys: set[str] = set()
    order = list(candidates)
    Random(f"bugs {seed}").shuffle(order)
    for round_number in range(ROUNDS):
        for unit in order:
            rng = Random(f"bugs {seed} {round_number} {unit.path} {unit.name}")
            for change in _drawn(unit, text_of(unit, files), rng, used):
                if change.key not in keys:
                    keys.add(change.key)
                    used[change.kind] += 1
                    yield change
                    break


def _drawn(unit: Unit, text: str, rng: Random, used: Counter[str]) -> Iterator[Change]:
    """Yield changes of a unit at one place, the least used kinds first."""
    lines = text.count("\n") + 1
    if not MIN_LINES <= lines <= MAX_LINES:
        return
    header = header_of(text)
    code = text.lstrip("\f")  # which libcst would drop
    try:
        syntax.count_tokens(text, MAX_TOKENS)
        tree = cst.parse_module(f"{header}{code}\n")
    except (cst.ParserSyntaxError, RecursionError, syntax.TooLarge):
        return
    sites = _sites(tree, bool(header), rng)
    rng.shuffle(sites)
    sites.sort(key=lambda site: used[site[0]])  # stable
    for kind, old, new in sites:
        replaced = tree.deep_replace(old, new)
        assert isinstance(replaced, cst.Module)
        new_text = text[: len(text) - len(code)] + replaced.code.removeprefix(header).removesuffix("\n")
        if _means_else(text, new_text) and changed_lines(text, new_text) <= MAX_CHANGED:
            yield Change(kind=kind, edits=(unit.becoming(new_text),), places=(unit.place,))


def _means_else(old: str, new: str) -> bool:
    """Return whether a function's new text is Python and another program."""
    try:
        return normalised(old) != normalised(new)
    except (SyntaxError, ValueError):
        return False


def _sites(tree: cst.Module, nested: bool, rng: Random) -> list[tuple[str, cst.CSTNode, cst.CSTNode]]:
    """Return (kind, node, replacement) for each possible change."""
    root: cst.CSTNode = tree.body[0]
    if nested:
        assert isinstance(root, cst.If)
        root = root.body.body[0]
    collector = _NodeCollector()
    root.visit(collector)
    names = sorted(collector.names)
    kinds = [(kind, mutate, node_type) for kind, (mutate, node_type) in KINDS.items()]
    pairs = [(kind, mutate, node) for node in collector.nodes for kind, mutate, of in kinds if isinstance(node, of)]
    return [(kind, node, new) for kind, mutate, node in pairs for new in mutate(node, rng, names)]


class _NodeCollector(cst.CSTVisitor):
    """Nodes in the order of the text, annotations left out, with the function's parameters and variables."""

    def __init__(self) -> None:
        self.nodes: list[cst.CSTNode] = []
        self.names: set[str] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.nodes.append(node)
        if isinstance(node, cst.Param):
            self.names.add(node.name.value)
        elif isinstance(node, cst.AssignTarget) and isinstance(node.target, cst.Name):
            self.names.add(node.target.value)
        return not isinstance(node, cst.Annotation)


def features(files: Mapping[str, str], where: Sequence[Unit], seed: str) -> Iterator[Change]:
    """Yield changes that remove the body of a public function, with the private functions that only it uses."""
    public_units = [unit for unit in where if _is_public(unit)]
    Random(f"features {seed}").shuffle(public_units)
    for unit in public_units:
        if edits := without_feature(unit, where, files):
            yield Change(kind="feature", edits=edits, places=(unit.place,))


def _is_public(unit: Unit) -> bool:
    return not re.search(r"(^|\.)_", unit.name)


def without_feature(unit: Unit, where: Sequence[Unit], files: Mapping[str, str]) -> tuple[Edit, ...]:
    """Return the edits that take a feature away, that of the public function first; none if it has too little to say."""
    text = text_of(unit, files)
    if not _is_public(unit) or not FEATURE_LINES[0] <= text.count("\n") + 1 <= FEATURE_LINES[1]:
        return ()
    stub = _without_body(text)
    helpers = [helper for helper in where if helper.path == unit.path and _only_helps(helper, text, files)]
    if not stub or any(helper.start <= unit.end and unit.start <= helper.end for helper in helpers):
        return ()
    return unit.becoming(stub), *(helper.becoming("") for helper in helpers)


def function_of(text: str) -> Function | None:
    """Return the syntax tree of a function's lines. Raises SyntaxError."""
    return next((node for node in ast.walk(syntax.parse(header_of(text) + text)) if isinstance(node, Function)), None)


def _without_body(text: str) -> str:
    """Return a documented function whose body only raises; empty where the body begins on the line of the head."""
    try:
        node = function_of(text)
    except SyntaxError:
        return ""
    if node is None or not ast.get_docstring(node):
        return ""
    head = [node.lineno, *(part.end_lineno for part in ast.walk(node.args) if isinstance(part, ast.expr | ast.arg))]
    head += [node.returns.end_lineno] if node.returns else []
    if node.body[0].lineno <= max(part or 0 for part in head):
        return ""
    lines = text.split("\n")
    body_line = node.body[0].lineno - 1 - header_of(text).count("\n")
    return "\n".join([*lines[:body_line], lines[body_line][: node.body[0].col_offset] + "raise NotImplementedError"])


def _only_helps(unit: Unit, text: str, files: Mapping[str, str]) -> bool:
    """Return whether a private function is mentioned nowhere but in itself and in `text`."""
    if "." in unit.name or not unit.name.startswith("_") or unit.name.startswith("__"):
        return False
    word = re.compile(rf"\b{re.escape(unit.name)}\b")
    inside = len(word.findall(text))
    everywhere = sum(len(word.findall(source)) for source in files.values() if unit.name in source)
    return inside > 0 and everywhere == inside + len(word.findall(text_of(unit, files)))


def combined(changes: Sequence[Change], seed: str) -> Iterator[Change]:
    """Yield combinations of two or three changes, of one file where possible and never of one function. None is used twice."""
    rng = Random(f"combined {seed}")
    unused = list(changes)
    rng.shuffle(unused)
    while len(unused) > 1:
        first = unused.pop(0)
        part_count = rng.choice((2, 2, 3))
        parts = [first]
        unused.sort(key=lambda change: change.edits[0].path != first.edits[0].path)  # stable
        for change in list(unused):
            if len(parts) < part_count and not any(_overlap(change, other) for other in parts):
                parts.append(change)
                unused.remove(change)
        if len(parts) > 1:
            yield Change(
                kind="combined",
                edits=tuple(edit for change in parts for edit in change.edits),
                places=tuple(dict.fromkeys(function for change in parts for function in change.places)),
                parts=tuple(change.key for change in parts),
            )


def _overlap(first: Change, other: Change) -> bool:
    return any(a.path == b.path and a.start <= b.end and b.start <= a.end for a in first.edits for b in other.edits)
