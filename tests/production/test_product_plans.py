"""`composer-nb agent --planner`: a plan is written, shown, edited, worked by and kept."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from termios import ICANON, tcgetattr
from typing import Any

import pytest

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Message, Said, User
from composer_nb.harness.agent.scripts import play, turn
from composer_nb.harness.tools.tool_call import call
from composer_nb.production.agents import write_plan
from composer_nb.production.planner import SHOWN, excerpt
from composer_nb.production.serve import ScriptServer
from tests.harness.json_server import JsonServer
from tests.waiting import wait_until

EDIT = call("search_replace", file_path="f.py", old_string="x + x + 1", new_string="x + x")


@pytest.fixture
def planner(tmp_path: Path) -> str:
    path = tmp_path / "planner.json"
    path.write_text(json.dumps([{"text": "1. Change f.py."}]))
    return f"scripted:{path}"


@pytest.fixture
def first_messages() -> list[str]:
    return []


@pytest.fixture
def policy(first_messages: list[str]) -> Iterator[str]:
    """Serve an agent that records its first message."""
    script = play([turn([EDIT]), Said(text="Done.")])

    def speak(talk: Sequence[Message]) -> Said:
        assert isinstance(talk[0], User)
        first_messages.append(talk[0].text)
        return script(talk)

    with ScriptServer(speak) as server:
        yield f"openai:{server.url}"


def test_an_agent_works_by_a_plan_that_is_kept_with_its_price(
    repository: Path, policy: str, first_messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "logo.png").write_bytes(b"\0\1")
    words = ["agent", str(repository), "fix double", "--policy", policy]
    out = ["--out", str(tmp_path / "out")]
    with ScriptServer(play([Said(text="1. Change f.py.")])) as server:
        options = ["--planner", f"openai:{server.url}", "--planner-price", "1,10"]
        assert main([*words, *options, *out, "--plan-only"]) == 0 and not first_messages
    output = capsys.readouterr().out
    assert "1. Change f.py." in output and f"--plan {tmp_path}/out/plan.md" in output and "2 of 3 files" in output
    plan = tmp_path / "out/plan.md"
    plan.write_text("2. Test it.\n")
    assert main([*words, *out, "--plan", str(plan), "--verdict", "accept"]) == 0
    assert set(first_messages) == {"fix double\n\nplan:\n2. Test it."}
    saved = json.loads((tmp_path / "out/plan.json").read_text())
    assert saved["text"] == "2. Test it." and saved["files"] == ["f.py", "test_f.py"] and saved["left_out"] == 1
    assert saved["dollars"] == pytest.approx((saved["read"] + 10 * saved["written"]) / 1e6) and saved["written"]
    assert main([*words, *out, "--plan", str(plan)]) == 2 and "exists already" in capsys.readouterr().err


def test_without_a_terminal_work_begins_at_once(
    repository: Path, planner: str, policy: str, first_messages: list[str]
) -> None:
    out = repository / ".composer_nb" / "work"
    words = ["--planner", planner, "--out", str(out), "--verdict", "reject"]
    assert main(["agent", str(repository), "fix double", "--policy", policy, *words]) == 1
    assert set(first_messages) == {"fix double\n\nplan:\n1. Change f.py."}
    assert (out / "plan.md").read_text() == "1. Change f.py.\n" and (out / ".gitignore").is_file()


def test_a_plan_that_fails_is_an_error(
    repository: Path, planner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, blank = tmp_path / "silent.json", tmp_path / "blank.md"
    silent.write_text(json.dumps([{"text": " "}]))
    blank.write_text("\n")
    words = ["agent", str(repository), "fix it", "--policy", planner, "--out", str(tmp_path / "out")]
    for options, text in (
        (["--planner", f"scripted:{silent}"], "its plan is empty"),
        (["--planner", "scripted:planner"], "plays the solution of a task"),
        (["--plan", str(blank)], "is empty"),
        (["--plan", str(tmp_path / "none.md")], "none.md"),
        (["--plan", str(blank), "--planner", planner], "use either --planner or --plan FILE"),
        (["--plan-only"], "use either --planner or --plan FILE"),
        (["--planner", planner, "--planner-price", "x"], "--planner-price x: give dollars per million tokens"),
    ):
        assert main([*words, *options]) == 2 and not (tmp_path / "out").exists()
        assert text in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_plan_is_text_that_a_file_can_hold(repository: Path, tmp_path: Path) -> None:
    with JsonServer(lambda path, body: {"choices": [{"message": {"content": "a \ud800 b"}}]}) as server:
        assert write_plan(repository, "fix it", f"openai:{server.url}#m", tmp_path / "out").text == "a ? b"


def test_of_a_large_repository_a_planner_reads_all_names_and_what_suits_the_request() -> None:
    files = {f"pkg/m{n:03}.py": f"def part{n}(x):\n    return x + {n}\n" * 20 for n in range(200)}
    files["pkg/zip_codes.py"] = "def parse_postcode(text):\n    return text.strip()\n"
    files["pkg/long.py"] = f"{files['pkg/m000.py'] * 60}\n\ndef postcode_table():\n    return {{}}\n"
    text, paths = excerpt("The postcode parser keeps white space", files)
    assert len(text) <= SHOWN and 50 < len(paths) < len(files) and all(path in text for path in files)
    assert paths[0] == "pkg/zip_codes.py" and files[paths[0]] in text
    assert "def postcode_table" in text and files["pkg/long.py"] not in text
    excerpt_files = {path: files[path] for path in ("pkg/m001.py", "pkg/m000.py")}
    joined = "\n\n".join(f"{path}:\n{excerpt_files[path]}" for path in sorted(excerpt_files))
    assert excerpt("x", excerpt_files) == (joined, tuple(sorted(excerpt_files)))


EDITOR = """\
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: None)
with open(sys.argv[1], "a") as plan:
    plan.write("2. Test it.\\n")
