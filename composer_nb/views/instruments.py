"""Instruments that record sandboxes for a notebook: calls of a rollout, common graders, and what a killed run left.
`environments.py` draws the records."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from composer_nb.harness.grading import box
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Turn
from composer_nb.harness.sandbox.contract import Backend, ExecResult, Sandbox, Stats, archive_of
from composer_nb.harness.sandbox.reap import mark_of, started
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task

Kind = Literal["read", "write", "exec"]
PatchVerdict = Literal["accepted", "rejected", "tampered"]
T = TypeVar("T")


# Rollouts.


class Watched:
    """A sandbox that records its calls as turns of a rollout, and its resource use after each message."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.turns: list[Turn] = []
        self.stats: list[Stats] = []
        self._said = ""

    def turn(self, message: str) -> None:
        """Begin a message of the agent."""
        self._said = message
        self.stats.append(self.sandbox.stats())

    def read(self, path: str) -> str:
        return self._noted("read", path, lambda: self.sandbox.read(path).decode("utf-8", "replace"), str.strip)

    def write(self, path: str, text: str) -> None:
        self._noted("write", path, lambda: self.sandbox.write(path, text.encode()), lambda _: "written")

    def exec(self, command: Sequence[str], **options: Any) -> ExecResult:
        return self._noted("exec", " ".join(command), lambda: self.sandbox.exec(command, **options), _last_line)

    def _noted(self, kind: Kind, target: str, call: Callable[[], T], observe: Callable[[T], str]) -> T:
        begin = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - begin
        text = json.dumps({"name": kind, "arguments": {"target": target}})
        said, self._said = self._said, ""
        turn = Turn(call=text, observation=observe(result), said=said, beside=not said, seconds=seconds)
        self.turns.append(turn)
        self.stats[-1] = self.sandbox.stats()
        return result


def _last_line(done: ExecResult) -> str:
    lines = (done.stdout + done.stderr).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """The result of a fork."""

    seen: bool
    """The visible tests pass."""
    grade: Grade
    digest: str
    """Digest of the workspace."""


# Graders.


def tools_archive(backend: Backend) -> bytes:
    """Return pytest as a tar archive, compiled for the sandboxes of `backend`, which have no Python packages."""
    files = {}
    for name, (_, package, text) in box.sources().items():
        if not name.startswith("composer_nb"):
            files[f"kit/{name.replace('.', '/')}{'/__init__' if package else ''}.py"] = text.encode()
    with backend.create() as sandbox:
        sandbox.exec(["tar", "xf", "-", "-C", "/tmp"], stdin=archive_of(files))
        sandbox.exec(["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/tmp/kit"])
        return sandbox.exec(["tar", "cf", "-", "-C", "/tmp", "kit"], output_bytes=32 << 20).stdout


def everyday(sandbox: Sandbox, task: Task, ids: Iterable[str], tools: bytes) -> dict[str, bool]:
    """Return whether common graders would accept a workspace, by rule. All judge one pytest run where the agent worked, with the
    hidden tests `ids` copied in; `tools` comes from `tools_archive`. Raises SandboxDied."""
    sandbox.exec(["tar", "xf", "-", "-C", "/tmp"], stdin=tools)
    sandbox.upload({path: text.encode() for path, text in task.tests.items()})
    command = ["python3", "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", *filter(is_test_module, task.tests)]
    done = sandbox.exec(command, env={"PYTHONPATH": "/tmp/kit"}, timeout_s=30)
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    said = {
        word: {line.removeprefix(word + " ").partition(" - ")[0] for line in lines if line.startswith(word + " ")}
        for word in ("PASSED", "FAILED")
    }
    return {
        "exit code 0": done.exit_code == 0,
        "no line says FAILED": not said["FAILED"] & set(ids),
        "every line says PASSED": said["PASSED"] >= set(ids),
    }


def verdict(grade: Grade) -> PatchVerdict:
    return "accepted" if grade.passed else "tampered" if grade.status == "tampered" else "rejected"


# What is left behind.


def descendants(pid: int) -> dict[int, int | None]:
    """Return the descendants of a process with their start times."""
    return {child.pid: started(child.pid) for child in psutil.Process(pid).children(recursive=True)}


def census(folder: Path, below: Mapping[int, int | None]) -> dict[str, int]:
    """Count what is left of a run: its processes (pid -> start time), and the resources that the journals in `folder` name."""
    named = Counter[tuple[str, str, str]]()
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            named[entry["kind"], entry["name"], entry["mark"]] += 1 if entry["event"] == "made" else -1
    held = [thing for thing, count in named.items() if count > 0]
    there = Counter(kind for kind, name, mark in held if mark_of(kind, name) == mark)  # type: ignore[arg-type]
    return {
        "processes": sum(started(pid) == tick is not None for pid, tick in below.items()),
        "cgroups": there["cgroup"],
        "containers": there["container"],
        "folders": there["directory"],
        "notes in the journal": len(held),
    }
