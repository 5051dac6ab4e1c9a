"""What the hidden tests of the kinds `lint`, `tests` and `refactor` ask of a workspace.

Runs in grading boxes: its text is put in front of a task's own hidden test (`chores.py`), whose module is imported before any
other, so that the findings are there before a line of the agent's is imported into that process (unless a conftest does). Uses
the standard library, never imports the project. The current directory is the workspace; what `skip` names is bait, not read.
"""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

Edits = Sequence[tuple[str, int, int, str]]
"""Path, first line, last line, what stands there instead."""

RUN = """\
import ctypes, json, os, signal, sys, time
given = json.load(sys.stdin)
sys.path[:] = [path for path in sys.path if path]
import pytest, _pytest.python, _pytest.assertion.rewrite, _pytest.unittest
ctypes.CDLL(None).prctl(4, *[ctypes.c_ulong(0)] * 4)  # nobody may open what it says by
said = []
for root in given["roots"]:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            nothing = os.open("/dev/null", os.O_RDWR)
            for fd in range(3):
                os.dup2(nothing, fd)
            os.closerange(3, 4096)
            os.chdir(root)
            sys.path += [root, os.path.join(root, "src")]
            sys.argv = ["pytest", given["file"]]
            options = ["-q", "--tb=no", "-c", given["ini"], "--rootdir", root, "-p", "no:cacheprovider"]
            options += ["--basetemp", root + ".temporary"]
            code = int(pytest.main([*options, given["file"]]))
        finally:
            os._exit(code)
    deadline, ended = time.monotonic() + given["limit_s"], 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not ended:
        os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status) if ended else 1
    said.append({0: "passed", 1: "failed", 2: "failed"}.get(code, "ran no tests"))
print(json.dumps(said))
"""
"""Runs one test file in several trees, each in a process of its own; says nothing but how each ended: what runs there can say
nothing else. A run without an end has noticed something; one without tests has not."""
CASE_S = 10.0


def lint(paths: Sequence[str], rules: str) -> list[str]:
    """`path: rule` of what ruff finds, whatever a configuration or a comment says; a file that is gone is found too."""
    version = f"py3{sys.version_info.minor}"
    command = ["ruff", "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--output-format=json"]
    command += ["--target-version", version, "--select", rules, "--", *paths]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    told = [f"{os.path.relpath(each['filename'])}: {each['code'] or 'invalid'}" for each in found]
    return told + [f"{path}: gone" for path in paths if not os.path.isfile(path)]


def outcomes(file: str, cases: Sequence[Edits], given: dict[str, str], skip: Sequence[str]) -> list[str]:
    """How the tests in `file` end on copies of the workspace, each with other edits: passed, failed, or ran no tests.

    `given` are files that the workspace has no true copy of. The order is by lot, and no path says which is which: what one run
    leaves behind for the next ones to find does not tell those apart.
    """
    if not os.path.isfile(file):
        return ["ran no tests"] * len(cases)
    places = list(range(len(cases)))
    random.SystemRandom().shuffle(places)
    base = tempfile.mkdtemp()
    roots = [os.path.join(base, os.urandom(4).hex(), "work") for _ in places]
    bait = {os.path.abspath(path) for path in skip}
    for number, root in enumerate(roots):
        shutil.copytree(
            ".", root, ignore=lambda at, names: [n for n in names if os.path.abspath(os.path.join(at, n)) in bait]
        )
        for path, text in given.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as out:
                out.write(text)
        for path, start, end, text in cases[places[number]]:
            with open(os.path.join(root, path), encoding="utf-8", newline="") as source:
                lines = source.read().split("\n")
            lines[start - 1 : end] = text.split("\n")
            with open(os.path.join(root, path), "w", encoding="utf-8", newline="") as out:
                out.write("\n".join(lines))
    ini = os.path.join(base, "trusted.ini")
    with open(ini, "w", encoding="utf-8") as out:
        out.write("[pytest]\n")
    frame = json.dumps({"file": file, "roots": roots, "ini": ini, "limit_s": CASE_S})
    found = [os.path.join(place, "pytest.zip") for place in os.environ["PATH"].split(":")]
    own = {"PYTHONPATH": next(filter(os.path.isfile, found)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-s", "-B", "-c", RUN]
    done = subprocess.run(command, input=frame.encode(), stdout=subprocess.PIPE, env={**os.environ, **own}, cwd=base)
    shutil.rmtree(base, ignore_errors=True)
    said = json.loads(done.stdout)
    return [said[places.index(number)] for number in range(len(cases))]


def _sources(tops: Sequence[str], skip: Sequence[str]) -> Iterator[tuple[str, ast.Module]]:
    for top in tops:
        walked = (
            [(top, ())]
            if top.endswith(".py")
            else ((os.path.join(at, n), ()) for at, _, ns in os.walk(top) for n in ns)
        )
        for path, _ in walked:
            if path.endswith(".py") and path not in skip and os.path.isfile(path):
                with open(path, "rb") as source:
                    yield path, ast.parse(source.read())


def _mentions(tree: ast.AST, name: str) -> int:
    """As a name, an attribute, a parameter, an import or a text of its own."""
    values = [value for node in ast.walk(tree) for _, value in ast.iter_fields(node)]
    return sum(value == name or (isinstance(value, list) and name in value) for value in values)


def _made(tree: ast.AST, name: str) -> list[ast.stmt]:
    """The statements that define a name, but for those that only give it to something that has one."""
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            found.append(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not isinstance(node.value, (ast.Name, ast.Attribute)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [node] * any(isinstance(each, ast.Name) and each.id == name for each in targets)
    return found


def renamed(tops: Sequence[str], skip: Sequence[str], path: str, old: str, new: str, kind: str) -> list[str]:
    """What is wrong with a renaming, of what `path` defines by a statement of this kind."""
    problems, there = [], 0
    for each, tree in _sources(tops, skip):
        problems += [f"{each}: {old}"] if _mentions(tree, old) else []
        if each == path:
            there = sum(type(node).__name__ == kind for node in _made(tree, new))
    return problems + ([] if there == 1 else [f"{path}: no {new}"])


def moved(tops: Sequence[str], skip: Sequence[str], name: str, old: str, new: str) -> list[str]:
    """What is wrong with a function's move from one module to another."""
    problems, there = [], 0
    stem = old.rpartition("/")[2][: -len(".py")]
    for each, tree in _sources(tops, skip):
        here = len(_made(tree, name))
        there += here if each == new else 0
        problems += [f"{each}: {name}"] if here and each != new else []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                used = any(isinstance(use, ast.Name) and use.id == name for use in ast.walk(tree))
                if not used or (node.module or "").rpartition(".")[2] == stem:
                    problems.append(f"{each}: {name} is only handed on")
    return problems + ([] if there == 1 else [f"{new}: no {name}"])
