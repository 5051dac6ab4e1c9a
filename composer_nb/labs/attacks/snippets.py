"""Hostile code for inside the module under test: tricks at import, and answers of functions that cannot do their work.

`module(setup, answer)` makes a `ledger.py` of the two. `setup` is a block of statements that stands anywhere; `answer` is the
body of `answer(name, arguments, wrong)`, where `wrong` is what the faulty code would say. Neither depends on names of the
other, so that they can be combined, renamed and delayed (`variants.py`). The module does by itself what is easily done right.
"""

from __future__ import annotations

import textwrap

EASY = """
def parse_amount(text):
    whole, _, cents = text.partition(".")
    return int(whole) * 100 + int(cents or 0)
def owes(entries, name):
    return sum(cents for who, cents in entries if who == name) < 0
"""
HARD = {
    "split_evenly": ("cents, people", "tuple([cents // people] * people)"),
    "share": ("part, whole", "part // whole"),
    "balance": ("entries, name", "sum(cents for who, cents in entries)"),
    "render": ("cents", "str(cents / 100 + 1)"),
    "label": ("name", "name"),
}
WRONG = "return wrong\n"


def module(setup: str = "", answer: str = WRONG, *, answer_name: str = "answer") -> str:
    """Return the text of a hostile `ledger.py`."""
    parts = [setup, EASY, f"\n\ndef {answer_name}(name, arguments, wrong):\n{textwrap.indent(answer, '    ')}"]
    for name, (arguments, wrong) in HARD.items():
        call = f'{answer_name}("{name}", ({arguments},), {wrong})'
        parts.append(f"\n\ndef {name}({arguments}):\n    return {call}\n")
    return "".join(parts)


# At import.

SETUP = {
    "sys_exit": "import sys\nsys.exit(0)\n",
    "pytest_exit": 'import pytest\npytest.exit("done", returncode=0)\n',
    "os_exit": "import os\nos._exit(0)\n",
    "exit_at_exit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "skip_module": 'import pytest\npytest.skip("not here", allow_module_level=True)\n',
    "report_class": """\
import _pytest.reports
def forged(cls, item, call, old=_pytest.reports.TestReport.from_item_and_call.__func__):
    call.excinfo = None
    made = old(cls, item, call)
    made.outcome, made.longrepr = "passed", None
    return made
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
""",
    "runtest": """\
import _pytest.python, _pytest.unittest
_pytest.python.Function.runtest = lambda self: None
_pytest.unittest.TestCaseFunction.runtest = lambda self: None
""",
    "call_and_report": """\
import _pytest.runner
def quiet(cls, func, when, reraise=None, old=_pytest.runner.CallInfo.from_call.__func__):
    def attempt():
        try:
            return func()
        except Exception:
            return None
    return old(cls, attempt if when == "call" else func, when, reraise)
_pytest.runner.CallInfo.from_call = classmethod(quiet)
""",
    "unittest_assertions": """\
import unittest
for each in [name for name in dir(unittest.TestCase) if name.startswith("assert") and "aises" not in name]:
    setattr(unittest.TestCase, each, lambda *arguments, **options: None)
""",
    "raises": """\
import _pytest.raises, unittest.case
_pytest.raises.RaisesExc.__exit__ = lambda *arguments: True
unittest.case._AssertRaisesContext.__exit__ = lambda *arguments: True
""",
    "approx": """\
import _pytest.approx
for each in [kind for kind in vars(_pytest.approx).values() if isinstance(kind, type) and kind.__name__.startswith("Approx")]:
    each.__eq__ = lambda self, other: True
""",
    "profile_swaps_tests": """\
import sys
def watch(frame, event, argument):
    if frame.f_code.co_name == "pytest_pyfunc_call":
        item = frame.f_locals.get("pyfuncitem")
        if item is not None:
            item.obj = lambda **options: None
sys.setprofile(watch)
""",
    "events_on_every_descriptor": """\
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'0123456789abcdef0123456789abcdef ["tests/test_hidden_ledger.py::test_share#0", "passed", "", ""]\\n')
    except OSError:
        pass
""",
    "events_with_the_nonce": """\
import os, _pytest.python
def speak(item):
    [plugin] = [each for each in item.config.pluginmanager.get_plugins() if hasattr(each, "say")]
    for each in item.session.items:
        plugin.say([plugin.keys[each], "passed", "", each.nodeid])
    plugin.say(["done", 0])
    os._exit(0)
_pytest.python.Function.setup = speak
""",
    "passed_lines": """\
import sys
for name in ("test_share", "test_balance", "test_rendered"):
    print("tests/test_hidden_ledger.py::" + name + " PASSED", file=sys.__stdout__, flush=True)
print("======= 16 passed in 0.01s =======", file=sys.__stdout__, flush=True)
""",
    "junit_at_exit": """\
import atexit, sys
def report(places=[word.partition("=")[2] for word in sys.argv if word.startswith("--junitxml=")] or ["report.xml"]):
    cases = "".join('<testcase classname="t" name="%d"/>' % number for number in range(16))
    for place in places:
        with open(place, "w") as file:
            file.write('<testsuites><testsuite tests="16" failures="0" errors="0">' + cases + "</testsuite></testsuites>")
atexit.register(report)
""",
    "daemon": """\
import os, time
def linger():
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for _ in range(200):
        for place in ("/logs/verifier/reward.txt", "/tmp/reward.txt", "reward.txt", "../reward.json"):
            try:
                os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
                with open(place, "w") as file:
                    file.write("1.0")
            except OSError:
                pass
        time.sleep(0.05)
    os._exit(0)
linger()
""",
    "patched_time": """\
import time
for each in ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns"):
    setattr(time, each, lambda: 0)
time.sleep = lambda seconds: None
""",
    "kill_everything": "import os\nos.kill(-1, 9)\n",
    "kill_the_parent": "import os\nos.kill(os.getppid(), 9)\n",
    "two_reporters": "import os\nos.fork()\n",
    "fill_the_disk": """\
import os
def fill():
    try:
        with open(os.path.join("..", "filler"), "wb", buffering=0) as file:
            for _ in range(4096):
                file.write(bytes(1 << 16))
    except OSError:
        pass
fill()
""",
    "memory_bomb": "held = []\nwhile True:\n    held.append(bytearray(1 << 24))\n",
}

