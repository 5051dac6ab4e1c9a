"""The command line: what it prints, what it refuses, how it ends."""

import argparse
import errno
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.table import Table

from composer_nb import cli
from composer_nb.harness import environment
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.harness.untrusted import visible_lines
from composer_nb.operations import COMMANDS, emit
from composer_nb.operations.logs import print_lines
from composer_nb.trainer.records.rundir import RunDir

TASK = Task(
    id="add-1",
    instruction="fix f.py: the sum",
    files={
        "f.py": "def f(a, b):\n    return a - b\n",
        "test_f.py": "from f import f\n\n\ndef test_0():\n    assert f(1, 2) == 3\n",
    },
    tests={"test_hidden.py": "from f import f\n\n\ndef test_0():\n    assert f(2, 5) == 7\n"},
    solution={"f.py": "def f(a, b):\n    return a + b\n"},
    source_scope=("f.py",),
)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    save_tasks([TASK], path)
    return path


def test_heavy_libraries_are_not_imported_before_they_are_needed():
    script = "import sys, composer_nb.cli; print([m for m in ('torch', 'papermill', 'pandas') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["report", "nowhere"], "nowhere: no run here"),
        (["compare", "nowhere", "elsewhere"], "nowhere: neither a run nor the folder of an evaluation"),
        (["tour", "--set", "rl.stepz=3"], "unknown setting 'rl.stepz'; did you mean 'rl.steps'?"),
        (["tour", "--set", "rl.steps"], "'rl.steps': write NAME=VALUE"),
        (["serve", "--policy", "scripted:s.json", "--ray", "auto"], "--ray need --model DIR"),
        (["serve", "--model", "nowhere", "--temperature", "-1"], "--temperature -1: must be 0 or more"),
        (["serve", "--model", "nowhere", "--temperature", "nan"], "--temperature nan: must be 0 or more"),
        (["tour", "--set", "data.code=."], "data.code='.': only 0 usable Python files"),
        (["rl", "--model", "gone", "--tasks", "TASKS"], "gone': no such folder"),
        (["serve", "--model", __file__], "convert FILE DIR makes a checkpoint of a GGUF file"),
        (["rl", "--model", ".", "--tasks", "TASKS"], "tokenizer.json: a checkpoint needs its tokenizer beside it"),
        (["verdict", "nowhere", "accept"], "nowhere: no agent's work is kept here"),
        (["jobs", "run", "nowhere.yml"], "nowhere.yml: no such job file"),
        (["agent", "nowhere", "fix it", "--policy", "scripted:x.json"], "nowhere: no folder here"),
        (["agent", ".", "fix caf\udce9", "--policy", "scripted:x.json"], "the instruction is not UTF-8"),
        (["eval", "--policy", "vllm:http://x", "--tasks", "TASKS"], "write vllm:URL#DIR"),
        (["eval", "--policy", "scripted:genius", "--tasks", "TASKS"], "there is scripted:expert, scripted:lazy, "),
        (["eval", "--policy", "scripted:expert", "--tasks", "gone"], "gone: no task file or folder here"),
        (["eval", "--policy", "scripted:expert", "--tasks", "TASKS", "--samples", "0"], "at least 1"),
        (["sandbox", "check", "--backend", "wishes"], "backend must be one of bwrap"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(tasks) if word == "TASKS" else word for word in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


@pytest.mark.parametrize("command", [["tour", "--runs", "runs"], ["rl", "--model", "gone", "--tasks", "TASKS"]])
def test_the_backend_of_the_settings_is_the_one_that_must_work(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: list[str]
):
    """Docker without a daemon is named; where it works, nobody asks for bubblewrap."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    options = ["--set", f"env.tasks={tasks}"] if command[0] == "tour" else []
    args = [str(tasks) if word == "TASKS" else word for word in [*command, *options, "--set", "env.backend=docker"]]
    assert cli.main(args) == 2
    assert capsys.readouterr().err.startswith("composer-nb: env.backend=docker: ")
    monkeypatch.setattr(environment, "open_backend", lambda *_: MagicMock(egress=()))
    assert cli.main(args) == 2  # it fails for another reason
    assert "bubblewrap" not in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "error, status",
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (KeyboardInterrupt(), 130),
        *((bug, None) for bug in (KeyError("x"), AssertionError(), OSError(errno.EBADF, "bad"))),
    ],
)
def test_a_full_disk_and_an_interrupt_are_one_line_and_a_bug_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, error: BaseException, status: int | None
):
    def fail(_: object) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "report", replace(COMMANDS["report"], run=fail))
    if status is None:
        with pytest.raises(type(error)):
            cli.main(["report", "x"])
    else:
        assert cli.main(["report", "x"]) == status and capsys.readouterr().err.count("\n") == 1


def test_a_command_whose_reader_is_gone_is_no_success(monkeypatch: pytest.MonkeyPatch):
    """Training that `| head` cut off, or an update that the gate stopped, must not end with status 0."""

    def fail(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(COMMANDS, "report", replace(COMMANDS["report"], run=fail))
    assert cli.main(["report", "x"]) == 141


SHOWN = {
    "report": ("policy before it", "midtrained", "final", "every token accounted for", "mismatch ("),
    "watch": ("complete, 3 RL steps", "ledger, tokens"),
    "compare": ("settings that differ: none", "paired by task", "the same final weights"),
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_run_is_shown_for_programs_for_people_and_as_a_page(
    command: str, tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir], tmp_path: Path, capsys: Any
):
    runs = [str(tiny_run.path), *([str(copy_of(tiny_run).path)] if command == "compare" else [])]
    page = tmp_path / "page.html"
    assert cli.main([command, *runs, "--json", "--html", str(page)]) == 0
    result = json.loads(capsys.readouterr().out)
    if command == "report":
        assert result["complete"] and result["verdict"].startswith("After RL the policy solves ")
    elif command == "watch":
        assert (result["state"], result["trained"], result["pid"]) == ("complete", 3, None)
        assert result["last_step"] == tiny_run.steps("rl")[-1] and result["ledger"] == tiny_run.ledger()
    else:
        assert [run["path"] for run in result["runs"]] == runs and result["settings"] == {}
    assert cli.main([command, *runs]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in SHOWN[command])
    text = page.read_text()
    assert text.startswith("<!doctype html>") and ("<svg" in text or "<img" in text) and "://" not in text


def test_a_mismatch_is_explained_to_programs_and_to_people(capsys: Any):
    example = str(Path(__file__).parents[1] / "data" / "example")
    looking = ["microscope", example, "--engine", "bf16-head", "--rollouts", "2"]
    assert cli.main([*looking, "--json"]) == 0
    named = json.loads(capsys.readouterr().out)["named"]
    assert named[-1] == "head dtype" and set(named) <= {"tokens", "head dtype"}
    assert cli.main(looking) == 0
    assert f"named: {', '.join(named)}" in capsys.readouterr().out
    assert cli.main(["microscope", example, "--engine", "genius"]) == 2
    assert "must be one of recorded, float32" in capsys.readouterr().err


def test_interrupted_runs_say_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from composer_nb.trainer.recipe import launch

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "start_or_resume", interrupt)
    assert cli.main(["tour", "--plain", "--runs", str(tmp_path), "--set", "seed=5"]) == 130
    assert f"composer-nb tour --resume --plain --runs {tmp_path}" in capsys.readouterr().err
    saved = json.loads((tmp_path / "tour" / "settings.json").read_text())
    assert saved["seed"] == 5 and (tmp_path / "tour" / "run.db").is_file()
    monkeypatch.setattr(launch, "begin_run", interrupt)
    weights = str(Path(__file__).parents[1] / "data" / "example" / "weights" / "final")
    call = ["rl", "--model", weights, "--tasks", "generated", "--out", str(tmp_path / "r"), "--track", ""]
    assert cli.main(call) == 130 and "interrupted; resume with the same command" in capsys.readouterr().err


ENVIRONMENT = """
from composer_nb.harness.tools.toolset import ToolSet
from tests.test_cli import TASK

class Mine:
    tools = ToolSet.tiny(("read_file", "edit_line", "run_tests", "finish"))

    def tasks(self):
        return [TASK, TASK.model_copy(update={"id": "add-2"})]

    def reward(self, rollout, grade):
        return 7.0 * grade.passed
"""


def test_an_environment_of_ones_own_is_scored_and_examined(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_environment.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    call = ["--policy", "scripted:expert", "--samples", "2", "--json"]
    assert cli.main(["eval", "--tasks", "an_environment:Mine", "--out", "out", *call]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["pass_at_1"], summary["n_tasks"], summary["invalid_call_rate"]) == (1.0, 2, 0.0)
    assert cli.main(["headroom", "an_environment:Mine", *call]) == 0
    assert json.loads(capsys.readouterr().out)["n_tasks"] == 2
    assert cli.main(["eval", "--tasks", "an_environment:Gone", *call]) == 2
    assert "neither a path nor MODULE:CLASS" in capsys.readouterr().err


def evaluation(out: Path, solved: dict[str, list[bool]], status: str = "graded") -> Path:
    """Write what `eval` keeps of the attempts of one arm."""
    rows = [{"task_id": t, "status": status, "passed": passed} for t, tries in solved.items() for passed in tries]
    (out / "all").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), out / "all" / "rollouts.parquet")
    return out


def test_two_evaluations_are_compared_by_task(tmp_path: Path, capsys: Any) -> None:
    first = evaluation(tmp_path / "one", {"a": [True, False], "b": [False, False], "gone\x1b[2J": [True, True]})
    second = evaluation(tmp_path / "two", {"a": [True, True], "b": [True, False], "new": [False, False]})
    assert cli.main(["compare", str(first), str(second), "--json", "--html", str(tmp_path / "page.html")]) == 0
    row = json.loads(capsys.readouterr().out)["arms"]["all"]
    assert [score["pass_at_1"] for score in row["scores"]] == [0.25, 0.75] and row["n_tasks"] == 2
    assert row["difference"] == {"pass_at_1": 0.5, "ci95": [0.5, 0.5]}
    assert row["left_out"] == [["gone\x1b[2J"], ["new"]]
    assert cli.main(["compare", str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert "+0.500" in text and "gone\\x1b[2J" in text and "\x1b" not in text and "of the second new" in text
    assert "+0.500" in (tmp_path / "page.html").read_text()
    row = {"n_tasks": 2, "pass_at_1": 0.5, "ci95": [0.1, 0.9], "tokens_per_task": 90.0}
    (second / "report.json").write_text(json.dumps({"arms": {"all": row}}))
    assert cli.main(["compare", str(first), str(second), str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png" in page and f"no report.json: {first}, {tmp_path}." in page and capsys.readouterr()
    assert cli.main(["compare", str(first)]) == cli.main(["compare", str(first), str(first), str(first)]) == 2
    assert capsys.readouterr().err.count("give two runs or more, or two folders of eval") == 2
    (tmp_path / "run.db").touch()
    assert cli.main(["compare", str(first), str(second), str(tmp_path)]) == 2
    assert f"{first}: no run" in capsys.readouterr().err
    (tmp_path / "run.db").unlink()
    assert cli.main(["compare", str(first), str(tmp_path)]) == 2
    assert "neither a run nor the folder of an evaluation" in capsys.readouterr().err


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u202e"


@pytest.mark.parametrize("command", ["report", "watch", "compare", "headroom"])
def test_no_text_of_a_foreign_run_reaches_the_terminal(
    command: str, tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir], capsys: Any
) -> None:
    run = copy_of(tiny_run)
    settings = json.loads((run.path / "settings.json").read_text())
    settings["data"]["code"] = settings["env"]["tools"] = f"x{HOSTILE}"
    settings[f"new{HOSTILE}"] = HOSTILE
    (run.path / "settings.json").write_text(json.dumps(settings))
    moved = run.path.rename(run.path.with_name(f"run{HOSTILE.replace('/', '')}"))
    cli.main([command, str(moved), *([str(tiny_run.path)] if command == "compare" else [])])
    output = "".join(capsys.readouterr())
    moved.rename(run.path)
    assert output.strip() and not set("\x1b\x07\r\u202e") & set(output)


def test_what_is_logged_and_printed_is_escaped(capsys: Any) -> None:
    print_lines("stdout", render=visible_lines)
    logging.getLogger("composer_nb.somewhere").info("a %s", HOSTILE)
    args = argparse.Namespace(json=False)
    for printed in (f"b {HOSTILE}", Table(f"c {HOSTILE}", title=f"d {HOSTILE}")):
        emit(args, None, lambda printed=printed: printed)
    out = capsys.readouterr().out
    assert all(f"{letter} \\x1b]0;own" in out for letter in "abcd")
    assert not set("\x1b\x07\r\u202e") & set(out)


def test_unfit_tasks_are_found(tmp_path: Path, capsys: Any):
    wrong = TASK.model_copy(update={"id": "wrong", "solution": {"f.py": "def f(a, b):\n    return a * b\n"}})
    solved = TASK.model_copy(update={"id": "done", "files": {**TASK.files, **TASK.solution}})
    bare = TASK.model_copy(update={"id": "bare", "solution": {}})
    path = tmp_path / "tasks.jsonl"
    save_tasks([TASK, wrong, solved, bare], path)
    assert cli.main(["tasks", "check", str(path), "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["fit"], summary["unfit"], summary["guards"]) == (1, 3, {"calls": 4})
    assert {row["id"]: row["problem"] for row in summary["tasks"]} == {
        "add-1": "",
        "wrong": "the solution fails 1 tests, first test_hidden.py::test_0",
        "done": "passes before anything is changed",
        "bare": "has no solution",
    }
    save_tasks([TASK], path)
    assert cli.main(["tasks", "check", str(path)]) == 0
    assert "1 of 1 tasks are fit; guarded by recorded calls: 1; " in capsys.readouterr().out


def test_rows_of_a_benchmark_become_task_folders(tmp_path: Path, capsys: Any):
    from tests.harness.tasks.test_swe import SMITH

    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    arguments = ["tasks", "from", str(rows), "--out", str(out), "--format", "swesmith"]
    rows.write_text(
        "\n".join([json.dumps(SMITH), "{", json.dumps(SMITH | {"patch": ""}), "", json.dumps(SMITH), "[1]"])
    )
    assert cli.main([*arguments, "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    problems = [problem.removeprefix(f"{rows}:") for problem in summary["problems"]]
    assert summary["tasks"] == 1 and [problem.partition(":")[0] for problem in problems] == ["2", "3", "5", "6"]
    assert "patch is missing" in problems[1] and "is there already" in problems[2] and "not an object" in problems[3]
    assert Task.from_harbor(out / "Org__lib-1").grader == "script"
    for text, message in (("", "holds no row"), ("[", "neither JSON Lines nor a JSON list")):
        rows.write_text(text)
        assert cli.main(arguments) == 2 and message in capsys.readouterr().err


def test_a_run_is_followed_to_its_end_and_stopped_only_while_it_is_live(tiny_run: RunDir, tmp_path: Path, capsys: Any):
    assert cli.main(["follow", str(tiny_run.path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the run is complete")
    assert cli.main(["stop", str(tiny_run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": False}
    assert cli.main(["up", str(tmp_path / "head"), "--down"]) == 0
    assert "no head lives in" in capsys.readouterr().out


FOLLOWED = {"tour", "rl", "fork", "track", "follow", "serve", "mcp", "agent", "jobs run", "jobs log", "jobs sweep"}
"""Commands that print what happens while it happens, or nothing; their results are files."""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_that_prints_a_result_prints_it_as_json_when_asked(name: str) -> None:
    flags = {flag for names, _ in COMMANDS[name].arguments for flag in names}
    assert ("--json" in flags) == (name not in FOLLOWED)
