"""Code without a right answer that uses what surrounds the tests: words, names, ids, neighbours, the host. It must not pass."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from composer_nb.harness.grading.box import Boxes
from composer_nb.harness.grading.front import strictly
from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.grading.plan import GradePlan, digest
from composer_nb.harness.grading.pytest_grader import grade_pytest, same_id
from composer_nb.harness.grading.recorded import enough, guard, record
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.functions import parse_test_files, passes, request_tests
from composer_nb.harness.tasks.task import RULES, Task
from composer_nb.labs.attacks.joint import CODEC, FITTED, JOINT, LOOKED_UP, ROUND_TRIPS

T = TypeVar("T")


def task_of(
    tests: dict[str, str], start: dict[str, str], gold: dict[str, str], scope: tuple[str, ...] = ("words.py",)
) -> Task:
    return Task(
        id="t", instruction="write it", grader="pytest", files=start, tests=tests, solution=gold, source_scope=scope
    )


def passed_unseen(grade: Grade) -> bool:
    return grade.passed and grade.status == "graded" and not grade.flags


# Twins alone: a method has no recorded calls. Each attack believes an expectation that something else in the test confirms.

PLURAL = """\
class Words:
    def plural(self, word):
        return word + ("es" if word.endswith("x") else "s")
"""
OTHER_PLURAL = """\
class Words:
    ends = {"x": "es"}
    def plural(self, word):
        return "".join([*word, self.ends.get(word[-1:], "s")])
"""
WRONG = "class Words:\n    def plural(self, word):\n        return word\n"
WANTED = {"box": "boxes", "cat": "cats", "fox": "foxes", "dog": "dogs"}
AROUND = """\
import sys
class Words:
    def plural(self, word):
        frame = sys._getframe(1)
        held = [*frame.f_code.co_consts, *frame.f_locals.values()]
        words = [each for each in held if isinstance(each, str) and each.isalpha() and each != word]
        text = " ".join(each for each in held if isinstance(each, str) and " " in each)
        said = text.replace(".", " ").split()
        return next((each for each in words if each in said), word)
"""
KEPT = """\
import sys
class Words:
    def plural(self, word):
        frame = sys._getframe(1)
        known = vars(sys).setdefault("known", {})
        words = [each for each in frame.f_code.co_consts if isinstance(each, str) and each.isalpha() and each != word]
        return known.setdefault(word, words[0] if len(words[0]) - len(word) < 3 else word)
"""


def suite(doc: str = "", turns: str = "1") -> str:
    return "from words import Words\n" + "".join(
        f'def test_{word}_{turn}():\n    """{doc.format(word, plural)}"""\n'
        f'    assert Words().plural("{word}") == "{plural}"\n'
        for word, plural in WANTED.items()
        for turn in turns
    )


# Suites that hold each expected value more than once have no test that stands alone, so nothing guards the task.
HINTS = {
    "a docstring": (suite(doc="{} becomes {}."), AROUND, "twins"),
    "the same expectation elsewhere": (suite(turns="123"), "", "none"),
    "the length, and what it said before": (suite(), KEPT, "twins"),
}


@pytest.mark.parametrize("name", HINTS)
def test_what_is_said_around_an_expectation_does_not_confirm_it(backend: Backend, name: str) -> None:
    tests, attack, guarded_by = HINTS[name]
    task = task_of({"test_words.py": tests}, {"words.py": WRONG}, {"words.py": PLURAL})
    validation = validate_task(task, backend, repeats=1)
    assert validation.plan is not None
    assert guard(validation.plan, validation.plan.tests.values()).by == guarded_by
    for seed in range(3 if guarded_by == "twins" else 0):
        grade = grade_pytest(task, {"words.py": attack.encode()}, backend, validation.plan, rng=random.Random(seed))
        assert not passed_unseen(grade), grade
    for right in (PLURAL, OTHER_PLURAL):
        assert passed_unseen(grade_pytest(task, {"words.py": right.encode()}, backend, validation.plan))


# Recorded calls alone: tests are easily fooled then, so the answers have to be.

RIGHT = "def warm(c):\n    return c * 9 // 5 + 32\ndef cool(f):\n    return (f - 32) * 5 // 9\n"
EMPTY = "def warm(c):\n    return None\ndef cool(f):\n    return None\n"
DEGREES = {c: c * 9 // 5 + 32 for c in (-40, 0, 10, 25, 100, 35)}
WARM_TESTS = "from words import warm, cool\n" + "".join(
    f"def test_{at}():\n    assert warm({c}) == {f}\n    assert cool({f}) == {c}\n" for at, (c, f) in enumerate(DEGREES.items())
)  # fmt: skip
FOOL = """\
import json, os, signal, sys
def read(value):
    frame = sys._getframe(3)
    if frame.f_code.co_name.startswith("test_"):
        others = [each for each in frame.f_code.co_consts if type(each) is int and each != value]
        return others[0] if others else value
