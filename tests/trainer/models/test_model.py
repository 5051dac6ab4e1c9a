"""The model against `transformers`, and the promises that the engine and the trainer build on."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.kernels.formats.groupwise import rounded
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.induction import plant_induction
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows
from composer_nb.trainer.models.variants import PAIRS, Numerics, as_engine, variant
from composer_nb.trainer.recipe.mismatch import measure_mismatch
from tests.tiny_models import LATENT


def test_angles_stay_float32_in_a_bf16_model(make_model):
    model = make_model(0, rope_theta=10_000.0, max_position_embeddings=4096)
    before = model.rope_table(model.embed).clone()
    model.to(torch.bfloat16)
    table = model.rope_table(model.embed)
    fresh = make_model(0, rope_theta=10_000.0, max_position_embeddings=4096).to(torch.bfloat16)
    for angles in (table, fresh.rope_table(fresh.embed)):
        assert angles.dtype == torch.float32 and torch.equal(angles, before)
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
        begin = 0
        for row in rows:
            alone, routes = model(torch.tensor([row]))
            torch.testing.assert_close(logits[begin : begin + len(row)], alone[0], atol=1e-4, rtol=1e-4)
            for index, routing in enumerate(routings):
                assert torch.equal(routing.experts_NK[begin : begin + len(row)], routes[0, :, index])
            begin += len(row)


def test_tokens_and_routes_that_there_are_not_are_named(make_model):
    for token in (61, -1):
        with pytest.raises(ValueError, match=f"token_ids: holds {token}; there are 61 tokens"):
            make_model(0)(torch.tensor([[0, token]]))
    with pytest.raises(ValueError, match="replay: holds 99; there are"):
        make_model(0)(torch.tensor([[0, 1]]), torch.full((1, 2, 2, 2), 99))


def test_replay_uses_the_given_experts_and_must_fit_every_layer(make_model):
    model = make_model(7)
    ids = torch.randint(0, 61, (2, 10))
    logits, routes = model(ids)
    replayed, again = model(ids, routes)
    assert torch.equal(logits, replayed) and torch.equal(routes, again)
    forced_logits, forced = model(ids, (routes + 1) % 6)
    assert torch.equal(forced, (routes + 1) % 6) and not torch.allclose(logits, forced_logits)
    for wrong in (routes[:, :9], routes[:, :, :1], routes[..., :1], torch.cat([routes, routes], 2)):
        with pytest.raises(ValueError, match="replayed routes are"):
            model(ids, wrong)


# Planted induction heads


def repeated_loss(model: Model, seed: int, period: int) -> float:
    """Return the mean cross-entropy, in nats, of the second half of rows whose random tokens come twice."""
    rows = torch.randint(model.config.vocab_size, (4, period), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([rows, rows], dim=1)
    with torch.no_grad():
        logits, _ = model(ids)
    half = slice(period, 2 * period - 1)
    return float(torch.nn.functional.cross_entropy(logits[:, half].flatten(0, 1), ids[:, period + 1 :].flatten()))


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"hidden_size": 192, "num_key_value_heads": 4}])
@pytest.mark.parametrize("period", [12, 100])
def test_a_planted_head_predicts_what_comes_again(changes: dict[str, int], period: int) -> None:
    config = replace(ModelConfig(), **changes)
    torch.manual_seed(1)
    plain, planted = Model(config), Model(config)
    plant_induction(planted, seed=3)
    guess = math.log(config.vocab_size)
    assert repeated_loss(planted, 5, period) < 0.8 * guess < guess < repeated_loss(plain, 5, period)


# Engines beside trainers: what each pair changes, what it leaves alone, and what replay mends of it


NEVER = frozenset[int]()


def test_a_variant_changes_what_it_says_and_nothing_else(make_model):
    model = make_model(3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    changed = variant(model, Numerics(expert_bits=4, router_bits=8, router_dtype=torch.bfloat16))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items()), "a copy"
    assert not any(weight.requires_grad for weight in changed.parameters())
    assert changed.router_dtype == torch.bfloat16 and model.router_dtype is None
    for name, weight in changed.state_dict().items():
        if name.endswith(("w_in", "w_out")):
            assert torch.equal(weight, rounded(before[name], bits=4, group=32, dim=1)) and weight.dtype == torch.float32
        elif name.endswith("router"):
            assert torch.equal(weight, rounded(before[name], bits=8, group=64))
        else:
            assert torch.equal(weight, before[name]) and weight.dtype == torch.float32


@pytest.mark.parametrize("sizes", [{"tie_word_embeddings": False}, {}, LATENT], ids=["untied", "tied", "deepseek"])
def test_int8_rounds_every_matrix_to_integers_times_a_power_of_two_for_each_output(make_model, sizes: dict[str, Any]):
    model = make_model(3, **sizes)
    before, quantised = dict(model.named_parameters()), as_engine(model, "int8")
    for name, weight in quantised.named_parameters():
        if weight.ndim == 1 or (name == "embed" and not model.config.tie_word_embeddings):
            assert torch.equal(weight, before[name])
            continue
        turned = any(part in name for part in ("w_", "dense", "shared"))  # [..., in, out]
        outputs, gap = (x.mT if turned else x for x in (weight, (weight - before[name]).abs()))
        step = (outputs.double().abs().amax(-1, keepdim=True) / 127).log2().ceil().exp2()
        codes = outputs.double() / step
        assert torch.equal(codes, codes.round()) and 64 <= codes.abs().amax() <= 127
        assert bool((gap <= step / 2 + 1e-9).all()) and gap.max() > 0


@pytest.mark.parametrize("name", list(PAIRS))
def test_every_pair_has_a_gap_that_replay_narrows(make_model, converse, name: str):
    model = make_model(3)
    engine = Engine(variant(model, PAIRS[name].engine), stop=NEVER, slots=24, max_length=96)
    mismatch = measure_mismatch(variant(model, PAIRS[name].trainer), converse(engine, 24))
    assert 0 < mismatch["routes_differ"] < 0.1
    assert 0 < mismatch["on"]["logprob_gap_p99"] < mismatch["off"]["logprob_gap_p99"]
    assert 0 < mismatch["on"]["k3"] < mismatch["off"]["k3"]
