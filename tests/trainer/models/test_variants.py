"""Engines beside trainers: what each pair changes, what it leaves alone, and what replay mends of it."""

from __future__ import annotations

import pytest
import torch

from composer_nb.kernels.formats.groupwise import rounded
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.variants import PAIRS, Numerics, as_engine, variant
from composer_nb.trainer.recipe.mismatch import measure_mismatch

NEVER = frozenset[int]()


def test_a_variant_changes_what_it_says_and_nothing_else(make_model):
    model = make_model(3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = variant(model, Numerics(expert_bits=4, router_bits=8, router_dtype=torch.bfloat16))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items()), "a copy"
    assert not any(weight.requires_grad for weight in made.parameters())
    assert made.router_dtype == torch.bfloat16 and model.router_dtype is None
    for name, weight in made.state_dict().items():
        if name.endswith(("w_in", "w_out")):
            assert torch.equal(weight, rounded(before[name], bits=4, group=32, dim=1)) and weight.dtype == torch.float32
        elif name.endswith("router"):
            assert torch.equal(weight, rounded(before[name], bits=8, group=64))
        else:
            assert torch.equal(weight, before[name]) and weight.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_int8_rounds_every_matrix_to_integers_times_a_power_of_two_for_each_output(make_model, tied: bool):
    model = make_model(3, tie_word_embeddings=tied)
    before, made = dict(model.named_parameters()), as_engine(model, "int8")
    for name, weight in made.named_parameters():
        if weight.ndim == 1 or (name == "embed" and not tied):
            assert torch.equal(weight, before[name])
            continue
        outputs = weight if weight.ndim == 2 else weight.transpose(1, 2)  # [..., out, in]
        step = (outputs.double().abs().amax(-1, keepdim=True) / 127).log2().ceil().exp2()
        codes = outputs.double() / step
        assert torch.equal(codes, codes.round()) and 64 <= codes.abs().amax() <= 127
        gap = (weight - before[name]).abs() if weight.ndim == 2 else (weight - before[name]).abs().transpose(1, 2)
        assert bool((gap <= step / 2 + 1e-9).all()) and gap.max() > 0


@pytest.mark.parametrize("name", list(PAIRS))
def test_every_pair_has_a_gap_that_replay_narrows(make_model, converse, name: str):
    model = make_model(3)
    engine = Engine(variant(model, PAIRS[name].engine), stop=NEVER, slots=24, max_length=96)
    found = measure_mismatch(variant(model, PAIRS[name].trainer), converse(engine, 24))
    assert 0 < found["routes_differ"] < 0.1
    assert 0 < found["on"]["logprob_gap_p99"] < found["off"]["logprob_gap_p99"]
    assert 0 < found["on"]["k3"] < found["off"]["k3"]
