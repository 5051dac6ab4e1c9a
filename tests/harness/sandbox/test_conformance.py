"""What every backend promises of its sandboxes, beyond what the attacks of `tests/adversarial/test_sandboxes.py` try."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from composer_nb.harness.sandbox.contract import Backend, ExecResult, Sandbox
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.system.linux import patience
from tests.harness.sandbox.conftest import SMALL, make
from tests.waiting import wait_until


def shell(box: Sandbox, text: str, timeout_s: float = 20.0) -> str:
    return output(box.exec(["bash", "-c", text], timeout_s=timeout_s))


def python(box: Sandbox, source: str, timeout_s: float = 20.0) -> str:
    return output(box.exec(["python3", "-c", source], timeout_s=timeout_s))


def output(result: ExecResult) -> str:
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


# Commands


def test_exec_reports_streams_and_exit_codes(box: Sandbox) -> None:
    result = box.exec(["bash", "-c", r"printf '\000\377\033[2J\r'; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"\x00\xff\x1b[2J\r", b"err\n")
    assert not result.timed_out and not result.truncated and not result.oom and result.duration_s > 0
    assert box.exec(["bash", "-c", "kill -9 $$"]).exit_code == 137
    missing, folder = box.exec(["no-such-program"]), box.exec(["/"])
    assert missing.exit_code == 127 and b"no-such-program" in missing.stderr
    assert folder.exit_code == 126 and folder.stderr
    assert box.exec(["echo", "x" * 3_000_000]).exit_code == 126


def test_exec_passes_stdin_environment_and_folder(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 2000
    assert box.exec(["cat"], stdin=data).stdout == data
    assert box.exec(["cat"]).stdout == b""  # without input there is none to wait for
    assert box.exec(["true"], stdin=data, timeout_s=10).exit_code == 0  # nobody reads it
    box.write("sub/file", b"")
    result = box.exec(["bash", "-c", "pwd; echo $COLOUR"], cwd="sub", env={"COLOUR": "blue"})
    assert result.stdout.endswith(b"/sub\nblue\n")
    for cwd in ("nowhere", ".."):
        with pytest.raises(OSError):
            box.exec(["true"], cwd=cwd)
    monkeypatch.setenv("SECRET_OF_THE_HOST", "yes")
    assert "SECRET_OF_THE_HOST" not in shell(box, "env")
    modules = "bz2, ctypes, decimal, hashlib, json, lzma, multiprocessing, sqlite3, ssl, unittest, venv, zlib"
    assert python(box, f"import {modules}; print('all there')") == "all there"
    assert shell(box, "rg --version").startswith("ripgrep") and shell(box, "ruff --version").startswith("ruff")


def test_exec_refuses_what_is_no_list_of_words_or_no_limit(box: Sandbox) -> None:
    for command in ("ls -l", [], ["ls", "a\0b"]):
        with pytest.raises(ValueError, match="command"):
            box.exec(command)
    for limit in (*({"timeout_s": seconds} for seconds in (0, 1e9, float("nan"))), {"output_bytes": 1}):
        with pytest.raises(ValueError, match=next(iter(limit))):
            box.exec(["true"], **limit)


def test_exec_keeps_head_and_tail_of_a_flood(box: Sandbox) -> None:
    for stream in (1, 2):
        flood = ["bash", "-c", f"(echo first; yes | head -c 3000000; echo last) >&{stream}"]
        result = box.exec(flood, output_bytes=1000)
        text = (result.stdout, result.stderr)[stream - 1]
        assert result.exit_code == 0 and result.truncated and text.startswith(b"first\n") and text.endswith(b"last\n")
        assert len(text) < 1100 and b"[... 2999011 bytes left out ...]" in text
    for length in (1, 2, 3):
        result = box.exec(["printf", "%s", "abc"[:length]], output_bytes=2)
        assert result.truncated == (length > 2) and (result.truncated or result.stdout == b"abc"[:length])


def test_exec_leaves_no_descriptor_of_a_failed_start(box: Sandbox) -> None:
    for _ in range(SMALL.open_files):
        assert box.exec(["no-such-program"], stdin=b"x").exit_code == 127
    assert shell(box, "echo on") == "on"


def test_an_interrupted_request_ends_the_sandbox(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer would be taken for that of the next request."""

    def interrupted(self: object, timeout_s: float) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(box._machine.channel), "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            box.exec(["echo", "first"])
    with pytest.raises(SandboxFailure, match="middle of a request"):
        box.exec(["echo", "second"])