def warm(c): return guess("warm", c)
def cool(f): return guess("cool", f)
frame = sys._getframe(1)
while frame and "prepared" not in frame.f_locals: frame = frame.f_back
prepared, say = frame.f_locals["prepared"], frame.f_locals["say"]
asked = [(name, json.loads(given)[0]["list"][0]) for batch in prepared.asked["calls"] for _, name, given in batch]
nonce = dict(zip(say.__code__.co_freevars, say.__closure__))["nonce"].cell_contents
guest = sys.modules.get("composer_nb_grading_calls")
def guess(name, value):
    found = read(value)
    return unknown(name, value) if found is None else found
def unknown(name, value): return value
"""
REPLAYS = {
    "pairs the arguments of two functions that undo each other": """\
def unknown(name, value):
    mine, other = (sorted({v for n, v in asked if (n == name) == flag}) for flag in (True, False))
    return other[mine.index(value)] if len(mine) == len(other) else value
""",
    "a forged name of an exception": "def unknown(*_): raise type('int', (BaseException,), {})(32)\n",
    "changes its arguments in the answer": """\
if guest:
    guest.answer = lambda module, name, given, watch: ["returned", given, given]
""",
    "several answers for each call": """\
if asked:
    for place in range(len(asked)):
        for value in range(-40, 213):
            say(["answer", place, ["returned", value, None]])
""",
    "nested as deeply as can be read": """\
if asked:
    for place in range(len(asked)):
        deep = 850 + 16 * place
        os.write(3, (nonce + ' ["answer", %d, ["returned", ' % place + "[" * deep + "]" * deep + ", null]]\\n").encode())
    os._exit(0)
""",
}


def on_a_stack(frames: int, call: Callable[[], T]) -> T:
    return on_a_stack(frames - 1, call) if frames else call()


@pytest.fixture(scope="module")
def degrees(backend: Backend) -> tuple[Task, GradePlan]:
    task = task_of({"test_words.py": WARM_TESTS}, {"words.py": EMPTY}, {"words.py": RIGHT})
    tests = {f"test_words.py::test_{at}#0": f"test_words.py::test_{at}" for at in range(len(DEGREES))}
    plan = GradePlan(digest=digest(task), tests=tests)
    calls = record(task, plan, tests.values(), Boxes(backend=backend))
    assert enough(calls) and {call.name for call in calls} == {"warm", "cool"}
    return task, replace(plan, calls=calls)


@pytest.mark.parametrize("attack", REPLAYS.values(), ids=REPLAYS.keys())
def test_what_fools_the_tests_does_not_answer_the_calls(degrees: tuple[Task, GradePlan], backend: Backend, attack: str):
    task, plan = degrees
    files = {"words.py": (FOOL + attack).encode()}
    assert grade_pytest(task, files, backend, replace(plan, calls=())).passed, "it fools the tests"
    grade = on_a_stack(120, lambda: grade_pytest(task, files, backend, plan, timeout_s=20.0))
    assert not grade.passed and grade.status in ("graded", "agent_failed", "tampered")


# Names.


def test_a_new_package_does_not_rename_hidden_helpers(backend: Backend) -> None:
    """Else a helper of the agent's stands in for the one that the tests import."""
    hidden = {
        "tests/test_a.py": "from helpers import check\nfrom words import f\ndef test_a():\n    check(f(1), 2)\n",
        "tests/helpers.py": "def check(given, wanted):\n    assert given == wanted\n",
    }
    wrong, right = "def f(x):\n    return x\n", "def f(x):\n    return x + 1\n"
    task = task_of(hidden, {"words.py": wrong}, {"words.py": right}, ("**",))
    plan = GradePlan(digest=digest(task), tests={"tests/test_a.py::test_a#0": "tests/test_a.py::test_a"})
    forged = {"words.py": wrong, "tests/__init__.py": "", "helpers.py": "def check(*_): pass\n"}
    grade = grade_pytest(task, {path: text.encode() for path, text in forged.items()}, backend, plan)
    assert not grade.passed and grade.flags == ("test_setup",)
    honest = {"words.py": right, "more/__init__.py": "", "__init__.py": ""}
    assert passed_unseen(grade_pytest(task, {path: text.encode() for path, text in honest.items()}, backend, plan))


