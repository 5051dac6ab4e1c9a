"""Terms about the change (what a linter finds, odd names, helpers that are written again) and about conduct."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.sandbox.toolchain import host_programs
from composer_nb.harness.terms import style
from composer_nb.harness.terms.registry import TERMS, term_named

GRADE = Grade(status="graded", tests={"t": True})
EMPTY = Rollout(task_id="t", segments=(), turns=(), files={}, stop="finished")
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


def value(name: str, before: dict[str, str], after: dict[str, str]) -> float:
    return term_named(name)(replace(EMPTY, files=before | after, before=before), GRADE)


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
    text, expected = NAMES[case]
    assert value("odd_names", {"a.py": UTIL}, {"a.py": UTIL + "\n\n" + text}) == expected
    assert value("odd_names", {"a.py": UTIL}, {"new.py": text}) == expected  # a new module has the code's convention


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
    after, expected = HELPERS[case]
    assert value("rewritten_helpers", {"a.py": CLEAN, "util.py": UTIL}, after) == expected


def test_the_table_in_the_docs_names_every_term() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = text.partition("| term |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip().strip("`") for line in table.split("\n")[2:]]
    term_named("asked_back")
    assert rows.pop() == "effort"
    assert sorted(rows) == sorted(name for name in TERMS if TERMS[name].__module__.startswith("composer_nb."))


# Conduct: what each term counts, by cases.

FAILED = Grade(status="graded", tests={"t": False})


def talk(*turns: tuple[Any, ...]) -> Rollout:
    """Return a rollout of these turns: (tool, arguments, fields of `Turn`), or a text alone for the final message."""
    records = []
    for spec in turns:
        if len(spec) == 1:
            records.append(Turn(call="", observation="", said=spec[0]))
            continue
        name, arguments, *rest = spec
        fields = {"observation": "", **(rest[0] if rest else {})}
        records.append(Turn(call=json.dumps({"name": name, "arguments": arguments}), **fields))
    return replace(EMPTY, turns=tuple(records))


def todos(merge: bool, **status: str) -> tuple[str, dict[str, Any]]:
    return "todo_write", {"merge": merge, "todos": [{"id": n, "content": n, "status": s} for n, s in status.items()]}


READ, EDIT = ("read_file", {"target_file": "a.py"}), ("search_replace", {"file_path": "./a.py"})
PART = ("read_file", {"target_file": "a.py", "offset": 40})
REFUSED = {"error": "InvalidArguments"}
GREEN, RED = {"tests_run": 2, "tests_passed": 2}, {"tests_run": 2, "tests_passed": 1}
SHELL = ("run_terminal_cmd", {"command": "pytest"})
CONDUCT: list[tuple[str, list[tuple[Any, ...]], float]] = [
    ("unfinished_todos", [todos(False, a="pending", b="completed")], 0.5),
    ("unfinished_todos", [todos(False, a="pending", b="in_progress"), todos(True, a="completed")], 0.5),
    ("unfinished_todos", [(*todos(False, a="pending"), REFUSED)], 0.0),
    ("unfinished_todos", [("todo_write", {"todos": "all of it"})], 0.0),
    ("unread_edits", [READ, EDIT], 0.0),
    ("unread_edits", [EDIT, READ, EDIT], 0.5),
    ("unread_edits", [EDIT, EDIT], 0.5),  # what it wrote itself it knows
    ("unread_edits", [(*READ, REFUSED), EDIT], 1.0),
    ("repeated_reads", [READ, READ], 0.5),
    ("repeated_reads", [READ, PART, ("read_file", {"target_file": "b.py"})], 0.0),
    ("repeated_reads", [READ, EDIT, READ], 0.0),
    ("repeated_reads", [READ, ("grep", {"pattern": "x"}), READ, READ], 2 / 3),
    ("unfounded_claims", [("All tests pass now.",)], 1.0),
    ("unfounded_claims", [EDIT, ("run_tests", {}, GREEN), ("All tests pass.",)], 0.0),
    ("unfounded_claims", [("run_tests", {}, GREEN), EDIT, ("I fixed it. The tests are passing.",)], 1.0),
    ("unfounded_claims", [EDIT, ("run_tests", {}, GREEN), ("run_tests", {}, RED), ("Tests pass.",)], 1.0),
    ("unfounded_claims", [EDIT, (*SHELL, {"observation": "3 passed in 0.1s"}), ("Tests pass.",)], 0.0),
    ("unfounded_claims", [EDIT, ("The tests do not pass yet.",)], 0.0),
    ("unfounded_claims", [EDIT, ("I could not run the tests; they should pass.",)], 0.0),
    ("long_message", [(" ".join(["word"] * 150),)], 0.0),
    ("long_message", [(" ".join(["word"] * 600),)], 0.75),
    ("asked_back", [("Done. Shall I also rename it?",)], 1.0),
    ("asked_back", [("The pattern is `a?b`, and ```is it?```",)], 0.0),
    ("asked_back", [("What next?",), READ], 0.0),  # beside a call: no last word
]


@pytest.mark.parametrize(
    ("name", "turns", "value"), CONDUCT, ids=lambda parameter: parameter if isinstance(parameter, str) else None
)
def test_conduct(name: str, turns: list[tuple[Any, ...]], value: float) -> None:
    assert term_named(name)(talk(*turns), FAILED) == pytest.approx(value)


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ("I fixed the sum in a.py.", 0.0),
        ("I fixed the sum in `src/a.py`.", 0.0),
        ("I fixed it.", 1.0),
        ("Updated data.py.", 1.0),  # another file
        ("The cause is the sign.", 0.0),
        ("", 0.0),
    ],
)
def test_a_claim_names_a_file_that_differs(message: str, value: float) -> None:
    files = {"before": {"src/a.py": "1", "data.py": "x"}, "files": {"src/a.py": "2", "data.py": "x"}}
    assert term_named("vague_claims")(replace(talk((message,)), **files), FAILED) == value


PLAIN = "def f(x):\n    # The caller has checked x.\n    return x + 1  # in metres\n"
THOUGHT = "# Wait, the loop ends early. Let me think: maybe we want range(n + 1).\n"
ESSAY = "".join(f"# Step {n}: the value moves from the left side to the right side of it.\n" for n in range(8))


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        ({"contents": PLAIN}, 0.0),
        ({"contents": "#!/bin/sh\n#include <a.h>\n"}, 0.0),
        ({"contents": THOUGHT + "x = 1\n"}, 12 / 16),
        ({"contents": ESSAY}, 1.0),
        ({"contents": ESSAY, "file_path": "notes.md"}, 0.0),  # prose is no comment
        ({"new_string": ESSAY + "x", "old_string": ESSAY}, 0.0),  # the repository's own
        ({"command": f"cat > a.py <<E\n{ESSAY}E"}, 1.0),
        ({"command": "ls # list"}, 0.0),
    ],
)
def test_reasoning_in_comments(arguments: dict[str, str], share: float) -> None:
    name = "run_terminal_cmd" if "command" in arguments else "search_replace" if "old_string" in arguments else "write"
    assert term_named("reasoning_in_comments")(talk((name, arguments)), GRADE) == pytest.approx(share, abs=0.1)
    patch = "*** Begin Patch\n*** Update File: a.py\n" + "".join(f"+{line}\n" for line in THOUGHT.splitlines())
    assert term_named("reasoning_in_comments")(talk(("apply_patch", {"patch": patch})), GRADE) > 0.9


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        ("cat a.py", True),
        ("cd src && A=1 sudo /bin/sed -i s/a/b/ a.py", True),
        ("echo 'x = 1' > a.py", True),
        ("python - <<E\nopen('a.py').read()\nE", True),
        ("cat > a.py <<E\nx\nE", True),
        ("python -m pytest -q 2>&1 | tail -5", False),
        ("git log --oneline | head", False),
        ("make; ./run.sh", False),
        ("for f in *.py; do sed -i s/a/b/ $f; done", True),
        ("echo 'a > b' >> a.py", True),
        ("./run.sh || echo 'no result' >&2", False),
        ("echo 'a -> b'; echo x >>/dev/null", False),
        ("", False),
    ],
)
def test_work_of_tools_by_the_terminal(command: str, counts: bool) -> None:
    terminal_call, read_call = ("run_terminal_cmd", {"command": command}), ("read_file", {"target_file": "a"})
    assert term_named("terminal_only")(talk(terminal_call), GRADE) == float(counts)
    assert term_named("terminal_only")(talk(terminal_call, read_call, read_call, read_call), GRADE) == counts / 4
