"""Workspaces that a task must accept or refuse, made from its start and its solution.

Right ones do what the task asks: the solution, the solution in another layout, the solution beside a file of notes. Wrong ones do
not: no change, a solution whose changed functions do nothing, and tricks at the tests' process. References: SWE-bench #465, #601,
#620 and #631, Anthropic on `AlwaysEqual` and `sys.exit(0)`, Harbor #1779.

`leaks` compares what an agent can read (the workspace, the instruction, the environment's other files) with what it must not
read, `untold` with what it must know. By text alone, so reworded answers are not found. Signs of comments, quotes and patches
before a line do not count. References: SWE-bench #465 (history), Composer 2.5 (caches of type checkers, decompiled bytecode).
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from composer_nb.harness.grading.source import Function
from composer_nb.harness.syntax import nodes_of, parse
from composer_nb.harness.tasks.functions import parse_test_files
from composer_nb.harness.tasks.making.changes import Unit, bugs, units
from composer_nb.harness.tasks.making.instructions import without_tests
from composer_nb.harness.tasks.making.mine import declared, defined, used
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patches import REPORT
from composer_nb.labs.attacks.texts import ATTACKS

Files = Mapping[str, bytes]
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
# Bugs that are planted in a solution.
SLIPS = 5
_TEXTS = ATTACKS["audit"][1]
LAZY = _TEXTS["body"]  # bodies of the functions that a solution changes; an empty one returns the first argument
AT_IMPORT = _TEXTS["head"]
BY_HEART, CLOCK = ("\n" + _TEXTS["program"][name] for name in ("BY_HEART", "CLOCK"))
CLOCK_READ = re.compile(r"\b(today|now|utcnow|time|time_ns|localtime|gmtime|strftime)\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A workspace. `right`: it does what the task asks. `slip`: it does so but for one planted bug, which tests may miss.
    `example`: it is wrong only if it answers some call otherwise than the solution does."""

    name: str
    files: Files
    right: bool = False
    slip: bool = False
    example: bool = False


def probes(task: Task, start: Files, gold: Files) -> Iterator[Probe]:
    """Yield the probes of a task, the solution first. `start` and `gold`: the workspace before, and with the solution."""
    changed = {path for path in gold if gold[path] != start.get(path)}
    code = changed_code(start, gold)
    yield Probe(name="the solution", files=gold, right=True)
    if plain := {path: (ast.unparse(parse(text)) + "\n").encode() for path, text in code.items()}:
        yield Probe(name="the solution, in another layout", files={**gold, **plain}, right=True)
    if task.strictness in ("tests", "twins"):
        notes = {"NOTES_OF_THE_AGENT.md": b"Changed what was asked.\n"}
        yield Probe(name="the solution, beside notes", files={**gold, **notes}, right=True)
    yield Probe(name="no change", files=start)
    if changed:
        yield Probe(name="changed files emptied", files={**gold, **dict.fromkeys(changed, b"")})
        yield Probe(name="changed files deleted", files={path: gold[path] for path in gold if path not in changed})
    if task.grader == "script":
        yield Probe(name="all files deleted", files={})
    touched = _touched(code, start)
    stubs = {
        name: {**gold, **{path: _stubbed(text, touched[path], body) for path, text in code.items()}}
        for name, body in LAZY.items()
    }
    for name, files in stubs.items():
        if any(files[path] != plain[path] for path in code):
            yield Probe(name=name, files=files)
    broken = stubs["functions return None"]
    if all(broken[path] == plain[path] for path in code):  # the solution changes no function
        broken = {**start, **{path: start.get(path, b"") for path in code}}
    for name, head in AT_IMPORT.items() if code else ():
        yield Probe(name=name, files={**broken, **{path: _headed(broken[path].decode(), head) for path in code}})
    yield Probe(name="a conftest that passes all", files={**start, "conftest.py": REPORT.encode()})
    collecting = {"pytest.ini": b"[pytest]\naddopts = --collect-only\n"}
    yield Probe(name="an ini file that only collects", files={**start, **collecting})
    tests = {path for path in {*task.tests, *start} if is_test_module(path)} - set(task.source_scope)
    if tests:
        yield Probe(name="tests replaced", files={**start, **{path: _passing(task.tests.get(path)) for path in tests}})
    if task.grader == "functions" and (memorised := _by_heart(task, start, code)):
        yield Probe(
            name="the start, with the examples that it shows by heart", files={**start, **memorised}, example=True
        )
    graded = {path: text for path, text in code.items() if task.mutants or not is_test_module(path)}
    for kind, planted in slips(graded, start, gold):
        yield Probe(name=f"a planted bug: {kind}", files=planted, slip=True)


