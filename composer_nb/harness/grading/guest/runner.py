"""The program inside a grading box: runs hidden tests against the files that an agent left.

`box.py` hands it, compiled, to a bare interpreter inside the sandbox, with pytest's own modules, which live in memory and
nowhere on disk; or to a copy of a process that has pytest imported (`sandbox/guest/warm.py`). It uses the standard library and
pytest and never imports the project. It reads the run's frame (files, tests, a nonce) from stdin, runs pytest in a folder of its
own, and writes events to stdout; what tests print goes to stderr. Its parent is the sandbox's resident program, which keeps its
time and cannot be traced, killed or read from here. What it has taken, nobody here can take back, so no line of the agent's or
the task's code runs before it has taken the word that the run begins (`taken`).

A sandbox sees one run, so nothing of a run is left for another; what the run leaves behind ends with the sandbox.

Hidden tests are *sealed*: all hidden modules and conftests are compiled before anything else runs, their texts are let go, and
what lies at their paths is bait: empty files. Whoever reads those is noted, by their time of access. Sealing after collection, as
in the reference's experiment, would be too late for code that reads at import. The workspace comes last on `sys.path`, so that no
file in it can stand in for pytest or the standard library; ini files and conftests of the workspace are not read; plugins are not
looked for.

What this cannot promise: agent code runs in this interpreter. It can read the compiled tests, what is left of their texts
in memory, the nonce and every frame, and can replace any part of pytest, so every event is worth no more than the agent's word.
That is why a run is never told which of its tests are true and which are changed: only the host knows that.

Does not cover tests that need their own source (`inspect.getsource`, assertion messages of pytest's rewriting) or are imported
again by processes that they start (multiprocessing's `spawn`), and data files of tests, which lie open in the workspace.
Covers Linux, Python 3.9 and newer (as far as the pytest of the host goes). Raises nothing: a run that cannot begin says why.
"""

from __future__ import annotations

import ast
import atexit
import fcntl
import importlib
import importlib.util
import json
import linecache
import marshal
import os
import sys
import tempfile
import time
import traceback
import types
import typing

Kit = dict[str, tuple[str, bool, bytes]]  # name -> path, whether a package, marshalled code
Codes = dict[str, tuple[str, bool, types.CodeType]]
Json = dict[str, typing.Any]
Say = typing.Callable[[typing.Any], None]

FIONREAD = 0x541B  # how much of a pipe nobody has read yet
FOLDER, DECOY_AT = "run", "junit.xml"  # in the workspace
PLUGIN = "composer_nb_grading_plugin"  # plugin.py, in a box
CALLS = "composer_nb_grading_calls"  # guest_calls.py, in a box
UNUSED = [
    "pastebin", "doctest", "cacheprovider", "setuponly", "setupplan", "stepwise", "faulthandler", "junitxml",
    "terminal",
]  # fmt: skip
DECOY = b"<?xml version='1.0' encoding='utf-8'?><testsuites name='pytest tests'></testsuites>\n"


