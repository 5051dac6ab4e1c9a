"""Checkpoints in the shape of Hugging Face's Qwen3-MoE, so that `transformers` and everything else can read them.

In memory an expert's matrices are stacked for the grouped GEMM and lie [in, out]; on disk they are one tensor an expert and
lie [out, in], as Hugging Face has them. The mapping is a bijection.
"""

from __future__ import annotations

import json
import os
import shutil
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


def to_hugging_face(model: Model) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, in their present dtype."""
    c = model.config
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
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
def from_hugging_face(model: Model, tensors: dict[str, Tensor]) -> None:
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


def save_pretrained(
    model: Model, path: Path, *, dtype: torch.dtype = torch.bfloat16, tokenizer: Path | None = None
) -> None:
    """Writes `path` as a Hugging Face checkpoint, atomically: an interrupted save leaves what was there before."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    c = model.config
    config = {
        **c.to_dict(),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "intermediate_size": c.moe_intermediate_size,
        "router_aux_loss_coef": 0.001,
        "use_sliding_window": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.to(dtype) for name, tensor in to_hugging_face(model).items()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, part / "tokenizer.json")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(part, path)


def load_pretrained(path: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """Reads a Qwen3-MoE checkpoint. Raises FileNotFoundError or ValueError that names the file and what is wrong."""
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: not a checkpoint, config.json is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path / 'config.json'}: not JSON: {error}") from None
    if config.get("model_type") != "qwen3_moe":
        raise ValueError(f"{path}: model_type {config.get('model_type')!r} is not supported, only 'qwen3_moe'")
    known = ModelConfig.__dataclass_fields__
    model = Model(ModelConfig(**{name: value for name, value in config.items() if name in known}))
    from_hugging_face(model, _shards(path))
    return model.to(dtype)


def _shards(path: Path) -> dict[str, Tensor]:
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name}: this shard of the checkpoint is missing")
        try:
            tensors |= load_file(path / name)
        except SafetensorError as error:
            raise ValueError(f"{path / name}: this shard is damaged ({error}); fetch or write it again") from None
    return tensors
