"""The compiled decode against the model's own forward pass, on models of many shapes; and what it promises of batches."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.policy import Request
from composer_nb.trainer.engine import Engine, pack
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.models.variants import as_engine

NEVER = frozenset[int]()
SPARSE = st.fixed_dictionaries({"num_experts": st.integers(2, 5), "num_experts_per_tok": st.integers(1, 2)})
SPARSE = SPARSE.flatmap(
    lambda sizes: st.sampled_from([8, 16]).map(lambda inner: sizes | {"moe_intermediate_size": inner})
)
FAMILIES = st.one_of(
    st.just({"family": "qwen3_moe"}),
    st.just({"family": "qwen3_moe", "mlp_only_layers": (0,), "intermediate_size": 24, "num_hidden_layers": 2}),
    st.just({"family": "mixtral"}),
    *(st.just({"family": family, "intermediate_size": 24}) for family in ("qwen3", "qwen2", "llama")),
)
configs = st.builds(
    lambda width, layers, keys, groups, head, sparse, tied, vocabulary, family: ModelConfig(
        **{"num_hidden_layers": layers, "vocab_size": vocabulary, "hidden_size": 8 * width, "head_dim": head}
        | {"num_attention_heads": keys * groups, "num_key_value_heads": keys, "max_position_embeddings": 32}
        | ({} if family["family"] in ("qwen3", "qwen2", "llama") else sparse)
        | {"tie_word_embeddings": tied, **family}
    ),
    *(st.integers(1, 9), st.integers(1, 3), st.integers(1, 2), st.integers(1, 7), st.sampled_from([2, 6, 10, 16, 32])),
    *(SPARSE, st.booleans(), st.integers(5, 80), FAMILIES),
)


def random_model(config: ModelConfig, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms' weights, too, move away from 1
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return model


def conversation(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Two turns of three tokens after each prompt, with an observation of two tokens between; rollouts 0 and 1 begin alike."""
    first = engine.generate([Request(rollout=n, token_ids=p, max_tokens=3) for n, p in enumerate(prompts)])
    second = engine.generate([Request(rollout=n, token_ids=[1, 2], max_tokens=3) for n in range(len(prompts))])
    return [*first, *second, *(engine.release(n) for n in range(len(prompts)))]


@settings(max_examples=25, deadline=None)
@given(
    configs, st.integers(0, 1000), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=4)
)
def test_it_computes_what_the_model_computes(config: ModelConfig, seed: int, prompts: list[list[int]]):
    model = random_model(config, seed)
    prompts = [prompts[0], *prompts]
    engines = [Engine(model, stop=NEVER, slots=8, max_length=32, temperature=0.0, seed=seed) for _ in range(2)]
    engines[1]._packed = None
    ours, theirs = (conversation(engine, prompts) for engine in engines)
    turns = 2 * len(prompts)
    for actual, expected in zip(ours[:turns], theirs[:turns], strict=True):
        # Two tokens may be all but equally likely; from there on the engines sample different rollouts.
        if actual.token_ids != expected.token_ids:
            return
        np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-4)
    for actual, expected in zip(ours[turns:], theirs[turns:], strict=True):
        sure = expected.margins > 1e-4
        np.testing.assert_allclose(actual.margins, expected.margins, atol=1e-4)
        if sure[:-1].all():  # a different route changes all that follows
            np.testing.assert_array_equal(actual.routes, expected.routes)
            np.testing.assert_allclose(actual.gates, expected.gates, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(configs, st.integers(0, 1000), st.integers(2, 7))
def test_a_token_does_not_depend_on_its_batch_to_the_last_bit(config: ModelConfig, seed: int, count: int):
    model = random_model(config, seed)
    prompts = [[(3 * n + i) % 5 for i in range(1 + n % 4)] for n in range(count)]
    together = Engine(model, stop=NEVER, slots=8, max_length=32, seed=seed)
    turns = together.generate([Request(rollout=n, token_ids=p, max_tokens=6) for n, p in enumerate(prompts)])
    for n, prompt in enumerate(prompts):
        alone = Engine(model, stop=NEVER, slots=1, max_length=32, seed=seed)
        [turn] = alone.generate([Request(rollout=n, token_ids=prompt, max_tokens=6)])
        assert turn == turns[n]
        actual, expected = alone.release(n), together.release(n)
        for name in ("routes", "gates", "margins"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), name)


@settings(max_examples=4, deadline=None)
@given(configs, st.integers(0, 1000), st.sampled_from([np.uint16, np.int8]))
def test_weights_that_fit_fewer_bits_are_read_so_and_computed_with_in_float32(config: ModelConfig, seed: int, kind):
    model = random_model(config, seed)
    if kind is np.int8:
        model = as_engine(model, "int8")
    for parameter in model.parameters() if kind is np.uint16 else ():
        parameter.data = parameter.bfloat16().float()
    with pytest.MonkeyPatch.context() as patch:
        engines = list[Engine]()
        for cached in (1 << 30, 0):
            patch.setattr("composer_nb.trainer.engine.CACHED_BYTES", cached)
            engines.append(Engine(model, stop=NEVER, slots=4, max_length=32, seed=seed))
    assert [engine._packed.output.panels.dtype for engine in engines] == [np.float32, kind]
    wide, narrow = (conversation(engine, [[1], [1, 2, 3]]) for engine in engines)
    for actual, expected in zip(narrow[:4], wide[:4], strict=True):
        assert actual.token_ids == expected.token_ids and list(actual.logprobs) == list(expected.logprobs)


def test_only_what_it_covers_goes_through_it(monkeypatch: pytest.MonkeyPatch):
    config = ModelConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=4, moe_intermediate_size=8)
    model = random_model(config, 0)
    assert pack(model) is not None
    monkeypatch.setattr("composer_nb.trainer.engine.PACKED_BYTES", sum(4 * p.numel() for p in model.parameters()) - 1)
    assert pack(model) is None, "a second copy of a large model costs more than it gains"
    monkeypatch.undo()
    assert pack(model.bfloat16()) is None


@pytest.mark.parametrize("score", [1e30, -1e30])
def test_experts_beyond_all_measure_are_still_routed(score: float):
    model = random_model(
        ModelConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, head_dim=4, moe_intermediate_size=8), 0
    )
    with torch.no_grad():
        model.layers[0].router[0].fill_(score)
    engine = Engine(model, stop=NEVER, slots=1, max_length=8)
    [turn] = engine.generate([Request(rollout=0, token_ids=[1, 2], max_tokens=2)])
    trace = engine.release(0)
    assert np.isfinite(turn.logprobs).all() and np.isfinite(trace.gates).all() and np.isfinite(trace.margins).all()
    np.testing.assert_allclose(trace.gates[:-1].sum(-1), 1, atol=1e-6)
