"""Recorded calls: which are kept, how answers compare, and that code which only fools pytest fails them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from composer_nb.harness.grading import recorded
from composer_nb.harness.grading.box import Boxes, JobResult
from composer_nb.harness.grading.check import check_tasks
from composer_nb.harness.grading.plan import GradePlan, RecordedCall, Twin, digest, with_plan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.recorded import Guarding, chosen, enough, guard, meets, record, same, wrong
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.guest.values import NotPlain, decode, encode
from composer_nb.harness.tasks.task import Task

Make = Callable[..., Task]


# Values.

PLAIN: list[Any] = [
    None, True, 0, -(10**40), 1.5, float("inf"), "", "é\ud800", b"\0\xff", [], (), set(), frozenset({1}), {},
    [1, (2, {"a": {3.0, 1.0}}), {(1, "b"): [None]}],
]  # fmt: skip
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_value_comes_back_with_its_types(value: object) -> None:
    decoded = decode(json.loads(json.dumps(encode(value))))
    assert decoded == value and repr(decoded) == repr(value)


@pytest.mark.parametrize(
    "value",
    [object(), bytearray(b"x"), 1 + 2j, range(3), type("Word", (str,), {})("x"), [iter([])], CYCLE, "x" * 10_000, [0] * 10_000],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_anything_else_is_not_plain(value: object) -> None:
    with pytest.raises(NotPlain):
        encode(value)


@pytest.mark.parametrize(
    "first, second, agree",
    [
        (1, 1, True), (1, True, False), (1, 1.0, False), (0.1 + 0.2, 0.3, True), (0.3, 0.3001, False), (0.0, 1e-9, False),
        (float("nan"), float("nan"), True), ((1, 2), [1, 2], False), ({1, 2}, {2, 1}, True), ({1, 2}, frozenset({1, 2}), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({"a": 1}, {"a": 2}, False), ({"a": 1}, {"a": 1, "b": 1}, False),
        ("1", 1, False), (b"a", "a", False), ([0.1 + 0.2, "x"], [0.3, "x"], True), (None, False, False), ([1], [1, 1], False),
    ],
)  # fmt: skip
def test_when_values_agree(first: object, second: object, agree: bool) -> None:
    assert same(encode(first), encode(second)) == same(encode(second), encode(first)) == agree
    for forged in ({"dict": 1}, {"dict": [1, None]}, {"dict": [[]]}, {}, [], "dict", None):
        assert not same({"dict": [["a", 1]]}, forged), "only another value"


# Which calls are kept.


def call(
    argument: object, value: object, telling: bool = True, name: str = "f", kind: str = "returned"
) -> RecordedCall:
    argument = json.dumps([encode([argument]), encode({})])
    outcome = json.dumps([kind, value if kind == "raised" else encode(value), None])
    return RecordedCall(module="m", name=name, given=argument, said=outcome, telling=telling)


def test_no_kept_call_gives_another_of_its_function_away() -> None:
    encoding, decoding = call("plain text", "coded text"), call("coded text", "plain text")
    assert chosen([encoding, decoding], []) == (encoding,)
    assert chosen([encoding], [decoding]) == (encoding,), "a call that does not tell gives way"
    for form in ("1234", [1234], "at 1234", {"n": (1234,)}):
        assert chosen([call("x", 1234), call(form, "y")], []) == (call("x", 1234),)
    repeated = call(["plain text"], "something")
    assert chosen([encoding, repeated], []) == (encoding, repeated), "an argument may occur twice"
    digits, booleans = [call(3, 7), call(7, 3)], [call(True, False), call(False, True)]
    assert chosen(digits, []) == tuple(digits[:1]) and chosen(booleans, []) == tuple(booleans)
    sorts, sorted_ = call([2, 1], None), call([1, 2], None)
    sorts = replace(sorts, said=json.dumps(["returned", None, [encode([[1, 2]]), encode({})]]))
    assert chosen([sorts, sorted_], []) == (sorts,)


def test_functions_whose_calls_tell_are_asked_apart() -> None:
    encoding = call("plain text", "coded text", name="encode")
    decoding = call("coded text", "plain text", name="decode")
    others = [call(n, n, telling=False, name=f"g{n}") for n in range(5)]
    selected = chosen([encoding, decoding], others)
    assert selected == (encoding, decoding, *others)
    orders = [order for _, order in recorded.replay({}, selected, random.Random(0))]
    assert sorted(map(len, orders)) == [1, 1, 5] and [encoding] in orders and [decoding] in orders
    numbered = [call(n, n + 10**7, name=f"f{n % 20}") for n in range(41)]
    selected = chosen(numbered, [])
    assert len({entry.name for entry in selected}) == recorded.APART and "f0" in {entry.name for entry in selected}


def test_when_calls_are_enough() -> None:
    texts, truths = [call(n, f"answer {n}") for n in range(3)], [call(n, n % 2 == 0) for n in range(6)]
    assert enough(texts) and enough(truths)
    for insufficient in (
        [],
        texts[:2],
        truths[:5],
        [call(n, f"answer {n}", telling=n > 0) for n in range(3)],
        [call(n, "the same answer") for n in range(9)],
        [call(n, "ValueError", kind="raised") for n in range(9)],
        [call(f"answer {n}", f"answer {n}") for n in range(5)],
        [call(1, f"answer {n}", name=f"f{n}") for n in range(3)],
    ):
        assert not enough(insufficient), insufficient


def plan_with(calls: int, *twins: Twin) -> GradePlan:
    tests = {f"t.py::test_{n}#0": f"t.py::test_{n}" for n in range(4)}
    return GradePlan(digest="", tests=tests, twins=twins, calls=tuple(call(n, f"answer {n}") for n in range(calls)))


def twin(*tests: int, alone: bool = True) -> Twin:
    keys = tuple(f"t.py::test_{n}#0" for n in tests)
    return Twin(path="t.py", start=0, end=1, text="", keys=keys, alone=alone and len(tests) == 1)


@pytest.mark.parametrize(
    "plan, by, tests",
    [
        (plan_with(3), "calls", (0, 3)),
        (plan_with(2), "none", (0, 3)),
        (plan_with(0, twin(0), twin(1), twin(2)), "twins", (3, 0)),
        (plan_with(3, twin(0), twin(1), twin(2)), "calls", (3, 0)),
        (plan_with(0, twin(0), twin(1), twin(3)), "none", (2, 1)),
        (plan_with(0, twin(0, 1), twin(1, 2), twin(0, 2)), "none", (3, 0)),
        (plan_with(0, twin(0), twin(1), twin(2, alone=False)), "none", (3, 0)),
        (plan_with(0, twin(0), twin(0), twin(1)), "none", (2, 1)),
    ],
)
def test_what_guards_a_task(plan: GradePlan, by: Guarding, tests: tuple[int, int]) -> None:
    guarding = guard(plan, [f"t.py::test_{n}" for n in range(3)])
    assert (guarding.by, (guarding.strong, guarding.none)) == (by, tests)
    assert guarding.calls == guarding.telling == len(plan.calls)
    assert [meets(guarding.by, required) for required in ("calls", "twins", "none")] == {
        "calls": [True, True, True], "twins": [False, True, True], "none": [False, False, True]
    }[by]  # fmt: skip
    assert GradePlan.from_json(plan.to_json()) == plan


# Recording.

GOLD = """\
import os, random, time
from other import helped, used

