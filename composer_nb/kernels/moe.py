"""The mixture-of-experts layer: route, group tokens by expert, two grouped GEMMs with SwiGLU between, combine.

Dimensions: N tokens, D model width, E experts, K experts a token, H expert width.
The CPU and GPU back end of this file is torch's grouped GEMM; `moe_reference` is the plain loop that it is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router decided for N tokens."""

    experts_NK: Tensor
    """int64, in order of falling probability (or in the replayed order)."""
    gates_NK: Tensor
    """float32, each row sums to 1; gradients flow through it to the router."""
    margin_N: Tensor
    """float32: probability of the K-th expert minus that of the next, the distance to a flip."""
    probs_NE: Tensor
    """float32 softmax over all experts."""


def route(x_ND: Tensor, router_ED: Tensor, k: int, replay_NK: Tensor | None = None) -> Routing:
    """Qwen3-MoE's router: softmax in float32, top k, gates renormalised over the chosen.

    With `replay_NK` (int64) the experts are those given, the gates still come from the live scores, so that the router
    learns (R3, arXiv 2510.11370). Scores are computed in the dtype of `router_ED`, whatever that of `x_ND` is. Raises
    ValueError when the replayed experts do not fit the tokens.
    """
    logits_NE = F.linear(x_ND.to(router_ED.dtype), router_ED).float()
    probs_NE = logits_NE.softmax(-1)
    top = probs_NE.topk(k + 1 if k < probs_NE.shape[1] else k, dim=-1)
    margin_N = (top.values[:, k - 1] - top.values[:, k]) if k < probs_NE.shape[1] else top.values[:, k - 1]
    experts_NK = top.indices[:, :k]
    if replay_NK is not None:
        if replay_NK.shape != experts_NK.shape:
            raise ValueError(f"replayed routes are {tuple(replay_NK.shape)}, the tokens need {tuple(experts_NK.shape)}")
        experts_NK = replay_NK
    # A softmax over the chosen logits is the same as dividing their probabilities by their sum, but stays finite when
    # replayed experts have lost all of theirs.
    gates_NK = logits_NE.gather(1, experts_NK).softmax(-1)
    return Routing(experts_NK, gates_NK, margin_N.detach(), probs_NE)


def moe(x_ND: Tensor, routing: Routing, w_in_EDF: Tensor, w_out_EHD: Tensor) -> Tensor:
    """The experts' output, [N, D] in the dtype of `x_ND`. `w_in_EDF` holds gate and up side by side, F = 2H."""
    experts_M = routing.experts_NK.reshape(-1)
    order_M = torch.argsort(experts_M, stable=True)
    counts_E = torch.bincount(experts_M, minlength=w_in_EDF.shape[0])
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    token_M = order_M // routing.experts_NK.shape[1]
    hidden_MF = F.grouped_mm(x_ND.index_select(0, token_M), w_in_EDF, offs=offsets_E)
    gate_MH, up_MH = hidden_MF.chunk(2, dim=-1)
    out_MD = F.grouped_mm(F.silu(gate_MH) * up_MH, w_out_EHD, offs=offsets_E)
    weighted_MD = out_MD * routing.gates_NK.reshape(-1).index_select(0, order_M).unsqueeze(-1).to(out_MD.dtype)
    return torch.zeros_like(x_ND).index_add(0, token_M, weighted_MD)


def moe_reference(x_ND: Tensor, routing: Routing, w_in_EDF: Tensor, w_out_EHD: Tensor) -> Tensor:
    """The same by the definition: for each expert, its tokens through its SwiGLU, weighted and summed."""
    out_ND = torch.zeros_like(x_ND)
    for expert in range(w_in_EDF.shape[0]):
        token_M, slot_M = (routing.experts_NK == expert).nonzero(as_tuple=True)
        gate_MH, up_MH = (x_ND[token_M] @ w_in_EDF[expert]).chunk(2, dim=-1)
        y_MD = (F.silu(gate_MH) * up_MH) @ w_out_EHD[expert]
        out_ND = out_ND.index_add(0, token_M, y_MD * routing.gates_NK[token_M, slot_M, None].to(y_MD.dtype))
    return out_ND


def load_balance(routing: Routing) -> Tensor:
    """Auxiliary loss of one layer, E · Σ_e f_e · P_e (Switch, arXiv 2101.03961, eq. 4, with f counted over the K choices as
    in Qwen3-MoE): K when experts are used evenly, E when all tokens go to the same ones."""
    experts = routing.probs_NE.shape[1]
    counts_E = torch.bincount(routing.experts_NK.reshape(-1), minlength=experts).float()
    share_E = counts_E / max(1, routing.experts_NK.shape[0])
    return experts * (share_E * routing.probs_NE.mean(0)).sum()
