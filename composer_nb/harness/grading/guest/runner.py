"""The program inside a grading box: runs hidden tests against the files that an agent left.

`box.py` hands it, compiled, to a bare interpreter inside the sandbox, with pytest's own modules, which live in memory and
nowhere on disk. It uses the standard library and pytest and never imports the project. Two kinds of process:

* the *parent* imports pytest, or is a copy of a process that has (`sandbox/guest/warm.py`), and never a line of what the agent or
  the task wrote. It starts the child, keeps its time, takes what it says, and prints one report at the end. It cannot be traced,
  and its descriptors not be opened, by what runs beside it as the same user (PR_SET_DUMPABLE).
* the *child* is a copy of it that reads the run's frame (files, tests, a nonce) from the parent's stdin, so that the parent never
  holds it, and runs pytest in a folder of its own.

A sandbox sees one run, so nothing of a run is left for another; what the run leaves behind ends with the sandbox.

Hidden tests are *sealed*: all hidden modules and conftests are compiled before anything else runs, their texts are let go, and
what lies at their paths is bait: empty files. Whoever reads those is noted, by their time of access. Sealing after collection, as
in the reference's experiment, would be too late for code that reads at import. The workspace comes last on `sys.path`, so that no
file in it can stand in for pytest or the standard library; ini files and conftests of the workspace are not read; plugins are not
looked for.

What this cannot promise: agent code runs in the child's interpreter. It can read the compiled tests, what is left of their texts
in memory, the nonce and every frame, and can replace any part of pytest, so every event of a child is worth no more than the
agent's word. That is why a child is never told which of its tests are true and which are changed: only the host knows that.

Does not cover tests that need their own source (`inspect.getsource`, assertion messages of pytest's rewriting) or are imported
again by processes that they start (multiprocessing's `spawn`), and data files of tests, which lie open in the workspace.
Covers Linux, Python 3.9 and newer (as far as the pytest of the host goes). Raises nothing: a run that cannot begin says why.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import importlib
import importlib.util
import json
import linecache
import marshal
import os
import select
import signal
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

PR_SET_DUMPABLE = 4
EVENT_BYTES = 4 << 20  # of one run; more is cut off, and what is cut off did not pass
OUTPUT_BYTES = 64 << 10  # of what one run printed, its head
FOLDER = "run"
PLUGIN = "composer_nb_grading_plugin"  # plugin.py, in a box
CALLS = "composer_nb_grading_calls"  # guest_calls.py, in a box
UNUSED = [
    "pastebin", "doctest", "cacheprovider", "setuponly", "setupplan", "stepwise", "faulthandler", "junitxml",
    "terminal",
]  # fmt: skip
DECOY = b"<?xml version='1.0' encoding='utf-8'?><testsuites name='pytest tests'></testsuites>\n"


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


class Memory:
    """An importer of modules from compiled code."""

    def __init__(self, codes: Kit | Codes) -> None:
        self.codes = codes

    def find_spec(self, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        if name not in self.codes:
            return None
        place, package, _ = self.codes[name]
        spec = importlib.util.spec_from_loader(name, self, origin=place, is_package=package)  # type: ignore[arg-type]
        if spec is not None:
            spec.has_location = True
            if package:
                spec.submodule_search_locations = [os.path.dirname(place)]
        return spec

    def create_module(self, spec: typing.Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        code = self.codes[module.__name__][2]
        exec(marshal.loads(code) if isinstance(code, bytes) else code, module.__dict__)


def main(kit: Kit) -> None:
    """Run what the frame on stdin asks for. argv: seconds that the run may take.

    A kit without pytest is for a process that has it imported, and for calls, which need none.
    """
    limit_s = float(sys.argv[1])
    prctl(PR_SET_DUMPABLE, 0)
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
    wake, note = os.pipe()
    for fd in (wake, note):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note)
    write(1, b"ready\n")  # from here on no fault is the machine's
    write(1, json.dumps(run(wake, limit_s)).encode() + b"\n")
    os._exit(0)  # without a look at every object


def write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def run(wake: int, limit_s: float) -> Json:
    """Follow the run to its end. Return what its child reported, what it printed, and which traces it left."""
    (heard, says), (output, prints), (waits, go) = os.pipe(), os.pipe(), os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            child(waits, says, prints)
        except BaseException:  # process boundary: to where the tests print
            traceback.print_exc()
        finally:
            os._exit(70)
    for fd in (says, prints, waits):
        os.close(fd)
    kept = {heard: bytearray(), output: bytearray()}
    deadline = began + limit_s
    ready: Json = {}
    if follow(pid, wake, kept, deadline, until=lambda: b"\n" in kept[heard]):
        line, _, kept[heard] = kept[heard].partition(b"\n")
        ready = json.loads(line.decode())
        if not ready.get("failed"):
            os.write(go, b"!")
    os.close(go)
    if ready:
        follow(pid, wake, kept, deadline, until=lambda: False)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    for fd in kept:
        os.close(fd)
    return {
        "failed": ready.get("failed", "" if ready else "it ended before it began"),
        "timed_out": not ended,
        "events": kept[heard][:EVENT_BYTES].decode("utf-8", "replace"),
        "output": kept[output][:OUTPUT_BYTES].decode("utf-8", "replace"),
        "bait_read": [path for path in ready.get("bait", ()) if read_since(path)],
        "decoy_changed": bool(ready) and changed(ready["decoy"]),
        "seconds": time.monotonic() - began,
    }


def follow(pid: int, wake: int, kept: dict[int, bytearray], deadline: float, until: typing.Callable[[], bool]) -> bool:
    """Read what a child writes, until it ends (False), its time is up (False), or `until` holds (True)."""
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    for fd in kept:
        os.set_blocking(fd, False)
        poller.register(fd, select.POLLIN)
    left = set(kept)
    while True:
        rest = deadline - time.monotonic()
        gone = rest <= 0 or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        for fd in tuple(left):
            if not take(fd, kept[fd]):
                left.discard(fd)
                poller.unregister(fd)
        if gone or until():
            return until()
        poller.poll(1 + 1000 * rest)
        try:
            os.read(wake, 4096)
        except BlockingIOError:
            pass


def take(fd: int, buffer: bytearray) -> bool:
    """Read what is there, within a bound, because a process may write without end. Return False at the end of the stream."""
    for _ in range(64):
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        if len(buffer) <= EVENT_BYTES:
            buffer += data
    return True


def read_since(path: str) -> bool:
    """Return whether a file's time of access is no longer what `bait` made it."""
    try:
        return os.stat(path, follow_symlinks=False).st_atime_ns != 0
    except OSError:
        return False


