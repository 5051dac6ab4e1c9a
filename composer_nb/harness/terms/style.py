"""Terms about the change that an attempt left: what a linter says of it, and whether it keeps to the code's names and helpers.

Each reads the Python files that differ, as they were and as they are. The linter is ruff, the one behind `read_lints`: it parses
text and runs nothing of it. It reads no settings of the repository and heeds no `noqa`, for an agent can write both.
"""

import ast
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from composer_nb.harness import syntax
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.source import Function
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.toolchain import host_programs
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.terms.registry import term

# Rules of ruff about probable errors, and about style.
LINTS, STYLE = ("F", "E9", "B"), ("E4", "E7", "W", "I", "N", "C4", "C90", "SIM", "RET", "PIE")
TIMEOUT_S = 20.0
# Names of a kind that make a convention.
FEW = 3
# Nodes of the syntax tree from which on a function counts as a helper.
SMALL = 12


def saturated(count: float) -> float:
    """Return n / (1 + |n|): between −1 and 1, so that no number of findings outweighs the task, and no padding dilutes them."""
    return count / (1 + abs(count))


@lru_cache(maxsize=8192)
def findings(text: str) -> tuple[int, int]:
    """Return what ruff finds in a module: probable errors, and faults of style. A text that is too large for the linter, or
    ends it, is one of each. Raises ValueError where there is no ruff."""
    if (ruff := host_programs().get("ruff")) is None:
        raise ValueError("lint_delta and style_delta need ruff: pip install -e '.[agent]'")
    rules = ",".join((*LINTS, *STYLE))
    command = [ruff, "check", "--isolated", "--no-cache", "--quiet", "--ignore-noqa", "--output-format=json"]
    command += [f"--select={rules}", "--stdin-filename=module.py", "-"]
    data = text.encode("utf-8", "surrogateescape")
    try:
        syntax.count_tokens(text)
        ran = subprocess.run(command, input=data, capture_output=True, cwd="/", env={}, timeout=TIMEOUT_S, check=False)
        codes = [str(finding["code"] or "") for finding in json.loads(ran.stdout)]
    except (subprocess.TimeoutExpired, ValueError):
        return 1, 1
    style = sum(code.startswith(STYLE) for code in codes)
    return len(codes) - style, style


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return path, text before and text after of each Python file that differs."""
    pairs = [(p, before.get(p, ""), after.get(p, "")) for p in sorted({*before, *after}) if p.endswith(".py")]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _delta(rollout: Rollout, index: int) -> float:
    findings("")
    changed = _changed(rollout.before, rollout.files)
    return saturated(sum(findings(new)[index] - findings(old)[index] for _, old, new in changed))


@term
def lint_delta(rollout: Rollout, grade: Grade) -> float:
    """Return the probable errors that the change adds less those that it removes, `saturated`."""
    return _delta(rollout, 0)


@term
def style_delta(rollout: Rollout, grade: Grade) -> float:
    """Return the faults of style that the change adds less those that it removes, `saturated`."""
    return _delta(rollout, 1)


class Defined(NamedTuple):
    """A function of a module.

    Attributes:
        top: It is in no class and no function.
        shape: Its code without names of its own, annotations, decorators and docstring; empty for a small one.
    """

    name: str
    top: bool
    arguments: int
    shape: str


class Names(NamedTuple):
    """The functions and names, by kind, that a module defines."""

    functions: tuple[Defined, ...] = ()
    names: frozenset[tuple[str, str]] = frozenset()


@lru_cache(maxsize=8192)
def defined(text: str) -> Names:
    """Return what a module defines; nothing for one that cannot be parsed."""
    try:
        tree = syntax.parse(text)
        return Names(tuple(_functions(tree)), frozenset(_names(tree)))
    except (SyntaxError, ValueError, RecursionError):
        return Names()


def _names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield "function", node.name
        elif isinstance(node, ast.ClassDef):
            yield "class", node.name
        elif isinstance(node, ast.arg):
            yield "variable", node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "variable", node.id


def case_of(name: str) -> str:
    """Return the form of a name; empty where it could be of several (`total`, `x`, `__init__`)."""
    bare = name.strip("_")
    if not bare or name.startswith("__") or (bare.islower() and "_" not in bare) or len(bare) == 1:
        return ""
    if bare.islower() or bare.isupper():
        return "snake" if bare.islower() else "UPPER"
    return "mixed" if "_" in bare else "Pascal" if bare[0].isupper() else "camel"


def _convention(modules: Iterable[str], kind: str) -> str:
    """Return the form that most names of a kind have; empty for fewer than `FEW` that show one."""
    names = {name for text in modules for other, name in defined(text).names if other == kind}
    forms = Counter(form for name in sorted(names) if (form := case_of(name)) not in ("", "UPPER"))
    return forms.most_common(1)[0][0] if forms.total() >= FEW else ""


@term
def odd_names(rollout: Rollout, grade: Grade) -> float:
    """Return the share of new names (functions, classes, variables) that break the convention of their module, or of all code
    where the module has too few. Names that fit every form, and constants, do not count."""
    sources = [text for path, text in rollout.before.items() if path.endswith(".py")]
    odd = count = 0
    for _, old, new in _changed(rollout.before, rollout.files):
        for kind, name in defined(new).names - defined(old).names:
            convention = _convention([old], kind) or _convention(sources, kind)
            if convention and (form := case_of(name)) not in ("", "UPPER"):
                odd, count = odd + (form != convention), count + 1
    return odd / max(1, count)


def _functions(node: ast.AST, top: bool = True) -> Iterator[Defined]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            count = sum(isinstance(part, ast.arg) for part in ast.walk(child.args))
            yield Defined(child.name, top, count, _shape(child))
        yield from _functions(child, top and not isinstance(child, ast.ClassDef | Function))


def _shape(function: Function) -> str:
    body: Sequence[ast.stmt] = function.body[1:] if ast.get_docstring(function, clean=False) else function.body
    nodes = [node for subtree in (function.args, *body) for node in ast.walk(subtree)]
    if len(nodes) < SMALL:
        return ""
    renamed = {function.name: "f"}
    for node in nodes:
        if isinstance(node, ast.arg):
            renamed.setdefault(node.arg, f"v{len(renamed)}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            renamed.setdefault(node.id, f"v{len(renamed)}")
    return "\n".join(_dump(subtree, renamed) for subtree in (function.args, *body))


def _dump(node: object, renamed: dict[str, str]) -> str:
    """Return a syntax tree as text, with names replaced."""
    if isinstance(node, list):
        return f"[{','.join(_dump(item, renamed) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    named = {"arg", "id"} if isinstance(node, ast.arg | ast.Name) else set()
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in ("annotation", "ctx", "kind")]
    values = [repr(renamed.get(value, value)) if name in named else _dump(value, renamed) for name, value in fields]
    return f"{type(node).__name__}({','.join(values)})"


def rewritten(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the names of the functions that a change wrote which the code had already, and still has: the same code under
    whatever names, or a new function of a module with the name and the number of arguments of another module's. Beside them, the
    number of functions that it wrote. Tests and small functions do not count."""
    written = [
        (
            path,
            function,
            function.top and function.name not in {"main", *(other.name for other in defined(old).functions)},
        )
        for path, old, new in _changed(before, after)
        for function in (() if is_test_module(path) else defined(new).functions)
        if function.shape and function not in defined(old).functions
    ]
    helpers = [
        (path, function)
        for path, text in (before if written else {}).items()
        if path.endswith(".py") and not is_test_module(path)
        for function in defined(text).functions
        if function.shape and function in defined(after.get(path, "")).functions
    ]
    shapes = {helper.shape for _, helper in helpers}

    def is_there(path: str, function: Defined, fresh: bool) -> bool:
        homes = {home for home, helper in helpers if helper.top and helper[:3] == function[:3]}
        return function.shape in shapes or (fresh and bool(homes - {path}))

    return [function.name for path, function, fresh in written if is_there(path, function, fresh)], len(written)


@term
def rewritten_helpers(rollout: Rollout, grade: Grade) -> float:
    """Return the share of the functions that the change wrote which the code had already (`rewritten`)."""
    names, count = rewritten(rollout.before, rollout.files)
    return len(names) / max(1, count)
