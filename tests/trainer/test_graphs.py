"""The engine's steps as CUDA graphs against the same steps launched one by one. On a CPU the padded pass runs without a graph."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import NEVER, ask, prompt

from composer_nb.trainer import engine, graphs
from composer_nb.trainer.drafts import DraftHead, DraftingEngine
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.transformer import Kernels, Model
from tests.tiny_models import LATENT


@pytest.fixture(params=[{}, LATENT], ids=["grouped", "latent"])
def model(device: str, make_model, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Model:
    monkeypatch.setattr(engine, "capturable", lambda model: True)
    new_model: Model = make_model(3, **request.param)
    return new_model.to(device, torch.float32 if device == "cuda" else torch.float64)


@pytest.mark.parametrize("drafts", [False, True])
def test_so_they_are_with_drafts_masks_a_user_who_takes_a_place_and_weights_swapped_in_between(
    model: Model, drafts: bool
):
    after = copy.deepcopy(model)
    with torch.no_grad():
        for weight in after.parameters():
            weight.mul_(1.1)
    torch.manual_seed(0)
    head = DraftHead(model.config.hidden_size).requires_grad_(False).to(model.embed.device)
    head.join.weight.zero_()
    masks = {1: lambda written: np.arange(99) % 2 == len(written) % 2}

    def run(graphed: bool) -> tuple[dict[int, tuple[list[int], list[int]]], int]:
        size: dict[str, Any] = {"stop": NEVER, "slots": 3, "max_length": 60, "seed": 2}
        policy = DraftingEngine(model, head, **size) if drafts else Engine(model, **size)
        policy._graphs = policy._graphs if graphed else None
        for number in range(3):
            policy.submit(ask(number, prompt(4, number // 2), 20, allowed=masks.get(number)))
        completions: dict[int, tuple[list[int], list[int]]] = {}
        for step in itertools.count():
            if step == 3:
                policy.submit(ask(-1, prompt(5, 3), 9, priority=0))
            if step == 5:
                policy.swap(after, 1)
            completions |= {turn.rollout: (turn.token_ids, turn.policy_versions) for turn in policy.step()}
            if len(completions) == 4:
                return completions, getattr(policy, "accepted", 0)

    turns, accepted = run(True)
    assert (turns, accepted) == run(False) and all(token % 2 == n % 2 for n, token in enumerate(turns[1][0]))
    assert [*dict.fromkeys(turns[-1][1])] == [0, 1], "each token says which weights drew it"


@pytest.mark.gpu
def test_a_bf16_model_on_a_gpu_is_captured_and_one_in_torch_is_not(make_model):
    if not torch.cuda.is_available():
        pytest.skip("no GPU; on a CPU the padded pass is tested above")
    bf16_model: Model = make_model(3).to("cuda", torch.bfloat16)
    assert graphs.capturable(bf16_model)
    bf16_model.kernels = Kernels(backend="torch")
    assert not graphs.capturable(bf16_model) and not graphs.capturable(bf16_model.double())
