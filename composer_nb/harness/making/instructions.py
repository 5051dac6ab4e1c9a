"""What a user would write: short, from the symptom, without the place or the kind of what is wrong.

A *symptom* is how one failing test failed: the assertion, if it says everything by itself, or the exception, and the name of what
was called. Several ways of writing are drawn from by lot; the same seed gives the same text. What a symptom quotes comes out of a
sandbox and is treated as text, cut off and on one line.

Reference: instructions of real sessions are terse and under-specified, 390 characters in the median (CursorBench, Composer 2
report, section 5).
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from composer_nb.harness.grading.box import Failure, Result

MAX_QUOTE = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What is seen of a bug."""

    subject: str
    """What was called, as the test names it; else the test's module."""
    topic: str
    """What the test is about, by its name."""
    example: str = ""
    """An assertion that says everything by itself, as `f(1) == 2`, and does not hold."""
    exception: str = ""
    message: str = ""
    """Of an exception that the code raised; an assertion's are not kept."""
    missing: str = ""
    """The exception that should have been raised."""


def symptom(key: str, test: str, result: Result, failure: Failure | None, known: Iterable[str]) -> Symptom:
    """Of one failing test. `test` is its module as it ran (`plan.normal`), `known` holds the names of the repository's functions
    and classes."""
    path, *where = key.rpartition("#")[0].split("::")
    tree = ast.parse(test)
    function = find(tree, where)
    statement = _failing(function, failure.line) if function and failure else None
    names = set(known)
    subject = _called(statement, names) or _called(function, names) or _about(path)
    topic = " ".join(where[-1].removeprefix("test").strip("_").replace("_", " ").lower().split())
    asserted = result.why in ("AssertionError", "Failed", "failureException")
    missing = ""
    if statement is not None and failure and re.search(r"DID NOT RAISE|not raised", failure.message):
        found = re.search(
            r"\b([A-Z]\w+(?:Error|Exception|Iteration|Warning|Exit)) not raised|<class '(?:\w+\.)*(\w+)'>",
            failure.message,
        )
        missing = next(filter(None, found.groups()), "") if found else ""
    said = failure.message if failure and not asserted else ""
    return Symptom(
        subject=subject,
        topic=topic,
        example="" if missing or not asserted else _example(statement, tree),
        exception="" if asserted else result.why,
        message=_short(said),
        missing=missing,
    )


def find(tree: ast.Module, where: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The test function of a key's parts after the path; of an inherited one, that of any class of the module."""
    body: list[ast.stmt] = tree.body
    for name in where[:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    others = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body if len(where) > 1]
    for node in [*body, *others]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == where[-1]:
            return node
    return None


def _failing(function: ast.AST, line: int) -> ast.stmt | None:
    """The smallest statement around a line."""
    around = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and node is not function and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return min(around, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


def _called(node: ast.AST | None, known: set[str]) -> str:
    """The first thing of the repository that is called, as it is written."""
    calls = [] if node is None else [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in known and not name.startswith(("assert", "_")) and name not in dir(builtins):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            return f"{owner.id}.{name}" if isinstance(owner, ast.Name) and owner.id[:1].isupper() else name
    return ""


def _about(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".py").removeprefix("test_").removesuffix("_test")


def _example(statement: ast.stmt | None, tree: ast.Module) -> str:
    """The failing assertion, if nothing in it is a variable of the test."""
    match statement:
        case ast.Assert(test=ast.Compare(ops=[ast.Eq() | ast.In() | ast.Is()]) as test):
            text = ast.unparse(test)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="assertEqual"), args=[left, right, *_])):
            text, test = f"{ast.unparse(left)} == {ast.unparse(right)}", ast.Compare(left, [ast.Eq()], [right])
        case _:
            return ""
    inner = {arg.arg for node in ast.walk(test) if isinstance(node, ast.arguments) for arg in node.args}
    inner |= {
        n.id
        for node in ast.walk(test)
        if isinstance(node, ast.comprehension)
        for n in ast.walk(node.target)
        if isinstance(n, ast.Name)
    }
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    free = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} - inner - imported - set(dir(builtins))
    return "" if free or len(text) > MAX_QUOTE or "\n" in text else text


def _short(text: str) -> str:
    text = " ".join(re.sub(r"/\S*/", "", "".join(c if c.isprintable() else " " for c in text)).split())
    return text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 1] + "…"


# {s}: subject, {t}: topic, {x}: example, {e}: exception, {m}: message
_WITH_EXAMPLE = (
    "{s} gives wrong results. I'd expect `{x}`, and that is not what I get.",
    "this used to hold and doesn't any more: `{x}`",
    "Bug in {s}: `{x}` should be true. Please fix.",
    "why is `{x}` false?? fix it",
    "{s} is off, see `{x}`. Please find out why and repair it.",
)
_WITH_EXCEPTION = (
    "{s} fails with {e}{m} where it should just work",
    "Getting {e}{m} from {s} on input that worked before. Can you fix that?",
    "{s} crashes ({e}{m}), please have a look",
    "we see {e}{m} when using {s}. It comes from our code, not from the caller's.",
)
_WITHOUT_EXCEPTION = (
    "{s} accepts what it should refuse: I expected {e} and got nothing",
    "no {e} from {s} any more when it is used wrongly. please restore that",
    "{s} should raise {e} in some cases where it doesn't now ({t}).",
)
_BARE = (
    "{s} does not do what it should ({t}), please fix",
    "something is wrong with {s}: {t}",
    '{s} misbehaves. It is about "{t}". Find the cause and fix it.',
    "a user reports that {s} is broken: {t}. can you look into it?",
    "Regression around {s} ({t}).",
)