# Commands side by side. A command ends here only when something else has happened meanwhile.

MEET = 'touch "at-$0"; until [ -e at-0 -a -e at-1 -a -e at-2 -a -e go ]; do sleep 0.01; done; echo "$0"; exec cat'


def wait_for(box: Sandbox, *names: str) -> None:
    wait_until(lambda: {*names} <= {entry.name for entry in box.entries()})


def test_commands_of_several_threads_meet_and_files_are_answered_meanwhile(box: Sandbox) -> None:
    with ThreadPoolExecutor(3) as pool:
        data = [os.urandom(300_000 + number) for number in range(3)]
        ends = [pool.submit(box.exec, ["bash", "-c", MEET, str(n)], stdin=data[n]) for n in range(3)]
        wait_for(box, "at-0", "at-1", "at-2")
        assert box.stats().processes >= 3 and not any(end.done() for end in ends)
        box.write("go", b"")
        assert [end.result().stdout for end in ends] == [b"%d\n" % n + data[n] for n in range(3)]


def test_a_command_that_ends_badly_leaves_those_beside_it_alone(box: Sandbox) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(box.exec, ["bash", "-c", "touch at-0; until [ -e go ]; do sleep 0.01; done; echo on"])
        stopped = pool.submit(box.exec, ["bash", "-c", "touch at-1; sleep 7000"], stop=stop)
        wait_for(box, "at-0", "at-1")
        late = pool.submit(box.exec, ["bash", "-c", "(setsid sleep 7000 &); yes"], timeout_s=0.5, output_bytes=1000)
        dead, missing = box.exec(["bash", "-c", "kill -9 $$"]), box.exec(["no-such-program"])
        assert (dead.exit_code, missing.exit_code, late.result().timed_out) == (137, 127, True)
        with pytest.raises(OSError):
            box.exec(["true"], cwd="nowhere")
        assert not stopped.done() and not beside.done()
        stop.set()
        assert stopped.result().stopped and not beside.done() and len(late.result().stdout) < 1100
        box.write("go", b"")
        assert beside.result() == replace(beside.result(), exit_code=0, stdout=b"on\n", timed_out=False, stopped=False)
    assert box.stats().processes == 0


@pytest.mark.parametrize("end", ["destroy", "end_all"])
def test_an_end_amid_commands_ends_all_of_them(backend: Backend, end: str) -> None:
    with backend.create(SMALL) as box, ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(box.exec, ["bash", "-c", f"touch at-{n}; sleep 7000 & wait"]) for n in range(3)]
        wait_for(box, "at-0", "at-1", "at-2")
        getattr(box, end)()
        if end == "end_all":
            assert [result.result().exit_code for result in ends] == [137] * 3 and box.stats().processes == 0
        else:
            box.destroy()
            for request in (*(result.result for result in ends), box.stats):
                with pytest.raises(SandboxFailure, match="destroyed"):
                    request()


# The end of commands

