"""The pytest side of a grading child: collects sealed modules, runs the listed tests, reports how each ended.

Part of what `runner.py` is, in a file of its own because it needs pytest, which is imported first. A test passes if its setup,
its call and its teardown pass, and it is neither skipped nor expected to fail.

Each test has a *key*: path, class and function with its place among the tests of that function, `test_a.py::test_f#2`. Unlike
pytest's node ids, keys do not depend on the values of parameters, which a changed test changes.

Runs where agent code runs, so nothing that it says can be relied on alone: see `runner.py`.
"""

from __future__ import annotations

import importlib
import os
import signal
import site
import sys
import time
import types
import typing
from pathlib import Path

import pytest
from _pytest.fixtures import FixtureManager

if typing.TYPE_CHECKING:
    from composer_nb.harness.grading.guest.runner import Prepared, Say


def run(prepared: Prepared, say: Say) -> int:
    """Run the tests and return pytest's exit code."""
    if prepared.asked["site"]:  # an image's own packages
        sys.path += site.getsitepackages()
    sys.argv = ["pytest", "--junitxml=" + prepared.decoy, *map(os.path.relpath, prepared.tests)]
    options = ["-c", prepared.ini, "--rootdir", prepared.root, "--noconftest", "-s", "--assert=plain"]
    options += ["--import-mode=importlib", "--continue-on-collection-errors"]
    options += ["--basetemp=" + os.path.join(os.path.dirname(prepared.ini), "temporary")]
    for name in prepared.unused:
        options += ["-p", "no:" + name]
    plugins: list[object] = [Plugin(prepared, say)]
    if prepared.asked["record"]:
        plugins.append(importlib.import_module("composer_nb_grading_calls").Recorder(prepared, say))
    options += prepared.asked["select"]
    # pytest 9.2 looks into every object of every plugin for fixtures behind wrappers, only to warn of them.
    typing.cast(typing.Any, FixtureManager)._check_for_wrapped_fixture = lambda *_: None
    return int(pytest.main([*options, *prepared.tests], plugins=plugins))


class Sealed(pytest.Module):
    """A test module whose code is in memory."""

    module_name = ""

    def _getobj(self) -> typing.Any:
        module = importlib.import_module(self.module_name)
        self.config.pluginmanager.consider_module(module)
        return module


