"""Content that somebody else wrote: a sandbox's answers, run databases, job files, diffs. It ends in a typed error in bounded
work, or is shown with everything escaped that a terminal would obey."""

import io
import json
import socket
import sqlite3
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Said
from composer_nb.harness.carry import Blob
from composer_nb.harness.sandbox.contract import SPARE, Sandbox, SandboxSpec, members
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.host import Channel
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import as_html, visible, visible_lines
from composer_nb.production.diff import patch
from composer_nb.production.show import teller
from composer_nb.trainer.recipe.reader import read_status
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views.task import card
from tests.harness.tasks.test_task import MINIMAL

DEEP = "[" * 100_000

# What a sandbox answers


class Feed(Channel):
    """A connection on which the resident program sends these frames, whatever the request."""

    def __init__(self, frames: list[bytes]) -> None:
        super().__init__(socket.socketpair()[0])
        self.frames = frames

    def send(self, data: bytes, timeout_s: float) -> None: ...

    def receive(self, timeout_s: float) -> bytes:
        return self.frames.pop(0) if self.frames else b""


class Scripted:
    """A machine whose resident program was replaced by one that sends whatever it likes."""

    id = "scripted"
    proxy = None

    def __init__(self, *answers: bytes) -> None:
        self.channel = Feed([len(body).to_bytes(4, "big") + body for body in (b'{"ready": true}\n', *answers)])
        self.ended = False

    def end(self) -> None:
        self.channel.close()
        self.ended = True

    def kills(self) -> int:
        return 0


TRUE = {"command": ["true"]}
ASKED: dict[str, dict[str, Any]] = {"exec": TRUE, "exec_background": TRUE | {"log": "l"}, "read": {"path": "a"}}
"""Arguments of the methods that take any."""
STRANGE: dict[str, list[Any]] = {
    "exec": [
        {}, {"answer": 3}, {"answer": [0]}, {"answer": [0, -1, False, False, False, 0.1]},
        {"answer": [{}, 0, False, False, False, 0.1]}, {"answer": [0, 0, False, False, False, float("nan")]},
    ],
    "exec_background": [{}, {"answer": "x"}, {"answer": [1]}, {"answer": -1}],
    "end_all": [
        {"answer": 1}, {"answer": None, "number": 0}, {"answer": None, "number": 2}, {"answer": None, "number": True},
        {"answer": None, "number": "1"}, {"answer": None, "number": [1]}, {"answer": None, "number": "x" * (65 << 20)},
    ],
    "read": [{"error": 5}, {"error": [1]}, {"error": ["x", "y"]}, {"error": [1, {}]}, {"answer": DEEP}, [], 5, None],
    "entries": [{}, {"answer": [["a"]]}, {"answer": [["a", "door", 1, 1]]}, {"answer": [["a", "file", -1, 1]]}],
    "download": [{"answer": 5}],
    "snapshot": [{"answer": None}],
    "stats": [{"answer": ["x", 0, 0]}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "answer"),
    [(method, answer) for method, answers in STRANGE.items() for answer in answers],
    ids=lambda v: str(v)[:40],
)
def test_a_strange_answer_ends_the_sandbox(method: str, answer: Any) -> None:
    numbered = {"number": 1, **answer} if isinstance(answer, dict) else answer
    machine = Scripted(json.dumps(numbered).encode() + b"\n")
    box = Sandbox(MagicMock(), SandboxSpec(), machine)
    with pytest.raises(SandboxFailure):
        getattr(box, method)(**ASKED.get(method, {}))
    assert machine.ended


