"""config.json: what a wrapper must state itself, and one line for each thing that is not supported."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_nb.trainer.models.hf_config import _STATED, PackedIntegers, config_json, read_config
from composer_nb.trainer.models.transformer import Yarn

CONFIGS = Path(__file__).parents[1] / "configs"
KIMI, QWEN = (json.loads((CONFIGS / name).read_text()) for name in ("kimi_k25.json", "qwen3_30b_a3b.json"))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def described(tmp_path: Path, config: object):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_config(tmp_path / "config.json")


def test_kimi_k25_is_read_from_its_text_config(tmp_path: Path):
    found = described(tmp_path, KIMI)
    c = found.model
    assert found.prefix == "language_model." and found.format == PackedIntegers(bits=4, group=32)
    assert (c.family, c.num_experts, c.num_experts_per_tok, c.n_group, c.num_attention_heads) == (
        "deepseek_v3",
        384,
        8,
        1,
        64,
    )
    assert (c.head_dim, c.v_head_dim, c.rms_norm_eps, c.rope_theta) == (192, 128, 1e-5, 50_000.0)
    assert c.yarn == Yarn(factor=64.0) and c.num_nextn_predict_layers == 0
    (tmp_path / "text.json").write_text(config_json(c, torch.bfloat16))
    assert read_config(tmp_path / "text.json").model == c, "written again, without the wrapper"


@pytest.mark.parametrize("name", _STATED)
def test_a_wrapper_takes_no_default_of_a_class(tmp_path: Path, name: str):
    config = copy.deepcopy(KIMI)
    del config["text_config"][name]
    with pytest.raises(ValueError, match=rf"config.json: lacks text_config.{name}$"):
        described(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3' is not supported, only 'qwen3_moe'"),
        (
            {"architectures": ["Qwen3MoeForSequenceClassification"]},
            "architectures='Qwen3MoeForSequenceClassification' is not",
        ),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129 must lie in 1..model.num_experts=128"),
        ({"hidden_size": "2048"}, "hidden_size='2048' is not supported, only a value of type int"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 is not supported, only a list of layers"),
        ({"rope_scaling": "yarn"}, "rope_parameters or rope_scaling is 'yarn', no JSON object"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures='Qwen3MoeForCausalLM' is no list of names"),
        ({"rms_norm_eps": -1e-6}, "model.rms_norm_eps=-1e-06 must be at least 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta=1000000.0, and rope_theta=500000.0 in rope_parameters or rope_scaling: which of them?",
        ),
        ({"quantization_config": 4}, "quantization_config is no JSON object"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config: quant_method='gptq' is not supported",
        ),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config: fmt='e5m2' is not supported"),
        ({"logit_scale": 0.5}, "logit_scale=0.5: this key is not known and may change what the model computes"),
        ({"layer_types": ["sliding_attention"] * 48}, "is not supported, only 'full_attention'"),
        ({"rope_scaling": YARN | {"mrope_section": [16, 24]}}, "mrope_section=[16, 24]: this key is not known"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "which of them?"),
        ({"num_experts": 10**9}, "model.num_experts=1000000000 must be at most 65536"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        described(tmp_path, QWEN | changes)
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 3}, "num_bits=3 is not supported"),
        ({"symmetric": False}, "symmetric=False is not supported"),
        ({"group_size": -1}, "group_size=-1 is not supported"),
        ({"type": "float"}, "type='float' is not supported"),
    ],
)
def test_other_integers_are_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    config = copy.deepcopy(KIMI)
    config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(ValueError, match=message):
        described(tmp_path, config)


def test_keys_without_effect_are_read(tmp_path: Path):
    harmless = {"use_cache": True, "sliding_window": 4096, "max_window_layers": 28, "some_feature": None}
    assert described(tmp_path, QWEN | harmless | {"layer_types": ["full_attention"] * 48}).model
    with pytest.raises(ValueError, match=r"config.json: text_tower=.*: this key is not known"):
        described(tmp_path, KIMI | {"text_tower": {"scale": 2}})


def test_yarn_of_qwen3_is_written_and_read_again(tmp_path: Path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    c = described(tmp_path, QWEN | {"rope_scaling": yarn}).model
    assert c.yarn == Yarn(factor=4.0, original_max_position_embeddings=32768, mscale_all_dim=0.0)
    (tmp_path / "config.json").write_text(config_json(c, torch.bfloat16))
    assert read_config(tmp_path / "config.json").model == c
    with pytest.raises(ValueError, match="this form of YaRN"):
        described(tmp_path, QWEN | {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}})
    with pytest.raises(ValueError, match="mscale_all_dim=0"):
        replace(c, yarn=Yarn(factor=4.0))