class Plugin:
    def __init__(self, prepared: Prepared, say: Say) -> None:
        self.prepared, self.say = prepared, say
        self.counts: dict[str, int] = {}
        self.keys: dict[pytest.Item, str] = {}
        self.phases: dict[pytest.Item, list[tuple[str, str, str]]] = {}
        self.failures: dict[pytest.Item, tuple[int, str, dict[str, str], list[str]]] = {}
        self.compared: list[str] = []
        self.calls = Calls(prepared) if prepared.asked["reach"] else None
        self.late = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        session.config.option.xmlpath = self.prepared.decoy
        # To show a traceback, pytest parses source, which Python 3.11 may end in SystemError where a `__del__` raises meanwhile,
        # and the whole run with it. That of a test's own failure is not even looked at (`pytest_itemcollected`).
        session.config.option.tbstyle = "no"
        for path in self.prepared.conftests:
            module = importlib.import_module(self.prepared.names[path])
            session.config.pluginmanager.register(module, name=os.path.join(self.prepared.root, path))

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector:
        return pytest.Dir.from_parent(parent, path=path)  # a Package would put its folder first on sys.path

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        name = self.prepared.names.get(os.path.relpath(module_path, self.prepared.root))
        if name is None:
            return None  # a file of the workspace beside the hidden ones; it is not run
        module = Sealed.from_parent(parent, path=module_path)
        module.module_name = name
        return module

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        parent = item.parent.nodeid if item.parent else ""
        base = parent + "::" + (getattr(item, "originalname", None) or item.name)
        number = self.counts[base] = self.counts.get(base, -1) + 1
        self.keys[item] = f"{base}#{number}"
        item.repr_failure = lambda *_: ""  # type: ignore[method-assign]  # nobody reads it

    @pytest.fixture(scope="session")
    def doctest_namespace(self) -> dict[str, object]:
        """Stand in for the fixture of pytest's doctest plugin, which conftests ask for in every test."""
        return {}

    def pytest_exception_interact(self, call: pytest.CallInfo[None], report: object) -> None:
        """Print why a module cannot be imported; for people, like all that is printed."""
        if isinstance(report, pytest.CollectReport) and call.excinfo:
            print(call.excinfo.exconly(tryshort=True)[:300], file=sys.stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.prepared.asked["keys"] is not None:
            keys = set(self.prepared.asked["keys"])
            items[:] = [item for item in items if self.keys[item] in keys]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> typing.Generator[None, object, object]:
        if self.calls is None:
            return (yield)
        began, self.calls.depths = time.monotonic(), {}
        sys.settrace(self.calls.note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seconds = round(time.monotonic() - began, 3)
            for path, line in self.calls.fresh():
                self.say(["place", path, line])
            depths = [[self.calls.numbers[code], depth] for code, depth in self.calls.depths.items()]
            self.say(["reached", self.keys[item], seconds, depths])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> typing.Generator[None, object, object]:
        seconds = self.prepared.asked["test_s"]
        if not seconds:
            return (yield)
        signal.signal(signal.SIGALRM, self.end)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """Note what is compared. pytest calls this for comparisons that fail, in a run that explains."""
        self.compared = [op, shown(left), shown(right)]

    def end(self, number: int, frame: object) -> None:
        self.late = True
        raise Endless

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> typing.Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        outcome = "skipped" if report.skipped or hasattr(report, "wasxfail") else report.outcome
        phases = self.phases.setdefault(item, [])  # of a test with subtests there are several calls
        phases.append((str(report.when), outcome, call.excinfo.typename if call.excinfo else ""))
        if self.prepared.asked["explain"] and call.excinfo and item not in self.failures:
            entries = [entry for entry in call.excinfo.traceback if entry.path == item.path]
            message = str(call.excinfo.value).strip().split("\n")[0][:200]
            line, values = (entries[-1].lineno + 1, plain(entries[-1].locals)) if entries else (0, {})
            compared = self.compared if call.excinfo.typename == "AssertionError" else []
            self.failures[item] = line, message, values, compared
        if report.when == "setup":
            self.compared = []
        if report.when == "teardown":
            complete = {"setup", "call", "teardown"} == {when for when, _, _ in phases}
            bad = [(verdict, why) for _, verdict, why in phases if verdict != "passed"]
            verdict, why = min(bad, default=("passed" if complete else "failed", ""))  # "failed" before "skipped"
            if self.late:  # whatever the test made of it
                verdict, why, self.late = "failed", "Endless", False
            if verdict == "failed" and self.prepared.asked["explain"]:
                self.say(["at", self.keys[item], *self.failures.get(item, (0, "", {}, []))])
            self.say([self.keys[item], verdict, why, item.nodeid])
        return report


PLAIN = (str, bytes, int, float, bool, type(None), list, tuple, dict, set)
SHOWN = 400  # characters of a value
VALUES = 40  # of one test


def plain(variables: typing.Mapping[str, object]) -> dict[str, str]:
    """Return the variables that can be written down, as `repr` writes them."""
    values = {name: value for name, value in variables.items() if type(value) in PLAIN and not name.startswith("@")}
    texts = {name: shown(value) for name, value in list(values.items())[:VALUES]}
    return {name: text for name, text in texts.items() if len(text) < SHOWN}


def shown(value: object) -> str:
    try:
        return repr(value)[:SHOWN]
    except Exception:  # of the code that is tested
        return ""


class Endless(BaseException):
    """A test's time is up. No `except Exception` of a test takes it for something else."""


class Calls:
    """A tracer of the workspace's functions that are called, except in other threads."""

    def __init__(self, prepared: Prepared) -> None:
        self.inside = prepared.root + os.sep
        self.sealed = {os.path.join(prepared.root, path) for path in prepared.names}
        self.depths: dict[types.CodeType, int] = {}
        self.numbers: dict[types.CodeType, int] = {}
        self.reported = 0

    def covers(self, code: types.CodeType) -> bool:
        return code.co_filename.startswith(self.inside) and code.co_filename not in self.sealed

    def note(self, frame: types.FrameType, event: str, argument: object) -> None:
        """A trace function for calls only."""
        code = frame.f_code
        if code not in self.depths and self.covers(code):
            self.numbers.setdefault(code, len(self.numbers))
            depth, at = 0, typing.cast("types.FrameType | None", frame)
            while at is not None:
                depth += self.covers(at.f_code)
                at = at.f_back
            self.depths[code] = depth

    def fresh(self) -> list[tuple[str, int]]:
        """Return the places of the functions that got a number since the last call, in the order of the numbers."""
        codes = list(self.numbers)[self.reported :]
        self.reported = len(self.numbers)
        return [(code.co_filename[len(self.inside) :], code.co_firstlineno) for code in codes]
