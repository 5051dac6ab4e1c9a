"""A model's weights under Hugging Face's names, each as a view: what is read is copied into views, what is written out of them.

In memory queries, keys and values lie in one matrix, gates and ups too, and an expert's matrices are stacked for the grouped
GEMM and lie [in, out]; on disk each is a tensor of its own and lies [out, in]. The mapping is a bijection.
"""

from __future__ import annotations

import re

from torch import Tensor

from composer_nb.trainer.model import Layer, Model, ModelConfig

FOREIGN = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
"""Names of tensors that the model neither holds nor needs: they are passed over when a checkpoint is read, and copied byte for
byte when one is written like it."""
FOREIGN_VISION = (r"vision_tower\..+", r"mm_projector\..+")
"""More of them, in the checkpoint of a model that also sees."""
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
"""Always float32: it moves in steps of a thousandth (arXiv 2412.19437, §4.2)."""


def is_foreign(name: str, prefix: str) -> bool:
    """Whether `name` is one of `FOREIGN`, under the prefix of the language model, or one beside a model that has a prefix."""
    own = name.removeprefix(prefix)
    return any(re.fullmatch(pattern, own) for pattern in FOREIGN) or (
        bool(prefix) and any(re.fullmatch(pattern, name) for pattern in FOREIGN_VISION)
    )


def repeated(c: ModelConfig) -> dict[str, str]:
    """Tensors that a checkpoint may hold once more, by the name of what they repeat."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    names = {head: embed} if c.tie_word_embeddings else {}
    for depth in range(c.num_nextn_predict_layers):
        prefix = f"model.layers.{c.num_hidden_layers + depth}."
        names[prefix + "embed_tokens.weight"] = embed
        names[prefix + "shared_head.head.weight"] = embed if c.tie_word_embeddings else head
    return names


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
        views |= swiglu_views(layer.dense_in, layer.dense_out, "mlp.")
        return {prefix + name: view for name, view in views.items()}
    views["mlp.gate.weight"] = layer.router
    if layer.router_bias is not None:
        views[ROUTER_BIAS] = layer.router_bias
    if c.n_shared_experts:
        views |= swiglu_views(layer.shared_in, layer.shared_out, "mlp.shared_experts.")
    for expert in range(c.num_experts):
        views |= swiglu_views(layer.w_in[expert], layer.w_out[expert], f"mlp.experts.{expert}.")
    return {prefix + name: view for name, view in views.items()}


def swiglu_views(w_in: Tensor, w_out: Tensor, prefix: str) -> dict[str, Tensor]:
    gate, up = w_in.chunk(2, dim=1)
    return {prefix + "gate_proj.weight": gate.T, prefix + "up_proj.weight": up.T, prefix + "down_proj.weight": w_out.T}
