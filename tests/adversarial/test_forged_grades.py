"""Agent code that wants a pass without knowing the answer. Each must get a grade, and the grade must be 0.

The code runs where its results are made, so it can say anything: what it can not do is say the right thing, because the
expected values never enter a sandbox.
"""

from collections.abc import Iterator

import pytest

from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import CallLimits
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import Task

HONEST = "def f(xs, k):\n    return [x * k for x in xs if x > k]\n"
VISIBLE = [(([1, 5, 3], 2), [10, 6]), (([], 1), [])]
HIDDEN = [(([4, 7, 9], 4), [28, 36]), (([2, 8], 1), [2, 8]), (([-1, 6], 5), [30]), (([3], 3), [])]

SPY = """
import gc, sys

def everything():
    found, frame = [], sys._getframe()
    while frame is not None:
        found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    return found + gc.get_objects()
"""

FORGED: dict[str, str] = {
    "floats for integers": "def f(xs, k):\n    return [float(x * k) for x in xs if x > k]\n",
    "patched eval and the box's own functions": SPY
    + """
import __main__
__main__.value_text = lambda *_: "[]"
__main__.call = lambda *_: ["returned", "[28, 36]"]
__main__.send_line = lambda nonce, fields: None
def f(xs, k):
    return [0]
""",
    "replaces itself in the box": SPY
    + """
def f(xs, k):
    for value in everything():
        if isinstance(value, dict) and value.get("function") is f:
            value["function"] = lambda *_: [28, 36]
    return [x * k for x in xs if x > k] if len(xs) == 3 else 0
""",
    "right for the first call alone": """
calls = []
def f(xs, k):
    calls.append(k)
    return [x * k for x in xs if x > k] if len(calls) == 1 else None
""",
    "patched in another thread": """
import threading, time
def patch():
    import builtins
    while True:
        builtins.repr = lambda value: "[28, 36]"
        time.sleep(0.001)
threading.Thread(target=patch, daemon=True).start()
def f(xs, k):
    time.sleep(0.01)
    return [1]
""",
}


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[SandboxExecutor]:
    with SandboxExecutor(CallLimits(wall_s=20.0)) as boxes:  # a busy machine must not fail a test
        yield boxes


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(
        id="scale",
        instruction="fix f.py: items times k for items more than k",
        files={"f.py": "def f(xs, k):\n    return xs\n", "test_f.py": render_tests("f", "f", VISIBLE)},
        tests={"test_hidden.py": render_tests("f", "f", HIDDEN)},
        solution={"f.py": HONEST},
        source_scope=("f.py",),
    )


def grade(task: Task, source: str, sandboxes: SandboxExecutor) -> Grade:
    return grade_functions(task, task.files | {"f.py": source}, sandboxes)


@pytest.mark.parametrize("source", FORGED.values(), ids=list(FORGED))
def test_a_forged_result_is_graded_zero(task: Task, sandboxes: SandboxExecutor, source: str) -> None:
    result = grade(task, source, sandboxes)
    assert result.status == "graded" and len(result.tests) == len(HIDDEN)
    assert not result.passed
    assert grade(task, HONEST, sandboxes).passed  # and it left nothing behind
