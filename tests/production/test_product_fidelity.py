"""Whether training and the product look the same, and whether the comparison would see it if they did not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from composer_nb.harness import environment
from composer_nb.harness.agent.loop import LIMITS
from composer_nb.harness.attempt import Agent
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools import files
from composer_nb.harness.tools.tiny import TINY
from composer_nb.harness.tools.tool_call import Reply
from composer_nb.harness.tools.toolset import NAMES, ToolSet
from composer_nb.production import work
from composer_nb.production.fidelity import PLACES, differences, probes, tiny_probes, two_samples
from composer_nb.trainer.models.tokenizer import train_tokenizer

CURSOR = EnvSettings(tasks="tasks", tools="cursor", renderer="qwen")


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    with Sandboxes() as open_sandboxes:
        yield open_sandboxes


@pytest.fixture
def agent(tokenizer: Tokenizer, sandboxes: Sandboxes) -> Agent:
    """Return an agent as an environment worker makes it."""
    return make_agent(CURSOR, tokenizer, LIMITS, sandboxes)


@pytest.mark.parametrize("tools", ["cursor", "tiny", "read_file,run_terminal_cmd"])
def test_every_tool_is_probed_and_answers_the_same(
    task: Task, sandboxes: Sandboxes, tools: str, tmp_path: Path
) -> None:
    (tmp_path / "pages").write_text('{"url": "u", "title": "parsing", "text": "how text is parsed"}')
    web = str(tmp_path / "pages") if tools == "cursor" else ""
    tokens = train_tokenizer(["def f(x):"], 400)
    env = replace(CURSOR, tools=tools, renderer="compact", user="scripted", web=web)
    calls, mismatches = differences(task, make_agent(env, tokens, LIMITS, sandboxes))
    assert calls > 8 and mismatches == []
    for probe, names in ((probes, {*NAMES, "web_search"}), (tiny_probes, {tool.name for tool in TINY})):
        assert {call.name for call in probe(task.files)} - {"unknown_tool"} == names


PLANTS = {"reply": {"run_terminal_cmd"}, "system text": {"system text"}, "description": {"description of read_file"}}


@pytest.mark.parametrize("side", PLACES)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_word_more_in_either_place_is_found(
    task: Task, tokenizer: Tokenizer, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch, plant: str, side: str
) -> None:
    """The word is planted in a part of the RL worker or of the product."""

    def more(tools: ToolSet) -> ToolSet:
        if plant == "description":
            changed_tool = replace(files.read_file, description=f"{files.read_file.description} ok")
            return replace(tools, tools={**tools.tools, "read_file": changed_tool})
        if plant == "reply":
            return Wordy(**{name: getattr(tools, name) for name in ("tools", "search", "terse", "described")})
        return tools

    if side == "training":
        toolset: Any = EnvSettings.toolset
        monkeypatch.setattr(EnvSettings, "toolset", property(lambda env: more(toolset.fget(env))))
        if plant == "system text":
            monkeypatch.setattr(environment, "system_text", lambda root, answered, **_: f"A coding agent at {root}")
    else:
        original = work.tools_for
        monkeypatch.setattr(work, "tools_for", lambda name: more(original(name)))
        if plant == "system text":
            monkeypatch.setattr(work, "system_text", lambda root, answered, **_: f"A coding agent at {root}")
    _, mismatches = differences(task, make_agent(CURSOR, tokenizer, LIMITS, sandboxes))
    assert {mismatch.what for mismatch in mismatches} == PLANTS[plant]
    for mismatch in mismatches:
        excerpt = mismatch.excerpt(40)
        assert excerpt["training"] != excerpt["product"] and max(len(excerpt[side]) for side in PLACES) <= 40


class Wordy(ToolSet):
    """Tools whose terminal prints one word more."""

    def observation(self, reply: Reply) -> str:
        return super().observation(reply) + " ok" * (reply.call.name == "run_terminal_cmd")


def test_the_level_and_the_power_of_two_samples_in_pairs() -> None:
    """Conversations about one thing are alike within a pair; a word more in a part of one side's answers is to be found."""
    lot = np.random.default_rng(0)

    def talks(word: str, noise: float) -> list[list[str]]:
        def more() -> str:
            return ("other " if lot.random() < noise else "") + (word if lot.random() < 0.3 else "")

        return [[f"topic {n} " * 5 + more() for _ in range(4)] for n in range(10)]

    false = [two_samples(talks("", 0.1), talks("", 0.1), seed, shuffles=39).chance for seed in range(40)]
    chances = [two_samples(talks("", 0.05), talks("added", 0.05), seed, shuffles=39).chance for seed in range(20)]
    assert np.mean(np.array(false) <= 0.05) <= 0.15 and np.mean(np.array(chances) <= 0.05) >= 0.4
