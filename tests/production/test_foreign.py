"""Environments of OpenEnv and verifiers as environments of this package, by the real libraries where they are installed."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from composer_nb.cli import main
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings, Sandboxes, load_environment, make_agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.tools.tool_call import ToolCall, call
from composer_nb.tour.expert import ScriptedPolicy
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.recipe.launch import new_run
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.rl import score_groups
from composer_nb.trainer.settings import Settings, override
from tests.production.test_foreign_audit import BEGIN, LIBRARY, STAND_IN

WEIGHTS = EXAMPLES[0] / "weights" / "final"
COUNTER = """
class Add(Action):
    number: int
    note: str | int | None = None
class Adds(Base):
    open = 0
    def __init__(self):
        Adds.open += 1
    def reset(self, seed=None, **kwargs):
        self.sum, self.steps = seed, 0
        return Seen(text=str(self.sum))
    def step(self, action, **kwargs):
        self.sum, self.steps = self.sum + action.number, self.steps + 1
        return self.over(str(self.sum), action.number, self.steps == 3)
    def close(self):
        Adds.open -= 1
class Unseeded(Adds):
    def reset(self, seed=None, **kwargs):
        return super().reset(seed=random.random())
class Rows(Adds):
    def num_tasks(self, split):
        return {"train": 4}[split]
    def reset(self, split=None, index=None, **kwargs):
        return super().reset(seed=100 + index)
class Unpaid(Adds):
    def step(self, action, **kwargs):
        return self.over("", float("nan"), True)
class Client:
    def reset(self, **kwargs):
        return type("StepResult", (), {"observation": {"text": "a"}, "reward": None, "done": False})
"""
SUMS = """
import verifiers.v1 as vf
class Data(vf.TaskData):
    answer: str
class Adder(vf.Toolset[vf.ToolsetConfig]):
    async def setup_task(self, task):
        self.most = int(task.answer)
    @vf.tool
    async def add(self, a: int, b: int = 0) -> int:
        "Add two numbers."
        if a + b > self.most:
            raise ValueError("too much")
        return a + b
class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer == trace.last_reply)
    @vf.reward(weight=0.25)
    async def careful(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]
class Sums(vf.Taskset[Sum]):
    def load(self):
        for n in range(5, 9):
            yield Sum(Data(prompt=f"What is {n} + {n}?", answer=str(2 * n)))