seen = []
def plain(number, text="x", *rest, key=None, **more): return [number, text, rest, key, sorted(more)]
def items(count):
    yield from range(count)
def fails(text): raise KeyError(text)
def recovers(text):
    try:
        return int(text)
    except ValueError:
        return None
def fills(found, value): found.append(value)
def _private(number): return number * 3
def _inner(number): return number
class Kind:
    @staticmethod
    def still(number): return number + 1
    def method(self, number): return number
def clock(number): return time.time() > number
def chance(number): return random.random() < 2
def order(text): return list(set(text))
def counts(number):
    seen.append(number)
    return len(seen)
def switched(number): return os.environ.get("SWITCH", "") * number
def takes_any(value): return 1
def gives_any(number): return object()
def endless(number): return iter(int, 1)
def set_mode(text): seen[:] = [text]
def shown(number): return f"{seen[:1]} {number}"
"""
OTHER = """\
def used(number):
    import module
    return module.plain(number) and module._inner(number)
def helped(number): return number
"""
TESTS = """\
import pytest
from module import *
from module import _private, Kind
from other import used
def test_all(monkeypatch):
    plain(1); plain(2, "x", key=None); plain(3, "y", 4, key=5, other=6)
    list(items(3)); recovers("7"); recovers("no"); _private(1)
    with pytest.raises(KeyError): fails("a")
    found = [1]
    fills(found, 2)
    Kind.still(1); Kind().method(1)
    shown(1); shown(2); shown(3); set_mode("loud")
    clock(1); chance(1); order("abcdefgh"); counts(1); counts(2)
    takes_any(object()); gives_any(1); next(endless(1)); used(9)
    monkeypatch.setenv("SWITCH", "on")
    switched(1)
    plain(1)
