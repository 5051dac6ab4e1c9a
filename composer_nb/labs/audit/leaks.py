"""Compare what an agent can read (the workspace, the instruction, the environment's other files) with what it must not read, and
with what it must know.

By text alone, so reworded answers are not found. Signs of comments, quotes and patches before a line do not count. References:
SWE-bench #465 (history), Composer 2.5 (caches of type checkers, decompiled bytecode).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from composer_nb.harness.grading.source import Function
from composer_nb.harness.syntax import nodes_of
from composer_nb.harness.tasks.making.instructions import without_tests
from composer_nb.harness.tasks.making.mine import declared, defined, used
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.audit.probes import Files

Names = Collection[str]
LETTERS = 12
"""Characters of a line that says something."""
SHARE = 0.8
"""Share of the lines of a test module, or of a solution, that makes a copy of it."""
FEW = 3
"""A solution of fewer lines may stand elsewhere in other code by chance; only in places that hold no other code does it count."""
LEFTOVERS = re.compile(r"(^|/)(\.git|\.hg|\.svn|__pycache__|\.mypy_cache|\.pytest_cache)/|\.(py[co]|orig|rej|bak)$")
SIGNS = "#>+-/* "
"""What stands before a line of code in comments, quotes and patches."""
DATA = re.compile(r"\.(txt|json|jsonl|csv|tsv|md|rst|ya?ml|toml|cfg|ini|xml|html)$")
"""Files that hold no code."""
METHODS = {name for kind in (str, bytes, list, dict, set) for name in dir(kind)}
COPIES = re.compile(r"^[ \t]*(COPY|ADD)\s.*\b(solution|tests)\b", re.I | re.M)


def leaks(task: Task, start: Files, gold: Files, failed: Names = (), passing: Names = ()) -> Iterator[str]:
    """Yield what an agent could read that it must not, in one line each.

    Args:
        failed: node ids of the hidden tests that fail at the start. Where they are known, only these count: the others are
            often the workspace's own.
        passing: functions of visible tests that pass at the start, as node ids. They are earlier versions of hidden tests of
            the same names.
    """
    places = readable(task, start)
    if left := sorted(path for path in places if LEFTOVERS.search(path)):
        yield f"leftovers lie in the workspace: {', '.join(left[:3])}"
    if COPIES.search(places.get("environment/Dockerfile", "")):
        yield "environment/Dockerfile copies the solution or the tests"
    for path, text in task.tests.items():
        tested = _tested(path, text, failed)
        asserted = {line for line in tested if "assert" in line}
        earlier = [name for name in passing if name.startswith(f"{path}::")]
        newer = tested - _tested(path, text, [name for name in failed if name.partition("[")[0] in earlier] or [path])
        if is_test_module(path) and len(asserted) > 1:
            # Tests of one subject share assertions, so a module of tests has to hold more than these.
            wanted = {place: tested if is_test_module(place) else asserted for place in places} | {path: newer}
            held = [place for place in places if _holds(_quoted(places[place]), wanted[place])]
            if earlier and _holds(_quoted(without_tests(places[path], [f"{name}#" for name in earlier])), tested):
                held.append(path)
            if held:
                yield f"the hidden tests of {path} lie in {held[0]}"
    changed = [path for path, data in gold.items() if data != start.get(path)]
    new = _all(gold, changed) - _all(start, changed)
    # Data that a solution adds may resemble other data, and hide that its code is told, so its code counts by itself.
    own = new & _all(gold, [path for path in changed if not DATA.search(path)]) or new
    for place, known in places.items():
        code = place.endswith(".py") and not LEFTOVERS.search(place)
        told = _quoted(known) - _lines(known) if code and len(own) < FEW else _quoted(known)
        if _holds(told, own):
            yield f"the solution lies in {place}"


def untold(task: Task, start: Files, gold: Files) -> list[str]:
    """Return the names that hidden tests import, look up or give as keywords, that the solution defines, and that an agent cannot
    have read."""
    known = {word for place, text in readable(task, start).items() for word in re.findall(r"\w+", f"{place} {text}")}
    texts = {p: d.decode("utf-8", "replace") for p, d in gold.items() if p.endswith(".py") and d != start.get(p)}
    made = set[str]().union(*(defined(path, text) | declared(path, text) for path, text in texts.items()))
    return sorted(name for name in made & (used(task.tests) - METHODS) - known if not name.startswith("__"))


def readable(task: Task, start: Files) -> Mapping[str, str]:
    """Return the texts that an agent can read, by place."""
    kept = task.kept.rest if task.kept else {}
    rest = {path: data for path, data in kept.items() if path.startswith("environment/")}
    texts = {path: data.decode("utf-8", "replace") for path, data in {**start, **rest}.items()}
    return {"the instruction": task.instruction, **texts}


def _tested(path: str, text: str, failed: Names) -> set[str]:
    """Return the lines of the tests that failed if any is known by its id, or else of the whole module. Their names do not count,
    because a copy may have others."""
    names = {name.partition("[")[0].rpartition("::")[2] for name in failed if name.startswith(f"{path}::")}
    tests = [node for node in nodes_of(text) if isinstance(node, Function) and node.name in names]
    parts = [ast.get_source_segment(text, node) or "" for node in tests] if failed else [text]
    return {line for part in parts for line in _lines(part) if not line.startswith(("def ", "async def "))}


def _holds(known: Set[str], lines: Set[str]) -> bool:
    """Return whether a text holds a copy of these lines; False if there are none."""
    return bool(lines) and len(lines & known) >= SHARE * len(lines)


def _all(files: Files, paths: Iterable[str]) -> set[str]:
    return {line for path in paths for line in _lines(files.get(path, b"").decode("utf-8", "replace"))}


def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LETTERS}


def _quoted(text: str) -> set[str]:
    """Return the lines of a text as they are, and without the signs before them."""
    return _lines(text) | _lines("\n".join(line.lstrip(SIGNS) for line in text.splitlines()))
