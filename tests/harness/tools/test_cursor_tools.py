"""Each tool in a sandbox of each backend."""

import re
import tracemalloc
from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox.contract import Backend, Sandbox
from composer_nb.harness.tools.patch import BEGIN, END
from composer_nb.harness.tools.session import FOLDER, SHOWN, Session
from tests.harness.sandbox.conftest import BACKENDS, make
from tests.harness.tools.conftest import Call
from tests.waiting import wait_until

NEVER = {"error": "InvalidArguments"}
NOT_THERE = {"error": "UnexpectedEnvironment"}
OUTSIDE = ["..", "../a", "/etc/passwd", "a/../../b", "/", "out", "out/passwd", "way/etc/passwd"]


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = make(request.param, request)
    yield backend
    backend.close()


class TestFiles:
    def test_reading_a_part(self, box: Sandbox, call: Call) -> None:
        box.write("a.py", b"one\r\ntwo\nthree")
        assert call("read_file", target_file="a.py").text == "1|one\n2|two\n3|three"
        assert call("read_file", target_file="a.py", offset=2, limit=1).text == "2|two\n(lines 2 to 2 of 3)"
        assert "has 3 lines" in call("read_file", target_file="a.py", offset=4, **NEVER).text

    def test_reading_what_is_no_text_or_long_or_empty(self, box: Sandbox, call: Call) -> None:
        box.write("empty", b"")
        assert "empty" in call("read_file", target_file="empty").text
        box.write("binary", b"a\0b")
        call("read_file", target_file="binary", error="UnexpectedEnvironment")
        box.write("latin", b"caf\xe9 \x1b[31mred\n")
        assert call("read_file", target_file="latin").text == "1|caf\ufffd \\x1b[31mred"
        box.write("wide", b"x" * (1 << 20))
        assert call("read_file", target_file="wide").text == f"1|{'x' * 2000}[… {(1 << 20) - 2000} more characters]"
        box.write("long", b"".join(b"line %d\n" % n for n in range(9000)))
        first = call("read_file", target_file="long").text
        last = int(re.search(r"\(lines 1 to (\d+) of 9000\)$", first)[1])  # type: ignore[index]
        assert call("read_file", target_file="long", offset=last + 1).text.startswith(f"{last + 1}|line {last}\n")

    def test_reading_very_many_lines_takes_little_memory(self, box: Sandbox, call: Call) -> None:
        box.write("lines", b"\n" * (8 << 20))
        tracemalloc.start()
        try:
            assert call("read_file", target_file="lines", limit=1).text == f"1|\n(lines 1 to 1 of {8 << 20})"
            assert tracemalloc.get_traced_memory()[1] < 96 << 20
        finally:
            tracemalloc.stop()

    def test_nothing_leads_out(self, box: Sandbox, call: Call) -> None:
        box.exec(["bash", "-c", "ln -s /etc out; ln -s / way"])
        before = sorted(entry.name for entry in box.entries())
        for path in OUTSIDE:
            self.leads_nowhere(call, path)
            assert sorted(entry.name for entry in box.entries()) == before

    def leads_nowhere(self, call: Call, path: str) -> None:
        calls = [
            call("read_file", target_file=path, **NEVER),
            call("write", file_path=path, contents="", **NEVER),
            call("search_replace", file_path=path, old_string="root", new_string="", **NEVER),
            call("list_dir", target_directory=path, **NEVER) if path != "out/passwd" else None,
            call("grep", pattern="root", path=path, **NEVER),
            call("read_lints", paths=[path], **NEVER),
            call("glob_file_search", glob_pattern="*", target_directory=path, **NEVER),
            call("run_terminal_cmd", command="ls", is_background=False, working_directory=path, **NEVER),
            call("apply_patch", patch=f"*** Begin Patch\n*** Add File: {path}\n+x\n*** End Patch", **NEVER),
        ]
        if path not in ("out", ".."):
            calls.append(call("delete_file", target_file=path, **NEVER))
        for reply in filter(None, calls):
            assert "\n" not in reply.text and "root:" not in reply.text

    def test_a_write_over_what_was_not_read(self, box: Sandbox, call: Call) -> None:
        box.write("run", b"old\n", mode=0o755)
        assert "read it" in call("write", file_path="run", contents="new", **NEVER).text
        assert box.read("run") == b"old\n"
        call("read_file", target_file="./run")
        assert call("write", file_path="run", contents="new\n").text == "run: written, 1 lines"
        assert box.read("run") == b"new\n" and box.entries()[0].mode == 0o755
        assert call("write", file_path="x/y", contents="1\n\n1").text == "x/y: made, 3 lines"
        assert call("write", file_path="x/y", contents="").text == "x/y: written, 0 lines"
        call("delete_file", target_file="x/y")
        box.write("x/y", b"another's")
        call("write", file_path="x/y", contents="3", **NEVER)

    def test_replacing(self, box: Sandbox, call: Call) -> None:
        box.write("a", b"\xff one\none\n")
        assert "2 times" in call("search_replace", file_path="a", old_string="one", new_string="x", **NEVER).text
        call("search_replace", file_path="a", old_string="\none", new_string="\ntwo")
        assert box.read("a") == b"\xff one\ntwo\n"  # bytes that are no UTF-8 stay
        call("search_replace", file_path="a", old_string="o", new_string="0", replace_all=True)
        assert box.read("a") == b"\xff 0ne\ntw0\n"
        box.write("large", b"x" * (3 << 20))
        call("search_replace", file_path="large", old_string="x", new_string="", error="UnexpectedEnvironment")

    def test_listing(self, box: Sandbox, call: Call) -> None:
        box.upload({"b.py": b"", "a.log": b"", ".env": b"", "d/c": b"", "node_modules/x": b""})
        box.exec(["ln", "-s", "b.py", "link"])
        assert call("list_dir", target_directory=".").text == "a.log\nb.py\nd/\nlink@\nnode_modules/"
        text = call("list_dir", target_directory=".", ignore_globs=["*.log", "**/node_modules/**", "l?nk"]).text
        assert text.split("\n") == ["b.py", "d/"]
        call("list_dir", target_directory="b.py", **NOT_THERE)

    def test_a_patch_that_does_not_fit_changes_nothing(self, box: Sandbox, call: Call) -> None:
        box.upload({"a": b"1\n", "b": b"2\n"})
        patch = "*** Begin Patch\n*** Update File: a\n-1\n+x\n*** Add File: n\n+n\n"
        patch += "*** Delete File: b\n*** Update File: {}\n-2\n+y\n*** End Patch"
        before = box.snapshot().digest
        call("apply_patch", patch=patch.format("c"), **NOT_THERE)
        for path in ("a", "./a", "d/../b"):
            call("apply_patch", patch=patch.format(path), **NEVER)
        under = "\n".join([BEGIN, "*** Update File: a\n-1\n+x", "*** Add File: n\n+n", "*** Add File: n/m\n+m", END])
        assert "Not a directory" in call("apply_patch", patch=under, **NOT_THERE).text
        assert box.snapshot().digest == before
        box.write("c", b"2\n", mode=0o755)
        assert call("apply_patch", patch=patch.format("c")).text == "changed a\nmade n\ndeleted b\nchanged c"
        assert {entry.name: entry.mode for entry in box.entries()} == {"a": 0o644, "c": 0o755, "n": 0o644}
        assert [box.read(name) for name in "acn"] == [b"x\n", b"y\n", b"n\n"]

    def test_a_patch_of_more_than_fits_into_memory_changes_nothing(self, box: Sandbox, call: Call) -> None:
        box.write("f0", b"x\n" * (1 << 19))
        box.exec(["sh", "-c", "for n in $(seq 20); do ln f0 f$n; done"])
        parts = "".join(f"*** Update File: f{number}\n@@\n-x\n+y\n" for number in range(20))
        assert "more than 8388608 characters" in call("apply_patch", patch=f"{BEGIN}\n{parts}{END}", **NEVER).text
        assert box.read("f0", max_bytes=2) == box.read("f19", max_bytes=2) == b"x\n"


