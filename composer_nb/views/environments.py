"""Figures and HTML of environments: rollouts, forks, cheats and graders, and limits; and the instruments that record them."""

from __future__ import annotations

import ast
import html
import json
import textwrap
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import psutil
from matplotlib.axes import Axes

from composer_nb.harness.grading import box
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import Twin
from composer_nb.harness.rollout import Turn
from composer_nb.harness.sandbox.contract import Backend, ExecResult, Sandbox, Stats, archive_of
from composer_nb.harness.sandbox.reap import mark_of, started
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.case import AttackVerdict
from composer_nb.labs.attacks.patch_target import trick
from composer_nb.labs.attacks.patches import Patch
from composer_nb.views import page, style
from composer_nb.views.page import Html
from composer_nb.views.style import Picture, key, title

HUES: dict[str, str] = {"read": style.SKY, "write": style.ORANGE, "exec": style.BLUE}


# Rollouts.


def timeline(agent: Watched) -> Picture:
    """Draw the calls of a rollout one after another, without thinking time, and the sandbox's memory and CPU use."""
    picture = Picture(9.5, 0.34 * len(agent.stats) + 1.6)
    calls, memory, cpu = picture.panels(1, 3, width_ratios=(5, 1.6, 1.6), sharey=True)
    total_ms, start_ms, message, message_ms = 1e3 * sum(turn.seconds for turn in agent.turns), 0.0, 0, 0.0
    labels = set(HUES)
    for turn, following in zip_longest(agent.turns, agent.turns[1:]):
        tool, call_ms = json.loads(turn.call)["name"], 1e3 * turn.seconds
        message, message_ms = (message, message_ms + call_ms) if turn.beside else (message + 1, call_ms)
        bar_ms = max(call_ms, 0.004 * total_ms)  # the shortest still show
        calls.barh(message, bar_ms, left=start_ms, height=0.6, color=HUES[tool], label=tool if tool in labels else "")
        labels.discard(tool)
        start_ms += call_ms
        if following is None or not following.beside:
            style.note(calls, start_ms, message, f"  {message_ms:.0f} ms")
    calls.set(xlim=(0, start_ms * 1.12), yticks=range(1, len(agent.stats) + 1))
    calls.invert_yaxis()
    title(calls, "calls, one after another", "ms in the sandbox", "turn")
    key(calls)
    for ax, name, unit, values in (
        (memory, "memory", "MB after the turn", [(stats.memory_bytes or 0) / 1e6 for stats in agent.stats]),
        (cpu, "CPU", "ms used so far", [(stats.cpu_s or 0.0) * 1e3 for stats in agent.stats]),
    ):
        ax.plot(values, range(1, len(values) + 1), "o-", color=style.INK, markersize=4, linewidth=1)
        ax.set_xlim(0, max([*values, 1e-9]) * 1.15)
        title(ax, name, unit)
    for ax in (calls, memory, cpu):
        ax.grid(axis="y", visible=False)
    return picture


def tree(trunk: Sequence[str], futures: Mapping[str, Future]) -> Picture:
    """Draw a rollout up to a snapshot and its forks with visible tests, hidden tests and the digest of the workspace. Equal
    digests share colour and marker."""
    picture, ax = style.one_panel(9.5, 0.5 * len(futures) + 1.0)
    ax.axis("off")
    middle, fork = (len(futures) - 1) / 2, 1.05 * len(trunk) - 0.2
    columns = {"edit": 1.35, "tests it can see": 2.75, "hidden tests": 3.75, "workspace": 4.85}
    columns = {text: fork + x for text, x in columns.items()}
    for text, x in columns.items():
        style.note(ax, x, -0.8, text, ha="center", color=style.GREY)
    ax.plot([0, fork], [middle, middle], color=style.GREY, linewidth=1.2, zorder=1)
    for index, text in enumerate(trunk):
        _node(ax, 1.05 * index, middle, text, "white")
    ax.plot(fork, middle, "D", color=style.INK, markersize=9, zorder=3)
    ax.text(fork - 0.05, middle - 0.25, "snapshot", ha="right", va="bottom", fontsize=8.5, color=style.INK)
    digests = list(dict.fromkeys(future.digest for future in futures.values()))
    for y, (name, future) in enumerate(futures.items()):
        ax.plot([fork, fork + 0.4, fork + 4.5], [middle, y, y], color=style.GREY, linewidth=1.2, zorder=1)
        _node(ax, columns["edit"], y, name, "white")
        _node(ax, columns["tests it can see"], y, "pass" if future.seen else "fail", "white")
        passed, hidden = sum(future.grade.tests.values()), len(future.grade.tests)
        fill = style.BLUE if future.grade.passed else style.VERMILION
        _node(ax, columns["hidden tests"], y, f"{passed} of {hidden} pass", fill, "white")
        number = digests.index(future.digest)
        hue = (style.GREEN, style.PURPLE, style.ORANGE, style.SKY)[number % 4]
        ax.plot(fork + 4.5, y, "os^v"[number % 4], color=hue, markersize=10, zorder=3)
        ax.text(fork + 4.65, y, future.digest[:8], va="center", fontsize=9, family="monospace", color=style.INK)
    ax.set(xlim=(-0.4, fork + 5.4), ylim=(len(futures) - 0.5, -1.1))
    return picture


