"""`transformers` as an engine: the same tokens through its own kernels, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from composer_nb.labs.microscope.frozen import Batch
from composer_nb.labs.microscope.microscope import examine
from composer_nb.labs.microscope.numerics import Forward, Forwarded, Place, Program, Rows, joined, observe, record
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.models.transformer import Model

NEVER = frozenset[int]()


def hugging_face(module: nn.Module) -> Forward:
    """A causal model of `transformers` (Qwen3-MoE or DeepSeek-V3) as a forward pass: its own kernels up to the final norm, each
    row by itself, without margins."""

    def forward(model: Model, rows: Rows) -> Forwarded:
        dense = model.config.first_k_dense_replace
        split = zip(rows.ids_N.split(rows.lengths), rows.position_N.split(rows.lengths), strict=True)
        return joined([_row(module, dense, ids_T, position_T) for ids_T, position_T in split])

    return forward


def _row(module: Any, dense: int, ids_T: Tensor, position_T: Tensor) -> Forwarded:
    seen: dict[Place, Tensor] = {}
    chosen: dict[int, tuple[Tensor, Tensor]] = {}
    inner = module.model

    def keep(place: Place) -> Any:
        return lambda m, given, out: seen.update({place: (out[0] if isinstance(out, tuple) else out)[0]})

    def before(place: Place) -> Any:
        return lambda m, given: seen.update({place: given[0][0]})

    def routed(layer: int) -> Any:
        return lambda m, given, out: chosen.update({layer: (out[2], out[1])})

    hooks = [inner.embed_tokens.register_forward_hook(lambda m, i, out: seen.update({(-1, "embedding"): out[0]}))]
    for number, layer in enumerate(inner.layers):
        hooks.append(layer.register_forward_hook(keep((number, "experts"))))
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(before((number, "attention"))))
        if number >= dense:
            hooks.append(layer.mlp.gate.register_forward_hook(routed(number)))
    hidden = inner(input_ids=ids_T[None], position_ids=position_T[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    experts, gates = (torch.stack([chosen[layer][which] for layer in sorted(chosen)], 1) for which in (0, 1))
    order = gates.argsort(dim=-1, descending=True, stable=True)  # DeepSeek-V3's come in no order
    experts, gates = experts.gather(-1, order), gates.gather(-1, order).float()
    return Forwarded(
        hidden_ND=hidden.float(),
        experts_NLK=experts,
        gates_NLK=gates,
        own_NLK=experts,
        live_NLK=gates,
        margin_NL=torch.full(experts.shape[:2], torch.nan),
        streams={place: x.float() for place, x in seen.items()},
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts_per_tok": 3},
        {
            "family": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
        },
    ],
    ids=["qwen3_moe", "deepseek_v3"],
)
def test_transformers_is_an_engine_that_differs_by_rounding(make_model, converse, sizes, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = make_model(3, **sizes)
    save_pretrained(model, tmp_path / "model", dtype=torch.float32)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    batch = Batch.of(converse(Engine(model, stop=NEVER, slots=3, max_length=96), 3))
    engine = Program(model=model, forward=hugging_face(module))
    ours, theirs = observe(Program(model=model), batch, streams=True), observe(engine, batch)
    assert set(ours.forwarded.streams) == set(theirs.forwarded.streams)
    for place, stream in ours.forwarded.streams.items():
        assert torch.allclose(stream, theirs.forwarded.streams[place], atol=1e-4), place
    assert np.array_equal(ours.forwarded.experts_NLK.sort(-1).values, theirs.forwarded.experts_NLK.sort(-1).values)
    with torch.no_grad():
        [ids] = [torch.from_numpy(row.token_ids).long()[None] for row in batch.rows[:1]]
        logits = module(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    written = batch.rows[0].acted[1:]
    assert np.allclose(theirs.logprob_S[: written.sum()], logits[written], atol=1e-5)
    report = examine(model, record(engine, batch), engine)
    assert report.named == () and report.left.most < 1e-6 and report.first is None

    with torch.no_grad():  # another weight in their copy: seen from outside, in the right layer
        module.model.layers[1].self_attn.o_proj.weight[0] += 0.3
    report = examine(model, record(engine, batch), engine)
    assert report.named == ("GEMM",) and report.first is not None
    assert (report.first.layer, report.first_in, report.first.row, report.first.token) == (1, "attention", 0, 0)