def write(symptoms: list[Symptom], failing: int, seed: str) -> str:
    """The instruction for a bug, or for several."""
    lot = Random(f"instruction {seed}")
    if len(symptoms) == 1:
        text = _line(symptoms[0], lot)
        extra = (
            "",
            "",
            f" {failing} tests that we run fail because of it.",
            " Don't touch the tests.",
            " Keep the change small.",
        )
        return (
            text
            if failing == 1
            else (text.rstrip() + ("" if text.endswith((".", "?", "!", "`")) else ".") + lot.choice(extra))
        )
    lines = [_line(each, lot) for each in symptoms]
    head = lot.choice(("Several things broke:", "please fix these:", "A few reports came in, likely not related:"))
    return "\n".join([head, *(f"- {line}" for line in lines)])


def _line(symptom: Symptom, lot: Random) -> str:
    pool: tuple[str, ...]
    if symptom.example and lot.random() < 0.6:
        pool = _WITH_EXAMPLE
    elif symptom.missing:
        pool = _WITHOUT_EXCEPTION
    elif symptom.exception:
        pool = _WITH_EXCEPTION
    else:
        pool = _BARE
    message = f": {symptom.message}" if symptom.message and lot.random() < 0.7 else ""
    return lot.choice(pool).format(
        s=f"`{symptom.subject}`" if lot.random() < 0.5 else symptom.subject,
        t=symptom.topic or "see its documentation",
        x=symptom.example,
        e=symptom.missing or symptom.exception,
        m=message,
    )


def write_feature(path: str, name: str, text: str, seed: str) -> str:
    """The instruction for a feature that is gone, from the function's text as it was: its signature and what it was for."""
    lot = Random(f"instruction {seed}")
    tree = ast.parse(f"if 1:\n{text}" if text[:1].isspace() else text)
    node = next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    told = (ast.get_docstring(node) or "").strip()
    paragraphs = told.split("\n\n")
    brief = " ".join(paragraphs[0].split())
    arguments = ast.unparse(node.args)
    call = f"{name}({arguments})" if len(arguments) <= MAX_QUOTE else f"{name}(…)"
    longer = told if len(told) <= 900 else "\n\n".join(paragraphs[:2])[:900].rstrip()
    styles = (
        f"implement `{call}` in {path}. {brief}",
        f"`{name}` only raises NotImplementedError at the moment. Please write it; this is what it should do:\n\n{longer}",
        f"We need `{call}` ({path}):\n\n{longer}",
        f"{name} in {path} is missing its implementation. {brief} The signature stays as it is.",
    )
    return lot.choice(styles)


# {p}: path, {n}: name, {w}: what it becomes, {s}: where it is
_CHORES = {
    "lint": (
        "ruff complains about {p}. clean it up",
        "please make `ruff check {p}` pass",
        "{p} has lint warnings again, fix them. No behaviour changes, no noqa.",
        "get rid of the ruff findings in {p}",
        "CI fails on lint in {p}. Can you fix that properly?",
    ),
    "tests": (
        "write tests for `{n}` ({s}), in {p}",
        "`{n}` in {s} has no tests. Add {p}; it should fail when somebody breaks the function or class.",
        "we need pytest tests for {n}. put them into {p}, they should cover its edge cases too",
        "add {p} with tests of {n} from {s}. They'll be run against broken versions of it.",
    ),
    "rename": (
        "rename `{n}` in {p} to `{w}` everywhere",
        "`{n}` is a bad name, please call it `{w}`. No alias for the old one.",
        "{p}: {n} -> {w}, and update whoever uses it",
        "Please rename {n} ({p}) to {w}; behaviour stays, nothing of the old name should be left.",
    ),
    "move": (
        "move `{n}` from {p} to {w}",
        "{n} doesn't belong in {p}. Put it into {w} and import it where it's used.",
        "Please move {n} ({p}) to {w} with the imports that it needs, no copy left behind.",
        "refactor: `{n}` should live in {w}, not in {p}",
    ),
}


def write_chore(kind: str, seed: str, *, path: str, name: str = "", new: str = "", source: str = "") -> str:
    """The instruction for work that is no bug."""
    return Random(f"instruction {kind} {seed}").choice(_CHORES[kind]).format(p=path, n=name, w=new, s=source)


def without_tests(text: str, keys: Iterable[str]) -> str:
    """A test module without the functions of these keys; all of it stays where none is found."""
    tree = ast.parse(text)
    spans: dict[int, tuple[int, str]] = {}
    owners: Mapping[int, ast.ClassDef] = {
        id(each): node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body
    }
    gone = [function for key in keys if (function := find(tree, key.rpartition("#")[0].split("::")[1:])) is not None]
    for node in gone:
        start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        owner = owners.get(id(node))
        alone = owner is not None and all(any(each is other for other in gone) for each in owner.body)
        spans[start] = (node.end_lineno or node.lineno, " " * node.col_offset + "pass" if alone else "")
    lines = text.split("\n")
    for start, (end, instead) in sorted(spans.items(), reverse=True):
        lines[start - 1 : end] = [instead] if instead else []
    return "\n".join(lines)
