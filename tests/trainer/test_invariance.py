"""Batch-invariant mode: what is computed for a token depends, to the last bit, on that token and those before it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.policy import Request, Trace
from composer_nb.harness.rollout import Kind, Segment
from composer_nb.labs.retrace import recompute
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.transformer import Model, PackedRows
from composer_nb.trainer.models.variants import as_engine, batch_invariant

DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
FAMILIES = [{}, DEEPSEEK]
QUIET = [HealthCheck.function_scoped_fixture]


def decoded(model: Model, prompts: list[list[int]], tokens: int = 12) -> list[tuple[list[int], list[float], Trace]]:
    engine = Engine(model, stop=frozenset(), slots=len(prompts), max_length=64, seed=3)
    requests = [Request(rollout=n, token_ids=ids, max_tokens=tokens) for n, ids in enumerate(prompts)]
    done = engine.generate(requests)
    return [(c.token_ids, c.logprobs, engine.release(n)) for n, c in enumerate(done)]


@pytest.mark.parametrize("sizes", FAMILIES, ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", ["float32", "bf16", "int4-experts"])
@settings(max_examples=6, deadline=None, suppress_health_check=QUIET)
@given(others=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30), min_size=1, max_size=9))
def test_a_rollout_is_the_same_whatever_is_decoded_beside_it(make_model, sizes, name: Any, others: list[list[int]]):
    model = as_engine(make_model(3, **sizes), name, invariant=True)
    mine = [5, 9, 2, 33, 17, 4, 4, 60]
    [(ids, logprobs, trace)] = decoded(model, [mine])
    also_ids, also_logprobs, also_trace = decoded(model, [mine, *others])[0]
    assert ids == also_ids and logprobs == also_logprobs, "to the last bit"
    assert np.array_equal(trace.gates, also_trace.gates) and np.array_equal(trace.routes, also_trace.routes)


@pytest.mark.parametrize("sizes", FAMILIES, ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_token_changes_nothing_before_it(make_model, sizes, dtype: torch.dtype):
    model = batch_invariant(make_model(4, **sizes).to(dtype))
    ids = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[25:] = (changed[25:] + 7) % 61
    rows = [ids, changed, ids[:25]]
    hidden = []
    for row in rows:
        packed = PackedRows.of_lengths([len(row)], model.config)
        with torch.no_grad():
            hidden.append(model.trunk(row, packed.position_N, _alone(packed))[0][:25])
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0], hidden[2])


def _alone(packed: PackedRows) -> Any:
    def attend(layer: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        return packed.attend_one_by_one(layer, q.float(), k.float(), v.float(), scale).to(q.dtype)

    return attend


@pytest.mark.parametrize("sizes", FAMILIES, ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", ["float32", "bf16", "int4-experts"])
def test_scoring_gives_the_very_log_probabilities_of_sampling(make_model, sizes, name: Any):
    model = as_engine(make_model(5, **sizes), name, invariant=True)
    prompts = [list(range(n, n + 5 + n)) for n in range(6)]
    segments, sampled = [], []
    for prompt, (ids, logprobs, trace) in zip(prompts, decoded(model, prompts), strict=True):
        every = np.array([*prompt, *ids], np.int32)
        kind = np.where(np.arange(len(every)) < len(prompt), Kind.PROMPT, Kind.TOOL_CALL).astype(np.uint8)
        blank = np.zeros(len(every), np.float32)
        version = np.where(kind == Kind.TOOL_CALL, 0, -1).astype(np.int32)
        segments.append(Segment(token_ids=every, kind=kind, logprob=blank, policy_version=version, trace=trace))
        sampled.append(np.array(logprobs, np.float32))
    for prompt, wanted, segment, found in zip(prompts, sampled, segments, recompute(model, segments), strict=True):
        assert np.array_equal(found.logprob[len(prompt) :], wanted), "the ratio at step 0 is exactly 1"
        valid = segment.trace.route_valid
        assert np.array_equal(found.trace.routes[valid], segment.trace.routes[valid])
        assert np.array_equal(found.trace.gates[valid], segment.trace.gates[valid])