def test_no_answer_counts_twice_or_is_longer_than_its_own_request_allows() -> None:
    """This holds also while another request that may have a longer answer is under way."""
    frame = b'{"number": 1, "answer": null}\n'
    box = Sandbox(MagicMock(), SandboxSpec(), machine := Scripted(frame, frame))
    box.end_all()
    with pytest.raises(SandboxFailure, match="to no request"):
        box.end_all()
    assert machine.ended
    machine = Scripted(b'{"number": 2, "answer": 0}\n' + bytes(SPARE))
    box = Sandbox(MagicMock(), SandboxSpec(), machine)
    machine.channel._awaited[next(machine.channel._numbers)] = 1 << 40
    with pytest.raises(SandboxFailure, match="of this size"):
        box.last_read("a")
    assert machine.ended


@pytest.mark.parametrize(
    "head", [DEEP, '{"a": ' * 100_000, "{", "9" * 10_000, "\0", "\xff", "NaN", '{"ready": '], ids=lambda v: v[:9]
)
def test_a_header_that_is_no_header_ends_the_sandbox(head: str) -> None:
    for answers in ((head.encode() + b"\n",), (head.encode("latin-1"),)):
        box = Sandbox(MagicMock(), SandboxSpec(), machine := Scripted(*answers))
        with pytest.raises(SandboxFailure):
            box.end_all()
        assert machine.ended


def test_an_error_from_a_sandbox_is_escaped_and_short() -> None:
    answer = {"number": 1, "error": [5, "\x1b[2J\u202e" + "x" * 10_000]}
    box = Sandbox(MagicMock(), SandboxSpec(), Scripted(json.dumps(answer).encode() + b"\n"))
    with pytest.raises(OSError, match=r"\\x1b\[2J\\u202e") as caught:
        box.remove("a")
    assert len(str(caught.value)) < 1000


def archive(size: int = 1, **more: Any) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("a")
        info.size = size
        for name, value in more.items():
            setattr(info, name, value)
        tar.addfile(info, io.BytesIO(b"x" * size))
    return packed.getvalue()


def resized(size: int) -> bytes:
    """Return an archive whose entry claims another size, in base 256."""
    field = (b"\xff" if size < 0 else b"\x80") + (size % (1 << 88)).to_bytes(11, "big")
    head = bytearray(archive()[:512])
    head[124:136], head[148:156] = field, b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + archive()[512:]


HUGE_HOLE = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "a", "GNU.sparse.size": str(1 << 50)}
LONG_NAME = archive(type=tarfile.GNUTYPE_LONGNAME, size=512)[:1024]
ARCHIVES = {
    "no archive": b"\x01" * 1024,
    "cut": archive(2000)[:1024],
    "larger than itself": resized(1 << 60),
    "backwards": resized(-512) * 4,
    "a hole": archive(pax_headers=HUGE_HOLE | {"GNU.sparse.map": f"{1 << 50},0"}),
    "a name of a name of a name": LONG_NAME * 5000 + archive(),
}