def _node(ax: Axes, x: float, y: float, text: str, fill: str, ink: str = style.INK) -> None:
    edge = {"facecolor": fill, "edgecolor": style.GREY, "boxstyle": "round,pad=0.4", "linewidth": 0.8}
    ax.text(x, y, text, ha="center", va="center", fontsize=8.5, color=ink, bbox=edge, zorder=2)


# Graders.


def twin(task: Task, twin_of_test: Twin) -> Html:
    """Return the statement around a hidden test's expectation beside that of its twin, with the difference marked."""
    text = task.tests[twin_of_test.path]
    lines, ends = text.split("\n"), [0, *(statement.end_lineno or 0 for statement in ast.parse(text).body)]
    number = bisect_left(ends, text.count("\n", 0, twin_of_test.start) + 1)
    begin, end = (len("\n".join(lines[:count])) for count in ends[number - 1 : number + 1])
    before, after = text[begin : twin_of_test.start], text[twin_of_test.end : end]
    columns = []
    for head, middle, tint in (
        ("the test: a right answer passes", text[twin_of_test.start : twin_of_test.end], "rgba(0,114,178,.3)"),
        ("its twin: a right answer fails", twin_of_test.text, "rgba(213,94,0,.4)"),
    ):
        body = html.escape(textwrap.dedent(f"{before}\0{middle}\1{after}").strip("\n"))
        body = body.replace("\0", f'<b style="background:{tint}">').replace("\1", "</b>")
        columns.append(f'<div style="flex:1 1 22em"><div class="head">{head}</div><pre>{body}</pre></div>')
    return page.box(f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(columns)}</div>')


def patches(chosen: Sequence[Patch]) -> Html:
    """Return the changes of each patch, with files folded. Hostile modules are alike but for their tricks: only the first
    is shown in full."""
    parts, in_full = list[str](), ""
    for patch in chosen:
        files = ""
        for path, data in patch.files.items():
            text, head = "(deleted)" if data is None else data.decode("utf-8", "replace"), path
            if (hostile_text := trick(text)) != text:
                if in_full:
                    text, head = hostile_text, f"{path}, otherwise as in “{in_full}”"
                in_full = in_full or patch.title
            files += f'<div class="quiet">{html.escape(head)}</div><pre>{html.escape(text)}</pre>'
        parts.append(f"<details><summary>{html.escape(patch.title)}</summary>{files}</details>")
    return page.box(*parts)


# (honest work, verdict) -> fill, ink, text.
_CELLS: dict[tuple[bool, PatchVerdict], tuple[str, str, str]] = {
    (True, "accepted"): (style.BLUE, "white", "✓ accepted"),
    (True, "rejected"): (style.VERMILION, "white", "✗ rejected"),
    (True, "tampered"): (style.VERMILION, "white", "✗ tampered"),
    (False, "accepted"): (style.VERMILION, "white", "✗ accepted"),
    (False, "rejected"): (style.PALE, style.INK, "rejected"),
    (False, "tampered"): (style.YELLOW, style.DARK, "! tampered"),
}


def matrix(verdicts: Mapping[str, Mapping[str, PatchVerdict]], honest: str) -> Picture:
    """Draw the verdict of each grader (columns) on each patch (rows); only `honest` should be accepted."""
    graders = list(next(iter(verdicts.values())))
    picture, ax = style.one_panel(2.6 + 1.35 * len(graders), 0.7 + 0.3 * len(verdicts))
    for y, (name, row) in enumerate(verdicts.items()):
        for x, grader in enumerate(graders):
            fill, ink, text = _CELLS[name == honest, row[grader]]
            ax.barh(y, 0.96, left=x + 0.02, height=0.9, color=fill)
            style.note(ax, x + 0.5, y, text, ha="center", color=ink)
    ax.set_yticks(range(len(verdicts)), list(verdicts), fontsize=9)
    ax.set_xticks([x + 0.5 for x in range(len(graders))], [textwrap.fill(name, 13) for name in graders], fontsize=9)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set(xlim=(0, len(graders)), ylim=(len(verdicts) - 0.5, -0.5))
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(visible=False)
    return picture


