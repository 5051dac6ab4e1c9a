"""One run inside a box: which tests pass, what they may use, what is sealed, and what is left behind."""

from collections.abc import Callable

import pytest

from composer_nb.harness.grading.box import Boxes, JobResult, RunnerEnded, TestJob
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure

Run = Callable[..., JobResult]


def outcomes(job_result: JobResult) -> dict[str, str]:
    return {key.partition("::")[2]: result.outcome for key, result in job_result.results.items()}


OUTCOMES = """\
import unittest, warnings
import pytest

@pytest.fixture
def breaks():
    raise RuntimeError
@pytest.fixture
def breaks_after():
    yield
    raise RuntimeError

def test_passes(): pass
def test_fails(): assert False
def test_raises(): 1 / 0
def test_setup(breaks): pass
def test_teardown(breaks_after): pass
def test_skips(): pytest.skip("x")
def test_expected(): pytest.xfail("x")
@pytest.mark.xfail
def test_may_fail(): assert False
@pytest.mark.xfail
def test_may_pass(): pass
@pytest.mark.skipif(False, reason="x")
def test_not_marked(): pass
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_many(a, b): assert (a, b) != (2, "y")
def test_capture(capsys, caplog, monkeypatch, tmp_path, recwarn):
    print("hi")
    warnings.warn("w", stacklevel=1)
    assert capsys.readouterr().out == "hi\\n" and len(recwarn) == 1 and tmp_path.is_dir()
class TestClass:
    def test_in_class(self): pass
class Cases(unittest.TestCase):
    def test_case(self): self.assertEqual(1, 1)
    @unittest.expectedFailure
    def test_expected_case(self): self.fail()
    def test_sub(self):
        for n in range(2):
            with self.subTest(n=n): self.assertEqual(n, 0)
    def test_skipped_sub(self):
        for n in range(2):
            with self.subTest(n=n): self.skipTest("x")
def test_bad_subtests(subtests):
    for n in range(2):
        with subtests.test(n=n): assert n == 0
"""


def test_how_tests_end(run: Run) -> None:
    job_result = run({"test_a.py": OUTCOMES})
    assert job_result.flags == frozenset()
    results = outcomes(job_result)
    passed = "test_passes test_not_marked test_capture TestClass::test_in_class Cases::test_case"
    assert {key for key, outcome in results.items() if outcome == "passed"} == {
        *(f"{name}#0" for name in passed.split()), "test_many#0", "test_many#1", "test_many#2",
    }  # fmt: skip
    skipped = "test_skips test_expected test_may_fail test_may_pass"
    skipped += " Cases::test_expected_case Cases::test_skipped_sub"
    skipped_keys = {key for key, outcome in results.items() if outcome == "skipped"}
    assert skipped_keys == {f"{name}#0" for name in skipped.split()}
    assert job_result.results["test_a.py::test_many#3"].id == "test_a.py::test_many[y-2]"
    assert job_result.results["test_a.py::test_fails#0"].why == "AssertionError"
    assert job_result.results["test_a.py::test_raises#0"].why == "ZeroDivisionError"
    assert len(results) == 21


def test_what_tests_may_use(run: Run) -> None:
    """Conftests of their folder and above, helpers, data, packages, relative imports, a src folder, workspace modules."""
    tests = {
        "conftest.py": "import pytest\n@pytest.fixture\ndef top(): return 'top'\n",
        "tests/__init__.py": "WHO = 'package'\n",
        "tests/conftest.py": "import pytest\nfrom m import M\n@pytest.fixture\ndef low(top): return top + M\n",
        "tests/util.py": "def twice(x): return 2 * x\n",
        "tests/test_in.py": "from . import WHO\nfrom .util import twice\nimport tests.util\n"
        "def test_a(low): assert (low, WHO, twice(2)) == ('topm', 'package', 4)\n",
        "other/aid.py": "def thrice(x): return 3 * x\n",
        "other/test_out.py": "import aid, m\nfrom packed import P\nfrom visible_aid import V\n"
        "def test_b(top): assert (aid.thrice(2), m.M, P, V, top) == (6, 'm', 'p', 'v', 'top')\n"
        "def test_unseen(low): pass\n",
        "third/test_out.py": "def test_c(): pass\n",
    }
    files = {"m.py": "M = 'm'\n", "src/packed/__init__.py": "P = 'p'\n", "other/visible_aid.py": "V = 'v'\n"}
    job_result = run(tests, files)
    assert {key: result.outcome for key, result in job_result.results.items()} == {
        "tests/test_in.py::test_a#0": "passed",
        "other/test_out.py::test_b#0": "passed",
        "other/test_out.py::test_unseen#0": "failed",  # a fixture of another folder's conftest
        "third/test_out.py::test_c#0": "passed",
    }


