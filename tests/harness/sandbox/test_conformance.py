"""What every backend promises of its sandboxes (`contract.Sandbox`)."""

from __future__ import annotations

import os
import threading
import time

import pytest

from composer_nb.harness.sandbox.contract import Backend, CallLimits, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.system.linux import patience
from tests.harness.sandbox.conftest import SMALL, make


def shell(box: Sandbox, text: str, timeout_s: float = 20.0, **more: object) -> str:
    done = box.exec(["bash", "-c", text], timeout_s=timeout_s, **more)  # type: ignore[arg-type]
    assert done.exit_code == 0, done
    return done.stdout.decode().strip()


def python(box: Sandbox, source: str, timeout_s: float = 20.0) -> str:
    done = box.exec(["python3", "-c", source], timeout_s=timeout_s)
    assert done.exit_code == 0, done
    return done.stdout.decode().strip()


class TestExec:
    def test_streams_and_exit_code(self, box: Sandbox) -> None:
        done = box.exec(["bash", "-c", "echo out; echo err >&2; exit 3"])
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
        assert not done.timed_out and not done.truncated and not done.oom and done.duration_s > 0

    def test_death_by_signal_is_128_and_more(self, box: Sandbox) -> None:
        assert box.exec(["bash", "-c", "kill -9 $$"]).exit_code == 137

    def test_what_cannot_be_started_says_why(self, box: Sandbox) -> None:
        missing, folder = box.exec(["no-such-program"]), box.exec(["/"])
        assert missing.exit_code == 127 and b"no-such-program" in missing.stderr
        assert folder.exit_code == 126 and folder.stderr

    def test_stdin_environment_and_folder(self, box: Sandbox) -> None:
        data = bytes(range(256)) * 2000
        assert box.exec(["cat"], stdin=data).stdout == data
        assert box.exec(["cat"]).stdout == b""  # without input there is none to wait for
        box.write("sub/file", b"")
        assert shell(box, "pwd; echo $COLOUR", cwd="sub", env={"COLOUR": "blue"}).endswith("/sub\nblue")
        with pytest.raises(OSError):
            box.exec(["true"], cwd="nowhere")
        with pytest.raises(OSError):
            box.exec(["true"], cwd="..")

    def test_input_that_nobody_reads_holds_nothing_up(self, box: Sandbox) -> None:
        assert box.exec(["true"], stdin=b"x" * (1 << 20), timeout_s=10).exit_code == 0

    def test_a_program_sees_what_was_given_and_nothing_of_the_host(self, box: Sandbox) -> None:
        os.environ["SECRET_OF_THE_HOST"] = "yes"
        try:
            assert "SECRET_OF_THE_HOST" not in shell(box, "env")
        finally:
            del os.environ["SECRET_OF_THE_HOST"]

    def test_commands_are_lists_of_words(self, box: Sandbox) -> None:
        for wrong in ("ls -l", [], ["ls", "a\0b"]):
            with pytest.raises(ValueError, match="command"):
                box.exec(wrong)

    @pytest.mark.parametrize("stream", [1, 2])
    def test_head_and_tail_of_a_flood(self, box: Sandbox, stream: int) -> None:
        done = box.exec(["bash", "-c", f"(echo first; yes | head -c 3000000; echo last) >&{stream}"], output_bytes=1000)
        kept = (done.stdout, done.stderr)[stream - 1]
        assert done.exit_code == 0 and done.truncated and kept.startswith(b"first\n") and kept.endswith(b"last\n")
        assert len(kept) < 1100 and b"[... 2999011 bytes left out ...]" in kept

    def test_bytes_stay_what_they_are(self, box: Sandbox) -> None:
        done = box.exec(["printf", r"\000\377\033[2J\r"])
        assert done.stdout == b"\x00\xff\x1b[2J\r"


EVASIONS = {
    "daemon": "(setsid bash -c 'sleep 61 & sleep 62' >/dev/null 2>&1 &); sleep 60",
    "stopped": "trap '' TERM INT HUP; kill -STOP $$",
}