open(f"{sys.argv[1]}~", "x").close()  # what emacs and joe keep of the text before
print("editing", flush=True)
time.sleep(0.5)
with open(sys.argv[1], "a") as plan:
    plan.write("3. Stop.\\n")
"""


@pytest.mark.parametrize("last", [b"y", b"n"])
def test_a_plan_is_edited_on_a_terminal_and_ctrl_c_loses_nothing(
    repository: Path, planner: str, tmp_path: Path, last: bytes
) -> None:
    ours, theirs = os.openpty()
    editor, out = tmp_path / "editor.py", tmp_path / "out"
    editor.write_text(EDITOR)
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"text": "Done."}]))
    words = ["agent", str(repository), "fix it", "--policy", f"scripted:{script}", "--out", str(out)]
    streams: dict[str, Any] = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "VISUAL": f"{sys.executable} {editor}"}
    command = [sys.executable, "-m", "composer_nb.cli", *words, "--planner", planner]
    with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
        os.close(theirs)
        output = b""

        def until(text: bytes) -> None:
            nonlocal output
            while text not in output and (part := process.stdout.read1()):  # type: ignore[union-attr]
                output += part
            assert text in output, output.decode()
            output = output.partition(text)[2]

        def press(key: bytes) -> None:
            wait_until(lambda: not tcgetattr(ours)[3] & ICANON)
            os.write(ours, key)

        until(b"e edits it] ")
        press(b"e")
        until(b"editing")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends Ctrl-C: to the editor too
        until(b"3. Stop.")
        until(b"e edits it] ")
        press(last)
        process.communicate()
    os.close(ours)
    assert process.returncode == (0 if last == b"y" else 1)
    assert (out / "plan.md").read_text() == "1. Change f.py.\n2. Test it.\n3. Stop.\n"
    assert (out / "verdict.json").exists() == (last == b"y")
