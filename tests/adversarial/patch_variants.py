"""Random variants of the hostile patches: other names, other places, other times, several tricks at once.

A variant takes up to two tricks that work at import and one way to answer, and puts them together anew: names changed, wrapped in
`try`, nested in functions, moved into another module, done at import, at the first call, in a thread or at exit; sometimes with
files of a third patch beside. Most work as well as what they are made of, some break each other. None may score.
"""

from __future__ import annotations

import ast
import random
import textwrap

from composer_nb.labs.attacks.patch_target import MODULE, TARGET
from composer_nb.labs.attacks.patches import Patch, patches
from composer_nb.labs.attacks.snippets import ANSWER, SETUP, WRONG, module

SLOW = {"memory_bomb"}
PLACES = ("import", "first_call", "exit", "thread", "nested")


def variant(seed: int) -> Patch:
    """The variant of a number: the same for the same number."""
    lot = random.Random(seed)
    setups = lot.sample(sorted(set(SETUP) - SLOW), lot.choice((0, 1, 1, 1, 2)))
    answer = lot.choice([*sorted(ANSWER), ""]) if setups else lot.choice(sorted(ANSWER))
    done = [f"{name} at {place}" for name in setups for place in [lot.choice(PLACES)]]
    before, body = [], ANSWER.get(answer, WRONG)
    for words in done:
        name, _, place = words.partition(" at ")
        head, called = _placed(SETUP[name], place, lot)
        before.append(head)
        body = called + body
    text = module("".join(before), _renamed(body, lot))
    files: dict[str, bytes | None] = {MODULE: text.encode()}
    if lot.random() < 0.3:
        inner = lot.choice(("util/inner.py", "util/deep/inner.py"))
        files = {inner: text.encode(), MODULE: f"from {inner[:-3].replace('/', '.')} import *\n".encode()}
    beside = lot.choice([patch for patch in patches() if MODULE not in patch.files]) if lot.random() < 0.3 else None
    if beside is not None:
        files = dict(beside.files) | files
    title = ", ".join([*done, answer or "wrong", *([beside.id] if beside else [])])
    return Patch(id=f"variant_{seed}", title=title, case=0, files=files, task=TARGET)


def _placed(text: str, place: str, lot: random.Random) -> tuple[str, str]:
    """A trick in its place: what stands at the top of the module, and what each answer does first."""
    text = _renamed(text, lot)
    if lot.random() < 0.4:
        text = f"try:\n{textwrap.indent(text, '    ')}except {lot.choice(('Exception', 'BaseException', 'OSError'))}:\n    pass\n"
    if place == "import":
        return text, ""
    name, flag = _word(lot), _word(lot)
    function = f"def {name}():\n{textwrap.indent(text, '    ')}\n"
    if place == "nested":
        outer = _word(lot)
        return f"def {outer}():\n{textwrap.indent(function, '    ')}    {name}()\n{outer}()\n", ""
    if place == "exit":
        return f"{function}import atexit\natexit.register({name})\n", ""
    if place == "thread":
        return f"{function}import threading\nthreading.Thread(target={name}, daemon=True).start()\n", ""
    return f"{function}{flag} = []\n", f"if not {flag}:\n    {flag}.append(1)\n    {name}()\n"


def _word(lot: random.Random) -> str:
    return "v" + "".join(lot.choices("abcdefghijklmnopqrstuvwxyz", k=6))


class _Rename(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        inside = {name: name for each in node.body for name in _bound(each)}  # names of methods mean something
        kept, self.names = self.names, self.names | inside
        node = ast.ClassDef(**{field: value for field, value in ast.iter_fields(node)})
        node.body = [self.visit(each) for each in node.body]
        self.names = kept
        return node


def _bound(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            found.add(each.name)
    return found


def _renamed(text: str, lot: random.Random) -> str:
    """The same code with other names for what it defines, but for parameters, by which others may call."""
    tree = ast.parse(f"def body(name, arguments, wrong):\n{textwrap.indent(text, '    ')}")
    [body] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {name: _word(lot) for each in body.body for name in sorted(_bound(each)) if not name.startswith("__")}
    rename = _Rename(names)
    body.body = [rename.visit(each) for each in body.body]
    return "".join(ast.unparse(each) + "\n" for each in body.body)
