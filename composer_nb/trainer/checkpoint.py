"""Checkpoints in the shape of Hugging Face's Qwen3-MoE, so that `transformers` and everything else can read them.

In memory an expert's matrices are stacked for the grouped GEMM and lie [in, out]; on disk they are one tensor an expert and
lie [out, in], as Hugging Face has them. The mapping is a bijection.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.trainer.model import Model, ModelConfig

_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "moe_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
}
_FIXED = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
"""What `Model` computes. A config.json that asks for something else is refused."""


def to_hugging_face(model: Model) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, in their present dtype."""
    c = model.config
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
    if not c.tie_word_embeddings:
        tensors["lm_head.weight"] = model.head
    sizes = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        tensors |= {prefix + name: getattr(layer, ours) for ours, name in _LAYER.items()}
        for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = part
        for expert in range(c.num_experts):
            gate, up = layer.w_in[expert].chunk(2, dim=1)
            where = f"{prefix}mlp.experts.{expert}."
            tensors[where + "gate_proj.weight"] = gate.T
            tensors[where + "up_proj.weight"] = up.T
            tensors[where + "down_proj.weight"] = layer.w_out[expert].T
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def from_hugging_face(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the model. Raises ValueError that lists what is missing, unknown or of a wrong shape."""
    wanted = to_hugging_face(model)
    if wrong := sorted(set(wanted) ^ set(tensors)):
        raise ValueError(f"the checkpoint does not fit its config.json: {len(wrong)} tensors differ, first {wrong[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, config.json says {tuple(wanted[name].shape)}")
    parts = dict(tensors)
    model.embed.copy_(parts["model.embed_tokens.weight"])
    model.final_norm.copy_(parts["model.norm.weight"])
    if not model.config.tie_word_embeddings:
        model.head.copy_(parts["lm_head.weight"])
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        for ours, name in _LAYER.items():
            getattr(layer, ours).copy_(parts[prefix + name])
        layer.qkv.copy_(torch.cat([parts[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]))
        for expert in range(model.config.num_experts):
            where = f"{prefix}mlp.experts.{expert}."
            gate_up = torch.cat([parts[where + "gate_proj.weight"], parts[where + "up_proj.weight"]])
            layer.w_in[expert].copy_(gate_up.T)
            layer.w_out[expert].copy_(parts[where + "down_proj.weight"].T)


def config_json(c: ModelConfig, dtype: torch.dtype) -> str:
    """The text of config.json."""
    config = {
        **c.to_dict(),
        **_FIXED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": c.moe_intermediate_size,
        "router_aux_loss_coef": 0.001,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return json.dumps(config, indent=2) + "\n"


def published(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A copy of the weights as they are published: under Hugging Face's names, in `dtype`, on the CPU."""
    return {name: tensor.to("cpu", dtype, copy=True) for name, tensor in to_hugging_face(model).items()}


def empty_model(config: ModelConfig) -> Model:
    """A model whose weights are still to be filled in."""
    with torch.device("meta"):  # no time and no random numbers for weights that are about to be overwritten
        model = Model(config)
    return model.to_empty(device="cpu")


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
    """Reads a Qwen3-MoE checkpoint. Raises FileNotFoundError or ValueError that names the file and what is wrong."""
    model = empty_model(_read_config(path / "config.json"))
    from_hugging_face(model, read_tensors(path))
    return model.to(dtype)


def _read_config(file: Path) -> ModelConfig:
    """Reads a config.json under the names of any `transformers` release; nothing in it is guessed or ignored."""
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.parent}: not a checkpoint, config.json is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds no JSON object, so it is not the configuration of a model")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{file}: rope_parameters or rope_scaling of type {kind!r} is not supported, only 'default'")
    absent = {
        **_FIXED,
        "model_type": None,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "head_dim": raw.get("hidden_size", 0) // raw.get("num_attention_heads", 1),
        "qk_norm_gain": 1.0,
    }
    raw = {"num_experts": raw.get("num_local_experts"), **raw}
    config = absent | {name: value for name, value in raw.items() if value is not None}
    for name, value in _FIXED.items():
        if config[name] != value:
            raise ValueError(f"{file}: {name}={config[name]!r} is not supported, only {value!r}")
    sizes = ModelConfig.__dataclass_fields__
    if missing := [name for name in sizes if name not in config]:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    return ModelConfig(**{name: config[name] for name in sizes})


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