"""


@pytest.fixture(scope="module")
def calls_by_name(make_task: Make, backend: Backend) -> dict[str, list[RecordedCall]]:
    """Return the calls that are kept of `TESTS`, by name, where the start knows none of the functions."""
    start = {"module.py": "", "other.py": OTHER}
    task = make_task({"test_a.py": TESTS}, start, {"module.py": GOLD}, scope=("module.py",))
    plan = GradePlan(digest=digest(task), tests={"test_a.py::test_all#0": "test_a.py::test_all"})
    by_name: dict[str, list[RecordedCall]] = {}
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(recorded, "APART", 20)
        calls = record(task, plan, plan.tests.values(), Boxes(backend=backend))
    for entry in calls:
        by_name.setdefault(f"{entry.module}.{entry.name}", []).append(entry)
    return by_name


def test_pure_calls_are_kept_with_what_goes_in_and_comes_out(calls_by_name: dict[str, list[RecordedCall]]) -> None:
    """Three calls depend on another that gives nothing: they are kept, and not that one."""
    names = ["plain", "items", "fails", "recovers", "fills", "_private", "Kind.still", "shown"]
    assert set(calls_by_name) == {f"module.{name}" for name in names} | {"other.used"}
    assert all(entry.telling for calls in calls_by_name.values() for entry in calls)

    def as_values(entry: RecordedCall) -> tuple[Any, Any, Any]:
        positional, named = map(decode, json.loads(entry.given))
        kind, value, after = json.loads(entry.said)
        plain = (kind, after) == ("returned", None)
        return (tuple(positional), named, decode(value)) if plain else (kind, value, after)

    full_names = [name for name in calls_by_name if "items" not in name]
    calls = {name.partition(".")[2]: sorted(map(as_values, calls_by_name[name]), key=repr) for name in full_names}
    # Defaults are left out, and what crosses the boundary from another file of the workspace counts too.
    assert calls["plain"] == [
        ((1,), {}, [1, "x", (), None, []]), ((2,), {}, [2, "x", (), None, []]),
        ((3, "y", 4), {"key": 5, "other": 6}, [3, "y", (4,), 5, ["other"]]), ((9,), {}, [9, "x", (), None, []]),
    ]  # fmt: skip
    assert calls["recovers"] == [(("7",), {}, 7)] and calls["_private"] == [((1,), {}, 3)]
    assert calls["fails"] == [("raised", "KeyError", None)]
    assert calls["fills"] == [("returned", None, [{"list": [{"list": [1, 2]}, 2]}, {"dict": []}])]
    [positional, _] = json.loads(calls_by_name["module.fills"][0].given)
    assert positional == {"list": [{"list": [1]}, 2]}, "as it was before the call"
    assert json.loads(calls_by_name["module.items"][0].said) == ["returned", {"iterator": [0, 1, 2]}, None]


# Grades.

ROMAN = """\
def roman(number):
    text = ""
    for value, letters in ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        while number >= value:
            text, number = text + letters, number - value
    return text
