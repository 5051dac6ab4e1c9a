"""`transformers` as an engine: the same tokens through its own kernels, layer by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from composer_nb.trainer.checkpoint import save_pretrained
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.frozen import Batch
from composer_nb.trainer.microscope import examine
from composer_nb.trainer.programs import hugging_face
from composer_nb.trainer.sides import Side, observe, record

NEVER = frozenset[int]()


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
    engine = Side(model=model, forward=hugging_face(module))
    ours, theirs = observe(Side(model=model), batch, streams=True), observe(engine, batch)
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
