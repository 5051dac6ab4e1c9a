"""The call sandbox: order, freshness, exact outcomes, refusals, and what remains after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness import sandbox, wire
from composer_nb.harness.calls import CallOutcome, CallRequest, Limits, SandboxFailure, SandboxUnavailable, value_text
from composer_nb.harness.sandbox import BwrapSandboxes

IDENTITY = "def f(x):\n    return x\n"


def request(source: str, *arguments: str, **files: str) -> CallRequest:
    return CallRequest(files={"f.py": source, **files}, module="f", function="f", arguments=arguments or ("()",))


def returned(text: str) -> CallOutcome:
    return CallOutcome(status="returned", text=text)


class OneShot(BwrapSandboxes):
    """On a machine that forbids nested namespaces: bubblewrap itself forbids them here."""

    def _command(self, mode: sandbox.Mode) -> list[str]:
        command = super()._command(mode)
        return [command[0], "--unshare-user", "--disable-userns", *command[1:]]


@pytest.fixture(scope="module")
def forked() -> Iterator[BwrapSandboxes]:
    with BwrapSandboxes() as boxes:
        yield boxes


@pytest.fixture(scope="module", params=["forked", "one-shot"])
def boxes(request: pytest.FixtureRequest, forked: BwrapSandboxes) -> Iterator[BwrapSandboxes]:
    if request.param == "forked":
        yield forked
    else:
        with OneShot() as one_shot:
            yield one_shot


def tree(pid: int) -> list[int]:
    """Processes below `pid` that are no zombies, itself first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split() if entry.name.isdigit() else ["Z", "0"]
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def wait_until_gone(pids: list[int], within_s: float = 3.0) -> list[int]:
    """Those of `pids` that still run after the time given."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists() and tree_state(pid) not in ("Z", "")]
        if not left:
            return []
        time.sleep(0.02)
    return left


def tree_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def test_reports_its_mode(boxes: BwrapSandboxes) -> None:
    facts = boxes.capabilities
    assert facts["backend"] == "bwrap"
    assert facts["mode"] == ("one-shot" if isinstance(boxes, OneShot) else "forked")
    assert facts["limits"]["inodes"] is (facts["mode"] == "forked")
    assert facts["uid"] != 0


def test_keeps_order_of_requests_and_arguments(boxes: BwrapSandboxes) -> None:
    count = 30 if boxes.capabilities["mode"] == "forked" else 4
    requests = [request(f"def f(x):\n    return ({i}, x)\n", "(1,)", "(2,)") for i in range(count)]
    assert boxes.run(requests) == [(returned(f"({i}, 1)"), returned(f"({i}, 2)")) for i in range(count)]


def test_no_requests_and_no_arguments(forked: BwrapSandboxes) -> None:
    assert forked.run([]) == []
    nothing = CallRequest(files={"f.py": IDENTITY}, module="f", function="f", arguments=())
    assert forked.run([nothing, request(IDENTITY, "(1,)")]) == [(), (returned("1"),)]


@pytest.mark.parametrize(
    ("source", "statuses"),
    [
        (
            "def f(x):\n    if x == 2:\n        raise KeyError(x)\n    return x\n",
            ["returned", "raised", "returned"],
        ),
        ("def f(x):\n    while x == 2:\n        pass\n    return x\n", ["returned", "timeout", "not_run"]),
        (
            "import os\ndef f(x):\n    if x == 2:\n        os._exit(0)\n    return x\n",
            ["returned", "died", "not_run"],
        ),
        ("import ctypes\ndef f(x):\n    ctypes.string_at(0)\n", ["died", "not_run", "not_run"]),
        ("def f(x):\n    return object() if x == 2 else x\n", ["returned", "unreadable", "returned"]),
        ("def f(x):\n    return 'a' * 20000 if x == 2 else x\n", ["returned", "unreadable", "returned"]),
        ("def f(x)\n", ["raised"] * 3),
        ("while True:\n    pass\n", ["timeout", "not_run", "not_run"]),
    ],
)
def test_each_failure_has_its_status(boxes: BwrapSandboxes, source: str, statuses: list[str]) -> None:
    outcomes = boxes.run([request(source, "(1,)", "(2,)", "(3,)")])[0]
    assert [outcome.status for outcome in outcomes] == statuses


def test_a_raised_outcome_names_the_exception(forked: BwrapSandboxes) -> None:
    sources = ["1 / 0", "def f(", "import sys; sys.exit(0)", "x = 1", "import nothing_of_this_name"]
    names = ["ZeroDivisionError", "SyntaxError", "SystemExit", "AttributeError", "ModuleNotFoundError"]
    assert forked.run([request(source) for source in sources]) == [
        (CallOutcome(status="raised", text=name),) for name in names
    ]


def test_a_failure_touches_no_other_request(forked: BwrapSandboxes) -> None:
    bad = request("import os\nos.kill(0, 9)\nos._exit(3)\n", "(1,)")
    good = request(IDENTITY, "(1,)")
    died = CallOutcome(status="died")
    assert forked.run([good, bad, good, bad, good]) == [
        (returned("1"),),
        (died,),
        (returned("1"),),
        (died,),
        (returned("1"),),
    ]


def test_state_is_fresh_between_requests_and_kept_within_one(boxes: BwrapSandboxes) -> None:
    source = "import math\ncount = []\ndef f():\n    count.append(1)\n    math.e += 1\n"
    source += "    open('n', 'a').write('x')\n    return [len(count), int(math.e), len(open('n').read())]\n"
    twice = (returned("[1, 3, 1]"), returned("[2, 4, 2]"))
    assert boxes.run([request(source, "()", "()")] * 2) == [twice, twice]


def test_arguments_are_fresh_objects(forked: BwrapSandboxes) -> None:
    same = "([1],)"
    assert forked.run([request("def f(x):\n    x.append(2)\n    return x\n", same, same)]) == [
        (returned("[1, 2]"),) * 2
    ]


def test_workspace_modules_win_over_preloaded_ones(forked: BwrapSandboxes) -> None:
    own = CallRequest(
        files={
            "heapq.py": IDENTITY,
            "pkg/__init__.py": "",
            "pkg/g.py": "import helper\ndef f(x):\n    return helper.h + x\n",
            "helper.py": "h = 1\n",
        },
        module="pkg.g",
        function="f",
        arguments=("(1,)",),
    )
    shadow = CallRequest(files=own.files, module="heapq", function="f", arguments=("(7,)",))
    assert forked.run([own, shadow]) == [(returned("2"),), (returned("7"),)]


def test_a_workspace_over_the_disk_limit_is_the_codes_fault(forked: BwrapSandboxes) -> None:
    big = request(IDENTITY, "(1,)", "(2,)", **{"big.txt": "x" * (forked.limits.disk_bytes + 1)})
    almost = request(IDENTITY, "(1,)", **{"big.txt": "x" * (forked.limits.disk_bytes - 5)})
    clash = request(IDENTITY, "(1,)", **{"a": "", "a/b": ""})
    raised = CallOutcome(status="raised", text="OSError")
    outcomes = forked.run([big, almost, clash, request(IDENTITY, "(1,)")])
    assert outcomes[:2] == [(raised, raised), (raised,)]
    assert outcomes[2][0].status == "raised" and outcomes[3] == (returned("1"),)


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(LITERALS, min_size=1, max_size=8))
def test_identity_returns_exactly_the_repr(forked: BwrapSandboxes, values: list[Any]) -> None:
    outcomes = forked.run([request(IDENTITY, *(f"({value!r},)" for value in values))])[0]
    assert outcomes == tuple(returned(repr(value)) for value in values)
    assert [value_text(value) for value in values] == [outcome.text for outcome in outcomes]


def test_floats_without_a_literal(forked: BwrapSandboxes) -> None:
    outcomes = forked.run([request("def f(x):\n    return [x, -x, x - x]\n", "(1e999,)")])
    assert outcomes == [(returned("[inf, -inf, nan]"),)]


def test_sets_have_one_text(boxes: BwrapSandboxes) -> None:
    source = "def f(x):\n    return [set(x), set(reversed(x)), set(), {1: {2}}, float('nan'), -0.0]\n"
    words = [f"w{i}" for i in range(20)]
    once = value_text([set(words), set(words), set(), {1: {2}}, float("nan"), -0.0])
    assert boxes.run([request(source, repr((words,)))]) == [(returned(once),)]


@pytest.mark.parametrize(
    "value", [object(), [1, (2, type)], {1: frozenset()}, "a" * 20000, 1 << 20000, True + 0j], ids=range(6)
)
def test_value_text_refuses_what_a_box_calls_unreadable(value: object) -> None:
    with pytest.raises(ValueError, match="plain data"):
        value_text(value)


def test_value_text_refuses_depth_and_cycles() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    wide: list[Any] = []
    for _ in range(40):
        wide = [wide, wide]
    for value in (cycle, wide):
        with pytest.raises(ValueError, match="plain data"):
            value_text(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../f.py": ""}}, "not a path inside the workspace"),
        ({"files": {"/f.py": ""}}, "not a path inside the workspace"),
        ({"module": "f;import os"}, "not a module name"),
        ({"function": "f()"}, "not a function name"),
        ({"arguments": ("open('x')",)}, "not a literal"),
        ({"arguments": ("(1)",)}, "not a tuple"),
    ],
)
def test_bad_requests_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "files": {"f.py": IDENTITY},
        "module": "f",
        "function": "f",
        "arguments": ("(1,)",),
    }
    with pytest.raises(ValueError, match=message):
        CallRequest(**(good | change))


def test_limits_are_positive_and_kept() -> None:
    with pytest.raises(ValueError, match=r"Limits\.cpu_s must be above 0"):
        Limits(cpu_s=0)
    source = "def f(n):\n    return len(bytearray(n << 20))\n"
    with BwrapSandboxes(Limits(memory_bytes=64 << 20, cpu_s=0.5)) as small:
        outcomes = small.run([request(source, "(4,)", "(60,)")])[0]
    assert outcomes == (returned(str(4 << 20)), CallOutcome(status="raised", text="MemoryError"))


def test_nothing_but_the_idle_zygote_is_left_after_a_run(forked: BwrapSandboxes) -> None:
    forked.run([request(IDENTITY, "(1,)")])
    assert forked.pid is not None
    before = len(tree(forked.pid))
    forked.run([request("import time\ndef f():\n    time.sleep(9)\n"), request("while True: pass\n")])
    after = len(tree(forked.pid))
    assert before == after == 3  # bubblewrap, the zygote, the worker made ahead


def test_close_leaves_no_process() -> None:
    with BwrapSandboxes() as boxes:
        boxes.run([request(IDENTITY, "(1,)")])
        assert boxes.pid is not None
        pids = tree(boxes.pid)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    boxes.close()
    with pytest.raises(SandboxFailure, match="closed"):
        boxes.run([request(IDENTITY, "(1,)")])


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_host_leaves_no_process(busy: bool, tmp_path: Path) -> None:
    program = """
