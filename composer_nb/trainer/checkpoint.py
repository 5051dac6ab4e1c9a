"""Checkpoints in the shape of Hugging Face's Qwen3-MoE and DeepSeek-V3, so that `transformers` and everything else can read them.

In memory an expert's matrices are stacked for the grouped GEMM and lie [in, out]; on disk they are one tensor an expert and
lie [out, in], as Hugging Face has them. The mapping is a bijection.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.trainer.model import DEEPSEEK, Family, Layer, Model, ModelConfig, Yarn

_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
"""What `Model` computes. A config.json that asks for something else is refused."""
_ABSENT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": False},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
}
"""What the family's configuration means by saying nothing, where that is not what `_FIXED` or `ModelConfig` has."""
_FAMILIES: dict[str, Family] = {
    "qwen3_moe": "qwen3_moe",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}


def hugging_face_views(model: Model) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under Hugging Face's name, as a view of the model's own weights: reading and writing them is
    reading and writing the model. Their order is that of the layers."""
    c = model.config
    views: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed}
    for index, layer in enumerate(model.layers):
        views |= _layer_views(layer, c, f"model.layers.{index}.")
    for depth, head in enumerate(model.aheads):
        prefix = f"model.layers.{c.num_hidden_layers + depth}."
        views |= {
            prefix + "enorm.weight": head.embed_norm,
            prefix + "hnorm.weight": head.hidden_norm,
            prefix + "eh_proj.weight": head.join,
            prefix + "shared_head.norm.weight": head.final_norm,
        }
        views |= _layer_views(head.layer, c, prefix)
    views["model.norm.weight"] = model.final_norm
    if not c.tie_word_embeddings:
        views["lm_head.weight"] = model.head
    return {name: view.detach() for name, view in views.items()}


def _layer_views(layer: Layer, c: ModelConfig, prefix: str) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.moe_norm,
        "self_attn.o_proj.weight": layer.o,
    }
    if c.latent:
        views |= {
            "self_attn.kv_a_proj_with_mqa.weight": layer.kv_a,
            "self_attn.kv_a_layernorm.weight": layer.kv_a_norm,
            "self_attn.kv_b_proj.weight": layer.kv_b,
        }
        if c.q_lora_rank:
            views |= {
                "self_attn.q_a_proj.weight": layer.q_a,
                "self_attn.q_a_layernorm.weight": layer.q_a_norm,
                "self_attn.q_b_proj.weight": layer.q_b,
            }
        else:
            views["self_attn.q_proj.weight"] = layer.q_b
    else:
        sizes = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
        views |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
        for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
            views[f"self_attn.{name}_proj.weight"] = part
    if layer.dense:
        views |= _swiglu_views(layer.dense_in, layer.dense_out, "mlp.")
        return {prefix + name: view for name, view in views.items()}
    views["mlp.gate.weight"] = layer.router
    if layer.router_bias is not None:
        views["mlp.gate.e_score_correction_bias"] = layer.router_bias
    if c.n_shared_experts:
        views |= _swiglu_views(layer.shared_in, layer.shared_out, "mlp.shared_experts.")
    for expert in range(c.num_experts):
        views |= _swiglu_views(layer.w_in[expert], layer.w_out[expert], f"mlp.experts.{expert}.")
    return {prefix + name: view for name, view in views.items()}


def _swiglu_views(w_in: Tensor, w_out: Tensor, prefix: str) -> dict[str, Tensor]:
    gate, up = w_in.chunk(2, dim=1)
    return {prefix + "gate_proj.weight": gate.T, prefix + "up_proj.weight": up.T, prefix + "down_proj.weight": w_out.T}


def to_hugging_face(model: Model) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, in their present dtype."""
    return {name: view.contiguous() for name, view in hugging_face_views(model).items()}


@torch.no_grad()
def from_hugging_face(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the model. Raises ValueError that lists what is missing, unknown or of a wrong shape."""
    views = hugging_face_views(model)
    if wrong := sorted(set(views) ^ set(tensors)):
        raise ValueError(f"the checkpoint does not fit its config.json: {len(wrong)} tensors differ, first {wrong[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != views[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, config.json says {tuple(views[name].shape)}")
        views[name].copy_(tensor)


def config_json(c: ModelConfig, dtype: torch.dtype) -> str:
    """The text of config.json."""
    sizes = c.to_dict()
    family, yarn = sizes.pop("family"), asdict(c.yarn)
    del sizes["yarn"]
    common = {**_FIXED[c.family], "model_type": family, "torch_dtype": str(dtype).removeprefix("torch.")}
    if not c.latent:
        for name in DEEPSEEK:
            del sizes[name]
        config = {
            **sizes,
            **common,
            "architectures": ["Qwen3MoeForCausalLM"],
            "intermediate_size": c.moe_intermediate_size,
            "router_aux_loss_coef": 0.001,
        }
    else:
        for name in ("head_dim", "qk_norm_gain"):
            del sizes[name]
        sizes["n_routed_experts"] = sizes.pop("num_experts")
        sizes["q_lora_rank"] = c.q_lora_rank or None
        rope = {"rope_type": "default"} if c.yarn.factor == 1 else {"rope_type": "yarn", **yarn}
        config = {
            **sizes,
            **common,
            "architectures": ["DeepseekV3ForCausalLM"],
            "rope_parameters": {**rope, "rope_theta": c.rope_theta},
        }
    return json.dumps(config, indent=2) + "\n"


def published(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A copy of the weights as they are published: under Hugging Face's names, in `dtype`, on the CPU."""
    return {name: tensor.to("cpu", dtype, copy=True) for name, tensor in to_hugging_face(model).items()}


def empty_model(config: ModelConfig) -> Model:
    """A model whose weights are still to be filled in."""
    with torch.device("meta"):  # no time and no random numbers for weights that are about to be overwritten
        model = Model(config)
    model.to_empty(device="cpu")
    for layer in (*model.layers, *(head.layer for head in model.aheads)):
        if layer.router_bias is not None:  # no parameter, so the call before did not see it
            layer.router_bias = torch.zeros(config.num_experts)
    return model


def save_pretrained(
    model: Model, path: Path, *, dtype: torch.dtype = torch.bfloat16, tokenizer: Path | None = None
) -> None:
    """Writes `path` as a Hugging Face checkpoint. No half-written one is ever there: what was there before is moved out of
    the way when the new one is complete, and removed when that is in place."""
    part, before = (path.with_name(path.name + ending) for ending in (".part", ".old.part"))
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "config.json").write_text(config_json(model.config, dtype))
    save_file(published(model, dtype), part / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, part / "tokenizer.json")
    if path.exists():
        os.replace(path, before)
    os.replace(part, path)
    shutil.rmtree(before, ignore_errors=True)