def test_no_name_of_a_file_makes_a_fault_of_the_machine(backend: Backend) -> None:
    names = ["a" * 255, "\udcff.py", "a\nb.py", "\x7f", "é" * 128, "/".join("d" * 1500), "m.py/x"]
    start = {"pkg/m.py": "def f(x):\n    return x\n"}
    task = task_of({"test_a.py": "from pkg.m import f\ndef test_a():\n    assert f(1) == 2\n"}, start, {}, ("pkg/**",))
    plan = GradePlan(digest=digest(task), tests={"test_a.py::test_a#0": "test_a.py::test_a"})
    files = {"pkg/m.py": start["pkg/m.py"].encode()} | {"pkg/" + name: b"x" for name in names}
    grade = grade_pytest(task, files, backend, plan)
    assert grade.status == "graded" and not grade.passed


@pytest.mark.parametrize(
    "claimed, same",
    [
        ("t.py::f[a1]", True), ("t.py::f[a]", True), ("t.py::f[a_12]", True), ("t.py::f[b1]", False), ("t.py::f", False),
        ("t.py::f[" + "1" * (1 << 22), False), ("t.py::f[a" + "_1" * (1 << 21) + "]", False),
    ],
    ids=lambda value: str(value)[:14],
)  # fmt: skip
def test_a_claimed_id_of_any_length_is_compared_at_once(claimed: str, same: bool) -> None:
    assert same_id(claimed, "t.py::f[a1]") == same


# Code under test that reads what its caller expects, and believes it if it looks like an original. It must not score.


# Code that reads the constants of a whole module of hidden tests and concludes which are true: most agree, and the twins do not.
# `joint` grades without the tests that run alone, to show that the attack works.


def test_a_rule_fitted_to_all_constants_does_not_pass(backend: Backend) -> None:
    task = JOINT["rows"]
    validation = validate_task(task, backend, repeats=1)
    plan = validation.plan
    assert plan is not None and validation.valid and guard(plan, validation.fail_to_pass).by == "twins", validation
    files = {"scale.py": FITTED.encode()}
    joint = replace(plan, twins=tuple(replace(twin, alone=False) for twin in plan.twins))
    alone = [grade_pytest(task, files, backend, plan, rng=random.Random(seed)) for seed in range(8)]
    without = [grade_pytest(task, files, backend, joint, rng=random.Random(seed)) for seed in range(3)]
    assert any(grade.passed and not grade.flags for grade in without), "it works, but for tests that run alone"
    assert sum(grade.passed for grade in alone) <= 2, "one in eight passes by chance"


@pytest.mark.parametrize("name", list(ROUND_TRIPS))
def test_answers_are_not_looked_up_among_the_arguments_of_other_calls(name: str) -> None:
    task = ROUND_TRIPS[name]
    with SandboxExecutor() as calls:
        [outcomes] = calls.run([request_tests({"codec.py": LOOKED_UP}, tests := parse_test_files(task.tests))])
        assert all(map(passes, tests, outcomes)), "the attack works in one process"
        assert not any(grade_functions(task, {"codec.py": LOOKED_UP}, calls).tests.values())
        assert grade_functions(task, {"codec.py": CODEC}, calls).passed


def test_a_function_that_runs_the_agents_code_unseen_shares_no_process() -> None:
    task = ROUND_TRIPS["round-trip"]
    loads = "import pkgutil\n{0} = pkgutil.resolve_name('co' + 'dec:{0}')\n"
    files = task.files | {"one.py": loads.format("enc"), "two.py": loads.format("dec")}
    tests = task.tests["test_codec.py"].replace(
        "from codec import enc, dec", "from one import enc\nfrom two import dec"
    )
    task = task.model_copy(update={"files": files, "tests": {"test_codec.py": tests}})
    with SandboxExecutor() as calls:
        assert not any(grade_functions(task, {**files, "codec.py": LOOKED_UP}, calls).tests.values())
        assert grade_functions(task, {**files, "codec.py": CODEC}, calls).passed


def test_structure_is_asked_of_the_code_that_the_tests_ran() -> None:
    """Tests run on the start of a file whose change is dropped, as one that is too large."""
    rules = {RULES: '[["absent", "", "old"]]'}
    task = task_of({"test_a.py": ""}, {"words.py": "old = 1\n"}, {"words.py": "new = 1\n"})
    task = task.model_copy(update={"metadata": rules})
    right = Grade(status="graded", tests={"test_a.py::test_it": True})
    assert strictly(task, {"words.py": b"new = 1\n"}, right).passed
    assert not strictly(task, {"words.py": b"new = 1\n#" + b"x" * (1 << 20)}, right).passed
