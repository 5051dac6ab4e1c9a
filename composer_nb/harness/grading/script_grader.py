"""The grader `script`: `tests/test.sh` of a Harbor task, in a fresh sandbox, and the number that it leaves.

In the order of things: the agent's changes over the task's own workspace; a new sandbox, in which nothing of the agent ran; the
tests, which come in only now; the script; the end of every process in the sandbox, so that nobody writes any more; and only then
the reward, of which nothing is believed but its form: finite numbers in a small regular file.

Weak: the script runs what the agent wrote, as the same user, and whoever runs as that user can write the reward. There are no
twins, no exact ids, nothing that would show it. Every grade is flagged `weak`, and no training rests on them:
`grade.grading`, which the trainer asks, refuses this grader.

References: Harbor's `Verifier` (paths, order of the two files, numbers only); Harbor #1779 for why this stays weak.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
import time
from collections.abc import Mapping

from composer_nb.harness import harbor
from composer_nb.harness.calls import SandboxFailure
from composer_nb.harness.grade import Grade
from composer_nb.harness.grading.diff import Changes, changes
from composer_nb.harness.runtime import start, variables
from composer_nb.harness.sandboxes.contract import Backend, ExecResult, Sandbox, SandboxDied
from composer_nb.harness.task import ENTRY, SOLVE, Task

FLAGS = {
    "weak": "graded by a script that shares its sandbox with what it tests",
    "no_reward": "the script left no reward, or one that is none",
    "timeout": "the script did not end in time",
    "ended_early": "the sandbox ended before the script had",
}
"""What the flags of a grade mean, besides those of `diff.py`."""
MAX_REWARD_BYTES = 64 << 10
MAX_REWARDS = 1000
LONGEST_REWARD_NAME = 200

_PLACE = """\
import sys, os, tarfile
os.makedirs("/tmp/logs/verifier", exist_ok=True)
tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall("/tmp")
"""
_REMOVE = "import sys, os, json\nfor path in json.load(sys.stdin): os.unlink(path)"
_ALLOW = "import sys, os, json\nfor path in json.load(sys.stdin): os.chmod(path, 0o755)"
_REWARD = """\
import sys, os, stat
for name in ("reward.json", "reward.txt"):
    try:
        fd = os.open("/tmp/logs/verifier/" + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        continue
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        sys.exit("no regular file")
    sys.stdout.buffer.write(name.encode() + b"\\n" + os.read(fd, int(sys.argv[1]) + 1))
    break
"""


def grade_script(task: Task, files: Mapping[str, bytes], backend: Backend) -> Grade:
    """Grades `files`, a whole workspace; passed is a reward of 1 or more under every name.

    Raises ValueError for a task that asks for what is not here, and SandboxUnavailable for an image that can not be had. What the
    sandbox or the agent did is in the grade's status.
    """
    if task.grader != "script":
        raise ValueError(f"task {task.id}: its grader is {task.grader!r}, not 'script'")
    began, told = time.monotonic(), task.settings
    flags = {"weak"}
    try:
        with start(task, backend) as box:
            found = _lay(task, box, files)
            flags |= set(found.flags)
            try:
                done = run_script(box, task, "tests", told.verifier.timeout_sec, told.verifier.env)
                flags |= {"timeout"} if done.timed_out else set()
                rewards = _rewards(box)
            except SandboxDied:
                flags.add("ended_early")
                return _grade("agent_failed", flags, {}, began)
    except SandboxFailure:
        return _grade("infra_error", flags, {}, began)
    except SandboxDied:  # before anything of the task ran
        return _grade("infra_error", flags, {}, began)
    return _grade("graded", flags | (set() if rewards else {"no_reward"}), rewards, began)


def run_script(box: Sandbox, task: Task, folder: str, timeout_s: float, env: Mapping[str, str]) -> ExecResult:
    """Runs `tests/test.sh` or `solution/solve.sh`, with what lies beside it in /tests or /solution, in the workspace."""
    name = {"tests": ENTRY, "solution": SOLVE}[folder]
    held = {path: data for path, data in harbor.layout(task).files.items() if path.startswith(f"{folder}/")}
    if f"{folder}/{name}" not in held:
        raise ValueError(f"task {task.id}: {folder}/{name} is missing")
    placed = box.exec(_python(_PLACE), stdin=_archive(held))
    if placed.exit_code:
        raise SandboxFailure(f"task {task.id}: {folder} do not fit into a sandbox: {placed.stderr[-300:]!r}")
    given = variables(task.settings.environment.env) | variables(env)
    return box.exec([f"/{folder}/{name}"], timeout_s=min(timeout_s, 1e6), env=given)


def _lay(task: Task, box: Sandbox, files: Mapping[str, bytes]) -> Changes:
    """Makes the workspace of a new sandbox what is to be graded. Modes do not leave a sandbox: what begins with `#!` may run."""
    try:
        pristine = box.download()
        found = changes(task, files, pristine)
        new = {path: data for path, data in found.files.items() if pristine.get(path) != data}
        _with_paths(box, _REMOVE, sorted(set(pristine) - set(found.files)))
        box.upload(new)
        _with_paths(box, _ALLOW, sorted(path for path, data in new.items() if data.startswith(b"#!")))
    except OSError as error:
        raise SandboxFailure(f"task {task.id}: the workspace does not fit into a sandbox: {error}") from error
    return found


def _with_paths(box: Sandbox, program: str, paths: list[str]) -> None:
    done = box.exec(_python(program), stdin=json.dumps(paths).encode()) if paths else None
    if done is not None and done.exit_code:
        raise OSError(done.stderr[-300:].decode("utf-8", "replace"))


def _rewards(box: Sandbox) -> dict[str, float]:
    """What the script said, after the end of everything in its sandbox."""
    try:
        box.end_all()
    except OSError as error:
        raise SandboxDied(f"sandbox {box.id}: {error}") from error
    done = box.exec([*_python(_REWARD), str(MAX_REWARD_BYTES)], output_bytes=4 * MAX_REWARD_BYTES)
    return parse_rewards(done.stdout) if done.exit_code == 0 else {}


def parse_rewards(said: bytes) -> dict[str, float]:
    """Rewards by name, of a file's name, a newline and its content: `reward.json` holds an object of finite numbers, `reward.txt`
    one number, which is called `reward`. Nothing for anything else."""
    name, _, content = said.partition(b"\n")
    if len(content) > MAX_REWARD_BYTES:
        return {}
    try:
        held = json.loads(content) if name == b"reward.json" else {"reward": float(content)}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(held, dict) or len(held) > MAX_REWARDS:
        return {}
    for key, value in held.items():
        if type(value) not in (int, float) or len(key) > LONGEST_REWARD_NAME or not key.isprintable():
            return {}
        if (isinstance(value, int) and abs(value) > 2**53) or not math.isfinite(value):
            return {}
    return {key: float(value) for key, value in held.items()}


def _grade(status: str, flags: set[str], rewards: Mapping[str, float], began: float) -> Grade:
    tests = {f"{ENTRY}::{name}": value >= 1 for name, value in rewards.items()}
    if not tests and status != "infra_error":
        tests = {f"{ENTRY}::reward": False}
    cost = {"wall_s": time.monotonic() - began}
    return Grade(status=status, tests=tests, flags=tuple(sorted(flags)), rewards=dict(rewards), cost=cost)  # type: ignore[arg-type]


def _python(program: str) -> list[str]:
    return ["python3", "-I", "-S", "-c", program]


def _archive(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), 0o755  # a script is made executable, as Harbor does
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()