"""
WANTED = {4: "IV", 6: "VI", 9: "IX", 14: "XIV", 19: "XIX", 27: "XXVII"}
ROMAN_TESTS = "from module import roman\n" + "".join(
    f"def test_{number}(): assert roman({number}) == {text!r}\n" for number, text in WANTED.items()
)


@pytest.fixture(scope="module")
def task(make_task: Make, backend: Backend) -> Task:
    """Return a task whose plan holds recorded calls and no twins."""
    start, gold = {"module.py": "def roman(number):\n    return 'I' * number\n"}, {"module.py": ROMAN}
    bare = make_task({"test_a.py": ROMAN_TESTS}, start, gold, scope=("module.py",))
    tests = {f"test_a.py::test_{number}#0": f"test_a.py::test_{number}" for number in WANTED}
    plan = GradePlan(digest=digest(bare), tests=tests)
    calls = record(bare, plan, tests.values(), Boxes(backend=backend))
    assert len(calls) == len(WANTED) and all(entry.telling for entry in calls) and enough(calls)
    return with_plan(bare, replace(plan, calls=calls))


def workspace(task: Task, text: str) -> dict[str, bytes]:
    return {path: source.encode() for path, source in (task.files | {"module.py": text}).items()}


def test_gold_is_accepted_every_time_and_the_start_is_not(task: Task, backend: Backend) -> None:
    for _ in range(4):
        grade = grade_pytest(task, workspace(task, ROMAN), backend)
        assert grade.passed and (grade.calls, grade.calls_failed, grade.flags) == (6, 0, ())
    start = grade_pytest(task, workspace(task, task.files["module.py"]), backend)
    assert not start.passed and start.calls_failed == 6 and start.flags == (), "failing tests say enough"


def test_the_box_holds_no_expected_value_and_asks_in_an_order_by_lot(task: Task, backend: Backend) -> None:
    plan = GradePlan.from_json(task.metadata["pytest.plan"])
    orders = set()
    for seed in range(5):
        [(asking, order)] = recorded.replay(workspace(task, ROMAN), plan.calls, random.Random(seed))
        assert sorted(order, key=repr) == sorted(plan.calls, key=repr) and len(asking.calls) > 1
        assert [call for batch in asking.calls for call in batch] == [entry.call for entry in order]
        assert not asking.hidden and "test_a.py" not in asking.files
        orders.add(tuple(order))
    assert len(orders) > 1
    [job_result] = Boxes(backend=backend).run([asking])
    assert not wrong(order, job_result) and wrong(order, JobResult()) == order
    leaky = (
        "import gc\ndef roman(number): return repr(gc.get_objects()).count(''.join(map(chr, (88, 88, 86, 73, 73))))\n"
    )
    leak = workspace(task, leaky)
    [job_result] = Boxes(backend=backend).run([replace(asking, files=leak)])
    assert len(job_result.answers) == 6
    assert all(json.loads(answer)[:2] == ["returned", 0] for answer in job_result.answers.values())


def test_a_check_says_what_guards_a_task(task: Task) -> None:
    [row] = check_tasks([(task.id, task)], require="calls")
    counts = {"calls": 6, "telling": 6, "strong": 0, "none": 6, "alone": 0}
    assert row["ok"] and row["guard"] == {"by": "calls"} | counts
    plan = GradePlan.from_json(task.metadata["pytest.plan"])
    bare = with_plan(task, replace(plan, calls=plan.calls[:1]))
    free, strict = check_tasks([("", bare)])[0], check_tasks([("", bare)], require="twins")[0]
    assert free["ok"] and free["guard"]["by"] == "none"
    assert not strict["ok"] and "its guard is 'none', not 'twins'" in strict["problem"]