def changed(decoy: str) -> bool:
    """Return whether the report that nobody reads says something else now."""
    try:
        fd = os.open(decoy, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return os.read(fd, 1 << 16) != DECOY
    except OSError:
        return True
    finally:
        os.close(fd)


# The child.


def child(waits: int, says: int, prints: int) -> None:
    """Run the tests of the frame. Never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    job = marshal.loads(b"".join(iter(lambda: os.read(0, 1 << 20), b"")))
    nothing = os.open("/dev/null", os.O_RDONLY)
    for number, fd in enumerate((nothing, prints, prints, says, waits)):
        os.dup2(fd, number + 100, inheritable=False)
    for number in range(5):
        os.dup2(number + 100, number, inheritable=number < 3)
    os.closerange(5, 4096)
    prctl(PR_SET_DUMPABLE, 1)  # now that it holds nothing of the parent's
    nonce: str = job["nonce"]

    def say(what: typing.Any) -> None:
        write(3, (nonce + " " + json.dumps(what) + "\n").encode())

    try:
        prepared = Prepared(job)
        first: Json = {"bait": prepared.bait(), "decoy": prepared.decoy}
    except BaseException as error:  # process boundary: the host gets the reason
        first = {"failed": type(error).__name__ + ": " + str(error)[:300], "decoy": ""}
    write(3, json.dumps(first).encode() + b"\n")
    if "failed" in first:
        os._exit(0)
    del job, first
    os.read(4, 1)
    os.close(4)
    sys.meta_path.insert(0, Memory(prepared.codes))
    sys.path += [place for place in dict.fromkeys(prepared.search) if os.path.isdir(place)]
    os.chdir(prepared.root)
    code = importlib.import_module(CALLS if prepared.asked["calls"] else PLUGIN).run(prepared, say)
    say(["done", code])
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


class Prepared:
    """A run's folder with all its files, its hidden modules, compiled, and its options (`asked`)."""

    unused = UNUSED

    def __init__(self, job: Json) -> None:
        self.root = os.path.abspath(FOLDER)
        aside = tempfile.mkdtemp(prefix="pytest-")
        self.decoy, self.ini = os.path.join(aside, "junit.xml"), os.path.join(aside, "trusted.ini")
        hidden, files, packages = (job.pop(each) for each in ("hidden", "files", "packages"))
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
        place = os.path.join(self.root, path)
        code = compile(explained(text) if self.asked["explain"] else text, place, "exec", dont_inherit=True)
        package = os.path.basename(path) == "__init__.py"
        full = path[: -len("/__init__.py")] if package else path[: -len(".py")]
        base = os.path.dirname(full) if package else os.path.dirname(path)
        while base in packages and base:
            base = os.path.dirname(base)
        self.search.append(os.path.join(self.root, base) if base else self.root)
        short = os.path.relpath(full, base or ".").replace("/", ".")
        full = full.replace("/", ".")
        self.codes.setdefault(short, (place, package, code))
        self.codes.setdefault(full, (place, package, code))
        self.names[path] = short if self.codes[short][0] == place else full

    def bait(self) -> list[str]:
        """Lay empty files, last read in 1970, where hidden modules would lie. Return their paths."""
        laid = [os.path.join(self.root, path) for path in self.names]
        for path in laid:
            put(path, b"")
            os.utime(path, (0, 0))
            linecache.cache[path] = (0, None, [], path)  # tracebacks and warnings look here and so do not read it
        return laid


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