__all__ = ["Sums"]
"""


@pytest.fixture(params=["doubles", "openenv"])
def counter(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name the module of an environment, of the library and of classes with the same fields and methods."""
    if request.param == "openenv":
        pytest.importorskip("openenv.core", reason="pip install openenv brings it")
    text = (LIBRARY if request.param == "openenv" else STAND_IN) + BEGIN + COUNTER
    (tmp_path / f"counter_of_{request.param}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"openenv:counter_of_{request.param}"


def sample(name: str, *scripts: list[ToolCall]) -> tuple[list[Attempt], Any]:
    """Return attempts at the second task of an environment, one for each script, and the environment."""
    env, (tasks, environment) = EnvSettings(tasks=name), load_environment(name)
    with Sandboxes() as sandboxes:
        agent = make_agent(env, load_tokenizer(WEIGHTS), Limits(tokens=2000), sandboxes)
        policy = ScriptedPolicy(agent.renderer, lambda number: (turn([step]) for step in scripts[number]))
        jobs = [agent.attempt(tasks[1], number) for number in range(len(scripts))]
        attempts = dict(drive(jobs, policy, sandboxes))
    return [attempts[number] for number in range(len(scripts))], environment


def test_rl_samples_groups_of_episodes(counter: str, tmp_path: Path) -> None:
    """Rewards are sums over an episode, whose end ends the rollout; what is no action is an invalid call; tokens are stored."""
    others = [call("act", number="x"), call("act", number=1, note=2), call("act", number=1)]
    group, environment = sample(f"{counter}:Adds:Add:5", *([call("act", number=n), *others] for n in (2, -2)))
    [scored] = score_groups([group], RewardSettings(), LossSettings(), environment.reward)
    assert [row.reward.total for row in scored] == [4.0, 0.0] and [row.advantage for row in scored] == [2.0, -2.0]
    assert [attempt.grade.passed for attempt in group] == [True, False]
    for attempt, last in zip(group, (5, 1), strict=True):
        turns, [segment] = attempt.rollout.turns, attempt.rollout.segments
        assert [turn.error for turn in turns] == [None, "InvalidArguments", None, None]
        assert attempt.rollout.stop == "finished" and len(segment.messages) == 4
        assert json.loads(turns[-1].observation) == {"text": str(last)}
    assert import_module(counter.removeprefix("openenv:")).Adds.open == 0
    values = dict.fromkeys(("midtrain.steps", "sft.steps", "data.demonstrations", "data.mistaken_demonstrations"), 0)
    values |= {"model.start": str(WEIGHTS), "env.tasks": f"{counter}:Adds:Add:5"}
    assert new_run(tmp_path / "runs", "run", override(Settings(), values)).path.is_dir()


def test_eval_reports_the_reward(counter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (values, reward) in enumerate({(2, 2, 2): 6.0, (1,): 1.0, ("x",): 0.0}.items()):
        steps: list[Any] = [{"calls": [{"name": "act", "arguments": {"number": value}}]} for value in values]
        (script := tmp_path / f"{number}.json").write_text(json.dumps([*steps, {"text": "done"}]))
        line = f"--policy scripted:{script} --tasks {counter}:Adds:Add:3 --samples 2 --out {tmp_path}/{number} --json"
        assert main(["eval", *line.split()]) == 0
        row = json.loads(capsys.readouterr().out)["arms"]["all"]
        assert (row["reward"], row["reward_ci95"], row["n_tasks"]) == (reward, [reward, reward], 3)
        assert row["pass_at_1"] == float(reward >= 1)


def test_a_reward_that_is_no_number_is_no_fault_of_the_policy(counter: str) -> None:
    [attempt], _ = sample(f"{counter}:Unpaid:Add:2", [call("act", number=1)])
    assert attempt.rollout.stop == "infrastructure"


def test_what_begins_an_episode(counter: str) -> None:
    texts = [task.instruction.rpartition("\n")[2] for task in load_environment(f"{counter}:Rows:Add")[0]]
    assert [json.loads(text) for text in texts] == [{"text": str(100 + n)} for n in range(4)]
    assert '{"text": "a"}' in load_environment(f"{counter}:Client:Add:1")[0][0].instruction
    for name, why in {
        "Unseeded:Add": "two calls of reset",
        "Adds:Add:0": "write openenv:MODULE:ENVIRONMENT:ACTION",
        "Adds:Nothing": "Nothing.*pip install openenv",
    }.items():
        with pytest.raises(ValueError, match=why):
            load_environment(f"{counter}:{name}")


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers.v1", reason="pip install 'verifiers>=0.4' brings it")
    loose = SUMS.replace("self.data.answer == trace", "self.data.answer in trace").replace("0.25", "0.0")
    needs = SUMS.replace("def right(self, trace: vf.Trace", "def right(self, runtime: vf.Runtime, trace: vf.Trace")
    for name, text in {"sums": SUMS, "loose_sums": loose, "boxed_sums": needs}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "verifiers:sums"


def test_rl_samples_groups_of_examples_with_their_tools(sums: str) -> None:
    right = [call("adder_add", a=6, b=6), call("adder_add", a=13), call("answer", text="12")]
    group, environment = sample(f"{sums}:3", right, [call("answer", text="1")])
    assert [environment.reward(attempt.rollout, attempt.grade) for attempt in group] == [1.5, 0.0]
    turns = [(turn.observation, turn.error) for turn in group[0].rollout.turns]
    assert turns == [("12", None), ("error: ValueError('too much')", "UnexpectedEnvironment"), ("", None)]
    assert [attempt.grade.passed for attempt in group] == [True, False]
    with pytest.raises(ValueError, match="example 0 needs a runtime"):
        load_environment("verifiers:boxed_sums")


def test_audit_of_verifiers_finds_a_loose_reward(sums: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", sums]) == 0
    capsys.readouterr()
    assert main(["audit", "verifiers:loose_sums", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == ["many numbers"] and report["probes"]["many numbers"] == {"tried": 4, "wrong": 4}
