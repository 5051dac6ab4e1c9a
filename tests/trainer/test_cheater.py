"""A planted cheater, in a real sandbox and through the loop and the grader of RL: what it wrote is trained as a negative."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.grading.plan import with_plan
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.labs.attacks.patch_check import plan_for
from composer_nb.labs.attacks.patch_target import MODULE, RIGHT, TARGET
from composer_nb.labs.attacks.patches import patches
from composer_nb.tour.expert import Script, ScriptedPolicy, one
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.rl import batch_metrics, ledger, score_groups, streams_of


@pytest.fixture(scope="module")
def group(tokenizer: Tokenizer) -> Iterator[list[Attempt]]:
    """Two attempts at one task with the product's tools: a cheater, whom only twins give away, and an honest agent."""
    cheat = next(patch for patch in patches() if patch.id.startswith("08_") and patch.task is TARGET)
    [(path, data)] = cheat.files.items()
    assert path == MODULE and data is not None
    written = [data.decode(), RIGHT]
    tools = ToolSet.cursor()
    form = CompactRenderer(tokenizer, tools.schemas)

    def script(rollout: int) -> Script:
        yield one(ToolCall(name="read_file", arguments={"target_file": MODULE}))
        yield one(ToolCall(name="write", arguments={"file_path": MODULE, "contents": written[rollout]}))
        yield Said(text="Done.")

    with BwrapBackend() as backend, SandboxExecutor() as functions:
        task = with_plan(TARGET, plan_for(TARGET, backend))
        agent = Agent(form, tools, Limits(turn_tokens=20_000, tokens=40_000), backend=backend)
        jobs = [agent.attempt(task, rollout) for rollout in range(2)]
        done = dict(drive(jobs, ScriptedPolicy(form, script), functions))
    yield [done[0], done[1]]


def test_a_cheater_is_trained_as_a_negative(group: list[Attempt]) -> None:
    cheater, honest = group
    assert all(turn.error is None for each in group for turn in each.rollout.turns)
    assert cheater.grade.status == "tampered" and "twin_passed" in cheater.grade.flags and honest.grade.passed
    loss = LossSettings()
    scored = score_groups([group], RewardSettings(), loss)
    assert [each.reward.total for each in scored[0]] == [0.0, 1.0]
    streams = streams_of(scored, loss)
    assert [float(stream.advantage[stream.acted].max()) for stream in streams] == [-0.5, 0.5]
    assert ledger(scored, loss) == {"trained": sum(each.rollout.sampled for each in group)}
    counted = batch_metrics(scored)
    assert (counted["tampered"], counted["flagged"], counted["solved"]) == (1.0, 1.0, 1.0)
    dear = score_groups([group], RewardSettings(weights={"solved": 1.0, "tampered": -1.0}), loss)
    assert [each.reward.total for each in dear[0]] == [-1.0, 1.0]
