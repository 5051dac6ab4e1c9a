"""Texts of others are read in a time that grows with their length: patterns, differences of lines, TOML."""

import time
from collections.abc import Callable

import pytest

from composer_nb.harness import untrusted
from composer_nb.harness.monitors import flags_of
from composer_nb.harness.syntax import lints
from composer_nb.harness.tasks.harbor import settings
from composer_nb.harness.tasks.making.mine import changelog, request_of
from composer_nb.harness.tasks.making.options import read_options
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.making.symptoms import _not_raised
from composer_nb.harness.tasks.making.trial import needed
from composer_nb.harness.terms import conduct
from composer_nb.harness.tools import terminal
from composer_nb.labs.audit.probes import COPIES
from composer_nb.labs.rewards.judges import COMMUNICATION, evidence
from composer_nb.trainer.corpus.repositories import is_allowed
from tests.harness.test_monitors import TASK, make_attempt

DOTS = "[" + ".".join(["a"] * 40_000) + "]\n"
LINES = [f"{number % 120}" for number in range(20_000)]
NESTED = "\n".join("f(" * 150 + "1, 2" + ")" * 150 for _ in range(100))
WIDE = [f"n{number}" for number in range(90_000)]
MODULES = {f"test_{number}.py": f"import test_{number + 1}\n" for number in range(2000)}
OTHER = [f"{number * 7 % 127}" for number in range(20_000)]


def state(lines: list[str]) -> Repository:
    return Repository(name="r", files={"CHANGES.md": "\n".join(lines)})


def raises(call: Callable[[], object]) -> Callable[[], object]:
    def refused() -> None:
        with pytest.raises(ValueError):
            call()

    return refused


CASES: dict[str, Callable[[], object]] = {
    "a call": lambda: flags_of(make_attempt({}, ("run_terminal_cmd", {"command": "git " * 100_000}, "x"))),
    "many modules": lambda: flags_of(make_attempt({f"m{n}.py": "a\n" * 20_000 for n in range(40)})),
    "values inside values": lambda: flags_of(make_attempt({"f.py": f"x == {'[' * 190}{'1, ' * 40_000}{']' * 190}\n"})),
    "a number that cannot be written": lambda: flags_of(make_attempt({"f.py": f"a == 0x{'f' * 5000}\n"})),
    "names in functions in functions": lambda: lints(f"a = {'lambda: ' * 190}[{', '.join(WIDE)}]\n"),
    "calls within calls": lambda: flags_of(
        make_attempt({}, task=TASK.model_copy(update={"files": {"test_f.py": NESTED}}))
    ),
    "a claim": lambda: conduct._says("tests " * 100_000, conduct._CLAIM),
    "an exception": lambda: _not_raised("DID NOT RAISE " + "a" * 200_000),
    "a commit's trailer": lambda: request_of("-by" * 200_000),
    "a commit's spaces": lambda: request_of("add it" + " " * 400_000 + "x"),
    "a Dockerfile": lambda: COPIES.search("\n" * 200_000),
    "pytest's summary": lambda: terminal.tested("9" * 5000 + " passed in 1.0s"),
    "lines of a file": lambda: untrusted.changed_lines("\n".join(LINES), "\n".join(OTHER)),
    "a changelog": lambda: changelog(state(LINES), state(OTHER)),
    "a judge's view": lambda: evidence(make_attempt({"f.py": "\n".join(OTHER)}), COMMUNICATION.shows),
    "TOML": raises(lambda: untrusted.toml_of(DOTS)),
    "TOML, quoted": raises(lambda: untrusted.toml_of("a" + '."\\""' * 40_000 + " = 1\n")),
    "a task.toml": raises(lambda: settings(DOTS)),
    "pytest's options": raises(lambda: read_options({"pyproject.toml": DOTS})),
    "imports of many modules": lambda: needed(MODULES, MODULES),
    "a licence": lambda: is_allowed("(" * 50_000, {"MIT"}),
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_text_takes_no_more_than_seconds(name: str) -> None:
    """The bound is of CPU time, some ten times what any case takes; in quadratic time the cases take minutes."""
    began = time.process_time()
    CASES[name]()
    assert time.process_time() - began < 20
