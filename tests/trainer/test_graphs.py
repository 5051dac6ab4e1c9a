"""The engine's steps as CUDA graphs against the same steps launched one by one. On a CPU the padded pass runs without a graph."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny_models import NEVER, ask, prompt

from composer_nb.harness.policy import Completion, Request
from composer_nb.trainer import engine, graphs
from composer_nb.trainer.drafts import DraftHead, DraftingEngine
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.transformer import Kernels, Model

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
        done: dict[int, tuple[list[int], list[int]]] = {}
        for step in itertools.count():
            if step == 3:
                policy.submit(ask(-1, prompt(5, 3), 9, priority=0))
            if step == 5:
                policy.swap(after, 1)
            done |= {turn.rollout: (turn.token_ids, turn.policy_versions) for turn in policy.step()}
            if len(done) == 4:
                return done, getattr(policy, "accepted", 0)

    assert run(True) == run(False) and all(token % 2 == n % 2 for n, token in enumerate(run(True)[0][1][0]))


def test_large_steps_are_launched_one_by_one(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "MOST_TOKENS", 4)
    sizes: list[int] = []
    whole = graphs.Graphs.__call__
    monkeypatch.setattr(
        graphs.Graphs, "__call__", lambda self, run, new: (sizes.append(len(new.row_N)), whole(self, run, new))[1]
    )
    policy = Engine(model, stop=NEVER, slots=2, max_length=80, seed=4)
    policy.generate([Request(rollout=n, token_ids=[3, 4, 5 + n], max_tokens=3) for n in range(2)])
    assert sizes == [2, 2], "the prompts' six tokens are more than four"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"kernels": Kernels(recipe="mxfp8", backend="triton")}, True),
        ({"kernels": Kernels(backend="torch")}, False),
        ({"dtype": torch.float64}, False),
        ({"watch": print}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_only_a_pass_that_does_not_wait_for_the_gpu_is_captured(monkeypatch, change: dict[str, Any], wanted: bool):
    monkeypatch.setattr(graphs, "choose", lambda device: ("triton", ""))
    one: dict[str, Any] = {"kernels": Kernels(), "dtype": torch.bfloat16, "watch": None, "device": "cuda"} | change
    embed = SimpleNamespace(device=torch.device(one.pop("device")), dtype=one.pop("dtype"))
    assert graphs.capturable(cast(Model, SimpleNamespace(embed=embed, **one))) == wanted


@pytest.mark.parametrize("waits", [False, True])
def test_a_graph_is_of_the_kernels_that_the_model_has_now(model: Model, monkeypatch: pytest.MonkeyPatch, waits: bool):
    """Also if these change in the middle of a turn, and if a pass of the new ones cannot be captured. Graphs are stand-ins."""
    monkeypatch.setattr(engine, "capturable", lambda model: not (waits and model.kernels.backend == "torch"))
    captured: list[tuple[int, str]] = []

    def capture(self: Any, run: Any, size: int) -> Any:
        inputs = self._blank(size).to(self._device)
        outputs, kernels = run(*inputs), model.kernels
        captured.append((size, kernels.backend))

        def replay() -> None:
            assert model.kernels == kernels
            for old, now in zip(outputs, run(*inputs), strict=True):
                old.copy_(now)

        return inputs, SimpleNamespace(replay=replay), outputs

    monkeypatch.setattr(graphs.Graphs, "_capture", capture)
    policy = Engine(model, stop=NEVER, slots=2, max_length=80, seed=4)
    assert policy._graphs is not None
    policy._graphs._pool = (0, 0)
    policy.submit(Request(rollout=0, token_ids=[3, 4, 5], max_tokens=8))
    done: list[Completion] = []
    while not done:
        model.kernels = Kernels(backend="torch" if 3 <= len(policy._live[0].sampled) < 5 else "auto")
        done = policy.step()
    assert captured == [(4, "auto"), (1, "auto"), *([] if waits else [(1, "torch")])]
    plain = Engine(model, stop=NEVER, slots=2, max_length=80, seed=4)
    plain._graphs = None
    assert plain.generate([Request(rollout=0, token_ids=[3, 4, 5], max_tokens=8)])[0].token_ids == done[0].token_ids


def test_an_engine_that_is_dropped_gives_its_cache_back_at_once(model: Model):
    policy = Engine(model, stop=NEVER, slots=2, max_length=80)
    policy.generate([Request(rollout=0, token_ids=[3, 4, 5], max_tokens=3)])
    cache = weakref.ref(policy._k)
    gc.disable()
    try:
        del policy
        assert cache() is None, "a cycle holds it until the next collection"
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_bf16_model_on_a_gpu_is_captured_and_one_in_torch_is_not(make_model):
    if not torch.cuda.is_available():
        pytest.skip("no GPU; on a CPU the padded pass is tested above")
    made: Model = make_model(3).to("cuda", torch.bfloat16)
    assert graphs.capturable(made)
    made.kernels = Kernels(backend="torch")
    assert not graphs.capturable(made) and not graphs.capturable(made.double())
