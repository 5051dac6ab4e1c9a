"""The grader `script`: `tests/test.sh` of a Harbor task, in a fresh sandbox, and the number that it leaves.

In order: a new sandbox, in which nothing of the agent ran; the tests; the agent's changes over the task's workspace; the script;
the end of every process in the sandbox, so that nothing writes any more; and only then the reward, which must be finite numbers
in a small regular file.

Weak: the script runs the agent's code as the same user, who can write the reward. No twins and no exact ids would show it. Every
grade is flagged `weak`, and none is trained on: the recipe refuses this grader (`prepare.own_tasks`). Other flags besides
those of `diff.py`: `no_reward` (none was left, or one that is none), `rewards_disagree` (one of `reward.json` and `reward.txt`
passes and the other does not: the script did not write both, so the grade is `tampered`), `timeout` (of the script),
`ended_early` (the sandbox ended before the script had).

References: Harbor's `Verifier` (paths, order of the two files, numbers only); Harbor #1779 for why this stays weak.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from composer_nb.harness.grading.diff import Changes, changes
from composer_nb.harness.grading.grade import Grade, Status
from composer_nb.harness.sandbox.contract import Backend, ExecResult, Sandbox
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.sandbox.toolchain import PLACE, TESTING
from composer_nb.harness.tasks import harbor
from composer_nb.harness.tasks.runtime import bring, lay_artifacts, start_sandbox, variables
from composer_nb.harness.tasks.task import ENTRY, SOLVE, Task

MAX_REWARD_BYTES = 64 << 10
MAX_REWARDS = 1000
OUTPUT = 8000  # Last characters of each of a script's streams that a grade keeps.
LONGEST_REWARD_NAME = 200
LOGS = "/tmp/logs/verifier"
_SCRIPTS = {"tests": ENTRY, "solution": SOLVE}

_REWARD = """\
import sys, os, stat
place, name, most = sys.argv[1:]
try:
    fd = os.open(place + "/" + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
except FileNotFoundError:
    sys.exit()
if not stat.S_ISREG(os.fstat(fd).st_mode):
    sys.exit("no regular file")
sys.stdout.buffer.write(name.encode() + b"\\n" + os.read(fd, int(most) + 1))
"""


def grade_script(task: Task, files: Mapping[str, bytes], backend: Backend) -> Grade:
    """Grade `files`, a whole workspace. It passes if every reward is 1 or more.

    Faults of the sandbox or the agent are in the grade's status. Raises ValueError for a task that asks for what no sandbox here
    has, and SandboxUnavailable for an image that cannot be had.
    """
    if task.grader != "script":
        raise ValueError(f"task {task.id}: its grader is {task.grader!r}, not 'script'")
    began, settings = time.monotonic(), task.settings
    flags, result = {"weak"}, None
    try:
        with start_sandbox(task, backend) as box:
            bring_scripts(box, task, "tests")  # before the agent's files, which could leave them no room
            try:
                edits = _lay(task, box, files)
            except OSError as error:
                return _grade("agent_failed", flags, {}, began, f"the agent's files do not fit into a sandbox: {error}")
            flags |= set(edits.flags)
            try:
                result = exec_script(box, task, "tests", settings.verifier.timeout_sec, settings.verifier.env)
                flags |= {"timeout"} if result.timed_out else set()
                rewards, other = _rewards(box)
            except SandboxDied:
                flags.add("ended_early")
                return _grade("agent_failed", flags, {}, began, shown(result) if result else "")
    except SandboxFailure as error:
        return _grade("infra_error", flags, {}, began, str(error))
    except SandboxDied:  # before anything of the task ran
        return _grade("infra_error", flags, {}, began)
    if rewards and other is not None and _passes(rewards) != _passes(other):
        return _grade("tampered", flags | {"rewards_disagree"}, other, began, shown(result))
    return _grade("graded", flags | (set() if rewards else {"no_reward"}), rewards, began, shown(result))


def _passes(rewards: Mapping[str, float]) -> bool:
    return bool(rewards) and all(value >= 1 for value in rewards.values())


def run_script(box: Sandbox, task: Task, folder: str, timeout_s: float, env: Mapping[str, str]) -> ExecResult:
    """Run `tests/test.sh` or `solution/solve.sh` in the workspace, with its folder at /tests or /solution."""
    bring_scripts(box, task, folder)
    return exec_script(box, task, folder, timeout_s, env)


def bring_scripts(box: Sandbox, task: Task, folder: str) -> None:
    """Bring the folder `tests` or `solution` into a sandbox. Raises SandboxFailure if it does not fit."""
    name = _SCRIPTS[folder]
    scripts = {path: data for path, data in harbor.layout(task).files.items() if path.startswith(f"{folder}/")}
    if f"{folder}/{name}" not in scripts:
        raise ValueError(f"task {task.id}: {folder}/{name} is missing")
    try:
        bring(box, scripts, "/tmp", mode=0o755)  # scripts are executable, as Harbor makes them
        bring(box, {}, LOGS)
    except OSError as error:
        raise SandboxFailure(f"task {task.id}: {folder} do not fit into a sandbox: {error}") from None


def exec_script(box: Sandbox, task: Task, folder: str, timeout_s: float, env: Mapping[str, str]) -> ExecResult:
    """Run the script of a folder that is in the sandbox already."""
    usual = {} if task.image else {"PYTHONPATH": f"{PLACE}/{TESTING}"}
    environment = usual | variables(task.settings.environment.env) | variables(env)
    return box.exec([f"/{folder}/{_SCRIPTS[folder]}"], timeout_s=min(timeout_s, 1e6), env=environment, granted=True)


def shown(result: ExecResult) -> str:
    """Return what a script printed, stdout before stderr, the end of each if it is long."""
    parts = []
    for data in (result.stdout, result.stderr):
        text = data.decode("utf-8", "replace").strip()
        parts.append(text if len(text) <= OUTPUT else f"[…]{text[-OUTPUT:]}")
    return "\n".join(filter(None, parts))


def _lay(task: Task, box: Sandbox, files: Mapping[str, bytes]) -> Changes:
    """Apply the agent's changes to a new sandbox. File modes are unknown: what begins with `#!` becomes executable.

    Raises OSError for files that do not fit."""
    pristine = box.download()
    all_laid = lay_artifacts(box, files)
    edits = changes(task, {path: data for path, data in files.items() if not path.startswith("/")}, pristine)
    new = {path: data for path, data in edits.files.items() if pristine.get(path) != data}
    for path in sorted(set(pristine) - set(edits.files)):
        box.remove(path)
    scripts = {path for path, data in new.items() if data.startswith(b"#!")}
    box.upload({path: data for path, data in new.items() if path not in scripts})
    for path in sorted(scripts):
        box.write(path, new[path], mode=0o755)
    return edits if all_laid else replace(edits, dropped={**edits.dropped, "/": "unsafe_path"})


def _rewards(box: Sandbox) -> tuple[dict[str, float], dict[str, float] | None]:
    """Return the script's rewards, after ending every process in its sandbox: those of `reward.json` or else of `reward.txt`, and
    those of `reward.txt` if both are there."""
    try:
        box.end_all()
    except OSError as error:
        raise SandboxDied(f"sandbox {box.id}: {error}") from error
    files = []
    for name in ("reward.json", "reward.txt"):
        program = ["python3", "-I", "-S", "-c", _REWARD, LOGS, name, str(MAX_REWARD_BYTES)]
        result = box.exec(program, output_bytes=4 * MAX_REWARD_BYTES)
        if result.stdout or result.exit_code:
            files.append(parse_rewards(result.stdout) if result.exit_code == 0 else {})
    return (files or [{}])[0], files[1] if len(files) > 1 else None


def parse_rewards(output: bytes) -> dict[str, float]:
    """Parse a file's name, a newline and its content to rewards by name: `reward.json` holds an object of finite numbers,
    `reward.txt` one number, which is called `reward`. Anything else gives nothing."""
    name, _, content = output.partition(b"\n")
    if len(content) > MAX_REWARD_BYTES:
        return {}
    try:
        values = json.loads(content) if name == b"reward.json" else {"reward": float(content)}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict) or len(values) > MAX_REWARDS:
        return {}
    for key, value in values.items():
        if type(value) not in (int, float) or len(key) > LONGEST_REWARD_NAME or not key.isprintable():
            return {}
        if (isinstance(value, int) and abs(value) > 2**53) or not math.isfinite(value):
            return {}
    return {key: float(value) for key, value in values.items()}


def _grade(status: Status, flags: set[str], rewards: Mapping[str, float], began: float, output: str = "") -> Grade:
    tests = {f"{ENTRY}::{name}": value >= 1 for name, value in rewards.items()}
    if not tests and status != "infra_error":
        tests = {f"{ENTRY}::reward": False}
    return Grade(
        status=status,
        tests=tests,
        flags=tuple(sorted(flags)),
        timeouts=int("timeout" in flags),
        rewards={**rewards},
        cost={"wall_s": time.monotonic() - began},
        output=output,
    )
