"""Whole runs on an environment of the user's own in which a tool blocks in one rollout, and the reward of another."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from composer_nb.harness import blocking
from composer_nb.harness.blocking import CallTimeout, GivenUp, TooManyBlocked, within
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override
from tests.trainer.services.test_coordinator import go

WEIGHTS = EXAMPLES[0] / "weights" / "final"
ENVIRONMENT = '''
import itertools, os, time
from dataclasses import replace
from pathlib import Path
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tiny import TINY
from composer_nb.harness.tools.toolset import ToolSet

HERE = Path(__file__).parent

def block(name, at):
    """Block in the calls of these numbers, counted over all processes."""
    for number in itertools.count():
        try:
            os.close(os.open(HERE / f"{name}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if number in at:
            (HERE / f"blocked-{name}-{number}").touch()
            while True:
                time.sleep(1)
        return

def blocking(tool):
    def run(place, **given):
        if (HERE / "armed").exists():
            block("tool", {5})
        return tool.run(place, **given)
    return replace(tool, run=run)

class Mine:
    tools = ToolSet(tools={each.name: blocking(each) for each in TINY}, terse=True)

    def tasks(self):
        for n in range(1, 31):
            wrong, right = (f"def f(x):\\n    return x {sign} {n}\\n" for sign in "-+")
            test = f"from f import f\\n\\ndef test_0():\\n    assert f(1) == {n + 1}\\n"
            yield Task(id=f"add-{n}", instruction=f"fix f.py: x plus {n}", files={"f.py": wrong, "test_f.py": test},
                       tests={"test_hidden.py": test}, solution={"f.py": right}, source_scope=("f.py",))

    def reward(self, rollout, grade):
        if (HERE / "armed").exists():
            block("reward", {5})
        return float(grade.passed) - 0.01 * rollout.calls
'''
SMALL: dict[str, Any] = {
    **dict.fromkeys(("midtrain.steps", "sft.steps", "data.demonstrations", "data.mistaken_demonstrations"), 0),
    **{"model.start": str(WEIGHTS), "env.tasks": "blocking_env:Mine", "ranks": 1, "rl.gate": False},
    **{"rl.steps": 3, "rl.prompts": 2, "rl.group": 3, "rl.evaluate_every": 0, "rl.checkpoint_every": 1, "rl.max_seconds": 0.0},
    **{"eval.samples": 1, "data.heldout_tasks": 1, "data.tune_tasks": 1, "limits.turns": 3, "limits.seconds": 6.0},
    "services.on": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the environment's module, which other processes can import too."""
    folder = tmp_path_factory.mktemp("blocking")
    (folder / "blocking_env.py").write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield folder


@pytest.fixture
def begun(folder: Path, loop: RunDir) -> Iterator[Callable[..., tuple[RunDir, Settings]]]:
    """`begun(settings)`: a fork of a run, about to begin RL, in which something will block."""
    (folder / "armed").touch()

    def fork_of(**changes: Any) -> tuple[RunDir, Settings]:
        settings = override(Settings(), SMALL | changes)
        return fork(loop, settings, runs=folder / "runs", name="fork"), settings

    yield fork_of
    for path in (*folder.glob("tool-*"), *folder.glob("reward-*"), *folder.glob("blocked-*"), folder / "armed"):
        path.unlink()


@pytest.fixture(scope="module")
def loop(folder: Path) -> RunDir:
    """A run in which nothing blocks."""
    return start_or_resume(None, override(Settings(), SMALL), runs=folder / "runs", say=lambda line: None)


def require_whole(run: RunDir, folder: Path) -> None:
    """Require that both blocked, that every batch is complete, and that the counts say what was lost."""
    assert {path.name for path in folder.glob("blocked-*")} == {"blocked-tool-5", "blocked-reward-5"}
    rows = [
        row
        for file in sorted(run.path.glob("rollouts/rl_*.parquet"))
        for row in pq.read_table(file, columns=["stop", "status", "turns"]).to_pylist()
    ]
    assert len(rows) == 3 * 2 * 3 and {row["status"] for row in rows} == {"graded"}
    late = [row for row in rows if any(turn["error"] == "Timeout" for turn in json.loads(row["turns"]))]
    assert len(late) == 1 and late[0]["stop"] == "time" and [row["stop"] for row in rows].count("time") == 1
    assert sum(step["infra_errors"] for step in run.steps("rl")) == 1, "whose reward blocked was sampled again"


Begun = Callable[..., tuple[RunDir, Settings]]


@pytest.mark.whole
def test_the_plain_loop_ends_although_a_tool_and_a_reward_block(folder: Path, begun: Begun) -> None:
    run, _ = begun()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    start_or_resume(run.path, say=lambda line: None)
    require_whole(run, folder)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not list((run.path / "journal").iterdir())


@pytest.mark.whole
@pytest.mark.parametrize("on_ray", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["threads", "ray"])
def test_the_services_end_although_a_tool_and_a_reward_block(folder: Path, begun: Begun, on_ray: bool) -> None:
    run, settings = begun(**{"services.on": True})
    if on_ray:
        start_or_resume(run.path, say=lambda line: None)
        assert not list((run.path / "journal").iterdir())
    else:
        run.finish("rl", 1.0, go(run, settings))
    require_whole(run, folder)
    info = run.finished("rl")
    assert info is not None and sum(run.ledger().values()) == info["sampled"] and run.ledger()["faulted"] > 0


def test_a_call_has_its_time_and_a_process_in_which_too_many_block_makes_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocking, "_late", set())
    monkeypatch.setattr(blocking, "MOST", 2)
    free, stop, calls = threading.Event(), threading.Event(), list[int]()
    assert within(lambda: 60.0, "it", lambda: 7) == 7
    with pytest.raises(KeyError, match="gone"):
        within(lambda: 60.0, "it", lambda: {}["gone"])
    until = time.monotonic() + 0.1
    with pytest.raises(CallTimeout, match=r"it did not return within 0 s \(limits.seconds\)"):
        within(lambda: until - time.monotonic(), "it", free.wait)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(GivenUp):
        within(lambda: 600.0, "it", free.wait, stop)
    with pytest.raises(TooManyBlocked, match="it: 2 earlier calls"):
        within(lambda: 60.0, "it", lambda: calls.append(1))
    assert not calls
    free.set()
    for thread in blocking._late:
        thread.join()
    assert within(lambda: 60.0, "it", lambda: 7) == 7