def load_pretrained(path: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """Reads a checkpoint of either family. Raises FileNotFoundError or ValueError that names the file and what is wrong."""
    config, tensors = read_config(path / "config.json"), read_tensors(path)
    if not any(name.startswith(f"model.layers.{config.num_hidden_layers}.") for name in tensors):
        # `transformers` says nothing of heads that predict ahead when it leaves them out of what it saves.
        config = replace(config, num_nextn_predict_layers=0)
    model = empty_model(config)
    from_hugging_face(model, tensors)
    return model.to(dtype)


def read_config(file: Path) -> ModelConfig:
    """Reads a config.json under the names of any `transformers` release; nothing in it is guessed or ignored."""
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent}: not a checkpoint, config.json is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds no JSON object, so it is not the configuration of a model")
    raw = {name: value for name, value in raw.items() if value is not None}
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ValueError(
            f"{file}: model_type={raw.get('model_type')!r} is not supported, only {', '.join(map(repr, _FAMILIES))}"
        )
    config: dict[str, Any] = {**_FIXED[family], **_ABSENT[family], **raw}
    for name, value in _FIXED[family].items():
        if config[name] != value:
            raise ValueError(f"{file}: {name}={config[name]!r} is not supported, only {value!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    absent = {
        "family": family,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "qk_norm_gain": 1.0,
        "yarn": _yarn(file, rope, family),
        "num_experts": raw.get("n_routed_experts", raw.get("num_local_experts")),
        "head_dim": raw.get("hidden_size", 0) // raw.get("num_attention_heads", 1),
        **{name: ModelConfig.__dataclass_fields__[name].default for name in DEEPSEEK if family == "qwen3_moe"},
    }
    if family == "deepseek_v3":
        absent |= {
            "q_lora_rank": 0,
            "num_nextn_predict_layers": 0,
            "num_key_value_heads": raw.get("num_attention_heads"),
        }
        config["head_dim"] = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
    else:
        config = {name: value for name, value in config.items() if name not in DEEPSEEK}
    config = {name: value for name, value in absent.items() if value is not None} | config
    sizes = ModelConfig.__dataclass_fields__
    if missing := [name for name in sizes if name not in config]:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    try:
        return ModelConfig(**{name: config[name] for name in sizes})
    except TypeError as error:
        raise ValueError(f"{file}: {error}") from None


def _yarn(file: Path, rope: Mapping[str, Any], family: Family) -> Yarn:
    """How positions are stretched. `transformers` weighs two temperatures against each other where a configuration gives both,
    and else has one for the turned part alone; Yarn says that by mscale_all_dim = 0."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Yarn()
    if kind != "yarn" or family != "deepseek_v3":
        raise ValueError(
            f"{file}: rope_parameters or rope_scaling of type {kind!r} is not supported, only 'default'"
            f"{' and yarn' if family == 'deepseek_v3' else ''}"
        )
    both = bool(rope.get("mscale")) and bool(rope.get("mscale_all_dim"))
    if (
        rope.get("attention_factor") is not None
        or not rope.get("truncate", True)
        or bool(rope.get("mscale_all_dim")) != both
    ):
        raise ValueError(f"{file}: this form of YaRN is not supported: {dict(rope)}")
    known = {name: rope[name] for name in Yarn.__dataclass_fields__ if rope.get(name) is not None}
    return Yarn(**known if both else {**known, "mscale": 1.0, "mscale_all_dim": 0.0})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from one file or the shards of its index. Raises FileNotFoundError or ValueError that names
    the file."""
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index}: this index is damaged ({error!r}); fetch or write it again") from None
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name}: this shard of the checkpoint is missing")
        try:
            tensors |= load_file(path / name)
        except SafetensorError as error:
            raise ValueError(f"{path / name}: this shard is damaged ({error}); fetch or write it again") from None
    return tensors