ZOMBIE_WITH_A_THREAD = """
import ctypes, os, threading, time
print("partial", flush=True)
def work():
    while True:
        time.sleep(0.01)
threading.Thread(target=work).start()
if os.fork() == 0:
    time.sleep(777)
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends this thread alone
"""
TAKES_WHAT_IS_PRINTED = """
import fcntl, os, time
print("partial", flush=True)
if os.fork() == 0:
    pipe = os.open("/proc/self/fd/1", os.O_RDONLY)
    while True:
        os.read(pipe, 1 << 16)
unread = bytes(4)
while not any(unread):  # until the other stream is no longer read
    os.write(1, b"x")
    time.sleep(0.0005)
    os.write(2, b"x")
    time.sleep(0.02)
    unread = fcntl.ioctl(2, 0x541B, bytes(4))
time.sleep(777)
"""
ENDLESS = {
    "first thread ended": (["python3", "-c", ZOMBIE_WITH_A_THREAD], 1.0),
    "reads its own output": (["python3", "-c", TAKES_WHAT_IS_PRINTED], 2.0),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_time_limit_ends_the_whole_tree_and_nothing_else(box: Sandbox, name: str) -> None:
    box.exec_background(["sleep", "60"], log="log")
    command, limit_s = ENDLESS[name]
    result = box.exec(command, timeout_s=limit_s)
    assert result.timed_out and result.exit_code in (0, 137)
    assert result.stdout.startswith(b"partial\n") or name == "reads its own output"
    assert box.stats().processes == 1 and shell(box, "echo on") == "on"


def test_stop_ends_the_whole_tree_and_nothing_else(box: Sandbox) -> None:
    stop = threading.Event()
    assert not box.exec(["true"], stop=stop).stopped
    box.exec_background(["sleep", "55"], log="log")
    threading.Timer(0.2, stop.set).start()
    result = box.exec(["bash", "-c", "(sleep 7700 &) ; sleep 7700"], timeout_s=6000, stop=stop)
    assert (result.stopped, result.timed_out) == (True, False) and box.stats().processes == 1
    for _ in range(20):  # a command may end before it is told: its answer stands, and the next is its own
        result = box.exec(["echo", "x"], stop=stop)
        assert result.stopped or result.stdout == b"x\n"
        assert box.exec(["echo", "y"]).stdout == b"y\n"


def test_what_a_command_leaves_behind_goes_on_until_end_all(box: Sandbox) -> None:
    assert shell(box, "sleep 6000 & echo on") == "on"  # it also keeps the pipe open
    shell(box, "(sleep 60 >/dev/null 2>&1 &)")
    box.exec_background(["sh", "-c", "trap '' TERM HUP; while :; do sleep 0.05; done"], log="log")
    box.exec(["sh", "-c", "(setsid sh -c 'trap \"\" TERM; sleep 100 & kill -STOP $$') >/dev/null 2>&1 & sleep 0.1"])
    assert box.stats().processes >= 4
    box.end_all()
    box.end_all()
    assert box.stats().processes == 0 and shell(box, "echo on") == "on"


STOPS_ALL = """
import contextlib, os, signal
while True:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
"""


def test_a_program_that_stops_all_others_keeps_no_answer_back(box: Sandbox) -> None:
    """It also stops what has not begun: the sandbox then has to end that, or its silence looks like the machine's fault."""
    box.exec_background(["python3", "-c", STOPS_ALL], log="log")
    time.sleep(0.3)
    assert {box.exec(["true"], timeout_s=1).exit_code for _ in range(5)} <= {0, 137}
    box.end_all()
    assert box.stats().processes == 0 and shell(box, "echo on") == "on"


# Files


def test_read_and_write_round_trip(box: Sandbox) -> None:
    data = os.urandom(300_000)
    box.write("a/b/c.bin", data)
    assert box.read("a/b/c.bin") == data and box.read("a/b/c.bin", offset=299_990) == data[299_990:]
    root = shell(box, "pwd")
    assert box.read("a/b/c.bin", max_bytes=10) == box.read(f"{root}/a/b/c.bin", max_bytes=10) == data[:10]
    box.write("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert shell(box, "./run.sh") == "ran"


def test_write_keeps_permissions_and_replaces_a_link_but_not_its_target(box: Sandbox) -> None:
    box.write("run", b"1", mode=0o750)
    box.write("run", b"2")
    box.write("target", b"old")
    shell(box, "ln -s target link")
    box.write("link", b"new")
    assert [(entry.name, entry.mode) for entry in box.entries()] == [("link", 0o644), ("run", 0o750), ("target", 0o644)]
    assert box.read("target") == b"old" and box.read("link") == b"new"
    shell(box, "mkdir -p real/a; ln -s real within; ln -s ../real real/up")
    box.write("within/a/y", b"1")
    box.write("real/up/a/z", b"2")
    assert box.read("real/a/y") == b"1" and box.read("within/a/z") == b"2"


OUTSIDE = "pipe link up/etc/passwd loop ../x /etc/passwd dir/../../x /proc/1/environ".split()
REFUSED = {
    "read": [("none", FileNotFoundError), ("dir", IsADirectoryError), *((path, OSError) for path in [*OUTSIDE, "a\0b"])],
    "write": [("dir", IsADirectoryError), *((path, OSError) for path in "up/x ../x /tmp/x dir/f/x a/../../x".split())],
    "entries": [("dir/f", NotADirectoryError), ("no", FileNotFoundError), *((p, OSError) for p in "up .. /etc".split())],
    "remove": [
        ("dir", IsADirectoryError), ("no", FileNotFoundError), (".", IsADirectoryError),
        *((path, OSError) for path in "up/etc/passwd ../a /etc/passwd dir/.. ..".split()),
    ],
}  # fmt: skip


def test_files_outside_the_workspace_and_odd_ones_are_refused(box: Sandbox) -> None:
    box.write("dir/f", b"x")
    shell(box, "mkfifo pipe; ln -s /etc/passwd link; ln -s ../../.. up; ln -s loop loop")
    for method, (path, error) in ((method, case) for method, cases in REFUSED.items() for case in cases):
        with pytest.raises(error):  # reading the pipe would wait, and end with another error
            getattr(box, method)(path, *[b""] * (method == "write"))
    assert "pipe" not in box.download() and box.read("dir/f") == b"x"


def test_a_failed_write_leaves_no_space_taken(box: Sandbox) -> None:
    before = box.stats()
    box.write("first", b"x" * (SMALL.disk_bytes // 2))
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            box.write("big", b"x" * (SMALL.disk_bytes * 3 // 4))
    after = box.stats()
    assert SMALL.disk_bytes // 2 <= after.disk_bytes - before.disk_bytes <= SMALL.disk_bytes // 2 + 8192
    assert after.inodes == before.inodes + 1 and after.processes == 0


def test_upload_and_download(box: Sandbox) -> None:
    files = {"a.py": b"x = 1\n", "p/q/r.txt": b"", "ö/ü": b"\x00\xff"}
    box.upload(files)
    assert box.download() == files
    with pytest.raises(OSError, match="bytes"):
        box.download(max_bytes=5)
    with pytest.raises(OSError):
        box.upload({"../x": b""})
    shell(box, "rm -r *; for n in $(seq 300); do mkdir d$n; echo $n > d$n/f; done")  # more than may be open
    assert box.download() == {f"d{n}/f": b"%d\n" % n for n in range(1, 301)}
    python(box, "import os\nfor _ in range(90):\n    os.mkdir('d')\n    os.chdir('d')")
    with pytest.raises(OSError, match="folders"):
        box.download()


def test_entries_lists_every_kind_of_file(box: Sandbox) -> None:
    box.upload({"d/a": b"123", "d/e/f": b""})
    box.write("d/run", b"#!", mode=0o755)
    shell(box, r"ln -s /etc d/out; mkfifo d/pipe; touch d/$'\xff'")
    entries = box.entries("d")
    assert {entry.name: entry.kind for entry in entries} == {
        "a": "file", "e": "folder", "out": "link", "pipe": "other", "run": "file", "\udcff": "file",
    }  # fmt: skip
    assert {(e.name, e.size, e.mode) for e in entries} >= {("a", 3, 0o644), ("run", 2, 0o755)}
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    box.remove("d/out")
    box.remove("d/e/f")
    assert box.entries("d/e") == box.entries(shell(box, "pwd") + "/d/e") == []


# Snapshots


def test_a_fork_has_the_files_and_goes_its_own_way(backend: Backend, box: Sandbox) -> None:
    shell(box, "mkdir -p d/e; echo one > d/f; ln -s f d/l; chmod 750 d; echo '#!/bin/sh' > x; chmod +x x")
    shell(box, "touch -d 2001-02-03 x; mkdir closed; touch closed/f; echo 1 > secret; echo 2 > odd")
    shell(box, "chmod 000 closed secret; touch -d @9223372036854775 odd || true")
    look = "cat d/l odd; stat -c %a d x; stat -c %Y x"
    snapshot = box.snapshot()
    with box.fork() as fork:
        assert fork.snapshot().digest == snapshot.digest and shell(fork, look) == shell(box, look)
        fork.write("d/f", b"two")
        assert box.read("d/f") == b"one\n" and fork.snapshot().digest != snapshot.digest
    box.write("d/f", b"three")
    with backend.create(SMALL, snapshot) as second:
        assert second.read("d/f") == b"one\n" and second.snapshot().digest == snapshot.digest, "it may be used again"
    shell(box, "chmod 700 closed secret")


# Life and death


def test_a_closed_backend_makes_nothing_and_leaves_nothing(backend: Backend, request: pytest.FixtureRequest):
    closing = make(backend.name, request)
    boxes: list[Sandbox] = []

    def create() -> None:
        with contextlib.suppress(SandboxFailure):
            while True:
                boxes.append(closing.create(SMALL))

    threads = [threading.Thread(target=create) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: boxes)
    closing.close()
    for thread in threads:
        thread.join(timeout=patience(60))
        assert not thread.is_alive()
    for box in boxes:
        with pytest.raises(SandboxFailure):
            box.read("x")


def test_a_fault_of_this_machine_is_not_the_workspaces(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backend, "_begin", full)
    with pytest.raises(SandboxFailure, match="no sandbox could be made: .*No space left"):
        backend.create(SMALL)


# Walls

OUT_OF_REACH = """
import os
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
found = []
def attempt(name, call):
    try: call()
    except OSError: return
    found.append(name)
for name in ("mem", "environ", "fd/0", "fd/1", "root", "cwd", "maps"):
    attempt(name, lambda: os.listdir("/proc/1/fd") if name[:2] == "fd" else open("/proc/1/" + name, "rb").read(1))
for name in ("oom_score_adj", "mem", "attr/current"):
    attempt("write " + name, lambda: os.write(os.open("/proc/1/" + name, os.O_WRONLY), b"1"))
attempt("scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
attempt("affinity", lambda: os.sched_setaffinity(1, {0}))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt("priority of all", lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt("up", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))
os.setpriority(os.PRIO_PROCESS, 0, 19)
print(found)
"""


def test_the_resident_program_is_out_of_reach(box: Sandbox) -> None:
    assert python(box, OUT_OF_REACH) == "[]" and shell(box, "echo on") == "on"
    assert python(box, "import socket; socket.create_server(('127.0.0.1', 0))") == "", "a loopback of its own"
    box.exec(["bash", "-c", "for n in $(seq 30); do (while :; do :; done) & done"], timeout_s=30)
    assert shell(box, "echo on", timeout_s=30) == "on", "many that spin do not silence it"


def test_devices_hold_nothing_for_another_sandbox(backend: Backend) -> None:
    with backend.create(SMALL) as first, backend.create(SMALL) as second:
        change = "echo x > /dev/x; mkdir /dev/d; ln -sf /workspace /dev/stdout; rm /dev/null; ls /dev/pts"
        result = first.exec(["bash", "-c", change])
        assert b"x" not in second.exec(["ls", "/dev"]).stdout.split() and b"0" not in result.stdout.split()
        assert shell(second, "echo on > /dev/null; echo on > /dev/stdout") == "on"