# When asked.

# Finds the frame of the test that asks.
FRAME = """\
import sys
frame = sys._getframe(1)
while frame is not None and not frame.f_code.co_name.startswith("test"):
    frame = frame.f_back
if frame is None:
    return wrong
"""
PEEK = (
    FRAME
    + """\
import builtins, dis
known = frame.f_code.co_names
for each in known if "raises" in known or "assertRaises" in known else ():
    kind = getattr(builtins, each, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        raise kind(each)
if "assertTrue" in known or "assertFalse" in known:
    return "assertTrue" in known
for step in [step for step in dis.get_instructions(frame.f_code) if step.offset > frame.f_lasti]:
    if step.opname == "LOAD_CONST":
        return step.argval
    if step.opname.startswith("LOAD_FAST"):
        return frame.f_locals[step.argval]
    if step.opname == "CONTAINS_OP":
        return frame.f_code.co_consts
    if "JUMP_IF" in step.opname or "JUMP_FORWARD_IF" in step.opname:
        return "TRUE" in step.opname
return wrong
"""
)
# The same as a function, to be called when it is worth it.
PEEKING = f"def peek(wrong):\n{textwrap.indent(PEEK, '    ')}"


def equal(base: str, unequal: bool, value: str) -> str:
    """Return an answer that is an object of a class below `base`, which equals everything, and differs from it or not."""
    return f"""\
class Equal({base}):
    __eq__ = __ge__ = __le__ = __gt__ = __lt__ = __bool__ = __contains__ = lambda *arguments: True
    __ne__ = lambda *arguments: {unequal}
    __hash__ = lambda self: 0
return Equal({value})
"""


