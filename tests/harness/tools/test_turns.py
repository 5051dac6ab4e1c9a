"""Turns: several calls, in order or together, stopped, or met by faults. The backend makes no difference here."""

import contextlib
import errno
import signal
import threading

import pytest

from composer_nb.harness.sandbox.contract import ExecResult, Sandbox
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxSlow, SandboxUnavailable
from composer_nb.harness.search.index import Hit
from composer_nb.harness.tools import toolset
from composer_nb.harness.tools.arguments import tool
from composer_nb.harness.tools.search import Indexes
from composer_nb.harness.tools.session import FOLDER, SHOWN, Observation, Session, clean
from composer_nb.harness.tools.tool_call import Reply, call, invalid
from composer_nb.harness.tools.toolset import ToolSet
from tests.harness.tools.conftest import FixedSearch
from tests.waiting import wait_until

# Notes its start, and waits for the reads that began in the same state of the file `edits`.
LOOK = """
state=$(cat edits); touch "at-$1-$state"
until [ $(ls | grep -c "^at-.*-$state$") = "$2" ]; do sleep 0.01; done
[ $1 != slow ] || sleep 0.3
echo "$state"; head -c "$3" /dev/zero | tr '\\\\0' x
"""


@tool()
def look(session: Session, name: str, count: int = 1, size: int = 0) -> Observation:
    """Wait for other reads."""
    return Observation(text=clean(session.program(["bash", "-c", LOOK, "bash", name, str(count), str(size)]).stdout))


def test_reads_of_a_turn_meet_in_the_sandbox_and_edits_keep_their_place(box: Sandbox) -> None:
    tools = ToolSet(tools={"look": look} | ToolSet.cursor(offer=["search_replace", "read_file"]).tools)
    session = tools.open(box)
    box.write("edits", b"0")
    edit = call("search_replace", file_path="edits", old_string="0", new_string="1")
    reads = [call("look", name=name, count=3) for name in "abcdef"]
    replies = tools.run(session, [*reads[:3], edit, *reads[3:], call("nope"), call("read_file", target_file="edits")])
    assert [reply.text for reply in replies[:3] + replies[4:7]] == ["0\n"] * 3 + ["1\n"] * 3
    assert [reply.error for reply in replies] == [None] * 7 + ["InvalidArguments", None] and replies[8].text == "1|1"


def test_files_of_long_answers_are_numbered_in_the_order_of_the_calls(box: Sandbox) -> None:
    tools = ToolSet(tools={"look": look})
    box.write("edits", b"0")
    sizes = {"slow": SHOWN, "short": 0, "quick": SHOWN}
    looks = [call("look", name=name, count=3, size=size) for name, size in sizes.items()]
    slow, short, quick = tools.run(tools.open(box), looks)
    assert "outputs/1-look.txt" in slow.text and short.text == "0\n" and "outputs/2-look.txt" in quick.text
    assert {"1-look.txt", "2-look.txt"} == {entry.name for entry in box.entries(f"{FOLDER}/outputs")}