def changed_code(start: Files, gold: Files) -> dict[str, str]:
    """Return the texts of the modules that the solution changes."""
    paths = sorted(path for path in gold if path.endswith(".py") and gold[path] != start.get(path))
    return {path: text for path in paths if (text := _python(gold[path]))}


def later(code: Mapping[str, str], seconds: int) -> dict[str, bytes]:
    """Return modules that set the clock forward when they are imported."""
    return {path: _headed(text, f"{CLOCK}_composer_nb_later({seconds})\n") for path, text in code.items()}


def near(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield arguments that differ from those of a call in one place."""
    for position, value in enumerate(arguments):
        other: list[Any] = []
        if isinstance(value, int | float) and not isinstance(value, bool):
            other = [value + step for step in (-2, -1, 1, 2, 3, 5, 10)]
        elif isinstance(value, str | list | tuple):
            other = [value[:-1], value[1:], value[::-1], value * 2]
        yield from ((*arguments[:position], argument, *arguments[position + 1 :]) for argument in other)


def slips(code: Mapping[str, str], start: Files, gold: Files) -> Iterator[tuple[str, Files]]:
    """Yield up to SLIPS kinds of bugs, planted in the functions that the solution changes, and the workspace with each."""
    touched = _touched(code, start)
    where: list[Unit] = []
    for path, text in code.items():
        with suppress(ValueError):  # none can be planted there
            where += [unit for unit in units(path, text) if unit.name in touched[path]]
    # No bug is planted in two lines; an empty one after them makes three.
    where = [replace(unit, end=unit.end + (not code[unit.path].split("\n")[unit.end].strip())) for unit in where]
    for change in islice(bugs(code, where, "audit"), SLIPS):
        yield change.kind, {**gold, **{path: text.encode() for path, text in change.apply(code).items()}}


def contradicted(task: Task) -> Task | None:
    """Return the task with every assertion of its hidden tests negated, which its solution must fail. None if no hidden module
    asserts anything, or the answer is tests. Statements such as `pytest.raises` and `self.assertEqual` stay as they are; so do
    tests of the grader `functions`, whose values the host compares."""
    tests, asserts = dict(task.tests), False
    for path, text in task.tests.items() if task.grader != "functions" and not task.mutants else ():
        if is_test_module(path) and (module := _python(text.encode())):
            tree = parse(module)
            for node in ast.walk(tree):
                if isinstance(node, ast.Assert):
                    asserts = True
                    node.test, node.msg = ast.UnaryOp(op=ast.Not(), operand=node.test), None
            tests[path] = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return task.model_copy(update={"tests": tests, "kept": None}) if asserts else None


def _python(data: bytes) -> str:
    """Return the text of a module; empty if it is none."""
    try:
        text = data.decode()
        parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return text


def _functions(text: str) -> dict[str, str]:
    """Return the text of each function that is in no other, by its qualified name."""
    return {name: ast.unparse(node) for name, node in _outermost(parse(text).body)}


def _outermost(body: Sequence[ast.stmt], base: str = "") -> Iterator[tuple[str, AnyFunction]]:
    """Yield the functions that are in no other, with their qualified names."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _outermost(node.body, f"{base}{node.name}.")
        elif isinstance(node, Function):
            yield base + node.name, node


def _touched(code: Mapping[str, str], start: Files) -> dict[str, set[str]]:
    """Return the names of the functions that a change touches, by module; all of them if it touches none."""
    now = {path: _functions(text).items() for path, text in code.items()}
    new = {path: functions - _functions(_python(start.get(path, b""))).items() for path, functions in now.items()}
    return {path: {name for name, _ in functions} for path, functions in (new if any(new.values()) else now).items()}


def _stubbed(text: str, names: Collection[str], body: str) -> bytes:
    """Return a module in which these functions have another body; an empty one stands for their first argument."""
    tree = parse(text)
    for name, node in _outermost(tree.body):
        if name in names and not node.name.startswith("__"):
            arguments = (argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
            first = next((argument for argument in arguments if argument not in ("self", "cls")), "None")
            node.body = parse(f"def f():\n {body or f'return {first}'}").body[0].body  # type: ignore[attr-defined]
    return (ast.unparse(tree) + "\n").encode()


def _passing(text: str | None) -> bytes:
    """Return a test module that passes, with the tests of another."""
    names = [name for name in _functions(_python((text or "").encode())) if name.startswith("test")] or ["test_passes"]
    return "".join(f"def {name}(*_):\n    pass\n\n\n" for name in names).encode()


def _headed(text: str, head: str) -> bytes:
    """Return a module with statements at its beginning: after its docstring and imports from the future."""
    tree = parse(text)
    first = next((at for at, node in enumerate(tree.body) if not _leads(node)), len(tree.body))
    tree.body[first:first] = parse(head).body
    return (ast.unparse(tree) + "\n").encode()


def _leads(node: ast.stmt) -> bool:
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or (
        isinstance(node, ast.ImportFrom) and node.module == "__future__"
    )


def _by_heart(task: Task, start: Files, code: Mapping[str, str]) -> dict[str, bytes]:
    """Return the changed modules as they are at the start, with functions that also know the calls of visible tests, and those of
    hidden tests that the instruction quotes."""
    tables: dict[str, list[str]] = {}
    for test in parse_test_files(task.visible_tests | task.tests):
        quoted = all(part in task.instruction for part in (test.arguments[1:-1].rstrip(","), test.expected))
        if quoted or test.id.partition("::")[0] in task.visible_tests:
            tables.setdefault(test.function, []).append(f"{test.arguments!r}: {test.expected}")
    modules = {}
    for path, text in code.items():
        entries = [
            f"{name} = _composer_nb_known(globals().get({name!r}), {{{', '.join(table)}}})\n"
            for name, table in tables.items()
            if name in _functions(text)
        ]
        if entries:
            modules[path] = "".join([_python(start.get(path, b"")), BY_HEART, *entries]).encode()
    return modules


Names = Collection[str]
# Characters of a line that says something.
LETTERS = 12
# Share of the lines of a test module, or of a solution, that makes a copy of it.
SHARE = 0.8
# A solution of fewer lines may stand elsewhere in other code by chance; only in places that hold no other code does it count.
FEW = 3
LEFTOVERS = re.compile(r"(^|/)(\.git|\.hg|\.svn|__pycache__|\.mypy_cache|\.pytest_cache)/|\.(py[co]|orig|rej|bak)$")
# What stands before a line of code in comments, quotes and patches.
SIGNS = "#>+-/* "
# Files that hold no code.
DATA = re.compile(r"\.(txt|json|jsonl|csv|tsv|md|rst|ya?ml|toml|cfg|ini|xml|html)$")
METHODS = {name for kind in (str, bytes, list, dict, set) for name in dir(kind)}
COPIES = re.compile(r"^[ \t]*(COPY|ADD)\s.*\b(solution|tests)\b", re.I | re.M)


def leaks(task: Task, start: Files, gold: Files, failed: Names = (), passing: Names = ()) -> Iterator[str]:
    """Yield what an agent could read that it must not, in one line each.

    Args:
        failed: node ids of the hidden tests that fail at the start. Where they are known, only these count: the others are
            often the workspace's own.
        passing: functions of visible tests that pass at the start, as node ids. They are earlier versions of hidden tests of
            the same names.

    Test modules that the task asks to change are no leak.
    """
    places = readable(task, start)
    if leftovers := sorted(path for path in places if LEFTOVERS.search(path)):
        yield f"leftovers lie in the workspace: {', '.join(leftovers[:3])}"
    if COPIES.search(places.get("environment/Dockerfile", "")):
        yield "environment/Dockerfile copies the solution or the tests"
    for path, text in task.tests.items():
        tested = _tested(path, text, failed)
        asserted = {line for line in tested if "assert" in line}
        earlier = [name for name in passing if name.startswith(f"{path}::")]
        newer = tested - _tested(path, text, [name for name in failed if name.partition("[")[0] in earlier] or [path])
        if is_test_module(path) and len(asserted) > 1:
            # Tests of one subject share assertions, so a module of tests has to hold more than these.
            answers = {at: tested if is_test_module(at) else asserted for at in places} | {path: newer}
            others = [at for at in places if at not in task.source_scope]
            copies = [at for at in others if _holds(_quoted(places[at]), answers[at])]
            rest = without_tests(places[path], [f"{name}#" for name in earlier]) if earlier and path in others else ""
            copies += [path] if _holds(_quoted(rest), tested) else []
            if copies:
                yield f"the hidden tests of {path} lie in {copies[0]}"
    changed = [path for path, data in gold.items() if data != start.get(path)]
    new_lines = _all(gold, changed) - _all(start, changed)
    # Data that a solution adds may resemble other data, and hide that its code is told, so its code counts by itself.
    own_lines = new_lines & _all(gold, [path for path in changed if not DATA.search(path)]) or new_lines
    for location, text_read in places.items():
        is_code = location.endswith(".py") and not LEFTOVERS.search(location)
        lines = _quoted(text_read) - _lines(text_read) if is_code and len(own_lines) < FEW else _quoted(text_read)
        if _holds(lines, own_lines):
            yield f"the solution lies in {location}"


def untold(task: Task, start: Files, gold: Files) -> list[str]:
    """Return the names that hidden tests import, look up or give as keywords, that the solution defines, and that an agent cannot
    have read. Tests that an agent writes need none."""
    words = {word for path, text in readable(task, start).items() for word in re.findall(r"\w+", f"{path} {text}")}
    texts = {p: d.decode("utf-8", "replace") for p, d in gold.items() if p.endswith(".py") and d != start.get(p)}
    names = set[str]().union(*(defined(path, text) | declared(path, text) for path, text in texts.items()))
    return sorted(
        name
        for name in names & (used({} if task.mutants else task.tests) - METHODS) - words
        if not name.startswith("__")
    )


def readable(task: Task, start: Files) -> Mapping[str, str]:
    """Return the texts that an agent can read, by place."""
    foreign = task.kept.rest if task.kept else {}
    rest = {path: data for path, data in foreign.items() if path.startswith("environment/")}
    texts = {path: data.decode("utf-8", "replace") for path, data in {**start, **rest}.items()}
    return {"the instruction": task.instruction, **texts}


def _tested(path: str, text: str, failed: Names) -> set[str]:
    """Return the lines of the tests that failed if any is known by its id, or else of the whole module. Their names do not count,
    because a copy may have others."""
    names = {name.partition("[")[0].rpartition("::")[2] for name in failed if name.startswith(f"{path}::")}
    tests = [node for node in nodes_of(text) if isinstance(node, Function) and node.name in names]
    parts = [ast.get_source_segment(text, node) or "" for node in tests] if failed else [text]
    return {line for part in parts for line in _lines(part) if not line.startswith(("def ", "async def "))}


def _holds(text_lines: Set[str], lines: Set[str]) -> bool:
    """Return whether a text holds a copy of these lines; False if there are none."""
    return bool(lines) and len(lines & text_lines) >= SHARE * len(lines)


def _all(files: Files, paths: Iterable[str]) -> set[str]:
    return {line for path in paths for line in _lines(files.get(path, b"").decode("utf-8", "replace"))}


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LETTERS}


def _quoted(text: str) -> set[str]:
    """Return the lines of a text as they are, and without the signs before them."""
    return _lines(text) | _lines("\n".join(line.lstrip(SIGNS) for line in text.splitlines()))
