"""mini-swe-agent, unmodified, on a served model: its conversation is recorded token for token, so that it can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from composer_nb.harness.agent.chat import CallResult, Said, User, Written
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings, carry
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production.policies import open_engine
from composer_nb.production.record import served
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.models.convert import with_format
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows
from tests.production.conftest import serving

SYSTEM, TASK = "You work in a shell.", "How much is 1 + 2?"
COMMANDS = ("echo 3 > answer", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat answer")
SEEN = "<returncode>0</returncode>\n<output>\n</output>"


def taught(folder: Path, tools: list[Any]) -> list[int]:
    """Write a checkpoint that knows one conversation by heart. Return its tokens."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    config = ModelConfig(family="llama", vocab_size=420, **sizes)
    model, tokenizer = with_format(Model(config), train_tokenizer([SYSTEM, TASK, *COMMANDS, str(tools)], 400), "qwen")
    renderer = QwenRenderer(tokenizer, tools)
    calls = [ToolCall(name="bash", arguments={"command": command}) for command in COMMANDS]
    turns = [renderer.turn(Said(text="", calls=(Written(id="", call=call),))) for call in calls]
    read = [renderer.read([User(text=TASK)], SYSTEM), renderer.results([CallResult(id="", text=SEEN)])]
    ids, acted = list[int](), list[bool]()
    for heard, wrote in zip(read, turns, strict=True):
        ids += heard + wrote
        acted += [False] * len(heard) + [True] * len(wrote)
    tokens, optimizer = torch.tensor(ids), torch.optim.AdamW(model.parameters(), 1e-2)
    packed = PackedRows.of_lengths([len(ids)], model.config, tokens.device)
    for _ in range(120):
        hidden, _ = model.trunk(tokens, packed.position_N, packed.attend)
        logits = F.linear(hidden, model.output_weight)[:-1]
        loss = F.cross_entropy(logits[acted[1:]], tokens[1:][acted[1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3, "it knows them by heart"
    tokenizer.save(str(folder / "tokenizer.json"))
    save_pretrained(model, folder / "model", tokenizer=folder / "tokenizer.json", dtype=torch.float32)
    carry(folder / "model", EnvSettings(tools="cursor", renderer="qwen"), Limits())
    return ids


def test_mini_swe_agent_solves_a_task_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    for name, value in (
        settings | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ).items():  # before its import; litellm would ask the network for prices
        monkeypatch.setenv(name, value)
    agents = pytest.importorskip("minisweagent.agents.default", reason="pip install mini-swe-agent brings it")
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
    from minisweagent.models.litellm_model import LitellmModel
    from minisweagent.models.utils.actions_toolcall import BASH_TOOL

    ids = taught(tmp_path, [BASH_TOOL])
    with open_engine(tmp_path / "model", slots=2, tokens=2048) as engine, serving(engine, tmp_path / "run") as site:
        place = {"api_base": site.rollout("one"), "api_key": "none"}
        model = LitellmModel(model_name="openai/model", model_kwargs=place, cost_tracking="ignore_errors")
        agent = agents.DefaultAgent(
            model, BubblewrapEnvironment(), system_template=SYSTEM, instance_template="{{task}}", step_limit=4
        )
        ended = agent.run(TASK)
    assert ended == {"exit_status": "Submitted", "submission": "3\n"}
    [segment] = served(tmp_path / "run")["one"].rollout.segments
    assert segment.token_ids.tolist() == ids
    assert 0 < segment.acted.sum() < len(ids) and np.exp(segment.logprob[segment.acted]).min() > 0.9
