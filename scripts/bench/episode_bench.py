"""What an episode costs without a model: a sandbox, five calls, the visible tests, the work carried out, and the grade.

CPU is user and system time of this process and of all that it starts, sandboxes included, as a control group counts it.
All figures are medians. The tasks: a made one of sixteen hidden tests with twins and recorded calls (grader `pytest`), and
generated ones (grader `functions`), whose files are in no sandbox.

python scripts/bench/episode_bench.py [--backend bwrap|docker] [--episodes N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psutil

from composer_nb.harness.carry import add_history, carry_back
from composer_nb.harness.grading.box import Boxes
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import plan_of, with_plan
from composer_nb.harness.grading.recorded import record
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.reap import OWN
from composer_nb.harness.sandbox.system.cgroups import Cgroups
from composer_nb.harness.tasks.runtime import start_sandbox
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.harness.tools.workspace import Workspace
from composer_nb.labs.attacks.patch_check import plan_for
from composer_nb.labs.attacks.patch_target import MODULE, RIGHT, TARGET
from composer_nb.tour.repairs import make_tasks

EPISODES, FUNCTIONS = 20, 100
Table = Mapping[str, tuple[float, float]]
"""Step -> milliseconds of CPU and of wall time."""


@dataclass(slots=True)
class Meter:
    """Adds up what each step costs."""

    seconds: Callable[[], float]
    """Reads the CPU time that was used so far."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        used, began = self.seconds(), time.perf_counter()
        yield
        self.wall.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        self.cpu.setdefault(name, []).append(1e3 * (self.seconds() - used))

    def table(self) -> Table:
        """Return the medians of each step and of whole episodes."""
        medians = {name: (statistics.median(self.cpu[name]), statistics.median(self.wall[name])) for name in self.cpu}
        cpu, wall = (
            [sum(step_times) for step_times in zip(*times.values(), strict=True)] for times in (self.cpu, self.wall)
        )
        return medians | {"the episode": (statistics.median(cpu), statistics.median(wall))}


@contextmanager
def counted() -> Iterator[Callable[[], float]]:
    """Put this process into a control group, in which those of its sandboxes are made too. Yield what reads the group's CPU time.

    Raises RuntimeError where no group can be made.
    """
    cgroups = Cgroups.find()
    if isinstance(cgroups, str):
        raise RuntimeError(cgroups)
    memory = psutil.virtual_memory().total
    group = cgroups.make(cgroups.folders(f"{OWN}bench-{os.getpid()}"), memory, 4096, os.cpu_count() or 1)
    group.attach(os.getpid())
    try:
        yield group.cpu_s
    finally:
        for folder in cgroups.places.values():
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        group.remove()


def made_task(backend: Backend) -> Task:
    """Return the task of the grader `pytest` with a plan of twins and recorded calls."""
    plan = plan_for(TARGET, backend)
    return with_plan(TARGET, replace(plan, calls=record(TARGET, plan, plan.tests.values(), Boxes(backend=backend))))


def calls(text: str) -> list[ToolCall]:
    """Return five calls of an agent that writes `text`."""
    requests: list[tuple[str, dict[str, object]]] = [
        ("read_file", {"target_file": MODULE}),
        ("grep", {"pattern": "def share"}),
        ("list_dir", {"target_directory": "."}),
        ("write", {"file_path": MODULE, "contents": text}),
        ("run_terminal_cmd", {"command": "true", "is_background": False}),
    ]
    return [ToolCall(name=name, arguments=arguments) for name, arguments in requests]


def twins_alone(task: Task) -> Task:
    """Return the same task without recorded calls."""
    return with_plan(task, replace(plan_of(task), calls=()))


