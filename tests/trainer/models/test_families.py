"""Each family against `transformers`, over random small shapes: logits and decoding.

`transformers` computes norms, softmaxes and routers in float32 whatever the model's dtype is. Where float64 is compared these
islands are lifted: the oracle's modules see a torch whose float32 is float64.
"""

import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from composer_nb.harness.policy import Request
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.checkpoint import load_pretrained

VOCABULARY, LENGTH = 61, 37
SEEDS = range(6)
LIKE_QWEN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "llama": {"head_dim": 8},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 16},
}
"""Families that are Qwen3-MoE with something left out, and their own sizes."""
ALL_DENSE = [0, 1, 2]


class _Wide(types.ModuleType):
    """torch, but for the names of float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def lifted(family: str) -> Iterator[None]:
    module: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module.torch = _Wide("torch")
    narrow = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        module.torch = torch
        torch.Tensor.float = narrow  # type: ignore[method-assign]


def make(family: str, seed: int) -> nn.Module:
    """Return a model of `transformers` of random sizes, with weights far from their initial values."""
    from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

    random = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[random.integers(len(values))]

    common = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "max_position_embeddings": 512}
    common |= {"hidden_size": pick(32, 64), "num_hidden_layers": pick(2, 3), "tie_word_embeddings": pick(True, False)}
    common |= {"rms_norm_eps": pick(1e-6, 1e-3), "attn_implementation": "eager"}
    theta, inner = pick(1e4, 3e5), pick(16, 48)
    stretch = {"factor": 4.0, "original_max_position_embeddings": pick(64, 128)} if seed % 3 == 2 else {}
    rope: dict[str, Any] = {"rope_type": "yarn" if stretch else "default", "rope_theta": theta, **stretch}
    keys = pick(1, 2, 4)
    torch.manual_seed(seed)
    if family in LIKE_QWEN:
        sizes = {"intermediate_size": inner, "num_key_value_heads": keys, "rope_parameters": rope, **LIKE_QWEN[family]}
        config: Any = AutoConfig.for_model(family, **common, **sizes)
    elif family == "qwen3_moe":
        sizes = {"head_dim": pick(8, 16), "num_experts": pick(5, 8), "num_experts_per_tok": pick(1, 2, 5)}
        sizes |= {"intermediate_size": pick(24, 40), "num_key_value_heads": keys, "moe_intermediate_size": inner}
        sizes |= {"norm_topk_prob": seed % 4 != 1, "decoder_sparse_step": 2 if seed % 4 == 3 else 1}
        sizes |= {"mlp_only_layers": ALL_DENSE if seed == 5 else [0] if seed % 4 == 1 else []}
        config = Qwen3MoeConfig(**common, **sizes, rope_parameters=rope)
    else:
        stretch = {"factor": 8.0, "original_max_position_embeddings": pick(8, 64)}
        mscales = pick({"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {})
        rope = {"rope_type": "yarn", **stretch, **mscales} if seed % 3 else {"rope_type": "default"}
        groups = pick(1, 2, 4)
        chosen_groups = pick(*(g for g in (1, 2, 4) if g <= groups and 8 // groups * g >= 4))
        sizes = {"moe_intermediate_size": inner, "intermediate_size": pick(64, 88), "num_key_value_heads": 4}
        sizes |= {"n_routed_experts": 8, "n_shared_experts": pick(1, 2), "num_experts_per_tok": pick(2, 4)}
        sizes |= {"first_k_dense_replace": pick(0, 1), "n_group": groups, "topk_group": chosen_groups}
        sizes |= {"q_lora_rank": pick(None, 24), "kv_lora_rank": 16, "v_head_dim": pick(8, 24)}
        sizes |= {"qk_rope_head_dim": pick(4, 8), "qk_nope_head_dim": pick(8, 16), "num_mtp_layers": pick(0, 2)}
        sizes |= {"routed_scaling_factor": pick(1.0, 2.827), "norm_topk_prob": seed % 4 != 1}
        config = DeepseekV3Config(**common, **sizes, rope_parameters={**rope, "rope_theta": theta})
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(0.5 + torch.rand_like(weight) if "norm" in name else noise * weight.shape[-1] ** -0.5)
            if "embed" in name or "lm_head" in name:
                weight.copy_(noise * 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # otherwise scores for choice and gates are equal
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    if "experts" in str(model):
        model.set_experts_implementation("eager")
    whole: nn.Module = model.eval()
    return whole


CASES = [(f, s) for f in ("qwen3_moe", "deepseek_v3") for s in SEEDS] + [(f, s) for f in LIKE_QWEN for s in SEEDS[1:3]]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    """A model of `transformers`, and where it was saved."""
    family, seed = request.param
    path = tmp_path_factory.mktemp("pair") / "m"
    oracle = make(family, seed)
    oracle.save_pretrained(path)
    return family, oracle, path


def tokens(seed: int = 0, rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits_are_those_of_transformers(pair: tuple[str, nn.Module, Path]):
    family, oracle, path = pair
    ours, ids = load_pretrained(path), tokens()
    assert ours.config.family == family
    with torch.no_grad():
        theirs = oracle(ids).logits
        assert theirs.std() > 0.1, "a trivial model would prove nothing"
        assert far(ours(ids)[0], theirs) <= 5e-5
        wide = ours.double()(ids)[0]
        oracle.double()
        try:
            with lifted(family):
                assert far(wide, oracle(ids).logits) <= 1e-10
        finally:
            oracle.float()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", *LIKE_QWEN])
def test_greedy_decoding_of_256_tokens_is_that_of_transformers(tmp_path: Path, family: str):
    oracle = make(family, 1)
    oracle.save_pretrained(tmp_path / "m")
    ours, prompt = load_pretrained(tmp_path / "m").double(), tokens(3, 1, 9)
    engine = Engine(ours, stop=frozenset(), slots=2, max_length=300, temperature=0)
    [completion] = engine.generate([Request(rollout=0, token_ids=prompt[0].tolist(), max_tokens=256)])
    oracle.double()
    with lifted(family), torch.no_grad():
        whole = oracle.generate(prompt, max_new_tokens=256, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert completion.token_ids == whole[0, 9:].tolist()
    assert len(set(completion.token_ids)) > 3, "and says more than one thing"
