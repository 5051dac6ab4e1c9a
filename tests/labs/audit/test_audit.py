"""The audit of tasks: each planted fault is found and named, and sound tasks have none."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from composer_nb.cli import main
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.labs.audit.audit import audit
from composer_nb.labs.audit.probes import leaks

RIGHT = "def clip(values, most):\n    kept = [value for value in values if value < most]\n    return sorted(kept, reverse=True)\n"
WRONG = RIGHT.replace("value < most", "value <= most")
SHOWN = [(([3, 1], 9), [3, 1]), (([4], 4), [])]
HIDDEN = [(([5, 2, 7], 6), [5, 2]), (([8, 8, 1], 8), [1]), (([], 3), []), (([2, 6], 6), [2]), (([9], 1), [])]


def sound(**changes: Any) -> Task:
    files = {"clip.py": WRONG, "test_seen.py": render_tests("clip", "clip", SHOWN)}  # type: ignore[arg-type]
    fields = {
        "id": "clip",
        "instruction": "fix clip.py",
        "files": files,
        "tests": {"test_clip.py": render_tests("clip", "clip", HIDDEN)},  # type: ignore[arg-type]
        "solution": {"clip.py": RIGHT},
        "source_scope": ("clip.py",),
    }
    return Task.model_validate(fields | changes)


PAIR = "def test_one():\n    assert clip([1, 2], 2) == [1]\n\n\ndef test_two():\n    assert clip([3, 4], 4) == [3]\n"
BEFORE = "def test_one():\n    assert clip([], 1) == []\n\n\ndef test_two():\n    assert clip([5], 1) == [5]\n"
RENAMED = PAIR.replace("test_one", "test_any").replace("test_two", "test_another")
SOLUTION = "return sorted(kept, reverse=True)\nkept = [value for value in values if value < most]\n"
LEAKS = [
    ("old.py", "x = 1\n", ""),
    ("notes.md", SOLUTION, "the solution lies in notes.md"),
    (".git/HEAD", "ref: refs/heads/fix\n", "leftovers lie in the workspace: .git/HEAD"),
    ("test_copy.py", RENAMED, "the hidden tests of test_pair.py lie in test_copy.py"),
    ("test_pair.py", BEFORE + RENAMED, "the hidden tests of test_pair.py lie in test_pair.py"),
]


@pytest.mark.parametrize(("extra_path", "text", "expected"), LEAKS)
def test_what_an_agent_can_read(extra_path: str, text: str, expected: str) -> None:
    """An agent may read an earlier version of the hidden tests, but no renamed copy of them."""
    task = sound().model_copy(update={"tests": {"test_pair.py": PAIR}})
    start = {path: text.encode() for path, text in {**task.files, "test_pair.py": BEFORE, extra_path: text}.items()}
    names = ["test_pair.py::test_one", "test_pair.py::test_two"]
    assert "".join(leaks(task, start, start | {"clip.py": RIGHT.encode()}, names, names)) == expected


def script(text: str, **changes: Any) -> dict[str, Any]:
    return {
        "grader": "script",
        "files": {"clip.py": WRONG},
        "tests": {"test.sh": f"#!/bin/bash\n{text}\n", "test_clip.py": PYTEST},
        "solution": {"solve.sh": f"#!/bin/bash\ncat > clip.py <<'EOF'\n{RIGHT}EOF\n"},
        "source_scope": ("**",),
    } | changes


PYTEST = "from clip import clip\n\n\ndef test_clip():\n    assert clip([5, 2, 6, 7], 6) == [5, 2]\n"
REWARDED = "if {}; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi"
STATUS = "cd /workspace && PYTHONPATH=.:$PYTHONPATH python3 -m pytest -q /tests/test_clip.py"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("echo 1 > /logs/verifier/reward.txt", "false positive"),
        (REWARDED.format("grep -q 'value < most' clip.py"), "false positive"),
        pytest.param(REWARDED.format(STATUS), "false positive", marks=pytest.mark.slow),  # pytest, thirty times
        (REWARDED.format("md5sum clip.py | grep -q 'never'"), "false negative"),
    ],
    ids=["always", "source text", "exit code", "never"],
)
def test_scripts_of_others(text: str, kind: str, tmp_path: Path) -> None:
    Task.model_validate(sound().model_dump() | script(text)).to_harbor(tmp_path / "tasks" / "clip")
    out = tmp_path / "audit.json"
    with pytest.MonkeyPatch.context() as patch, out.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["audit", str(tmp_path / "tasks"), "--json"]) == 1
    report = json.loads(out.read_text())
    assert report["problems"][kind] == 1 and report["audited"] == report["read"] == 1


def test_a_set_of_tasks(tmp_path: Path) -> None:
    tasks = [sound(id=f"t{number}") for number in range(3)]
    save_tasks([*tasks, tasks[0]], tmp_path / "tasks.jsonl")
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write("nonsense\n")
    named = [(task.id, task) for task in [*tasks, tasks[0]]]
    report = audit([*named, ("line 5", ValueError("not JSON"))])
    assert report["problems"] == Counter(unreadable=3)
    assert (report["sound"], report["audited"], report["read"]) == (2, 5, 5)
    assert audit(named, seconds=0)["audited"] == 1
    assert main(["audit", str(tmp_path / "tasks.jsonl")]) == 1 and main(["audit", str(tmp_path / "none")]) == 2