def in_sandboxes(backend: Backend, episodes: int, seconds: Callable[[], float]) -> tuple[Table, dict[str, float]]:
    """Return what episodes with a sandbox of their own cost, and the median milliseconds of each tool call and of a grade's own
    sandbox. Every episode leaves other bytes, so that none is graded by another's result."""
    task, tools = made_task(backend), ToolSet.cursor()
    twins = twins_alone(task)
    for number in range(-2, episodes):  # the first ones make what all have in common
        if number <= 0:
            meter, besides = Meter(seconds), Meter(seconds)
            spent: dict[str, list[float]] = {}
        with meter.step("sandbox, git history"):
            box = start_sandbox(task, backend)
            add_history(box)
            session = tools.open(box)
        with box:
            with meter.step("five tool calls"):
                for call in calls(f"{RIGHT}# {random.random()}\n"):
                    [reply] = tools.run(session, [call])
                    assert not reply.error, reply.text
                    spent.setdefault(call.name, []).append(1e3 * reply.seconds)
            with meter.step("visible tests"):
                observation = session.run_visible_tests()
            assert observation.text == "pass 2", observation
            with meter.step("work carried out, sandbox ended"):
                files = {path: blob.data for path, blob in carry_back(box)[0].items() if not path.startswith(".git/")}
                box.destroy()
        with meter.step("grade with twins"):
            result = grade(twins, files, backend)
        assert result.passed, result
        began = time.perf_counter()
        backend.create().destroy()
        spent.setdefault("a grade's sandbox", []).append(1e3 * (time.perf_counter() - began))
        with besides.step("grade with twins and recorded calls"):
            result = grade(task, files, backend)
        assert result.passed and result.calls, result
    rows = {name: row for name, row in besides.table().items() if name != "the episode"}
    return {**meter.table(), **rows}, {name: statistics.median(values) for name, values in spent.items()}


def on_files(episodes: int, seconds: Callable[[], float]) -> Table:
    """Return what episodes on plain files cost, whose functions are called in shared sandboxes; no answer is remembered."""
    with SandboxExecutor() as sandboxes:
        tasks = list(make_tasks("bench", 24, heldout=False, executor=CachedExecutor(sandboxes)))
        for number in range(-2, episodes):
            if number <= 0:
                meter = Meter(seconds)
            task, tools = tasks[number % len(tasks)], ToolSet.tiny()
            work = Workspace(files=dict(task.files), visible_tests=task.visible_tests, sandboxes=sandboxes)
            path = task.source_scope[0]
            tool_calls = [ToolCall(name="read_file", arguments={"path": path})]
            tool_calls += [ToolCall(name="edit_line", arguments={"path": path, "line": 1, "text": "#"})] * 4
            with meter.step("five tool calls"):
                tools.run(work, tool_calls)
            work.files |= task.solution
            with meter.step("visible tests"):
                assert work.run_visible_tests().tests_run
            with meter.step("grade"):
                result = grade(task, work.files, sandboxes)
            assert result.passed, result
        return meter.table()


def measure(backend: str = "bwrap", episodes: int = EPISODES) -> dict[str, object]:
    """Return every figure, and the load of the machine before."""
    load = os.getloadavg()[0]
    with counted() as seconds:
        with open_backend(backend) as opened:
            steps, spent = in_sandboxes(opened, episodes, seconds)
        functions = on_files(FUNCTIONS, seconds)
    return {"backend": backend, "load": load, "pytest": steps, "ms": spent, "functions": functions}


def markdown(figures: Mapping[str, object]) -> str:
    """Return the figures as tables."""
    lines = [f"Backend {figures['backend']}, load {figures['load']:.1f} on {os.cpu_count()} cores before it.", ""]
    lines += ["| step | CPU, ms | wall, ms |", "|---|---|---|"]
    for kind in ("pytest", "functions"):
        rows: Table = figures[kind]  # type: ignore[assignment]
        lines += [f"| {kind}: {name} | {cpu:.1f} | {wall:.1f} |" for name, (cpu, wall) in rows.items()]
    medians: Mapping[str, float] = figures["ms"]  # type: ignore[assignment]
    median_texts = (f"`{name}` {value:.1f}" for name, value in medians.items())
    return "\n".join([*lines, "", f"Median milliseconds: {', '.join(median_texts)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("bwrap", "docker"), default="bwrap")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.backend, args.episodes)
    print(json.dumps(figures, indent=1) if args.json else markdown(figures))


if __name__ == "__main__":
    main()
