"""Turns: several calls, in order or together, stopped, or met by faults. The backend makes no difference here."""

from __future__ import annotations

import threading

import pytest

from composer_nb.harness.sandbox.contract import Sandbox
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.tools.session import Session
from composer_nb.harness.tools.tool_call import Reply, ToolCall, call, invalid
from composer_nb.harness.tools.toolset import ToolSet
from tests.harness.tools.conftest import FixedSearch


def test_replies_come_in_order_and_failures_stay_alone(box: Sandbox, tools: ToolSet, session: Session) -> None:
    box.write("n", b"0\n")
    calls, read = list[ToolCall](), call("read_file", target_file="n")
    for number in range(8):
        edit = call("search_replace", file_path="n", old_string=f"{number}", new_string=f"{number + 1}")
        calls += [read, call("nope"), edit, read]
    replies = tools.run(session, calls)
    assert [reply.call for reply in replies] == calls
    assert [reply.text for reply in replies[::4]] == [f"1|{n}" for n in range(8)]
    assert [reply.text for reply in replies[3::4]] == [f"1|{n + 1}" for n in range(8)]
    assert {reply.error for reply in replies[1::4]} == {"InvalidArguments"}
    assert all(reply.error is None for reply in (*replies[::4], *replies[2::4], *replies[3::4]))


def test_readers_meet_and_a_writer_is_alone(box: Sandbox) -> None:
    meeting, under_way, most = threading.Barrier(4), [0], []

    def search(query: str) -> list[object]:
        under_way[0] += 1
        most.append(under_way[0])
        if query == "meet":
            meeting.wait(timeout=patience(20))  # broken unless four are here at a time
        under_way[0] -= 1
        return []

    tools = ToolSet.cursor(search=lambda session: FixedSearch(search))
    session = tools.open(box)
    ask, alone = (call("codebase_search", query=query, target_directories=[]) for query in ("meet", "x"))
    write = call("write", file_path="a", contents="")
    replies = tools.run(session, [ask] * 4 + [write, alone, write])
    assert [reply.error for reply in replies] == [None] * 7 and most[-1] == 1


def test_an_abort_stops_what_runs_and_what_waits(tools: ToolSet, session: Session, box: Sandbox) -> None:
    threading.Timer(0.5, session.abort).start()
    sleep = call("run_terminal_cmd", command="echo begun; sleep 6000", is_background=False)
    write = call("write", file_path="a", contents="")
    replies = tools.run(session, [sleep, write])
    assert [reply.error for reply in replies] == ["UserAborted"] * 2
    assert "begun" in replies[0].text and box.entries() == []
    assert tools.run(session, [write])[0].error is None  # the next turn is another one


def test_a_fault_of_ours_is_logged_as_one(box: Sandbox, caplog: pytest.LogCaptureFixture) -> None:
    def broken(query: str) -> list[object]:
        if query == "down":
            raise ConnectionError("no route")
        raise KeyError("a bug")

    tools = ToolSet.cursor(search=lambda session: FixedSearch(broken))
    asked = [call("codebase_search", query=query, target_directories=[]) for query in ("down", "bug")]
    down, bug = tools.run(tools.open(box), asked)
    assert (down.error, bug.error) == ("ProviderError", "Bug")
    assert "no route" in down.text and "KeyError: 'a bug'" in caplog.text and "a bug" not in bug.text


def test_the_sandboxs_own_end(tools: ToolSet, session: Session, box: Sandbox) -> None:
    box.destroy()
    with pytest.raises(SandboxFailure):
        tools.run(session, [call("list_dir", target_directory=".")])


def test_a_missing_program_is_told_with_what_to_do(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.write("bin/sh", b"")
    original = box.exec
    monkeypatch.setattr(box, "exec", lambda command, **more: original(command, env={"PATH": "/usr/sbin:/bin"}, **more))
    if original(["sh", "-c", "command -v rg"], env={"PATH": "/usr/sbin:/bin"}).exit_code == 0:
        pytest.skip("this system has ripgrep among its own programs")
    with pytest.raises(SandboxUnavailable, match=r"no rg and no ruff in the sandbox.*pip install"):
        ToolSet.cursor().open(box)
    ToolSet.cursor(offer=["read_file", "write"]).open(box)


# -- the tools of tiny models in a sandbox --------------------------------------------------------------------

TESTS = """\
from f import f

def test_some():
    assert f([1, 5, 3], 2) == [5, 3]

def test_none():
    assert f([], 1) == []
"""
WRONG = "def f(xs, k):\n    return [x for x in xs if x < k]\n"


@pytest.fixture
def place(box: Sandbox) -> Session:
    for path, text in (("f.py", WRONG), ("test_f.py", TESTS), ("latin.txt", "a\xe9\r\n  b\r\n")):
        box.write(path, text.encode("latin-1"))
    return ToolSet.tiny().open(box)


def tiny(place: Session, name: str, **arguments: object) -> Reply:
    [reply] = ToolSet.tiny().run(place, [call(name, **arguments)])
    return reply


def test_a_tiny_model_mends_a_file_in_a_sandbox(place: Session, box: Sandbox) -> None:
    assert tiny(place, "read_file", path="f.py").text == "1def f(xs, k):\n2    return [x for x in xs if x < k]"
    seen = tiny(place, "run_tests")
    assert seen.text == "fail 1/2: f([1,5,3],2) = [1] want [5,3]" and (seen.tests_passed, seen.tests_run) == (1, 2)
    assert tiny(place, "edit_line", path="./f.py", line=2, text="return [x for x in xs if x > k]").text == "ok"
    assert box.read("f.py").decode() == WRONG.replace("<", ">") and place.touched == {"f.py"}
    seen = tiny(place, "run_tests")
    assert (seen.text, seen.tests_passed, seen.tests_run, seen.error) == ("pass 2", 2, 2, None)


def test_what_the_tests_say(place: Session, box: Sandbox) -> None:
    for code, tests, text in (
        ("", TESTS, "fail 1/1: ImportError: cannot import name 'f'"),
        ("def f(*x): return x", TESTS, "fail 2/2: f([1,5,3],2) = ([1,5,3],2) want [5,3]"),
        ("def f(*x): raise KeyError('a\\nb')", TESTS, "fail 2/2: KeyError: 'a\\nb'"),
        ("", "import pytest\n@pytest.mark.skip\ndef test_a():\n    pass\n", "pass 0"),
        ("", "import os\nos._exit(3)\n", None),
        ("print('E   spoofed')\ndef f(*x): return 1", TESTS, "fail 2/2: "),
    ):
        box.write("f.py", code.encode())
        box.write("test_f.py", tests.encode())
        seen = tiny(place, "run_tests")
        assert seen.error == (None if text else "UnexpectedEnvironment")
        assert seen.text.startswith(text or "") and len(seen.text) <= 110 and "\n" not in seen.text


def test_nothing_is_carried_out_after_the_end(place: Session, box: Sandbox) -> None:
    edit, read, bad = (
        call("edit_line", path="f.py", line=1, text="x"),
        call("read_file", path="f.py"),
        invalid("bad call"),
    )
    replies = ToolSet.tiny().run(place, [bad, read, call("finish"), read, bad, edit])
    assert [(reply.error, reply.ends) for reply in replies] == [
        *(("InvalidArguments", False), (None, False), (None, True))
    ]
    assert box.read("f.py").decode() == WRONG