@pytest.mark.parametrize("end", ["abort", "interrupt", "destroy"])
def test_an_end_amid_reads_leaves_nothing_of_them(box: Sandbox, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolset, "TOOLS", (look,))  # a turn waits for the end of ours
    tools = ToolSet(tools={"look": look})
    session = tools.open(box)
    box.write("edits", b"0")
    main, ctrl_c = threading.get_ident(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored

    def finish() -> None:
        wait_until(lambda: sum(entry.name.startswith("at-") for entry in box.entries()) == 3)
        {"abort": session.abort, "destroy": box.destroy}.get(end, lambda: signal.pthread_kill(main, signal.SIGINT))()

    ends = threading.Thread(target=finish)
    ends.start()
    reads = [call("look", name=name, count=4) for name in "abc"]
    expected = {"interrupt": KeyboardInterrupt, "destroy": SandboxFailure}
    with pytest.raises(expected[end]) if end in expected else contextlib.nullcontext():
        assert [reply.error for reply in tools.run(session, reads)] == ["UserAborted"] * 3
    ends.join()
    signal.signal(signal.SIGINT, ctrl_c)
    if end != "destroy":
        assert box.stats().processes == 0 and not session.stop.is_set()
        assert tools.run(session, [call("look", name="z", count=4)])[0].text == "0\n"


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
    calls = [call("codebase_search", query=query, target_directories=[]) for query in ("down", "bug")]
    down, bug = tools.run(tools.open(box), calls)
    assert (down.error, bug.error) == ("ProviderError", "Bug")
    assert "no route" in down.text and "KeyError: 'a bug'" in caplog.text and "a bug" not in bug.text


def test_a_hostile_file_name_is_found_and_any_chat_format_can_encode_it(box: Sandbox) -> None:
    hit = Hit(path="caf\udce9.py", first_line=1, last_line=1, text="x = 1\n" * SHOWN, score=1.0)
    tools = ToolSet.cursor(search=lambda session: FixedSearch(lambda query: [hit]))
    [reply] = tools.run(tools.open(box), [call("codebase_search", query="x", target_directories=[])])
    assert reply.error is None and reply.text.startswith("caf?.py:1-1\nx = 1\n")
    assert box.read(f"{FOLDER}/outputs/1-codebase_search.txt", max_bytes=7) == b"caf?.py"


def test_a_search_that_failed_leaves_the_next_one_to_see_all_changes(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large() -> dict[str, bytes]:
        raise OSError(errno.EFBIG, "the files are too large")

    box.write("a.py", b"def rotate(matrix):\n    return matrix\n")
    tools = ToolSet.cursor(search=Indexes())
    session = tools.open(box)
    search = call("codebase_search", query="rotate a matrix", target_directories=[])
    move = call("run_terminal_cmd", command="mv a.py b.py", is_background=False)
    assert tools.run(session, [search])[0].text.startswith("a.py:1-2\n")
    with monkeypatch.context() as patch:
        patch.setattr(box, "download", too_large)
        assert [reply.error for reply in tools.run(session, [move, search])] == [None, "ProviderError"]
    assert tools.run(session, [search])[0].text.startswith("b.py:1-2\n")


def test_a_missing_program_is_told_with_what_to_do(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.write("bin/sh", b"")
    original = box.exec
    monkeypatch.setattr(box, "exec", lambda command, **more: original(command, env={"PATH": "/usr/sbin:/bin"}, **more))
    if original(["sh", "-c", "command -v rg"], env={"PATH": "/usr/sbin:/bin"}).exit_code == 0:
        pytest.skip("this system has ripgrep among its own programs")
    with pytest.raises(SandboxUnavailable, match=r"no rg and no ruff in the sandbox.*pip install"):
        ToolSet.cursor().open(box)
    ToolSet.cursor(offer=["read_file", "write"]).open(box)


def test_a_busy_machine_is_said_to_lack_no_program(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    late = ExecResult(exit_code=137, stdout=b"", stderr=b"", timed_out=True)
    monkeypatch.setattr(box, "exec", lambda *_, **options: late if options["granted"] else None)
    with pytest.raises(SandboxSlow):
        ToolSet.cursor().open(box)


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
def tiny_session(box: Sandbox) -> Session:
    for path, text in (("f.py", WRONG), ("test_f.py", TESTS), ("latin.txt", "a\xe9\r\n  b\r\n")):
        box.write(path, text.encode("latin-1"))
    return ToolSet.tiny().open(box)


def tiny(tiny_session: Session, name: str, **arguments: object) -> Reply:
    [reply] = ToolSet.tiny().run(tiny_session, [call(name, **arguments)])
    return reply


def test_a_tiny_model_mends_a_file_in_a_sandbox(tiny_session: Session, box: Sandbox) -> None:
    assert tiny(tiny_session, "read_file", path="f.py").text == "1def f(xs, k):\n2    return [x for x in xs if x < k]"
    reply = tiny(tiny_session, "run_tests")
    assert reply.text == "fail 1/2: f([1,5,3],2) = [1] want [5,3]" and (reply.tests_passed, reply.tests_run) == (1, 2)
    assert tiny(tiny_session, "edit_line", path="./f.py", line=2, text="return [x for x in xs if x > k]").text == "ok"
    assert box.read("f.py").decode() == WRONG.replace("<", ">") and tiny_session.touched == {"f.py"}
    reply = tiny(tiny_session, "run_tests")
    assert (reply.text, reply.tests_passed, reply.tests_run, reply.error) == ("pass 2", 2, 2, None)


def test_what_the_tests_say(tiny_session: Session, box: Sandbox) -> None:
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
        reply = tiny(tiny_session, "run_tests")
        assert reply.error == (None if text else "UnexpectedEnvironment")
        assert reply.text.startswith(text or "") and len(reply.text) <= 110 and "\n" not in reply.text


def test_nothing_is_carried_out_after_the_end(tiny_session: Session, box: Sandbox) -> None:
    edit_call, read_call = call("edit_line", path="f.py", line=1, text="x"), call("read_file", path="f.py")
    replies = ToolSet.tiny().run(tiny_session, [invalid("bad call"), read_call, call("finish"), read_call, edit_call])
    assert [reply.error for reply in replies] == ["InvalidArguments", None, None] and replies[2].ends
    assert replies[0].text == "bad call" and not replies[1].ends
    assert box.read("f.py").decode() == WRONG
