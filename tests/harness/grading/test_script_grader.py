"""The grader `script`: foreign tasks load, run and are graded; what it believes, and what it does not."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading.check import _left, check_task, check_tasks
from composer_nb.harness.grading.script_grader import grade_script, parse_rewards
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.tasks.harbor import ForeignFiles
from composer_nb.harness.tasks.runtime import obstacles, spec_of, start_sandbox
from composer_nb.harness.tasks.task import Task, read_tasks
from tests.folders import write
from tests.harness.foreign import FOREIGN, lay


def task_of(test: str, **change: Any) -> Task:
    fields = {"files": {}, "tests": {"test.sh": test}, "source_scope": ("**",), "grader": "script"}
    return Task(**{"id": "t", "instruction": "say hello"} | fields | change)


QUICK = ("plain", "variables", "python_script_with_json", "helpers", "kinds_of_files", "windows_lines_and_more")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FOREIGN if name not in QUICK)]
)
def test_foreign_tasks_run_and_are_graded(name: str, tmp_path: Path, backend: Backend, monkeypatch) -> None:
    monkeypatch.setenv("WORD_OF_NOBODY", "secret")  # this machine's variables stay here
    task = Task.from_harbor(lay(name, tmp_path))
    assert not list(obstacles(task)) and not task.image
    solved = grade_script(task, _left(task, backend, solve=True), backend)
    assert solved.passed and solved.status == "graded" and solved.flags == ("weak",)
    start_ = {path: text.encode() for path, text in task.files.items()}
    untouched = grade_script(task, start_, backend)
    assert untouched.status == "graded" and not untouched.passed and "weak" in untouched.flags


def test_changes_outside_the_scope_are_dropped(tmp_path: Path, backend: Backend) -> None:
    task = Task.from_harbor(lay("scoped", tmp_path))
    result = grade_script(task, {"hello.txt": b"hello\n", "guard.py": b"x = 2\n", "new.py": b""}, backend)
    assert result.passed and result.flags == ("outside_scope", "weak")


LOOP = "trap '' TERM; mkdir -p /tmp/logs/verifier; while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done"


def test_nothing_writes_when_the_reward_is_read(backend: Backend) -> None:
    """What a script leaves behind is ended before the reward is read, by what it can not end."""
    with start_sandbox(task_of("#!/bin/sh\n"), backend) as box:
        box.exec(["bash", "-c", f"setsid bash -c {shlex.quote(LOOP)} & sleep 0.3"])
        assert box.stats().processes > 0
        box.end_all()
        assert box.stats().processes == 0
        box.exec(["sh", "-c", "echo 0 > /logs/verifier/reward.txt"])
        assert box.exec(["sh", "-c", "sleep 0.2; cat /logs/verifier/reward.txt"]).stdout == b"0\n"


@pytest.mark.parametrize(
    "script",
    [
        "true",
        "echo nan > /logs/verifier/reward.txt",
        "mkfifo /logs/verifier/reward.txt",
        "ln -s /etc/passwd /logs/verifier/reward.txt",
        "echo 1 > /tmp/one; ln -s /tmp/one /logs/verifier/reward.txt",
        "yes 1 | head -c 100000 > /logs/verifier/reward.txt",
        "echo '[1]' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
    ],
)
def test_what_is_no_reward_is_none(script: str, backend: Backend) -> None:
    """Scripts that are too slow are tested in `test_limits.py`."""
    result = grade_script(task_of(f"#!/bin/bash\n{script}\n"), {}, backend)
    assert result.status == "graded" and not result.passed and result.tests == {"test.sh::reward": False}
    assert {"no_reward", "weak"} <= {*result.flags}


@given(
    output=st.binary(max_size=60)
    | st.builds(lambda a, b: a + b"\n" + b, st.sampled_from([b"reward.json", b"reward.txt"]), st.binary())
)
def test_whatever_is_said_is_numbers_or_nothing(output: bytes) -> None:
    for name, value in parse_rewards(output).items():
        assert isinstance(name, str) and type(value) is float and abs(value) < float("inf")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("environment.network_mode = 'public'", r"environment\.network_mode = 'public': sandboxes have no network"),
        ("environment.gpus = 1", r"environment\.gpus"),
        ("environment.workdir = '/app'", r"environment\.workdir = '/app'"),
        ("environment.mcp_servers = [{name = 'x', url = 'http://x'}]", r"environment\.mcp_servers"),
        ("verifier.environment = {docker_image = 'x'}", r"verifier\.environment"),
        ("environment.env = {TOKEN = '${TOKEN}'}", r"environment\.env\.TOKEN"),
        ("environment.docker_image = 'x'", "needs an image"),
    ],
)
def test_what_can_not_be_had_is_refused_by_name(toml: str, message: str, tmp_path: Path, backend: Backend) -> None:
    path = lay("plain", tmp_path)
    (path / "task.toml").write_text(toml)
    task = Task.from_harbor(path)
    with pytest.raises(ValueError, match=message):
        grade_script(task, {}, backend)


@pytest.fixture(scope="module")
def docker() -> Iterator[Backend]:
    try:
        engine = open_backend("docker")
    except SandboxUnavailable as error:
        pytest.skip(f"{error} (make test starts no Docker Engine)")
    yield engine
    engine.close()


@pytest.mark.docker
@pytest.mark.slow
def test_an_image_is_built_on_docker_and_graded_in(tmp_path: Path, docker: Backend) -> None:
    from composer_nb.harness.sandbox.engine import connect
    from composer_nb.harness.sandbox.image import host_image

    with contextlib.closing(connect()) as client:
        base = host_image(client)
    path = lay("plain", tmp_path)
    (path / "environment/app").mkdir()
    (path / "environment/app/given.txt").write_text("given")
    (path / "environment/app/gone.txt").write_text("gone")
    (path / "environment/Dockerfile").write_text(f"FROM {base}\nUSER root\nWORKDIR /srv/app\nCOPY app/ ./\n")
    (path / "tests/test.sh").write_text(
        "#!/bin/bash\ncd /srv/app && [ $(cat hello.txt) = hello ] && [ -f given.txt ] && [ ! -e gone.txt ] && x=1\n"
        "echo ${x:-0} > /logs/verifier/reward.txt\n"
    )
    (path / "solution/solve.sh").write_text("#!/bin/bash\ncd /srv/app; echo hello > hello.txt; rm gone.txt\n")
    task = Task.from_harbor(path)
    assert task.image
    row = check_task(task, docker)
    assert row["problem"] == "" and row["gold"] and not row["none"]
    host = Task.from_harbor(lay("helpers", tmp_path))
    assert check_task(host, docker)["problem"] == ""


HOST = '[metadata.composer_nb]\nruntime = "host-python"\n'
RUNS_PYTEST = (
    "#!/bin/bash\nif python3 -m pytest -q -p no:cacheprovider /tests/test_it.py; then said=1; else said=0; fi\n"
    "echo $said > /logs/verifier/reward.txt\n"
)


def host_task(tmp_path: Path, dockerfile: str) -> Task:
    test = "import sys\nsys.path.insert(0, '.')\nfrom sums import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    files = {"task.toml": HOST, "environment/Dockerfile": dockerfile, "tests/test.sh": RUNS_PYTEST}
    files |= {"tests/test_it.py": test, "environment/workspace/sums.py": "def add(a, b):\n    return a - b\n"}
    return Task.from_harbor(write(lay("plain", tmp_path), files))


def test_without_an_image_pytest_is_there(tmp_path: Path, backend: Backend) -> None:
    task = host_task(
        tmp_path,
        "FROM python:3.12\nRUN pip install --no-cache-dir pytest==8.4\n# COPY a b\nWORKDIR /workspace\nCOPY workspace/ ./\n",
    )
    assert not task.image and not list(obstacles(task))
    final_files = _left(task, backend, solve=False)
    assert final_files["sums.py"] == b"def add(a, b):\n    return a - b\n"
    wrong = grade_script(task, final_files, backend)
    assert not wrong.passed and "assert -1 == 3" in wrong.output and "1 failed" in wrong.output
    assert grade_script(task, final_files | {"sums.py": b"def add(a, b):\n    return a + b\n"}, backend).passed


@pytest.mark.parametrize("line", ["RUN make", "ENV A=b", "COPY app/ .", "WORKDIR /app"])
def test_without_an_image_lines_that_matter_are_refused_by_name(line: str, tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(ValueError, match=rf"environment/Dockerfile: {line.split()[0].upper()} .*: needs an image, so"):
        spec_of(host_task(tmp_path, f"FROM x\n{line}\n"), backend)


def test_one_folder_that_cannot_be_read_does_not_end_a_check(tmp_path: Path) -> None:
    for name in ("good", "twice"):
        lay("plain", tmp_path).rename(tmp_path / name)
        (tmp_path / name / "task.toml").write_text('[metadata.composer_nb]\nid = "same"\n')
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/task.toml").write_text("[")
    rows = {row["id"]: row for row in check_tasks(read_tasks(tmp_path))}
    assert rows["same"]["ok"] and rows["same"]["gold"]
    assert not rows["bad"]["ok"] and "instruction.md is missing" in rows["bad"]["problem"]
    assert not rows["twice"]["ok"] and rows["twice"]["problem"] == "another task is named 'same' too"


FORGES = "import os\nif os.path.isdir('/logs/verifier'):\n    open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\n"
SAYS = """#!/bin/bash
python3 -c 'from f import f; assert f(1) == 2' && x=1
echo ${x:-0} > /logs/verifier/reward.txt
"""


def test_a_reward_that_the_script_did_not_write_is_tampering(backend: Backend) -> None:
    """Harbor reads reward.json first, so code under test that writes it passes whatever the script says in reward.txt."""
    task = task_of(SAYS)
    forged = grade_script(task, {"f.py": (FORGES + "def f(x): return 0\n").encode()}, backend)
    assert forged.status == "tampered" and not forged.passed and "rewards_disagree" in forged.flags
    assert forged.rewards == {"reward": 0.0}
    right = grade_script(task, {"f.py": b"def f(x): return x + 1\n"}, backend)
    assert right.passed and right.flags == ("weak",)
    script = '#!/bin/bash\ncd /logs/verifier; echo 0.5 > reward.txt; echo \'{"a": 1, "b": 0}\' > reward.json\n'
    result = grade_script(task_of(script), {}, backend)
    assert result.status == "graded" and result.rewards == {"a": 1.0, "b": 0.0}


ARTIFACTS = """
artifacts = ["/tmp/out", {source = "/logs/report", exclude = ["*.log"]}, "build/x", "/logs/verifier", "/dev/shm/y"]
"""
LEAVES = """#!/bin/bash
mkdir -p /tmp/out/deep /logs/report /logs/artifacts /logs/verifier /tmp/elsewhere /tmp/tests
echo 1 > /tmp/out/deep/a; printf '#!/bin/sh\\necho ran\\n' > /tmp/out/run; echo 1 > /logs/report/b; echo 1 > /logs/report/b.log
echo 1 > /logs/artifacts/c; echo 1 > /dev/shm/y; echo 1 > /logs/verifier/reward.json; echo 1 > /tmp/elsewhere/d
ln -s /etc/passwd /tmp/out/passwd; ln -s /tmp/elsewhere/d /tmp/out/linked; echo 1 > "/tmp/out/two
lines"; mkfifo /tmp/out/pipe; touch /tmp/out/hidden; chmod 0 /tmp/out/hidden
"""
SEES = """#!/bin/bash
cd /logs; found="$(cat /tmp/out/deep/a report/b artifacts/c /dev/shm/y /tmp/out/linked | tr -d '\\n') $(/tmp/out/run)"
[ "$found" = "11111 ran" ] && ! ls /tmp/out/passwd report/b.log verifier/reward.json /tmp/elsewhere && x=1
echo ${x:-0} > /logs/verifier/reward.txt
"""


def test_artifacts_are_carried_into_grading(backend: Backend) -> None:
    foreign_files = ForeignFiles(name="t", toml=ARTIFACTS + HOST, executable=("tests/test.sh",))
    task = task_of(SEES, solution={"solve.sh": LEAVES}, kept=foreign_files)
    assert not list(obstacles(task))
    final_files = _left(task, backend, solve=True)
    assert {path for path in final_files if path.startswith("/")} == {
        "/tmp/out/deep/a", "/tmp/out/run", "/tmp/out/linked", "/tmp/out/two\nlines",
        "/tmp/logs/report/b", "/tmp/logs/artifacts/c", "/dev/shm/y",
    }  # fmt: skip
    result = grade_script(task, final_files, backend)
    assert result.passed, result.output
    assert result.flags == ("weak",)
    assert not grade_script(task, {}, backend).passed


@pytest.mark.parametrize("path", ["/tmp/tests/test.sh", "/tmp/logs/verifier/reward.json", "/etc/x", "/tmp/../etc/x"])
def test_artifacts_have_no_place_among_the_verifiers_files(path: str, backend: Backend) -> None:
    script = "#!/bin/sh\nset -e; ! test -e /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt\n"
    result = grade_script(task_of(script), {path: b"#!/bin/sh\n"}, backend)
    assert result.passed and result.flags == ("unsafe_path", "weak")


@pytest.mark.parametrize(
    "files",
    [{"/tmp/logs": b"1\n"}, {"/tmp/out": bytes(1 << 20)}],
    ids=["in the way of the logs", "as large as the disk"],
)
def test_an_agents_files_that_do_not_fit_are_its_own_fault(files: dict[str, bytes], backend: Backend) -> None:
    """An agent must not be able to have its failing grade thrown away."""
    toml = f"[environment]\nstorage_mb = 1\n{HOST}"
    foreign_files = ForeignFiles(name="t", toml=toml, executable=("tests/test.sh",))
    task = task_of("#!/bin/sh\n" + "#" * 10_000, kept=foreign_files)
    result = grade_script(task, files, backend)
    assert result.status == "agent_failed" and not result.passed, result
    assert grade_script(task, {}, backend).status == "graded"
