"""The model against `transformers`, and the promises that the engine and the trainer build on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.trainer.models.transformer import ModelConfig, PackedRows


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
