"""The pytest side of a grading child: collects sealed modules, runs the listed tests, says how each ended.

Part of what `runner.py` is, in a file of its own because it needs pytest, which is imported first. A test passes if its setup,
its call and its teardown pass, and it is neither skipped nor expected to fail.

Each test has a *key*: path, class and function with its place among the tests of that function, `test_a.py::test_f#2`. Unlike
pytest's node ids, keys do not depend on the values of parameters, which a changed test changes.

Runs where agent code runs, so nothing that it says can be relied on alone: see `runner.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
import typing
from pathlib import Path

import pytest

if typing.TYPE_CHECKING:
    from composer_nb.harness.grading.runner import Prepared, Say

NO_PLUGINS = [
    "cacheprovider", "terminal", "junitxml", "pastebin", "doctest", "setuponly", "setupplan", "stepwise",
    "faulthandler",
]  # fmt: skip


def run(prepared: Prepared, say: Say) -> int:
    """Runs the tests and returns pytest's exit code."""
    sys.path += [place for place in dict.fromkeys(prepared.search) if os.path.isdir(place)]
    os.chdir(prepared.root)
    sys.argv = ["pytest", "--junitxml=" + prepared.decoy, *map(os.path.relpath, prepared.tests)]
    options = ["-c", prepared.ini, "--rootdir", prepared.root, "--noconftest", "-s", "--assert=plain"]
    options += ["--import-mode=importlib", "--continue-on-collection-errors"]
    options += ["--basetemp=" + os.path.join(os.path.dirname(prepared.ini), "temporary")]
    for name in NO_PLUGINS:
        options += ["-p", "no:" + name]
    return int(pytest.main([*options, *prepared.tests], plugins=[Plugin(prepared, say)]))


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

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        session.config.option.xmlpath = self.prepared.decoy
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

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = self.prepared.keys
        if wanted is not None:
            items[:] = [item for item in items if self.keys[item] in wanted]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> typing.Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        outcome = "skipped" if report.skipped or hasattr(report, "wasxfail") else report.outcome
        phases = self.phases.setdefault(item, [])  # of a test with subtests there are several calls
        phases.append((str(report.when), outcome, call.excinfo.typename if call.excinfo else ""))
        if report.when == "teardown":
            complete = {"setup", "call", "teardown"} == {when for when, _, _ in phases}
            bad = [(said, why) for _, said, why in phases if said != "passed"] or [("failed", "")] * (not complete)
            said, why = min(bad, default=("passed", ""))  # "failed" before "skipped"
            self.say([self.keys[item], said, why, item.nodeid])
        return report
