"""Requests in common processes: the answers of separate ones, and only for code that can look nothing up."""

import re
from collections.abc import Callable
from random import Random

import pytest

from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.merging import MOST, is_plain, run_merged
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor
from composer_nb.harness.tasks.functions import parse_tests, request_tests

GOOD = "def f(x):\n    return x + 1"
ENDINGS = {
    "never": "def f(x):\n    while True:\n        x = 1",
    "never at the second input": "def f(x):\n    while x:\n        x += 1\n    return x",
    "out of memory": "def f(x):\n    xs = [x]\n    for y in xs:\n        xs.append(y)\n    return xs",
    "no plain value": "def f(x):\n    return (y for y in [x])",
    "raises": "def f(x):\n    return [1][x]",
    "other parameters": "def f(x, y):\n    return x",
    "no compilation": "def f(x, x):\n    return x",
    "dies": "import os\ndef f(x):\n    os._exit(0)",
    "another function": "def g(x):\n    return x",
    "state": "def f(x, seen=[]):\n    seen.append(x)\n    return seen",
}


def request(source: str, **files: str) -> CallRequest:
    return CallRequest(files={"f.py": source, **files}, module="f", function="f", arguments=("(0,)", "(3,)"))


def test_requests_get_the_answers_of_separate_processes(sandboxes: SandboxExecutor) -> None:
    body = "import f\ndef test_0():\n    assert f(2) == 3\n"
    tests = [parse_tests(f"test_{module}.py", f"from {module} {body}") for module in ("f", "g")]
    several = [request_tests({"f.py": GOOD, "g.py": source}, sum(tests, ())) for source in (*ENDINGS.values(), GOOD)]
    requests = [request(GOOD.replace("1", str(n))) for n in range(MOST + 3)]
    requests += [*map(request, ENDINGS.values()), *several]
    requests += [request(GOOD, **{"f.txt": "x" * (4 << 20)}), request(GOOD, **{"a.py": "", "a.py/b.py": ""})]
    Random(0).shuffle(requests)
    assert run_merged(requests, sandboxes) == sandboxes.run(requests)


@pytest.mark.parametrize(
    "source",
    [
        *("", "x = 1", "import os\n" + GOOD, "@g\n" + GOOD, "def f(x: g):\n    return x", "def f(x) -> g:\n    return x"),
        *("def f(x=[]):\n    return x", "def f(*x):\n    return x", "def f(*, x):\n    return x", "async " + GOOD),
        *("def f(x):\n    return open", "def f(x):\n    return f", "def f(max):\n    return max(1)", "def sum(x):\n    return x"),
        *("def f(x):\n    sum = x", "def f(x):\n    return x(1)", "def f(x):\n    return [x][0](1)", "def f(_x):\n    return _x"),
        *("def f(x):\n    return x.append", "def f(x):\n    x.append = 1", "def f(x):\n    return x.__class__"),
        *("def _f(x):\n    return x", "class f:\n    pass", "def f(x):\n    del x", "def f(x):\n    assert x"),
        *("def f(x):\n    return sorted(x, key=x)", "def f(x):\n    return '%1000000d' % x", "def f(x):\n    return f'{x}'"),
        *("def f(x):\n    global y\n    y = x", "def f(x):\n    def g():\n        return x\n    return x", "f = lambda x: x"),
        *("def f(x):\n    try:\n        return x\n    except:\n        pass", "def f(x):\n    yield x"),
        *("def f(x):\n    return (y := x)", "def f(x):\n    return {x: x}", GOOD + " " * 5000),
    ],
)  # fmt: skip
def test_code_that_could_look_something_up_shares_no_process(source: str) -> None:
    assert not is_plain(source) and is_plain(GOOD)


@pytest.mark.parametrize("slow", [1, 5, 9])
def test_a_slow_machine_gives_the_same_answers(boxes: Callable[..., Executor], slow: int) -> None:
    """Requests of one process share its time; each is charged for its own calls alone."""

    def machine(merged: CallRequest) -> tuple[CallOutcome, ...]:
        [text] = merged.files.values()
        costs = [int(cost) for cost in re.findall(r"costs ([0-9]+)", text) for _ in range(2)]
        spent = [slow * sum(costs[: call + 1]) for call in range(len(costs))]
        in_time = [CallOutcome(status="returned", text="1") for total in spent if total <= 100]
        over = [CallOutcome(status="not_run")] * (len(costs) - len(in_time))
        return (*in_time, *[CallOutcome(status="timeout"), *over][: len(over)])

    costs = Random(slow).choices([0, 1, 2, 5, 1000], k=3 * MOST)
    requests = [request(f"def f(x):\n    return 1  # costs {cost}") for cost in costs]
    assert run_merged(requests, boxes(machine)) == [machine(alone) for alone in requests]
