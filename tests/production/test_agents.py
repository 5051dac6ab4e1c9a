"""`composer-nb agent`, `eval` with the product's tools, and `serve`, as a user calls them."""

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from termios import ICANON, tcgetattr
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Message, Said, User
from composer_nb.harness.agent.scripts import play, read_script
from composer_nb.harness.tasks.task import Task
from composer_nb.production.agents import run_agent
from composer_nb.production.bench import ARMS, evaluate
from composer_nb.production.serve import ScriptServer
from composer_nb.production.show import answerer, teller
from tests.waiting import wait_until

WRONG, RIGHT = "def double(x):\n    return x + x + 1\n", "def double(x):\n    return x + x\n"


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


SCRIPT = [
    {
        "text": "I look.",
        "calls": [call("grep", pattern="def"), call("codebase_search", query="double", target_directories=[])],
    },
    {"calls": [call("search_replace", file_path="f.py", old_string="x + x + 1", new_string="x + x")]},
    {"calls": [call("run_terminal_cmd", command="python -m pytest -q", is_background=False)]},
    {"text": "One was added for no reason."},
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return path


@pytest.fixture
def url(script: Path) -> Iterator[str]:
    with ScriptServer(read_script(script)) as server:
        yield server.url


def test_an_agent_behind_a_server_from_question_to_verdict(
    repository: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["agent", str(repository), "fix double", "--policy", f"openai:{url}", "--out", str(out)]
    assert main([*args, "--verdict", "accept"]) == 0
    assert (repository / "f.py").read_text() == RIGHT and not (repository / ".composer_nb").exists()
    output = capsys.readouterr().out
    assert "1 passed" in output and "One was added for no reason." in output and "+    return x + x" in output
    [row] = pq.read_table(out / "rollout.parquet").to_pylist()
    assert row["status"] == "ungraded" and row["instruction"] == "fix double" and row["written_tokens"] > 0
    assert json.loads(row["files"]) == {"f.py": RIGHT} and json.loads(row["before"]) == {"f.py": WRONG}
    assert json.loads((out / "verdict.json").read_text())["verdict"] == "accepted"


@pytest.mark.parametrize("verdict", ["reject", "later", "ask"])
def test_nothing_is_changed_without_a_yes(repository: Path, script: Path, tmp_path: Path, verdict: str) -> None:
    out = tmp_path / "out"
    words = ["--policy", f"scripted:{script}", "--out", str(out), "--verdict", verdict]
    args = ["agent", str(repository), "fix it", *words]
    assert main(args) == (0 if verdict == "later" else 1) and (repository / "f.py").read_text() == WRONG
    assert json.loads((out / "verdict.json").read_text())["verdict"] == ("rejected" if verdict == "reject" else "open")
    subprocess.run(["git", "apply", str(out / "changes.diff")], cwd=repository, check=True)
    assert (repository / "f.py").read_text() == RIGHT


def test_later_verdict(repository: Path, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "the work"
    args = ["agent", str(repository), "fix it", "--policy", f"scripted:{script}", "--out", str(out)]
    main([*args, "--verdict", "later"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "composer-nb verdict" in line]
    words = shlex.split(line.partition("composer-nb ")[2].partition(",")[0])
    assert words == ["verdict", str(out), "accept", "--repository", str(repository)]
    assert main(words[:3]) == 2 and "its changes are for" in capsys.readouterr().err
    (repository / "f.py").write_text("mine\n")
    complaint = f"f.py: has changed since the agent got it; nothing was written; the diff is {out}/changes.diff"
    assert main(words) == 2 and complaint in capsys.readouterr().err
    (repository / "f.py").write_text(WRONG)
    (repository / "f.py").chmod(0o600)
    assert main(words) == 0 and f"accepted: 1 files changed in {repository}" in capsys.readouterr().out
    assert (repository / "f.py").read_text() == RIGHT and (repository / "f.py").stat().st_mode & 0o777 == 0o600
    assert main([*words[:2], "reject"]) == 2 and "was accepted before" in capsys.readouterr().err


def test_a_user_answers_on_the_terminal(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations: list[list[Message]] = []
    script = play([Said(text="Which one?"), Said(text="And why?"), Said(text="Done.")])

    def speak(talk: Sequence[Message]) -> Said:
        conversations.append([*talk])
        return script(talk)

    console, answers = Console(file=io.StringIO()), iter(["the first ", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(console, "input", lambda prompt: next(answers))
    with ScriptServer(speak) as server:
        listeners: dict[str, Any] = {"user": answerer(console), "on_event": teller(console)}
        work = run_agent(repository, "fix it", f"openai:{server.url}", tmp_path / "out", **listeners)
    answered = [(turn.said, turn.observation) for turn in work.conversation.turns]
    assert answered == [("Which one?", "the first"), ("And why?", "")]
    assert conversations[-1][2] == User(text="the first") and "user: the first" in console.file.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert answerer(console)("Which one?", 0.0) == ""


def test_arms_of_the_bench(task: Task, tmp_path: Path) -> None:
    tasks = [task.model_copy(update={"id": f"dates-{number}"}) for number in range(2)]
    arms: list[str] = []
    options: dict[str, Any] = {"samples": 2, "on_attempt": lambda arm, attempt: arms.append(arm)}
    report = evaluate("scripted:expert", tasks, tmp_path / "out", arms="every", **options)
    assert arms == [arm for arm in ARMS for _ in range(4)] and list(report["arms"]) == list(ARMS)
    all_tools, bash = report["arms"]["all"], report["arms"]["bash"]
    assert (all_tools["pass_at_1"], all_tools["n_tasks"], all_tools["k"], all_tools["infra_errors"]) == (1.0, 2, 2, 0)
    assert (bash["pass_at_1"], bash["gain"]) == (0.0, [-1.0, -1.0, -1.0])
    assert bash["invalid_call_rate"] == pytest.approx(2 / 3)
    assert report["arms"]["no-descriptions"]["gain"] == [0.0, 0.0, 0.0]
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    stored = pq.read_table(tmp_path / "out/all/rollouts.parquet")
    assert stored.num_rows == 4 and stored["lines"].to_pylist() == stored["human_lines"].to_pylist() == [2] * 4
    assert (all_tools["quality"]["n"], all_tools["quality"]["lines_ratio"]["mean"], bash["quality"]) == (4, 1.0, None)
    arms.clear()
    evaluate("scripted:expert", tasks, tmp_path / "out", **options)
    assert len(arms) == 4
    with pytest.raises(ValueError, match="holds rollouts of another policy"):
        evaluate("scripted:lazy", tasks, tmp_path / "out", samples=2)


@pytest.mark.parametrize(("keys", "verdict"), [(b"xY", "accepted"), (b"n", "rejected")])
def test_one_key_decides(repository: Path, script: Path, tmp_path: Path, keys: bytes, verdict: str) -> None:
    ours, theirs = os.openpty()
    words = ["agent", str(repository), "fix it", "--policy", f"scripted:{script}", "--out", str(tmp_path / "out")]
    os.write(ours, b"y" if verdict == "rejected" else b"n")
    command = [sys.executable, "-m", "composer_nb.cli", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        os.close(theirs)
        assert process.stdout is not None
        output = b""
        while not output.endswith(b"[y/n] ") and (part := process.stdout.read1()):  # type: ignore[attr-defined]
            output += part
        # The question is there before the terminal hands out single keys.
        wait_until(lambda: not tcgetattr(ours)[3] & ICANON)
        os.write(ours, keys)
        output += process.stdout.read()
    os.close(ours)
    assert json.loads((tmp_path / "out/verdict.json").read_text())["verdict"] == verdict, output.decode()
