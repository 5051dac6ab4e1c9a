"""The model against `transformers`, and the promises that the engine and the trainer build on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.trainer.learning.data import TokenBatch, TokenRow
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows, balance_loss


def theirs(model: Model, path: Path) -> torch.nn.Module:
    from transformers import Qwen3MoeForCausalLM

    save_pretrained(model, path, dtype=torch.float32)
    return Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tie_word_embeddings": False},
        {"rope_theta": 5e5, "rms_norm_eps": 1e-2, "num_key_value_heads": 4, "num_experts_per_tok": 3},
        {"num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 1, "num_experts_per_tok": 6},
    ],
    ids=["tied", "untied", "other-sizes", "one-key-head"],
)
def test_logits_routes_and_gradients_are_those_of_transformers(make_model, tmp_path: Path, sizes):
    model = make_model(1, **sizes)
    oracle = theirs(model, tmp_path / "m")
    ids = torch.randint(0, 61, (3, 40), generator=torch.Generator().manual_seed(2))
    logits, routes = model(ids)
    wanted = oracle(ids, output_router_logits=True)
    assert float(wanted.logits.detach().std()) > 0.5, "a trivial model would prove nothing"
    torch.testing.assert_close(logits, wanted.logits, atol=3e-5, rtol=1e-4)
    k = model.config.num_experts_per_tok
    top = torch.stack([scores.topk(k).indices for scores in wanted.router_logits], 1).view(3, 40, 2, k)
    assert torch.equal(routes, top)
    assert len(routes.unique()) == 6, "all experts are used"

    pull = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    (logits * pull).sum().backward()
    (wanted.logits * pull).sum().backward()
    attention = oracle.model.layers[0].self_attn
    packed = torch.cat([attention.q_proj.weight.grad, attention.k_proj.weight.grad, attention.v_proj.weight.grad])
    pairs = [
        (model.embed.grad, oracle.model.embed_tokens.weight.grad),
        (model.layers[0].qkv.grad, packed),
        (model.layers[0].q_norm.grad, attention.q_norm.weight.grad),
        (model.layers[1].router.grad, oracle.model.layers[1].mlp.gate.weight.grad),
        (model.final_norm.grad, oracle.model.norm.weight.grad),
    ]
    for ours, other in pairs:
        torch.testing.assert_close(ours, other, atol=2e-4 * float(other.abs().max()), rtol=1e-3)


def test_bf16_logits_are_near_those_of_transformers(make_model, tmp_path: Path):
    model = make_model(1)
    oracle = theirs(model, tmp_path / "m").to(torch.bfloat16)
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = oracle(ids, output_router_logits=True)
        chosen = torch.stack([scores.float().topk(2).indices for scores in wanted.router_logits], 1).view(2, 24, 2, 2)
        logits, routes = model.to(torch.bfloat16)(ids, chosen)
    assert logits.dtype == torch.bfloat16 and torch.equal(routes, chosen)
    gap = (logits.float() - wanted.logits.float()).abs()
    assert float(gap.mean()) < 0.02 * float(wanted.logits.float().std()), "rounding alone, with the routes pinned"


def test_angles_stay_float32_in_a_bf16_model(make_model):
    model = make_model(0, rope_theta=10_000.0, max_position_embeddings=4096)
    before = model.rope_table(model.embed).clone()
    model.to(torch.bfloat16)
    table = model.rope_table(model.embed)
    fresh = make_model(0, rope_theta=10_000.0, max_position_embeddings=4096).to(torch.bfloat16)
    for kept in (table, fresh.rope_table(fresh.embed)):
        assert kept.dtype == torch.float32 and torch.equal(kept, before)
    exact = np.cos(np.outer(np.arange(4096), 10_000.0 ** (-np.arange(0, 16, 2) / 16)))
    assert np.abs(table[:, 0].numpy() - exact).max() < 1e-3


rows_of_tokens = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows_of_tokens)
def test_packed_rows_equal_separate_rows(make_model, rows: list[list[int]]):
    model = make_model(5)
    packed = PackedRows.of_lengths([len(row) for row in rows], model.config)
    with torch.no_grad():
        hidden, routings = model.trunk(torch.tensor(sum(rows, [])), packed.position_N, packed.attend)
        logits = hidden @ model.output_weight.T
        place = 0
        for row in rows:
            alone, routes = model(torch.tensor([row]))
            torch.testing.assert_close(logits[place : place + len(row)], alone[0], atol=1e-4, rtol=1e-4)
            for index, routing in enumerate(routings):
                assert torch.equal(routing.experts_NK[place : place + len(row)], routes[0, :, index])
            place += len(row)


def test_a_token_sees_nothing_that_comes_after_it(make_model):
    model = make_model(5)
    ids = torch.randint(0, 61, (1, 30))
    changed = ids.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 61
    with torch.no_grad():
        before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :20], after[:, :20], atol=1e-5, rtol=1e-5)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 1e-3


def test_a_row_may_be_as_long_as_the_positions_and_no_longer(make_model):
    model = make_model(0)
    assert model(torch.zeros(1, 96, dtype=torch.int64))[0].shape == (1, 96, 61)
    with pytest.raises(ValueError, match="a row of 97 tokens exceeds model.max_position_embeddings=96"):
        model(torch.zeros(1, 97, dtype=torch.int64))


@pytest.mark.parametrize(
    ("ids", "replay", "told"),
    [
        ([[0, 61]], None, "token_ids: holds 61; there are 61 tokens"),
        ([[0, -1]], None, "token_ids: holds -1"),
        ([[0, 1]], torch.full((1, 2, 2, 2), 99), "replay: holds 99; there are"),
    ],
)
def test_tokens_and_routes_that_there_are_not_are_named(make_model, ids, replay, told: str):
    with pytest.raises(ValueError, match=told):
        make_model(0)(torch.tensor(ids), replay)


def test_replay_uses_the_given_experts_and_must_fit_every_layer(make_model):
    model = make_model(7)
    ids = torch.randint(0, 61, (2, 10))
    own, routes = model(ids)
    same, again = model(ids, routes)
    assert torch.equal(own, same) and torch.equal(routes, again)
    other, forced = model(ids, (routes + 1) % 6)
    assert torch.equal(forced, (routes + 1) % 6) and not torch.allclose(own, other)
    for wrong in (routes[:, :9], routes[:, :, :1], routes[..., :1], torch.cat([routes, routes], 2)):
        with pytest.raises(ValueError, match="replayed routes are"):
            model(ids, wrong)


def test_the_balance_loss_is_the_mean_over_layers(make_model):
    model = make_model(7)
    batch = TokenBatch.of([TokenRow(np.arange(20, dtype=np.int32), np.ones(20, np.float32))])
    packed = PackedRows.of_lengths(batch.lengths, model.config)
    _, routings = model.trunk(batch.inputs_N, packed.position_N, packed.attend)
    by_layer = []
    for routing in routings:
        used = np.bincount(routing.experts_NK.flatten().numpy(), minlength=6) / 19
        by_layer.append(6 * float((used * routing.probs_NE.detach().mean(0).numpy()).sum()))
    assert float(balance_loss(routings).detach()) == pytest.approx(np.mean(by_layer), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "model.num_attention_heads=4: no multiple of model.num_key_value_heads=3"),
        ({"head_dim": 15}, "model.head_dim=15 must be even"),
        ({"num_experts_per_tok": 9}, "model.num_experts_per_tok=9 must lie in 1..model.num_experts=8"),
        ({"num_experts_per_tok": 0}, "model.num_experts_per_tok=0 must lie in 1..model.num_experts=8"),
        ({"hidden_size": 60}, "model.hidden_size=60 must be a multiple of 8"),
        ({"moe_intermediate_size": 3}, "model.moe_intermediate_size=3 must be a multiple of 8"),
        ({"num_hidden_layers": 0}, "model.num_hidden_layers=0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_by_name(changes: dict[str, int], message: str):
    with pytest.raises(ValueError) as error:
        ModelConfig(**changes)
    assert message in str(error.value)
