"""The prefix tree: as many tokens as there are distinct beginnings, and what is computed is what each row alone gives."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.policy import route_checks
from composer_nb.trainer.learning.packing import FULL, NO_REPLAY, Stream, flatten, microbatches, score
from composer_nb.trainer.models.transformer import Model, ModelConfig
from tests.trainer.learning.trees import tree_tokens

SIZES: dict[str, Any] = {
    **{"vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 8},
    **{"num_experts": 4, "num_experts_per_tok": 2},
}
FEW = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=20), min_size=1, max_size=9)


def stream(tokens: list[int], seed: int = 0, prompt: int = 1) -> Stream:
    random = np.random.default_rng([seed, *tokens])
    acted = random.random(len(tokens)) < 0.6
    acted[:prompt], acted[prompt] = False, True
    logprob, advantage = random.normal(size=(2, len(tokens))).astype(np.float32)
    routes = random.permuted(np.tile(np.arange(4, dtype=np.uint8), (len(tokens), 2, 1)), axis=2)[:, :, :2]
    return Stream(
        token_ids=np.array(tokens, np.int32),
        acted=acted,
        logprob=logprob,
        advantage=advantage,
        routes=routes,
        route_valid=np.arange(len(tokens)) < len(tokens) - 1,
        checks=route_checks(np.arange(len(tokens)), np.array(tokens), routes),
    )


def beginnings(streams: list[Stream], routed: bool = False) -> set[Any]:
    """Return every distinct prefix that is forwarded, by brute force."""
    prefixes: set[Any] = set()
    for s in streams:
        path = [(int(t), r.tobytes() if routed else b"") for t, r in zip(s.token_ids, s.routes, strict=True)]
        prefixes |= {tuple(path[: n + 1]) for n in range(len(path) - 1)}
    return prefixes


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(ModelConfig(**SIZES))


@given(FEW, st.booleans())
def test_the_tree_holds_each_beginning_once(rows: list[list[int]], replay: bool):
    streams = [stream(row, seed=number % 3) for number, row in enumerate(rows)]
    batch = flatten(streams, FULL if replay else NO_REPLAY)
    assert len(batch.inputs_N) == len(beginnings(streams, replay))
    assert tree_tokens(streams) == len(beginnings(streams))
    assert sorted(batch.order_N.tolist()) == list(range(len(batch.inputs_N)))
    acted = [s.acted[1:] for s in streams]
    assert batch.token_S.tolist() == [int(t) for s, a in zip(streams, acted, strict=True) for t in s.token_ids[1:][a]]
    assert batch.rollout_S.tolist() == [n for n, a in enumerate(acted) for _ in range(int(a.sum()))]


@given(FEW, st.booleans())
def test_scores_and_gradients_are_those_of_each_row_alone(model: Model, rows: list[list[int]], replay: bool):
    streams = [stream(row, seed=number % 3) for number, row in enumerate(rows)]

    def scored(part: list[Stream]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = flatten(part, FULL if replay else NO_REPLAY)
        return score(model, batch, batch.recorded)

    logprob, entropy = scored(streams)
    weight = torch.linspace(0.5, 1.5, len(logprob))
    slopes = torch.autograd.grad((logprob * weight).sum(), list(model.parameters()))
    alone = [scored([s]) for s in streams]
    expected_logprob = torch.cat([w[0] for w in alone])
    torch.testing.assert_close(logprob, expected_logprob, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat([w[1] for w in alone]), atol=2e-6, rtol=1e-5)
    expected = torch.autograd.grad((expected_logprob * weight).sum(), list(model.parameters()))
    for slope, expected_slope in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, expected_slope, atol=2e-5, rtol=1e-4)


@given(FEW, st.integers(1, 60))
def test_microbatches_hold_every_stream_once_within_the_budget(rows: list[list[int]], budget: int):
    streams = [stream(row) for row in rows]
    chunks = microbatches(streams, budget)
    assert sorted(map(id, sum(chunks, []))) == sorted(map(id, streams))
    for chunk in chunks:
        assert chunk and (tree_tokens(chunk) <= budget or len(chunk) == 1)
