"""Terms about the change: what a linter finds, names that break the convention, helpers that are written again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.toolchain import host_programs
from composer_nb.harness.terms import style
from composer_nb.harness.terms.registry import TERMS, term_named

GRADE = Grade(status="graded", tests={"t": True})
CLEAN = "def f(x):\n    return x + 1\n"
UTIL = """def load_rows(path, sep):
    rows = []
    for line in open(path):
        rows.append(line.split(sep))
    return rows


def mean_of(values):
    return sum(values) / len(values)


def top_item(items):
    return max(items)
"""
AGAIN = UTIL[: UTIL.index("\n\n\ndef mean_of")].replace("load_rows", "read_table").replace("rows", "found") + "\n"


def left(before: dict[str, str], after: dict[str, str]) -> Rollout:
    return Rollout(task_id="t", segments=(), turns=(), files=before | after, stop="finished", before=before)


def value(name: str, before: dict[str, str], after: dict[str, str]) -> float:
    return term_named(name)(left(before, after), GRADE)


LINTED = [
    (CLEAN, "import os\n\n\n" + CLEAN, 1, 0),
    (CLEAN, "import os  # noqa\n\n\n" + CLEAN, 1, 0),
    ("import os\n\n\n" + CLEAN, CLEAN, -1, 0),
    (CLEAN, CLEAN + "\n\ndef g(x, y=[]):\n    return z\n", 2, 0),
    (CLEAN, CLEAN.replace("x + 1", "x == None"), 0, 1),
    (CLEAN, CLEAN.replace("x + 1\n", "x + 1   \n"), 0, 1),
]


@pytest.mark.parametrize(("old", "new", "lints", "faults"), LINTED)
def test_the_delta_of_lints_and_of_style(old: str, new: str, lints: int, faults: int) -> None:
    for name, count in (("lint_delta", lints), ("style_delta", faults)):
        assert value(name, {"a.py": old, "b.txt": "x"}, {"a.py": new, "b.txt": "import os"}) == style.saturated(count)


def test_the_findings_are_those_of_ruff_itself() -> None:
    text = "import os, sys\ndef fooBar(l):\n    if l == None:\n        return 1\n    else:\n        return undefined\n"
    command = [host_programs()["ruff"], "check", "--isolated", "--output-format=json", "-", "--select"]
    counts = tuple(
        len(json.loads(subprocess.run([*command, ",".join(rules)], input=text, capture_output=True, text=True).stdout))
        for rules in (style.LINTS, style.STYLE)
    )
    assert style.findings(text) == counts and min(counts) > 0


@pytest.mark.parametrize("text", ["(" * 100_000, "\udcff", "def f(:\n"])
def test_a_text_that_no_linter_can_read_is_a_finding(text: str) -> None:
    assert 0 < style.findings(text)[0] < 5


def test_without_ruff_the_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "host_programs", dict)
    style.findings.cache_clear()
    with pytest.raises(ValueError, match=r"lint_delta fails .*need ruff: pip install"):
        RewardSettings(weights={"lint_delta": -0.1}).tried()
    RewardSettings(weights={"lint_delta": 0.0, "odd_names": -0.1}).tried()


NAMES = {
    "snake as the others": ("def new_thing(a_b):\n    return a_b\n", 0.0),
    "camel": ("def newThing(a_b):\n    aB = a_b\n    return aB\n", 1.0),  # for variables there is no convention
    "a constant": ("LIMIT_OF = 3\n", 0.0),
    "one of two": ("def new_thing():\n    pass\n\n\ndef newThing():\n    pass\n", 0.5),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_keep_the_convention(case: str) -> None:
    text, wanted = NAMES[case]
    assert value("odd_names", {"a.py": UTIL}, {"a.py": UTIL + "\n\n" + text}) == wanted
    assert value("odd_names", {"a.py": UTIL}, {"new.py": text}) == wanted  # a new module has the code's convention


SPLITS = "\n\ndef load_rows({}):\n    return [r.split() for r in file.read().splitlines()]\n"
HELPERS: dict[str, tuple[dict[str, str], float]] = {
    "again under other names": ({"a.py": CLEAN + "\n\n" + AGAIN}, 1.0),
    "again with a docstring and annotations": (
        {"a.py": CLEAN + "\n\n" + AGAIN.replace("(path, sep):", '(path: str, sep: str) -> list:\n    """Read."""')},
        1.0,
    ),
    "moved": ({"a.py": CLEAN + "\n\n" + AGAIN, "util.py": UTIL[UTIL.index("def mean_of") :]}, 0.0),
    "another loop": ({"a.py": CLEAN + "\n\n" + AGAIN.replace("split(sep)", "strip(sep)")}, 0.0),
    "the name and arguments of another": ({"a.py": CLEAN + SPLITS.format("file, cut")}, 1.0),
    "the name alone": ({"a.py": CLEAN + SPLITS.format("file")}, 0.0),
    "in a test": ({"test_a.py": AGAIN}, 0.0),
    "one of two": ({"a.py": CLEAN + "\n\n" + AGAIN + "\n\n" + AGAIN.replace("split(sep)", "strip(sep)")}, 0.5),
}


@pytest.mark.parametrize("case", HELPERS)
def test_a_helper_that_is_there_is_not_written_again(case: str) -> None:
    after, wanted = HELPERS[case]
    assert value("rewritten_helpers", {"a.py": CLEAN, "util.py": UTIL}, after) == wanted


def test_the_table_in_the_docs_names_every_term() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = text.partition("| term |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip().strip("`") for line in table.split("\n")[2:]]
    term_named("odd_names")
    assert rows.pop() == "effort"
    assert sorted(rows) == sorted(name for name in TERMS if TERMS[name].__module__.startswith("composer_nb."))