@pytest.mark.parametrize("data", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_from_a_sandbox_unpacks_to_no_more_than_it_is(data: bytes) -> None:
    with pytest.raises(SandboxFailure, match="archive .* cannot be read"):
        list(members(data))


# Run databases


def a_run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.commit("rl", 1, {"w": torch.ones(1)}, [(1, {"reward": 0.5, "time": {"wall_s": 1.0, "train_s": 0.5}})])
    run.finish("data", 1.0, {})
    with run.connect() as db:
        db.execute("PRAGMA journal_mode=DELETE")
    return run


ENDLESS = (
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT 'rl' stage, x step, '{}' metrics FROM n"
)
SCHEMAS = {
    "an endless view": f"DROP TABLE step; CREATE VIEW step AS {ENDLESS}",
    "a trigger": f"CREATE TRIGGER t AFTER INSERT ON stage BEGIN INSERT INTO ledger SELECT *, 0 FROM ({ENDLESS}); END",
    "a virtual table": "CREATE VIRTUAL TABLE odd USING fts4(x)",
}


@pytest.mark.parametrize("sql", SCHEMAS.values(), ids=SCHEMAS)
def test_a_run_database_computes_nothing(tmp_path: Path, sql: str) -> None:
    run = a_run(tmp_path)
    with sqlite3.connect(run.path / "run.db") as db:
        db.executescript(sql)
    for reader in (read_status, RunDir):
        with pytest.raises(ValueError, match="is no plain table"):
            reader(run.path)


CELLS: dict[str, tuple[str, Any]] = {
    "deep": ("UPDATE step SET metrics = ?", DEEP),
    "a word in the ledger": ("INSERT INTO stage VALUES ('rl', ?, '{}')", "long"),
}


@pytest.mark.parametrize(("sql", "value"), CELLS.values(), ids=CELLS)
def test_strange_cells_of_a_run_database_are_named(tmp_path: Path, sql: str, value: Any) -> None:
    run = a_run(tmp_path)
    with run.connect() as db:
        db.execute(sql, (value,))
    with pytest.raises(ValueError, match=r"run\.db"):
        read_status(run.path)
    (run.path / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match=str(run.path)):
        build_report(run)


# What a person sees

SIGNS = "\x1b[31m\r\x08\0\x7f\x9b\u202e\u2066\u200b\u200f\ufeff\u00ad\u2028\u2029\U000e0041\u3164\udc80"


def test_nothing_that_a_terminal_obeys_or_a_page_hides_is_left() -> None:
    assert visible("a\tb\nc") == r"a\x09b\x0ac" and visible_lines("a\tb\nc") == "a\tb\nc"
    for text in (visible(SIGNS), visible_lines(SIGNS)):
        assert text.isprintable() and text.startswith(r"\x1b[31m\x0d\x08\x00") and len(text) > 90
    assert visible("naïve 日本語 é 😀") == "naïve 日本語 é 😀" and as_html("<b>\u202e") == "&lt;b&gt;\\u202e"


def test_a_diff_hides_nothing() -> None:
    for data, expected in (
        (b"\0import os\nos.system('x')\n", "os.system('x')"),
        (b"safe()\revil()\n", r"safe()\x0devil()"),
        ("x = 'a\u202e' # \u2066b\n".encode(), r"x = 'a\u202e' # \u2066b"),
        (b"\x1b[1A\x1b[2Khidden\n", r"\x1b[1A\x1b[2Khidden"),
        (b"#!/bin/sh\nevil\n" + bytes(range(256)) * 9, "#!/bin/sh"),
    ):
        text = visible_lines(patch({}, {"a": Blob(data=data)}, whole=False).decode("utf-8", "surrogateescape"))
        assert expected in text and text.replace("\n", "").replace("\t", "").isprintable()


def test_a_card_of_a_task_holds_no_markup_of_the_tasks_own() -> None:
    fields = MINIMAL | {"instruction": "<img src=x>\u202e", "files": MINIMAL["files"] | {"f.py": "<script>\n1\n2\n"}}
    page = card(Task(**fields)).text
    assert "<script>" not in page and "<img" not in page and "\u202e" not in page


def test_an_error_on_the_command_line_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tasks" / "t\x1b[2J\u202e"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text("")
    assert main(["tasks", "check", str(tmp_path / "tasks")]) == 1
    output = capsys.readouterr().out
    assert r"t\x1b[2J\u202e" in output and "\x1b" not in output and "\u202e" not in output


def test_a_store_of_tasks_made_computes_nothing(tmp_path: Path) -> None:
    from composer_nb.harness.tasks.making.trial import TaskStore

    with sqlite3.connect(tmp_path / "record.db") as db:
        db.execute("CREATE VIEW outcomes AS " + ENDLESS)
    with pytest.raises(ValueError, match="not a record of tasks made"):
        TaskStore(tmp_path / "record.db")


def test_what_a_model_says_moves_no_cursor() -> None:
    console = Console(file=io.StringIO(), width=400)
    teller(console)(Said(text=SIGNS))
    assert "\x1b[31m" not in console.file.getvalue() and console.file.getvalue().rstrip("\n").isprintable()  # type: ignore[attr-defined]