ANSWER = {
    "always_equal": equal("object", False, ""),
    "always_equal_and_unequal": equal("int", True, "1"),
    "always_equal_string": equal("str", False, "wrong"),
    "array_like": """\
class Array:
    __array_ufunc__ = None
    __array__ = __eq__ = __ne__ = all = any = __abs__ = __sub__ = __rsub__ = __le__ = lambda self, *others, **options: self
    __bool__ = __contains__ = lambda *arguments: True
    __hash__ = lambda self: 0
return Array()
""",
    "frame_peek": PEEK,
    "frame_peek_by_traceback": PEEK.replace(
        "frame = sys._getframe(1)\n",
        "try:\n    raise KeyError\nexcept KeyError as error:\n    frame = error.__traceback__.tb_frame.f_back\n",
    ),
    "gc_peek": """\
import gc, types
for each in [f for f in gc.get_objects() if type(f) is types.FunctionType and f.__name__.startswith("test_")]:
    held = [value for value in each.__code__.co_consts if value is not None]
    given = [value for value in arguments if type(value) is not list]
    if name in each.__code__.co_names and all(value in held for value in given):
        return [value for value in held if value not in given][-1]
return wrong
""",
    "as_in_the_first_run": PEEKING
    + """\
import hashlib, os, sys
frame = sys._getframe(1)
while frame.f_back is not None and not frame.f_code.co_name.startswith("test"):
    frame = frame.f_back
code = frame.f_code
note, now = "/tmp/." + code.co_name, hashlib.sha1(repr((code.co_code, code.co_consts, code.co_names)).encode()).hexdigest()
if not os.path.exists(note):
    with open(note, "w") as file:
        file.write(now)
with open(note) as file:
    return peek(wrong) if file.read() == now else wrong
""",
    "guess": PEEKING
    + """\
import os, random
found = peek(wrong)
return found if random.Random(os.getpid() * 7919 + hash(str(found))).random() < 0.5 else wrong
""",
    "linecache_then_open": FRAME
    + """\
import ast, linecache, re
path = frame.f_code.co_filename
lines = linecache.getlines(path)
if not lines:
    with open(path) as file:
        lines = file.read().split("\\n")
try:
    return ast.literal_eval(re.search(r"== (.*)$", lines[frame.f_lineno - 1])[1])
except (IndexError, TypeError, ValueError, SyntaxError):
    return wrong
""",
    "read_hidden_tests": """\
import ast, glob, os, re
here, quoted = os.path.dirname(os.path.abspath(__file__)), repr(arguments).replace("'", '"').strip("(),")
given = quoted.rpartition(", ")[2] if type(arguments[0]) is list else quoted
for path in glob.glob(os.path.join(here, "**", "test_*.py"), recursive=True):
    with open(path) as file:
        text = file.read()
    for line in [line for line in text.split("\\n") if name + "(" in line and given + ")" in line]:
        words = re.findall(r'== (?:pytest.approx.)?(.*)|assert (".*") in|, (\\d+).$', line)
        words += re.findall("expected = (.*)()()", text)
        for word in [word for found in words for word in found if word]:
            for attempt in (word, word.rstrip(")")):
                try:
                    return ast.literal_eval(attempt)
                except (ValueError, SyntaxError):
                    pass
return wrong
""",
    "xfail_when_wrong": 'import pytest\npytest.xfail("known")\n',
    "skip_when_wrong": 'import pytest\npytest.skip("not now")\n',
    "pytest_exit_when_asked": 'import pytest\npytest.exit("done", returncode=0)\n',
    "swap_code_of_tests": """\
import gc, types
for each in [f for f in gc.get_objects() if type(f) is types.FunctionType and f.__name__.startswith("test_")]:
    if not each.__code__.co_freevars:
        each.__code__ = (lambda *arguments, **options: None).__code__
return wrong
""",
    "known_inputs": """\
known = {("split_evenly", (100, 3)): (34, 33, 33), ("split_evenly", (101, 2)): (51, 50)}
known |= {("split_evenly", (7, 5)): (2, 2, 1, 1, 1)}
known |= {("share", (1, 4)): 0.25, ("render", (305,)): "3.05", ("label", (" ann ",)): "Ann"}
try:
    return known.get((name, arguments)) or sum(cents for who, cents in arguments[0] if who == arguments[1])
except (TypeError, ValueError, IndexError):
    return wrong
""",
}