# Limits.


def cases(verdicts: Sequence[tuple[str, AttackVerdict, float]]) -> Html:
    """Return each attack with its outcome and seconds."""
    rows = []
    for name, judged, seconds in verdicts:
        text, hue = ("held", "0,158,115") if judged.blocked else ("NOT HELD", "213,94,0")
        chip = f'<span class="chip" style="background:rgba({hue},.4)">{text}</span>'
        detail = f'<span class="quiet">{html.escape(judged.detail)} · {seconds:.1f} s</span>'
        rows.append(f'<div class="head">{html.escape(name)} {chip}</div><div>{detail}</div>')
    return page.box(*rows)


def spread(durations: Mapping[str, Sequence[float]], unit: str) -> Picture:
    """Draw each duration as a dot, and the median of each row as a line."""
    picture, ax = style.one_panel(7.5, 0.32 * len(durations) + 0.8)
    for y, values in enumerate(durations.values()):
        ax.plot(values, [y] * len(values), "o", color=style.BLUE, alpha=0.5, markeredgewidth=0)
        ax.plot([median(values)] * 2, [y - 0.35, y + 0.35], color=style.INK)
    style.rows(ax, list(durations))
    ax.set_xlim(0)
    title(ax, "", unit)
    return picture


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
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        text = json.dumps({"name": kind, "arguments": {"target": target}})
        message, self._said = self._said, ""
        turn = Turn(call=text, observation=observe(result), said=message, beside=not message, seconds=seconds)
        self.turns.append(turn)
        self.stats[-1] = self.sandbox.stats()
        return result


def _last_line(result: ExecResult) -> str:
    lines = (result.stdout + result.stderr).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {result.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """The result of a fork: whether the visible tests pass (`seen`), the grade, and the digest of the workspace."""

    seen: bool
    grade: Grade
    digest: str


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


def everyday(sandbox: Sandbox, task: Task, ids: Iterable[str], tools: bytes) -> dict[str, PatchVerdict]:
    """Return the verdicts of common graders on a workspace, by rule. All judge one pytest run where the agent worked, with the
    hidden tests `ids` copied in; `tools` comes from `tools_archive`. Raises TimeoutError if that run did not end, and
    SandboxDied."""
    sandbox.exec(["tar", "xf", "-", "-C", "/tmp"], stdin=tools)
    sandbox.upload({path: text.encode() for path, text in task.tests.items()})
    command = ["python3", "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", *filter(is_test_module, task.tests)]
    result = sandbox.exec(command, env={"PYTHONPATH": "/tmp/kit"}, timeout_s=30, granted=True)
    if result.timed_out:
        raise TimeoutError("pytest did not end, so there is no verdict")
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    ids_by_word = {
        word: {line.removeprefix(word + " ").partition(" - ")[0] for line in lines if line.startswith(word + " ")}
        for word in ("PASSED", "FAILED")
    }
    passes = result.exit_code == 0, not ids_by_word["FAILED"] & set(ids), ids_by_word["PASSED"] >= set(ids)
    rules = "exit code 0", "no line says FAILED", "every line says PASSED"
    return {rule: "accepted" if passed else "rejected" for rule, passed in zip(rules, passes, strict=True)}


def verdict(grade: Grade) -> PatchVerdict:
    return "accepted" if grade.passed else "tampered" if grade.status == "tampered" else "rejected"


# What is left behind.


def descendants(pid: int) -> dict[int, int | None]:
    """Return the descendants of a process with their start times."""
    return {child.pid: started(child.pid) for child in psutil.Process(pid).children(recursive=True)}


def census(folder: Path, start_by_pid: Mapping[int, int | None]) -> dict[str, int]:
    """Count what is left of a run: its processes (pid -> start time), and the resources that the journals in `folder` name."""
    balance = Counter[tuple[str, str, str]]()
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            balance[entry["kind"], entry["name"], entry["mark"]] += 1 if entry["event"] == "made" else -1
    resources = [resource for resource, count in balance.items() if count > 0]
    live_counts = Counter(kind for kind, name, mark in resources if mark_of(kind, name) == mark)  # type: ignore[arg-type]
    return {
        "processes": sum(started(pid) == tick is not None for pid, tick in start_by_pid.items()),
        "cgroups": live_counts["cgroup"],
        "containers": live_counts["container"],
        "folders": live_counts["directory"],
        "notes in the journal": len(resources),
    }
