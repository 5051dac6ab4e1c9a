"""The audit of tasks: each planted fault is found and named, and sound tasks have none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from composer_nb.cli import main
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.labs.audit.audit import audit, limited
from composer_nb.labs.audit.probes import contradicted, leaks, probes, untold

RIGHT = "def clip(values, most):\n    kept = [value for value in values if value < most]\n    return sorted(kept, reverse=True)\n"
WRONG = RIGHT.replace("value < most", "value <= most")
SHOWN = [(([3, 1], 9), [3, 1]), (([4], 4), [])]
READ = "the start, with the examples that it shows by heart"
HIDDEN = [(([5, 2, 7], 6), [5, 2]), (([8, 8, 1], 8), [1]), (([], 3), []), (([2, 6], 6), [2]), (([9], 1), [])]


def sound(**changes: Any) -> Task:
    files = {"clip.py": WRONG, "test_seen.py": render_tests("clip", "clip", SHOWN)}  # type: ignore[arg-type]
    given = {
        "id": "clip",
        "instruction": "fix clip.py",
        "files": files,
        "tests": {"test_clip.py": render_tests("clip", "clip", HIDDEN)},  # type: ignore[arg-type]
        "solution": {"clip.py": RIGHT},
        "source_scope": ("clip.py",),
    }
    return Task.model_validate(given | changes)


def with_files(**files: str) -> dict[str, Any]:
    return {"files": sound().files | files}


def test_probes_are_what_they_say() -> None:
    task = sound()
    start, gold = (
        {path: text.encode() for path, text in files.items()} for files in (task.files, task.files | task.solution)
    )
    found = {probe.name: probe for probe in probes(task, start, gold)}
    values: dict[str, Any] = {}
    for name in ("the solution, in another layout", "functions return their first argument", READ):
        exec(compile(found[name].files["clip.py"], name, "exec"), space := {})  # type: ignore[var-annotated]
        values[name] = [space["clip"]([4, 3], 4), space["clip"]([3, 1], 9)]
    assert list(values.values()) == [[[3], [3, 1]], [[4, 3], [3, 1]], [[4, 3], [3, 1]]]
    slips = [probe.files["clip.py"] for probe in found.values() if probe.slip]
    assert len(set(slips)) == len(slips) == 5 and RIGHT.encode() not in slips
    assert found["no change"].files == start and [probe.name for probe in found.values() if probe.right] == [
        "the solution",
        "the solution, in another layout",
        "the solution, beside notes",
    ]


def test_negated_assertions() -> None:
    text = "def test_a():\n    assert 1 == 1, 'why'\n\n\ndef test_b():\n    with raises(ValueError):\n        f()\n"
    task = Task(id="t", instruction="i", files={}, tests={"test_a.py": text}, source_scope=("*.py",), grader="pytest")
    twin = contradicted(task)
    assert twin is not None and twin.tests["test_a.py"] == text.replace(
        "assert 1 == 1, 'why'", "assert not 1 == 1"
    ).replace("\n\n\n", "\n\n")
    assert contradicted(task.model_copy(update={"tests": {"test_a.py": text.replace("assert", "print")}})) is None
    assert contradicted(sound()) is None


COPY = "return sorted(kept, reverse=True)\nkept = [value for value in values if value < most]\n"
TESTS = render_tests("clip", "clip", HIDDEN)  # type: ignore[arg-type]
READABLE = [
    ({}, []),
    ({"old.py": "x = 1\n"}, []),
    ({"notes.md": COPY}, ["the solution lies in notes.md"]),
    ({".git/HEAD": "ref: refs/heads/fix\n"}, ["leftovers lie in the workspace: .git/HEAD"]),
    ({"copy_of_tests.py": TESTS}, ["the hidden tests of test_clip.py lie in copy_of_tests.py"]),
]


@pytest.mark.parametrize(("places", "wanted"), READABLE)
def test_what_an_agent_can_read(places: dict[str, str], wanted: list[str]) -> None:
    task = sound(**with_files(**places))
    start = {path: text.encode() for path, text in task.files.items()}
    assert list(leaks(task, start, start | {"clip.py": RIGHT.encode()})) == wanted


PAIR = "def test_one():\n    assert clip([1, 2], 2) == [1]\n\n\ndef test_two():\n    assert clip([3, 4], 4) == [3]\n"
BEFORE = "def test_one():\n    assert clip([], 1) == []\n\n\ndef test_two():\n    assert clip([5], 1) == [5]\n"
RENAMED = PAIR.replace("test_one", "test_any").replace("test_two", "test_another")
COPIES = {
    "under other names": ("test_copy.py", RENAMED),
    "in comments below earlier versions": ("test_pair.py", BEFORE + "".join(f"# {x}\n" for x in PAIR.splitlines())),
    "skipped below earlier versions": ("test_pair.py", BEFORE + RENAMED.replace("def ", "\n\n@skip\ndef ")),
    "an earlier version, no copy": ("", ""),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_hidden_tests_is_told_from_their_earlier_version(name: str) -> None:
    """Whatever it is called and wherever it lies."""
    place, text = COPIES[name]
    task = sound().model_copy(update={"tests": {"test_pair.py": PAIR}})
    files = {**task.files, "test_pair.py": BEFORE} | ({place: text} if place else {})
    start = {path: text.encode() for path, text in files.items()}
    names = ["test_pair.py::test_one", "test_pair.py::test_two"]
    lines = list(leaks(task, start, start | {"clip.py": RIGHT.encode()}, names, names))
    assert lines == [f"the hidden tests of test_pair.py lie in {place}"] * bool(place)


def test_names_of_parameters_and_variables_must_be_told_too() -> None:
    tests = (
        "from clip import MOST, clip\n\n\ndef test_keyword():\n    assert clip([1], most=MOST, strict=True) == [1]\n"
    )
    task = sound().model_copy(update={"tests": {"test_keyword.py": tests}})
    start = {path: text.encode() for path, text in task.files.items()}
    gold = {**start, "clip.py": f"MOST = 9\n\n\n{RIGHT.replace('most)', 'most, strict=False)')}".encode()}
    assert untold(task, start, gold) == ["MOST", "strict"]


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
    found = json.loads(out.read_text())
    assert found["problems"][kind] == 1 and found["audited"] == found["read"] == 1


class Own:
    """An environment whose reward pays for words."""

    def tasks(self) -> list[Task]:
        return [sound()]

    def reward(self, rollout: Rollout, grade: Grade) -> float:
        return float(grade.passed) + sum(len(turn.said) for turn in rollout.turns) / 1000


def test_a_reward_that_pays_for_talk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{__name__}:Own"]) == 1
    shown = capsys.readouterr().out
    assert "pays 1 for the solution, and up to 5.6 for: a long answer" in shown and "0 of 1 tasks are sound" in shown


def test_a_bug_that_loops_costs_no_more_than_the_limit() -> None:
    toml = '[agent]\ntimeout_sec = 900\n\n[verifier]\nenvironment_mode = "shared"\ntimeout_sec = 800.0\n'
    task = Task.model_validate(sound().model_dump() | script("exit", kept={"name": "clip", "toml": toml}))
    settings = limited(task, 7).settings
    assert (settings.agent.timeout_sec, settings.verifier.timeout_sec) == (900, 7) and limited(task, 900) is task


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
