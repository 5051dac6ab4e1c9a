"""What a grading box is given to run: pytest's own modules and our two, compiled by the box's own interpreter.

They travel as one block over the box's stdin and are imported from memory: nothing of it is on a disk in the box, nothing else of
our environment comes with it, and no box waits for hundreds of files. A block is made once for each kind of box in a process.

The stand-in for pygments (`sandboxes/testing.py`) is gone again when tests run. Projects that are pytest, pluggy, iniconfig or
packaging themselves can not be graded so: the box's copies would be tested.
"""

from __future__ import annotations

import marshal
import threading
from pathlib import Path

from composer_nb.harness.calls import SandboxFailure, SandboxUnavailable
from composer_nb.harness.grading.runner import PLUGIN
from composer_nb.harness.sandboxes.contract import Backend, SandboxSpec
from composer_nb.harness.sandboxes.testing import pytest_modules

RUNNER = "composer_nb_grading_runner"

_START = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # `-c` puts the current directory first
import marshal, os, types
def exactly(size):
    parts = []
    while size:
        parts.append(os.read(0, min(size, 1 << 20)))
        if not parts[-1]:
            sys.exit("no frame")
        size -= len(parts[-1])
    return b"".join(parts)
"""
_COMPILE = (
    _START
    + """\
table = marshal.loads(exactly(int.from_bytes(exactly(4), "big")))
for name, (path, package, text) in table.items():
    table[name] = (path, package, marshal.dumps(compile(text, path, "exec", dont_inherit=True)))
sys.stdout.buffer.write(marshal.dumps(table, 4))
"""
)
_RUN = (
    _START
    + f"""\
table = marshal.loads(exactly(int.from_bytes(exactly(4), "big")))
module = types.ModuleType({RUNNER!r})
exec(marshal.loads(table.pop({RUNNER!r})[2]), module.__dict__)
module.main(table)
"""
)

_blocks: dict[tuple[str, str], bytes] = {}
_lock = threading.Lock()


def command(timeout_s: float) -> list[str]:
    """What starts the runner in a box; its stdin is a block, framed, and the run's frame up to its end."""
    return ["python3", "-s", "-S", "-c", _RUN, str(timeout_s)]


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def block(backend: Backend, spec: SandboxSpec | None = None) -> bytes:
    """The modules, compiled for the boxes that `backend` makes of `spec`.

    Raises SandboxUnavailable when pytest is not installed here, or is not for the box's Python, and SandboxFailure.
    """
    kind = (backend.name, spec.image if spec else "")
    with _lock:
        if kind not in _blocks:
            _blocks[kind] = _compiled(backend, spec)
        return _blocks[kind]


def _compiled(backend: Backend, spec: SandboxSpec | None) -> bytes:
    box = backend.create(spec)
    try:
        stdin = framed(marshal.dumps(sources(), 4))
        done = box.exec(["python3", "-s", "-S", "-c", _COMPILE], stdin=stdin, output_bytes=64 << 20)
        if done.exit_code == 0 and not done.truncated:
            tried = box.exec(command(1.0), stdin=framed(done.stdout))
            if tried.stdout.startswith(b"ready\n"):
                return done.stdout
            done = tried
    finally:
        box.destroy()
    told = "".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
    if b"SyntaxError" in done.stderr or b"ModuleNotFoundError" in done.stderr:
        raise SandboxUnavailable(f"the pytest installed here is not for the Python of the sandbox: {told}")
    raise SandboxFailure(f"pytest could not be prepared in a sandbox: exit code {done.exit_code}, {told}")


def sources() -> dict[str, tuple[str, bool, str]]:
    """Module name -> (path to show, whether it is a package, text). Raises SandboxUnavailable without pytest."""
    found = pytest_modules()
    for name, file_name in (
        (RUNNER, "runner.py"),
        (PLUGIN, "plugin.py"),
    ):  # the latter imports pytest: it is only read here
        found[name] = (f"/kit/{name}.py", False, Path(__file__).with_name(file_name).read_text(encoding="utf-8"))
    return found
