"""Forward passes of other programs than `Model.trunk`, on the same tokens and weights: choices of a `Side`.

Dimensions: N forwarded tokens, T of a row, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from composer_nb.kernels.decode import NewTokens, decode
from composer_nb.trainer.engine import pack
from composer_nb.trainer.model import Model
from composer_nb.trainer.sides import Forward, Forwarded, Place, Rows, joined


def compiled(model: Model, rows: Rows) -> Forwarded:
    """The engine's compiled kernel (`kernels/decode.py`), which attends, routes and multiplies in one function a layer."""
    weights, c = pack(model), model.config
    if weights is None:
        raise ValueError("the compiled kernel is for a float32 Qwen3-MoE on a CPU whose layers fit its cache")
    if not torch.equal(rows.position_N, rows.depth_N):
        raise ValueError("the compiled kernel puts tokens at positions 0, 1, 2, …, and the batch says others")
    shape = (c.num_hidden_layers, len(rows.lengths), c.num_key_value_heads, max(rows.lengths))
    k, v = np.zeros((*shape, c.head_dim), np.float32), np.zeros((*shape, c.value_width), np.float32)
    at, row = rows.depth_N.numpy(), rows.row_N.numpy()
    new = NewTokens(rows.ids_N.numpy(), at, row, row, at, np.arange(len(at)))
    hidden, experts, gates, margins = decode(weights, new, k, v, c.num_experts_per_tok, c.rms_norm_eps)
    routed = torch.from_numpy(np.ascontiguousarray(experts))
    shares = torch.from_numpy(np.ascontiguousarray(gates))
    return Forwarded(
        hidden_ND=torch.from_numpy(hidden),
        experts_NLK=routed,
        gates_NLK=shares,
        own_NLK=routed,
        live_NLK=shares,
        margin_NL=torch.from_numpy(np.ascontiguousarray(margins)),
    )


def hugging_face(module: nn.Module) -> Forward:
    """A causal model of `transformers` (Qwen3-MoE or DeepSeek-V3) as a forward pass: its own kernels up to the final norm, each
    row by itself. It tells no margins. `module` is built by the caller; nothing is imported here."""

    def forward(model: Model, rows: Rows) -> Forwarded:
        parts = []
        dense = model.config.first_k_dense_replace
        for ids_T, position_T in zip(rows.ids_N.split(rows.lengths), rows.position_N.split(rows.lengths), strict=True):
            parts.append(_hugging_face_row(module, dense, ids_T, position_T))
        return joined(parts)

    return forward


def _hugging_face_row(module: Any, dense: int, ids_T: Tensor, position_T: Tensor) -> Forwarded:
    seen: dict[Place, Tensor] = {}
    chosen: dict[int, tuple[Tensor, Tensor]] = {}
    inner = module.model
    hooks = [inner.embed_tokens.register_forward_hook(lambda m, i, out: seen.update({(-1, "embedding"): out[0]}))]

    def keep(place: Place) -> Callable[[Any, Any, Any], None]:
        return lambda m, i, out: seen.update({place: (out[0] if isinstance(out, tuple) else out)[0]})

    def before(place: Place) -> Callable[[Any, Any], None]:
        return lambda m, given: seen.update({place: given[0][0]})

    def routed(layer: int) -> Callable[[Any, Any, Any], None]:
        return lambda m, i, out: chosen.update({layer: (out[2], out[1])})

    for number, layer in enumerate(inner.layers):
        hooks.append(layer.register_forward_hook(keep((number, "experts"))))
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(before((number, "attention"))))
        if number >= dense:
            hooks.append(layer.mlp.gate.register_forward_hook(routed(number)))
    try:
        hidden = inner(input_ids=ids_T[None], position_ids=position_T[None], use_cache=False).last_hidden_state[0]
    finally:
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
