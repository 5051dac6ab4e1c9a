"""Commands in copies of a process that has pytest imported do what they do in new interpreters, and leave nothing to the next."""

from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox.contract import Backend, ExecResult, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.toolchain import PLACE, TESTING

WARM = SandboxSpec(memory_bytes=256 << 20, disk_bytes=16 << 20, warm=True)
PYTEST = ("python", "-Bm", "pytest", "-q", "--no-header", "--color=no", "-p", "no:cacheprovider")
COPIED = "import sys; print(len(sys.modules) > 200)"
TESTS = b"""
import os, sys
def test_right():
    assert exit and os.getcwd() == sys.path[0] == os.environ["HOME"]
def test_wrong():
    assert [1, 2] == [1, 3], "differs"
def test_input():
    assert os.read(0, 9) == b""
"""


@pytest.fixture
def box(bwrap: Backend) -> Iterator[Sandbox]:
    with bwrap.create(WARM) as sandbox:
        assert sandbox.warm
        yield sandbox


def run_pytest(box: Sandbox, *, warm: bool = True, **environment: str) -> ExecResult:
    return box.exec(PYTEST, env={"PYTHONPATH": f"{PLACE}/{TESTING}"} | environment, warm=warm)


def code(box: Sandbox, text: str, *, seed: str = "0", stdin: bytes = b"", timeout_s: float = 20) -> ExecResult:
    command = ["python3", "-s", "-S", "-c", text, "one", "two"]
    return box.exec(command, env={"PYTHONHASHSEED": seed}, stdin=stdin, warm=True, timeout_s=timeout_s)


def test_tests_say_what_they_say_in_a_new_interpreter(box: Sandbox) -> None:
    box.write("test_all.py", TESTS)
    copy, new = run_pytest(box), run_pytest(box, warm=False)
    assert copy.exit_code == new.exit_code == 1 and copy.stderr == new.stderr == b""
    assert copy.stdout.split(b" in ")[0] == new.stdout.split(b" in ")[0] and b"1 failed, 2 passed" in copy.stdout
    box.write("test_all.py", b"def test_now():\n    pass\n")
    assert b"1 passed" in run_pytest(box).stdout, "nothing is left of the first run"


CONFIGURED = b"""
import pytest
def test_what_the_session_knows(pytestconfig):
    known, manager = pytestconfig.invocation_params, pytestconfig.pluginmanager
    print(known.dir, known.args, pytestconfig.rootpath, pytestconfig.inipath, pytestconfig.option.verbose)
    print(sorted(name for name, plugin in manager.list_name_plugin() if plugin and not name.isdigit()))
    assert "own: a mark" in pytestconfig.getini("markers")
    again = pytest.main(["--collect-only", "-q", __file__])
    assert again == 0 and manager.has_plugin("terminal") and not manager.has_plugin("cacheprovider")
"""


def test_a_configuration_that_was_made_ahead_is_like_a_new_one(box: Sandbox) -> None:
    box.write("test_configured.py", CONFIGURED)
    box.write("pytest.ini", b"[pytest]\naddopts = -s -vv\nmarkers =\n    own: a mark\n")
    copy, new = run_pytest(box), run_pytest(box, warm=False)
    assert copy.exit_code == new.exit_code == 0, copy.stdout
    assert copy.stdout.split(b" in ")[0] == new.stdout.split(b" in ")[0]


def test_what_would_differ_gets_a_new_interpreter(box: Sandbox) -> None:
    """Variables that an interpreter starts with, and a workspace with modules of the same names."""
    box.write("test_where.py", b"def test():\n    import sys\n    assert sys.flags.no_site == 1\n")
    values = {"PYTHONHASHSEED": "7", "PYTHONWARNINGS": "ignore", "LC_ALL": "C.UTF-8", "PATH": "/bin:/usr/local/bin"}
    assert [run_pytest(box, **{name: value}).exit_code for name, value in values.items()] == [1] * 4
    for path in ("packaging/__init__.py", "shlex.py", "src/tarfile.py", ".local/x"):
        assert run_pytest(box).exit_code == 0
        box.write(path, b"")
        assert run_pytest(box).exit_code != 0
        box.remove(path)
        box.exec(["rm", "-r", path.split("/")[0]])


def test_code_ends_as_in_a_new_interpreter(box: Sandbox) -> None:
    for text in ("raise SystemExit(3)", "raise SystemExit('why')", "1 / 0", "import os; os._exit(9)"):
        copy, new = code(box, text), code(box, text, seed="1")
        assert copy.exit_code == new.exit_code, text
        assert copy.stderr.split(b"\n")[-2:] == new.stderr.split(b"\n")[-2:], text
    assert code(box, COPIED).stdout == b"True\n" and code(box, COPIED, seed="1").stdout == b"False\n"
    result = code(box, "import sys; print(sys.argv, sys.stdin.read(), sys.flags.hash_randomization)", stdin=b"given")
    assert result.stdout == b"['-c', 'one', 'two'] given 0\n"
    assert code(box, "import atexit; atexit.register(print, 'bye')").stdout == b"bye\n"


def test_a_copy_is_ended_with_all_that_it_started(box: Sandbox) -> None:
    result = code(box, "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(60)", timeout_s=0.5)
    assert result.timed_out and box.stats().processes == 0
    assert code(box, "print(1)").stdout == b"1\n"


def test_a_copy_holds_no_request_and_no_descriptor_of_the_resident_program(box: Sandbox) -> None:
    text = """
import gc, os, sys
frame, names = sys._getframe(), []
while frame:
    names.append(frame.f_code.co_name)
    frame = frame.f_back
secret = b"se" + b"cret-of-the-request"
values = [each for object in gc.get_objects() for each in gc.get_referents(object)]
kinds = (bytes, bytearray, memoryview)
held = [type(each) for each in values if isinstance(each, kinds) and each is not secret and secret in bytes(each)]
print(names, held, sorted(os.listdir("/proc/self/fd"))[:-1])
"""
    result = code(box, text, stdin=b"secret-of-the-request")
    assert result.stdout == b"['<module>', 'run', 'main', '<module>', '<module>'] [] ['0', '1', '2']\n", result