class TestSearch:
    @pytest.fixture(autouse=True)
    def tree(self, box: Sandbox) -> None:
        calls = ("src/b.ts", "x.log", ".github/w.yml", ".git/config", f"{FOLDER}/o.txt")
        ignored = {".gitignore": b"*.log\n", f"{FOLDER}/.gitignore": b"*\n"}
        box.upload(dict.fromkeys(calls, b"f()\n") | ignored | {"a.py": b"def f():\n    pass\n\nF = 1\n"})

    def test_what_and_where(self, call: Call) -> None:
        assert call("grep", pattern=r"f\(").text == ".github/w.yml:1:f()\na.py:1:def f():\nsrc/b.ts:1:f()"
        assert call("grep", pattern="f", output_mode="count", path="a.py", **{"-i": True}).text == "a.py:2"
        assert call("grep", pattern="f", output_mode="files_with_matches", glob="*.{ts,js}").text == "src/b.ts"
        assert call("grep", pattern="f", type="py", path="src").text == "(no matches)"
        around = call("grep", pattern="pass", **{"-B": 1, "-A": 1}).text
        assert around == "a.py-1-def f():\na.py:2:    pass\na.py-3-"
        assert call("grep", pattern=r"\(\).*pass", multiline=True).text.startswith("a.py:1:")
        assert call("grep", pattern="f", path=f"{FOLDER}/o.txt").text == f"{FOLDER}/o.txt:1:f()"
        assert call("grep", pattern="-f").text == "(no matches)"

    def test_what_can_not_be_looked_for(self, call: Call) -> None:
        for wrong in ({"pattern": "("}, {"pattern": "a", "glob": "[z"}, {"pattern": "a", "type": "none"}):
            assert "\n" not in call("grep", **wrong, **NEVER).text

    def test_a_cut_answer_says_at_least(self, box: Sandbox, call: Call) -> None:
        box.write("many", b"here\n" * 300)
        assert call("grep", pattern="here", head_limit=2).text == "many:1:here\nmany:2:here\n(the first 2 of 300 lines)"
        box.write("many", b"here it is, among many others of its kind\n" * 60_000)
        assert re.search(r"\(the first 1 of at least \d{4,5} lines\)$", call("grep", pattern="here", head_limit=1).text)
        box.write("wide", b"here" * 100_000)
        assert len(call("grep", pattern="here", path="wide").text) < 1000

    def test_files_by_name_are_newest_first(self, box: Sandbox, call: Call) -> None:
        box.exec(["bash", "-c", "touch -d 2020-01-01 a.py; mkdir -p src/deep; touch -d 2030-01-01 src/deep/c.py"])
        assert call("glob_file_search", glob_pattern="*.py").text.split("\n") == ["src/deep/c.py", "a.py"]
        assert call("glob_file_search", glob_pattern="deep/*").text == "src/deep/c.py"
        assert call("glob_file_search", glob_pattern="**/*.py", target_directory="src").text == "src/deep/c.py"
        assert call("glob_file_search", glob_pattern="*.rs").text == "(no files)"

    def test_lints(self, box: Sandbox, call: Call) -> None:
        box.write("src/bad.py", b"import os\n\ndef f(:\n")
        assert "src/bad.py:3:" in call("read_lints", paths=["src"]).text
        assert call("read_lints", paths=["src/b.ts"]).text.startswith("(no linter for src/b.ts)")
        box.write("src/bad.py", b"x = 1\n")
        assert call("read_lints").text == "(no problems)"
        call("read_lints", paths=["none.py"], **NOT_THERE)
        box.write("ruff.toml", b"line-length = 'x'\n")
        assert "ruff" in call("read_lints", error="UnexpectedEnvironment").text


