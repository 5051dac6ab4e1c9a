"""The engine's steps as CUDA graphs against the same steps launched one by one. On a CPU the padded pass runs without a graph."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from composer_nb.harness.policy import Request
from composer_nb.trainer import engine, graphs
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.transformer import Kernels, Model

NEVER: frozenset[int] = frozenset()


LATENT = {
    "family": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 24, "q_lora_rank": 16, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 4, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture(params=[{}, LATENT], ids=["grouped", "latent"])
def model(device: str, make_model, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Model:
    monkeypatch.setattr(engine, "capturable", lambda model: True)
    made: Model = make_model(3, **request.param)
    return made.to(device, torch.float32 if device == "cuda" else torch.float64)


def converse(model: Model, after: Model, graphed: bool, rollouts: int) -> tuple[dict[int, list[int]], Engine]:
    """Rollouts with prompts of different lengths, some of them alike, take two turns; after the first the weights are swapped."""
    policy = Engine(model, stop=NEVER, slots=rollouts, max_length=80, seed=4)
    assert policy._graphs is not None
    if not graphed:
        policy._graphs = None
    ids: dict[int, list[int]] = {number: [] for number in range(rollouts)}
    for turn in range(2):
        news = {number: [3 + turn, *range(5, 8 + number // 2)] for number in ids}
        for done in policy.generate([Request(rollout=n, token_ids=news[n], max_tokens=9) for n in ids]):
            ids[done.rollout] += [*news[done.rollout], *done.token_ids]
        policy.swap(after, 1)
    return ids, policy


@pytest.mark.parametrize("rollouts", [1, 3, 6])
def test_rollouts_are_those_of_single_launches(model: Model, rollouts: int):
    after = copy.deepcopy(model)
    with torch.no_grad():
        for weight in after.parameters():
            weight.mul_(1.1)
    found, graphed = converse(model, after, True, rollouts)
    wanted, plain = converse(model, after, False, rollouts)
    assert found == wanted and graphed.forwarded == plain.forwarded
    for number in found:
        one, other = graphed.release(number), plain.release(number)
        np.testing.assert_array_equal(one.routes, other.routes)
        np.testing.assert_array_equal(one.checks, other.checks)
        np.testing.assert_allclose(one.gates, other.gates, atol=1e-4)
        np.testing.assert_allclose(one.margins, other.margins, atol=1e-4)


def test_large_steps_are_launched_one_by_one(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "MOST_TOKENS", 4)
    sizes: list[int] = []
    whole = graphs.Graphs.__call__
    monkeypatch.setattr(
        graphs.Graphs, "__call__", lambda self, new: (sizes.append(len(new.row_N)), whole(self, new))[1]
    )
    policy = Engine(model, stop=NEVER, slots=2, max_length=80, seed=4)
    policy.generate([Request(rollout=n, token_ids=[3, 4, 5 + n], max_tokens=3) for n in range(2)])
    assert sizes == [2, 2], "the prompts' six tokens are more than four"


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", torch.float32), ("auto", torch.float64), ("auto", torch.bfloat16)]
)
def test_only_kernels_that_do_not_wait_for_the_gpu_are_captured(make_model, backend, dtype: torch.dtype):
    made: Model = make_model(3)
    made.kernels = Kernels(backend=backend)
    assert not graphs.capturable(made.to(dtype)), "the CPU has no graphs"


@pytest.mark.gpu
def test_a_bf16_model_on_a_gpu_is_captured_and_one_in_torch_is_not(make_model):
    if not torch.cuda.is_available():
        pytest.skip("no GPU; on a CPU the padded pass is tested above")
    made: Model = make_model(3).to("cuda", torch.bfloat16)
    assert graphs.capturable(made)
    made.kernels = Kernels(backend="torch")
    assert not graphs.capturable(made) and not graphs.capturable(made.double())
