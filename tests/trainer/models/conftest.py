"""Tiny models made by `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import SIZES

_QWEN: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "rope_theta"} | {
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-3,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
_DEEPSEEK: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.fixture
def oracle() -> Callable[..., Any]:
    """`oracle(family, **sizes)`: a tiny model made by `transformers`, which names and stores some settings in its own way."""

    def make(family: str = "qwen3_moe", **sizes: Any) -> Any:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(4)
        if family == "qwen3_moe":
            model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_QWEN | sizes)).eval()
        else:
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**_DEEPSEEK | sizes)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight) * 0.3)
            for name, buffer in model.named_buffers():
                if "e_score_correction_bias" in name:  # zeros would never show that it moves the choice alone
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
        return model

    return make