class TestAfterTrouble:
    def test_commands_that_cannot_be_started_leave_nothing_open(self, box: Sandbox) -> None:
        for _ in range(SMALL.open_files):
            assert box.exec(["no-such-program"], stdin=b"x").exit_code == 127
        assert shell(box, "echo on") == "on"

    @pytest.mark.parametrize(
        "values", [{"timeout_s": 0}, {"timeout_s": 1e9}, {"timeout_s": float("nan")}, {"output_bytes": 1}]
    )
    def test_limits_that_are_none_are_refused(self, box: Sandbox, values: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(values))):
            box.exec(["true"], **values)  # type: ignore[arg-type]
        assert shell(box, "echo on") == "on"

    def test_a_request_that_is_broken_off_ends_the_sandbox(self, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its answer would be taken for that of the next request."""
        channel = box._machine.channel  # type: ignore[attr-defined]
        monkeypatch.setattr(type(channel), "receive", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            box.exec(["echo", "first"])
        monkeypatch.undo()
        with pytest.raises(SandboxFailure, match="middle of a request"):
            box.exec(["echo", "second"])


def _interrupted(self: object, timeout_s: float) -> bytes:
    raise KeyboardInterrupt


ZOMBIE_WITH_A_THREAD = """
import ctypes, os, threading, time
def work():
    while True:
        time.sleep(0.01)
        with open("count", "a") as file:
            file.write("x")
threading.Thread(target=work).start()
if os.fork() == 0:
    time.sleep(777)
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends this thread alone
"""

TAKES_WHAT_IS_PRINTED = """
import fcntl, os, time
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


class TestTimeLimit:
    def test_who_takes_what_was_printed_does_not_stop_the_clock(self, box: Sandbox) -> None:
        assert box.exec(["python3", "-c", TAKES_WHAT_IS_PRINTED], timeout_s=2).timed_out
        assert shell(box, "echo on") == "on" and box.stats().processes == 0

    def test_a_process_whose_first_thread_has_ended_lives_and_ends(self, box: Sandbox) -> None:
        done = box.exec(["python3", "-c", ZOMBIE_WITH_A_THREAD], timeout_s=1)
        assert done.timed_out
        count = len(box.read("count"))
        time.sleep(0.2)
        assert len(box.read("count")) == count and box.stats().processes == 0

    @pytest.mark.parametrize("name", EVASIONS)
    def test_the_whole_tree_ends(self, box: Sandbox, name: str) -> None:
        done = box.exec(["bash", "-c", "echo partial; " + EVASIONS[name]], timeout_s=0.5)
        assert done.timed_out and done.stdout == b"partial\n" and done.exit_code == 137
        assert box.stats().processes == 0
        assert shell(box, "echo on") == "on"

    def test_what_a_command_leaves_behind_goes_on(self, box: Sandbox) -> None:
        shell(box, "(sleep 60 >/dev/null 2>&1 &)")
        assert box.stats().processes == 1
        assert shell(box, "echo on") == "on" and box.stats().processes == 1

    def test_an_end_is_not_held_up_by_who_keeps_the_pipe(self, box: Sandbox) -> None:
        assert shell(box, "sleep 6000 & echo done") == "done" and box.stats().processes == 1

    def test_the_background_survives_the_time_limit_of_another(self, box: Sandbox) -> None:
        box.exec_background(["sleep", "60"], log="log")
        assert box.exec(["sleep", "60"], timeout_s=0.3).timed_out
        assert box.stats().processes == 1

    def test_life_of_a_background_command(self, box: Sandbox) -> None:
        pid = box.exec_background(["bash", "-c", "echo begun; read < fifo-or-not; echo never"], log="out/log")
        while box.stats().processes:
            time.sleep(0.01)
        assert b"begun\n" in box.read("out/log") and box.exec(["kill", "-0", str(pid)]).exit_code


class TestFiles:
    def test_round_trip(self, box: Sandbox) -> None:
        data = os.urandom(300_000)
        box.write("a/b/c.bin", data)
        assert box.read("a/b/c.bin") == data and box.read("a/b/c.bin", offset=299_990) == data[299_990:]
        assert box.read("a/b/c.bin", max_bytes=10) == data[:10]
        root = shell(box, "pwd")
        assert box.read(f"{root}/a/b/c.bin", max_bytes=3) == data[:3]
        box.write("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert shell(box, "./run.sh") == "ran"

    def test_errors_are_the_kernels(self, box: Sandbox) -> None:
        box.write("dir/file", b"x")
        shell(box, "mkfifo pipe; ln -s /etc/passwd link; ln -s ../../.. up; ln -s loop loop")
        assert "pipe" not in box.download()
        with pytest.raises(FileNotFoundError):
            box.read("none")
        with pytest.raises(IsADirectoryError):
            box.read("dir")
        with pytest.raises(IsADirectoryError):
            box.write("dir", b"")
        for path in [*"pipe link up/etc/passwd loop ../x /etc/passwd dir/../../x /proc/1/environ".split(), "a\0b"]:
            with pytest.raises(OSError):  # reading the pipe would wait, and end with another error
                box.read(path)
        for path in ("up/x", "../x", "/tmp/x", "dir/file/x", "a/../../x", ""):
            with pytest.raises(OSError):
                box.write(path, b"")

    def test_a_write_replaces_a_link_and_not_what_it_leads_to(self, box: Sandbox) -> None:
        box.write("target", b"old")
        shell(box, "ln -s target link")
        box.write("link", b"new")
        assert box.read("target") == b"old" and box.read("link") == b"new"

    def test_upload_and_download(self, box: Sandbox) -> None:
        files = {"a.py": b"x = 1\n", "p/q/r.txt": b"", "ö/ü": b"\x00\xff"}
        box.upload(files)
        assert box.download() == files
        with pytest.raises(OSError, match="bytes"):
            box.download(max_bytes=5)
        with pytest.raises(OSError):
            box.upload({"../x": b""})

    def test_more_folders_than_files_may_be_open(self, box: Sandbox) -> None:
        shell(box, "for n in $(seq 300); do mkdir d$n; echo $n > d$n/f; done")
        assert box.download() == {f"d{n}/f": b"%d\n" % n for n in range(1, 301)}

    def test_a_long_command_is_a_result_too(self, box: Sandbox) -> None:
        assert box.exec(["echo", "x" * 3_000_000]).exit_code == 126
        assert shell(box, "echo on") == "on"

    def test_deep_folders_are_refused_and_nothing_breaks(self, box: Sandbox) -> None:
        python(box, _DEEP)
        with pytest.raises(OSError, match="folders"):
            box.download()
        assert shell(box, "echo on") == "on"


_DEEP = """
import os
for _ in range(500):
    os.mkdir('d')
    os.chdir('d')
"""


class TestFilesUnderAttack:
    def test_a_failed_write_leaves_no_space_taken(self, cell: Sandbox) -> None:
        cell.write("first", b"x" * (SMALL.disk_bytes // 2))
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                cell.write("big", b"x" * (SMALL.disk_bytes * 3 // 4))
        assert cell.stats().disk_bytes <= SMALL.disk_bytes // 2 + 8192

    def test_a_write_follows_links_within_the_workspace(self, box: Sandbox) -> None:
        shell(box, "mkdir -p real/a; ln -s real link; ln -s ../real real/up")
        box.write("link/a/y", b"1")
        box.write("real/up/a/z", b"2")
        assert box.read("real/a/y") == b"1" and box.read("link/a/z") == b"2"

    def test_a_log_is_a_file(self, box: Sandbox) -> None:
        """Somebody swaps it for a pipe that nobody reads while a command is started."""
        swap = "mkfifo p; while :; do ln -sf p log; rm -f log; ln p log; rm -f log; done"
        box.exec_background(["bash", "-c", swap], log="other")
        for _ in range(50):
            try:
                box.exec_background(["true"], log="log")
            except OSError:
                pass
        box.end_all()
        assert shell(box, "echo on") == "on"


class TestStop:
    def test_the_whole_tree_ends_at_once(self, box: Sandbox) -> None:
        stop = threading.Event()
        threading.Timer(0.3, stop.set).start()
        done = box.exec(["bash", "-c", "echo begun; (sleep 7700 &) ; sleep 7700"], timeout_s=6000, stop=stop)
        assert (done.stopped, done.timed_out) == (True, False) and done.stdout in (b"begun\n", b"")
        assert box.stats().processes == 0

    def test_set_too_late_or_long_before(self, box: Sandbox) -> None:
        stop = threading.Event()
        assert not box.exec(["true"], stop=stop).stopped
        stop.set()
        for _ in range(20):  # a command may end before it is told: its answer stands, and the next is its own
            done = box.exec(["echo", "x"], stop=stop)
            assert done.stopped or done.stdout == b"x\n"
            assert box.exec(["echo", "y"]).stdout == b"y\n"

    def test_the_background_goes_on(self, box: Sandbox) -> None:
        box.exec_background(["sleep", "55"], log="log")
        stop = threading.Event()
        stop.set()
        assert box.exec(["sleep", "44"], stop=stop).stopped
        assert box.stats().processes == 1


class TestFolders:
    def test_what_is_in_one(self, box: Sandbox) -> None:
        box.upload({"d/a": b"123", "d/e/f": b""})
        box.write("d/run", b"#!", mode=0o755)
        shell(box, r"ln -s /etc d/out; mkfifo d/pipe; touch d/$'\xff'")
        found = {entry.name: (entry.kind, entry.size, entry.mode) for entry in box.entries("d")}
        assert found["a"] == ("file", 3, 0o644) and found["run"] == ("file", 2, 0o755)
        kinds = {name: kind for name, (kind, _, _) in found.items()}
        assert kinds == {"a": "file", "e": "folder", "out": "link", "pipe": "other", "run": "file", "\udcff": "file"}
        assert [entry.name for entry in box.entries("d")] == sorted(found)
        assert box.entries("d/e") == box.entries(shell(box, "pwd").strip() + "/d/e")

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("d/a", NotADirectoryError),
            ("no", FileNotFoundError),
            ("d/out", OSError),
            ("..", OSError),
            ("/etc", OSError),
        ],
    )
    def test_what_can_not_be_listed(self, box: Sandbox, path: str, error: type[OSError]) -> None:
        box.write("d/a", b"")
        shell(box, "ln -s /etc d/out")
        with pytest.raises(error):
            box.entries(path)

    def test_removal_is_of_a_file_or_a_link(self, box: Sandbox) -> None:
        box.upload({"a": b"", "d/b": b""})
        shell(box, "ln -s a link; ln -s /etc out")
        box.remove("link")
        assert box.read("a") == b""
        box.remove("d/b")
        for path, error in (("d", IsADirectoryError), ("d/b", FileNotFoundError), (".", IsADirectoryError)):
            with pytest.raises(error):
                box.remove(path)
        for path in ("out/passwd", "../a", "/etc/passwd", "a/..", ".."):
            with pytest.raises(OSError):
                box.remove(path)
        assert [entry.name for entry in box.entries()] == ["a", "d", "out"]

    def test_a_write_keeps_permissions_unless_told(self, box: Sandbox) -> None:
        box.write("run", b"1", mode=0o750)
        box.write("run", b"2")
        box.write("new", b"")
        assert [(entry.name, entry.mode) for entry in box.entries()] == [("new", 0o644), ("run", 0o750)]


def test_the_programs_of_tools_are_there(box: Sandbox) -> None:
    assert shell(box, "rg --version").startswith("ripgrep")
    assert shell(box, "ruff --version").startswith("ruff")


class TestSnapshots:
    def test_what_nobody_may_open_or_what_has_an_odd_time(self, box: Sandbox) -> None:
        shell(box, "mkdir closed; touch closed/f; echo 1 > secret; echo 2 > odd; echo 3 > plain")
        shell(box, "chmod 000 closed secret; touch -d @9223372036854775 odd || true")
        with box.fork() as other:
            assert other.read("plain") == b"3\n" and other.read("odd") == b"2\n"
        assert box.download()["plain"] == b"3\n"
        shell(box, "chmod 700 closed secret")

    def test_a_fork_has_the_files_and_goes_its_own_way(self, box: Sandbox) -> None:
        shell(
            box,
            "mkdir -p d/e; echo one > d/f; ln -s f d/l; chmod 750 d; echo '#!/bin/sh' > x; chmod +x x; touch -d 2001-02-03 x",
        )
        with box.fork() as other:
            assert other.snapshot().digest == box.snapshot().digest
            assert shell(other, "cat d/l; stat -c %a d x; stat -c %Y x") == shell(
                box, "cat d/l; stat -c %a d x; stat -c %Y x"
            )
            other.write("d/f", b"two")
            assert box.read("d/f") == b"one\n" and other.snapshot().digest != box.snapshot().digest

    def test_the_digest_is_of_what_is_there(self, backend: Backend) -> None:
        with backend.create(SMALL) as one, backend.create(SMALL) as two:
            one.write("a", b"1")
            one.write("b", b"2")
            two.write("b", b"2")
            two.write("a", b"1")
            assert one.snapshot().digest == two.snapshot().digest
            shell(two, "chmod 600 a")
            assert one.snapshot().digest != two.snapshot().digest

    def test_a_snapshot_may_be_used_again(self, backend: Backend, box: Sandbox) -> None:
        box.write("a", b"1")
        taken = box.snapshot()
        box.write("a", b"2")
        for _ in range(2):
            with backend.create(SMALL, taken) as again:
                assert again.read("a") == b"1"


class TestLife:
    def test_a_closed_backend_makes_nothing_and_leaves_nothing(
        self, request: pytest.FixtureRequest, backend: Backend
    ) -> None:
        own = make(request.node.callspec.params["backend"], request)
        made: list[Sandbox] = []
        refused: list[Exception] = []

        def create() -> None:
            while not refused:
                try:
                    made.append(own.create(SMALL))
                except SandboxFailure as error:
                    refused.append(error)

        threads = [threading.Thread(target=create) for _ in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + patience(60)
        while not made and time.monotonic() < deadline:
            time.sleep(0.05)
        own.close()
        for thread in threads:
            thread.join(timeout=patience(60))
        assert made and all(not thread.is_alive() for thread in threads)
        for box in made:
            with pytest.raises(SandboxFailure):
                box.read("x")

    def test_what_is_destroyed_answers_so(self, backend: Backend) -> None:
        box = backend.create(SMALL)
        box.destroy()
        box.destroy()
        with pytest.raises(SandboxFailure, match="destroyed"):
            box.read("a")

    def test_destruction_ends_what_runs(self, backend: Backend) -> None:
        box = backend.create(SMALL)
        told: list[BaseException] = []

        def wait() -> None:
            try:
                box.exec(["sleep", "60"])
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        box.destroy()
        thread.join(timeout=patience(10))
        assert not thread.is_alive() and isinstance(told[0], SandboxFailure)

    def test_a_machine_full_of_calls_from_threads(self, backend: Backend, box: Sandbox) -> None:
        answers: dict[int, bytes] = {}

        def call(number: int) -> None:
            answers[number] = box.exec(["echo", str(number)]).stdout

        threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {number: b"%d\n" % number for number in range(20)}

    def test_stats(self, box: Sandbox) -> None:
        before = box.stats()
        box.write("file", b"x" * 2_000_000)
        after = box.stats()
        assert after.disk_bytes - before.disk_bytes >= 2_000_000 and after.inodes == before.inodes + 1
        assert after.processes == 0


LATE = """sleep 1; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do
python3 -c 'import os; os.dup2(os.memfd_create("x", 0), 1); os.execv("/bin/sh", ["sh", "-c", "cat /dev/zero; sleep 60"])' &
done; wait"""
"""Memory that no process seems to have, so that the kernel ends the resident program too, and all of it between two requests."""
CROWD = """
import os
file = open("big", "wb")
for _ in range(60): file.write(os.urandom(1 << 20))
file.close()
name, folder = b"a" * 250, os.open(".", os.O_RDONLY)
for _ in range(15):
    os.mkdir(name, dir_fd=folder)
    folder = os.open(name, os.O_RDONLY, dir_fd=folder)
try:
    for number in range(20000): os.close(os.open(b"%06d" % number + name[:240], os.O_WRONLY | os.O_CREAT, dir_fd=folder))
except OSError: pass
"""


class TestWhoseFault:
    """What an agent can bring about is never laid to the machinery, which would try again for ever."""

    def test_memory_used_up_between_two_requests(self, request: pytest.FixtureRequest, backend: Backend) -> None:
        if not backend.capabilities().isolated or not backend.capabilities().enforced["memory_bytes"]:
            pytest.skip("this backend does not limit memory here")
        with backend.create(SMALL) as box:
            box.exec(["sh", "-c", f"({LATE}) </dev/null >/dev/null 2>&1 &"])
            time.sleep(6)
            try:
                box.exec(["true"])
            except SandboxDied:
                pass  # it may also have survived, which is as good

    def test_names_that_are_more_than_the_files(self, backend: Backend) -> None:
        if not backend.capabilities().isolated:
            pytest.skip("this backend limits no files")
        with backend.create(SandboxSpec()) as box:
            python(box, CROWD, timeout_s=60)
            for act in (box.download, box.snapshot):
                with pytest.raises(OSError, match="names are more than"):
                    act()
            assert shell(box, "echo on") == "on"

    @pytest.mark.parametrize("limit", [2, 3, 4, 5, 7])
    def test_an_output_as_long_as_its_cap_is_whole(self, box: Sandbox, limit: int) -> None:
        for length in (limit - 1, limit, limit + 1):
            done = box.exec(["printf", "%s", "abcdefgh"[:length]], output_bytes=limit)
            assert done.truncated == (length > limit)
            assert done.truncated or done.stdout == b"abcdefgh"[:length]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cpus": float("inf")}, "SandboxSpec.cpus=inf: must be a finite number"),
        ({"cpus": float("nan")}, "SandboxSpec.cpus"),
        ({"processes": 2**40}, "SandboxSpec.processes=.*: must be less than or equal to 4194304"),
        ({"disk_bytes": 1e6}, "SandboxSpec.disk_bytes"),
        ({"inodes": 2**70}, "SandboxSpec.inodes"),
        ({"open_files": 8}, "SandboxSpec.open_files=8: must be greater than or equal to 32"),
        ({"processes": True}, "SandboxSpec.processes"),
        ({"memory_bytes": 100 << 20, "disk_bytes": 64 << 20}, "SandboxSpec.memory_bytes"),
        *[
            ({name: 0}, f"SandboxSpec.{name}=0")
            for name in ("memory_bytes", "disk_bytes", "inodes", "processes", "cpus")
        ],
    ],
)
def test_a_limit_that_cannot_be_is_named(changed: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SandboxSpec(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "able", "told"),
    [
        (SandboxSpec(image="nope:1", trusted=True), "docker", "has no images; use docker"),
        (SandboxSpec(trusted=True, calls=CallLimits()), "bwrap", "serves no function calls; use bwrap"),
    ],
    ids=["images", "calls"],
)
def test_a_spec_that_another_backend_serves(backend: Backend, spec: SandboxSpec, able: str, told: str) -> None:
    if backend.name == able:
        pytest.skip(f"{able} serves it")
    with pytest.raises(SandboxUnavailable, match=told):
        backend.create(spec)


def test_a_fault_of_this_machine_is_no_fault_of_a_workspace(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backend, "_begin", full)
    with pytest.raises(SandboxFailure, match="no sandbox could be made: .*No space left"):
        backend.create(SMALL)


class TestWalls:
    """Walls beyond those that the attacks of `tests/adversarial/test_sandboxes.py` try."""

    def test_it_has_a_loopback_of_its_own(self, cell: Sandbox) -> None:
        source = "import socket\nwith socket.create_server(('127.0.0.1', 0)) as server:\n"
        assert python(cell, source + "    socket.create_connection(server.getsockname()).close()") == ""

    def test_processes(self, cell: Sandbox) -> None:
        source = """
import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0: time.sleep(20)
        n += 1
except OSError: pass
print(n, flush=True)
os._exit(0)
"""
        assert int(python(cell, source)) <= SMALL.processes
        assert shell(cell, "echo on") == "on"  # what was left behind had to make room

    def test_the_resident_program_is_out_of_reach(self, cell: Sandbox) -> None:
        source = """
import ctypes, os, signal
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for name in ("mem", "environ", "fd/0", "fd/1", "root", "cwd", "maps"):
    try:
        print("open", name, os.listdir("/proc/1/" + name) if name == "fd" else open("/proc/1/" + name, "rb").read(1))
    except OSError: pass
for name in ("oom_score_adj", "mem", "attr/current"):
    try:
        os.write(os.open("/proc/1/" + name, os.O_WRONLY), b"1")
        print("write", name)
    except OSError: pass
"""
        assert python(cell, source) == "" and shell(cell, "echo on") == "on"

    def test_priorities_of_others_are_out_of_reach(self, cell: Sandbox) -> None:
        source = """
import os
found = []
for name, call in {
    "scheduler": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "affinity": lambda: os.sched_setaffinity(1, {0}),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "priority of all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "up": lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
}.items():
    try: call()
    except OSError: continue
    found.append(name)
os.setpriority(os.PRIO_PROCESS, 0, 19)
print(found)
"""
        assert python(cell, source) == "[]"

    def test_many_that_spin_do_not_silence_the_resident_program(self, cell: Sandbox) -> None:
        cell.exec(["bash", "-c", "for n in $(seq 30); do (while :; do :; done) & done"], timeout_s=30)
        assert shell(cell, "echo on", timeout_s=30) == "on"

    def test_devices_hold_nothing(self, isolated: Backend) -> None:
        with isolated.create(SMALL) as one, isolated.create(SMALL) as two:
            change = "echo x > /dev/x; mkdir /dev/d; ln -sf /workspace /dev/stdout; rm /dev/null; ls /dev/pts"
            done = one.exec(["bash", "-c", change])
            assert b"x" not in two.exec(["ls", "/dev"]).stdout.split() and b"0" not in done.stdout.split()
            hold = "import os, time; os.openpty(); print(1, flush=True); time.sleep(60)"
            if isolated.name == "docker":  # an engine cannot limit terminals, so there are none
                assert one.exec(["python3", "-c", hold]).exit_code == 1
                return
            one.exec_background(["python3", "-c", hold], log="log")
            while one.read("log") != b"1\n":
                time.sleep(0.01)
            assert two.exec(["ls", "/dev/pts"]).stdout.split() in ([b"ptmx"], [])
            assert shell(two, "echo on > /dev/null; echo on > /dev/stdout") == "on"


def test_everything_that_runs_can_be_ended(box: Sandbox) -> None:
    """Background commands, orphans, what ignores signals and what has stopped."""
    box.exec_background(["sh", "-c", "trap '' TERM HUP; while :; do sleep 0.05; done"], log="log")
    box.exec(["sh", "-c", "(setsid sh -c 'trap \"\" TERM; sleep 100 & kill -STOP $$') >/dev/null 2>&1 & sleep 0.2"])
    assert box.stats().processes >= 2
    box.end_all()
    assert box.stats().processes == 0
    box.end_all()
    assert box.exec(["echo", "still here"]).stdout == b"still here\n"