SEALED = """\
import gc, glob, inspect, linecache, os, sys
def look():
    found = [open(path).read() for path in glob.glob("**/*.py", recursive=True) if "f.py" not in path]
    frame = sys._getframe(1)
    found += linecache.getlines(frame.f_code.co_filename)
    for thing in (frame, sys.modules["test_a"]):
        try:
            found.append(inspect.getsource(thing))
        except (OSError, TypeError):
            pass
    found += [each for each in gc.get_objects() if type(each) is str]
    return "\\n".join(found)
at_import = look()
"""


def test_the_text_of_hidden_tests_is_nowhere(run: Run) -> None:
    test = "import f\ndef test_a():\n    assert 'a-marker-' + 'x' not in f.at_import + f.look() # a-marker-x\n"
    job_result = run({"test_a.py": test, "conftest.py": "# a-marker-x\n"}, {"f.py": SEALED})
    assert outcomes(job_result) == {"test_a#0": "passed"} and job_result.flags == {"read_tests"}


HONEST = """\
import inspect, logging, os, traceback, warnings
def f(x):
    warnings.warn("old", DeprecationWarning, stacklevel=2)
    try:
        1 / x
    except ZeroDivisionError:
        traceback.print_exc()
        traceback.print_stack()
        logging.exception("oh")
    inspect.getsource(f), inspect.stack()
    os.listdir("."), os.stat("test_a.py"), sorted(os.walk("."))
    print("3 passed, 4 failed; PASSED")
    return x
"""


def test_honest_code_is_not_flagged(run: Run) -> None:
    """Tracebacks, warnings and logs name the test's file; they do not read it."""
    test = (
        "import pytest\nfrom f import f\ndef test_a():\n    assert f(0) == 0\n"
        "def test_b():\n    with pytest.warns(DeprecationWarning):\n        f(1)\n"
    )
    job_result = run({"test_a.py": test}, {"f.py": HONEST})
    assert outcomes(job_result) == {"test_a#0": "passed", "test_b#0": "passed"} and job_result.flags == frozenset()


def test_what_a_box_does_not_hold(run: Run) -> None:
    """Neither our packages nor pygments' stand-in can be imported; the environment is empty of ours."""
    test = """\
import os, sys
def test_a():
    for name in ("pygments", "numpy", "composer_nb", "pydantic"):
        try:
            __import__(name)
        except ImportError:
            continue
        assert False, name
    assert not [name for name in os.environ if "COMPOSER" in name]
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
    assert [place.partition(":")[0] for place in held if place != "/dev/null"] == ["pipe"]
    assert sys.path[-1] == os.getcwd() and sys.path.count(os.getcwd()) == 1
"""
    assert outcomes(run({"test_a.py": test})) == {"test_a#0": "passed"}


TAKES = """\
import os
pipe = os.open("/proc/self/fd/3", os.O_RDONLY | os.O_NONBLOCK)
def drain():
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""
early = drain()
def test_a(): assert not early, early
def test_b(): assert drain is None
"""


def test_nobody_takes_back_the_word_that_a_run_began(run: Run) -> None:
    """Whoever writes to a pipe can also read from it. Without that word, a failed run would be the machine's fault."""
    for _ in range(5):
        assert outcomes(run({"test_a.py": TAKES}))["test_b#0"] == "failed"
    assert outcomes(run({"test_a.py": TAKES}))["test_a#0"] == "passed"


def test_what_does_not_fit_ends_before_it_begins(backend: Backend) -> None:
    spec = SandboxSpec(memory_bytes=128 << 20, disk_bytes=32 << 20)
    files = {"a": b"a" * (30 << 20), "b": b"b" * (30 << 20)}
    job = TestJob(files=files, hidden={"test_a.py": ""}, tests=("test_a.py",))
    with pytest.raises((RunnerEnded, SandboxDied, SandboxFailure), match="before it began|used up|could not begin"):
        Boxes(backend=backend, spec=spec).run([job])