import sys
from composer_nb.harness.calls import CallRequest
from composer_nb.harness.sandbox import BwrapSandboxes
boxes = BwrapSandboxes()
print(boxes.pid, flush=True)
source = "import time\\ndef f():\\n    time.sleep(9)\\n"
if sys.argv[1] == "True":
    boxes.run([CallRequest(files={"f.py": source}, module="f", function="f", arguments=("()",))] * 5)
sys.stdin.read()
"""
    host = subprocess.Popen(
        [sys.executable, "-c", program, str(busy)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(sandbox.__file__).parents[2],
    )
    assert host.stdout is not None and host.stdin is not None
    pids = tree(int(host.stdout.readline()))
    time.sleep(0.3 if busy else 0)
    pids = sorted({*pids, *tree(pids[0])})
    assert len(pids) >= 3
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert wait_until_gone(pids) == []
    host.stdin.close()
    host.stdout.close()


def test_a_killed_zygote_is_started_again() -> None:
    with BwrapSandboxes() as boxes:
        for victim in (0, 1):
            assert boxes.pid is not None
            pids = tree(boxes.pid)
            os.kill(pids[victim], signal.SIGKILL)
            assert wait_until_gone(pids) == []
            assert boxes.run([request(IDENTITY, "(1,)"), request(IDENTITY, "(2,)")]) == [
                (returned("1"),),
                (returned("2"),),
            ]


class Nonsense(BwrapSandboxes):
    """Its box answers with `answer`, once it has been set."""

    answer = b""

    def _command(self, mode: sandbox.Mode) -> list[str]:
        if not self.answer:
            return super()._command(mode)
        octal = "".join(f"\\{byte:03o}" for byte in self.answer)
        return ["/bin/sh", "-c", f"printf '{octal}'; exec sleep 5"]


@pytest.mark.parametrize(
    "answer",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{}", b'\x00\x00\x00\x0e{"end": "x"}\n\n', b"\x00\x00\x00\x01x"],
)
def test_nonsense_from_the_box_is_a_failure_not_a_result(answer: bytes) -> None:
    with Nonsense() as boxes:
        boxes._stop()
        boxes.answer = answer
        with pytest.raises(SandboxFailure, match="failed twice"):
            boxes.run([request(IDENTITY, "(1,)")])


def test_host_believes_only_well_formed_reports() -> None:
    limits = Limits()
    ready, nonce = b'{"end": "finished"}\nready 00ff\n', b"00ff "
    good = nonce + b'["returned", "1"]\n'
    unreadable, not_run = CallOutcome(status="unreadable"), CallOutcome(status="not_run")
    assert wire.decode(ready + good, 1, limits) == (returned("1"),)
    bad_lines = [
        b'["returned", "1"]',
        nonce + b'{"a": 1}',
        nonce + b'["returned", 1]',
        nonce + b'["returned"]',
        nonce + b'["passed", "1"]',
        nonce + b'["returned", "\\u001b[31m"]',
        nonce + b'["raised", "a b"]',
        nonce + b'["returned", ""]',
        nonce + b'["unreadable", "1"]',
        nonce + b"[" * 99999,
        b"\xff\xfe",
        b"",
        nonce + json.dumps(["returned", "1" * (limits.output_bytes + 1)]).encode(),
    ]
    for line in bad_lines:
        assert wire.decode(ready + line + b"\n", 2, limits) == (unreadable, not_run), line
        assert wire.decode(ready + good + line + b"\n", 2, limits) == (returned("1"), unreadable), line
    assert wire.decode(ready + good + good, 1, limits) == (unreadable,), "one result too many"
    assert wire.decode(ready + good + b"00ff [", 2, limits)[1].status == "died"


def test_missing_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxUnavailable, match=r"bubblewrap \(bwrap\) is not installed: install bubblewrap"):
        BwrapSandboxes()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    with pytest.raises(SandboxUnavailable, match="apt-get install -y bubblewrap"):
        BwrapSandboxes()


def test_a_machine_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(fake))
    with pytest.raises(
        SandboxUnavailable, match=r"user namespaces allowed.*(No permissions to create|Permission denied)"
    ):
        BwrapSandboxes()


def test_the_journal_holds_what_runs_while_it_runs(tmp_path: Path) -> None:
    with BwrapSandboxes(run_id="run-7", journal=tmp_path / "journal") as boxes:
        boxes.run([request(IDENTITY, "(1,)")])
        [file] = (tmp_path / "journal").iterdir()
        [row] = [json.loads(line) for line in file.read_text().splitlines()]
        assert row["event"] == "made" and row["kind"] == "process" and row["name"] == str(boxes.pid)
        assert row["run_id"] == "run-7" and row["owner"]["pid"] == os.getpid()
    assert list((tmp_path / "journal").iterdir()) == []