class Memory:
    """An importer of modules from compiled code."""

    def __init__(self, codes: Kit | Codes) -> None:
        self.codes = codes

    def find_spec(self, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        if name not in self.codes:
            return None
        path_of_code, package, _ = self.codes[name]
        spec = importlib.util.spec_from_loader(name, self, origin=path_of_code, is_package=package)  # type: ignore[arg-type]
        if spec is not None:
            spec.has_location = True
            if package:
                spec.submodule_search_locations = [os.path.dirname(path_of_code)]
        return spec

    def create_module(self, spec: typing.Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        code = self.codes[module.__name__][2]
        exec(marshal.loads(code) if isinstance(code, bytes) else code, module.__dict__)


def main(kit: Kit) -> None:
    """Run what the frame on stdin asks for. Never returns after it has said that it is ready.

    A kit without pytest is for a process that has it imported, and for calls, which need none.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.meta_path.insert(0, Memory(kit))
    if "pytest" in kit or "pytest" in sys.modules:
        from _pytest.config import default_plugins

        for name in default_plugins:
            if name not in UNUSED:
                importlib.import_module("_pytest." + name)
        importlib.import_module(PLUGIN)
    for name in [name for name in kit if name.partition(".")[0] == "pygments"]:  # a stand-in, of use to nobody else
        del kit[name]
        sys.modules.pop(name, None)
    write(1, b"ready\n")  # from here on no fault is the machine's
    try:
        run()
    except BaseException:  # process boundary: to where the tests print
        traceback.print_exc()
    finally:
        os._exit(70)


def write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def run() -> None:
    """Run the tests of the frame. Never returns."""
    job = marshal.loads(b"".join(iter(lambda: os.read(0, 1 << 20), b"")))
    nothing = os.open("/dev/null", os.O_RDONLY)
    for number, fd in enumerate((nothing, 2, 2, 1)):
        os.dup2(fd, number + 100, inheritable=False)
    for number in range(4):
        os.dup2(number + 100, number, inheritable=number < 3)
    os.closerange(4, 4096)
    nonce: str = job["nonce"]

    def say(what: typing.Any) -> None:
        write(3, (nonce + " " + json.dumps(what) + "\n").encode())

    try:
        prepared = Prepared(job)
        prepared.bait()
    except BaseException as error:  # process boundary: the host gets the reason
        write(3, ("failed: " + type(error).__name__ + ": " + repr(str(error)[:300]) + "\n").encode())
        os._exit(0)
    del job
    write(3, b"began\n")
    taken(3)
    sys.meta_path.insert(0, Memory(prepared.codes))
    sys.path += [folder for folder in dict.fromkeys(prepared.search) if os.path.isdir(folder)]
    os.chdir(prepared.root)
    code = importlib.import_module(CALLS if prepared.asked["calls"] else PLUGIN).run(prepared, say)
    say(["done", code])
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # without a look at every object


def taken(pipe: int) -> None:
    """Wait until all that was written to a pipe has been read from it. Whoever holds one end of a pipe can open the other."""
    while any(fcntl.ioctl(pipe, FIONREAD, bytes(4))):
        time.sleep(0.0002)


class Prepared:
    """A run's folder with all its files, its hidden modules, compiled, and its options (`asked`)."""

    unused = UNUSED

    def __init__(self, job: Json) -> None:
        self.root = os.path.abspath(FOLDER)
        aside = tempfile.mkdtemp(prefix="pytest-")
        self.decoy, self.ini = os.path.abspath(DECOY_AT), os.path.join(aside, "trusted.ini")
        hidden, files, packages = (job.pop(name) for name in ("hidden", "files", "packages"))
        self.asked = {name: value for name, value in job.items() if name != "nonce"}
        put(self.decoy, DECOY)
        put(self.ini, b"[pytest]\n" + job["ini"].encode())
        installed = os.path.join(aside, "packages")
        for path, data in packages.items():
            put(os.path.join(installed, path), data)
        for path, data in files.items():
            put(os.path.join(self.root, path), data)
        self.codes: Codes = {}
        self.names: dict[str, str] = {}
        self.search = [installed, self.root, os.path.join(self.root, "src")]
        folders = {os.path.dirname(path) for path in (*files, *hidden) if path.endswith("__init__.py")}
        for path, text in sorted(hidden.items()):
            self._add(path, text, folders)
        self.tests = [os.path.join(self.root, path) for path in job["tests"]]
        self.conftests = sorted((path for path in hidden if os.path.basename(path) == "conftest.py"), key=len)

    def _add(self, path: str, text: str, packages: set[str]) -> None:
        file = os.path.join(self.root, path)
        code = compile(explained(text) if self.asked["explain"] else text, file, "exec", dont_inherit=True)
        package = os.path.basename(path) == "__init__.py"
        full = path[: -len("/__init__.py")] if package else path[: -len(".py")]
        base = os.path.dirname(full) if package else os.path.dirname(path)
        while base in packages and base:
            base = os.path.dirname(base)
        self.search.append(os.path.join(self.root, base) if base else self.root)
        short = os.path.relpath(full, base or ".").replace("/", ".")
        full = full.replace("/", ".")
        self.codes.setdefault(short, (file, package, code))
        self.codes.setdefault(full, (file, package, code))
        self.names[path] = short if self.codes[short][0] == file else full

    def bait(self) -> None:
        """Lay empty files, last read in 1970, where hidden modules would lie."""
        for path in [os.path.join(self.root, path) for path in self.names]:
            put(path, b"")
            os.utime(path, (0, 0))
            linecache.cache[path] = (0, None, [], path)  # tracebacks and warnings look here and so do not read it


def explained(text: str) -> typing.Any:
    """Return a module whose assertions pass both sides of a failing comparison to pytest."""
    from _pytest.assertion.rewrite import rewrite_asserts

    tree = ast.parse(text)
    rewrite_asserts(tree, text.encode())
    return tree


def put(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