class TestTerminal:
    def run(self, call: Call, command: str, **more: object) -> str:
        return call("run_terminal_cmd", command=command, is_background=False, **more).text

    def test_folder_and_variables_stay(self, session: Session, call: Call) -> None:
        first = self.run(call, "mkdir -p d/e; cd d; export A='x\ny' B=1; C=2; echo out; echo err >&2; false")
        assert first == "exit code 1, in d\nout\nerr"
        assert self.run(call, 'pwd; echo "$A|$B|$C"; unset B').split("\n")[1:] == [f"{session.root}/d", "x", "y|1|"]
        assert self.run(call, "echo [$B]; cd ..; exit 3") == "exit code 3\n[]"
        assert self.run(call, "pwd", working_directory="d/e").startswith("exit code 0, in d/e")
        strange = self.run(call, "mkdir ../$'\\xff'; cd ../$'\\xff'")
        assert strange == "exit code 0, in d/?", "no lone surrogate, which no chat format can encode"
        assert self.run(call, "ls -d ../e") == "exit code 0, in d/?\n../e"
        assert self.run(call, "cd /tmp && rmdir $OLDPWD; true") == "exit code 0, in /tmp"

    def test_tests_are_counted_as_pytest_sums_them_up(self, box: Sandbox, call: Call) -> None:
        box.write("test_a.py", b"def test_a(): pass\ndef test_b(): assert 1 == 2\n")
        counts = {"pytest test_a.py": (1, 2), "python -m pytest -q -x --tb=short -rN -k test_b": (0, 1)}
        counts["echo 1 failed, 7 passed, 16 subtests passed in 0.24s"] = (7, 8)
        counts |= dict.fromkeys(("pytest -qq test_a.py", "echo 5 passed"), (None, None))
        for command, expected in counts.items():
            reply = call("run_terminal_cmd", command=command, is_background=False)
            assert (reply.tests_passed, reply.tests_run) == expected

    def test_a_shell_that_tells_nothing_changes_nothing(self, session: Session, call: Call) -> None:
        self.run(call, "mkdir d; cd d; export A=1")
        for command in ("kill -9 $$", "trap - EXIT; cd /", "export BIG=$(head -c 99999 /dev/zero | tr '\\0' x)"):
            self.run(call, command)
            assert session.cwd == f"{session.root}/d" and session.environment["A"] == "1"

    def test_a_long_output_goes_to_a_file(self, box: Sandbox, call: Call) -> None:
        text = self.run(call, "seq 1 100000")
        assert len(text) < SHOWN + 300 and "\n1\n2\n" in text and text.endswith("\n99999\n100000")
        path = re.search(rf"all of it is in ({FOLDER}/outputs/\S+)", text)[1]  # type: ignore[index]
        assert box.read(path, max_bytes=1 << 20) == "".join(f"{n}\n" for n in range(1, 100_001)).encode()
        assert "50000:50000" in call("grep", pattern="^50000$", path=path).text

    def test_a_time_limit_ends_all(self, box: Sandbox, call: Call) -> None:
        command = "(sleep 71 &); echo x; sleep 71"
        reply = call("run_terminal_cmd", command=command, is_background=False, timeout_ms=300, error="Timeout")
        assert reply.text == "ended after 0.3 s, with all that it had started\nx"
        assert box.stats().processes == 0

    def test_the_background(self, box: Sandbox, call: Call) -> None:
        text = call("run_terminal_cmd", command="echo begun; sleep 0.2; exit 4", is_background=True).text
        log = re.search(r"is in (\S+)$", text)[1]  # type: ignore[index]
        wait_until(lambda: b"[exit code 4]" in box.read(log))
        assert call("read_file", target_file=log).text == "1|begun\n2|[exit code 4]"


class TestTodos:
    def todo(self, id: str, status: str = "pending", content: str = "do") -> dict[str, str]:
        return {"id": id, "content": content, "status": status}

    def test_one_at_a_time(self, session: Session, call: Call) -> None:
        call("todo_write", merge=False, todos=[self.todo("1", "in_progress"), self.todo("2")])
        call("todo_write", merge=True, todos=[self.todo("2", "in_progress")], **NEVER)
        call("todo_write", merge=True, todos=[self.todo("3"), self.todo("3")], **NEVER)
        todos = [self.todo("1", "completed"), self.todo("2", "in_progress"), self.todo("3")]
        text = call("todo_write", merge=True, todos=todos).text
        assert text == "[x] 1: do\n[>] 2: do\n[ ] 3: do"
        assert [todo.status for todo in session.todos.values()] == ["completed", "in_progress", "pending"]
        assert call("todo_write", merge=False, todos=[]).text == "(nothing to do)"
