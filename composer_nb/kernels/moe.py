"""The mixture-of-experts layer: route, group tokens by expert, two grouped GEMMs with SwiGLU between, combine.

Dimensions: N tokens, D model width, E experts, K experts a token, L MoE layers, M = N · K, P those rows with what fills them up,
H expert width.
The CPU and GPU back end of this file is torch's grouped GEMM; `moe_reference` is the plain loop that it is tested against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.compiled import compiled
from composer_nb.kernels.linear import grouped_mm, linear, sigmoid
from composer_nb.kernels.swiglu import swiglu

ALIGN = 32
"""Rows of an expert are filled up to a multiple of this for bf16 on a CPU: its GEMM is made anew, in a millisecond, for every
number of rows that it has not met lately."""

Level = Literal["ids", "ids+order", "weights"]
"""What of the routes on record is replayed: the set of experts (in the order of the live scores), their order too, or also
their gates, through which then no gradient reaches the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a router chooses. `chosen` is K."""

    chosen: int
    sigmoid: bool = False
    """Scores are sigmoids instead of a softmax (DeepSeek-V3, arXiv 2412.19437, eq. 13 to 16)."""
    groups: int = 1
    kept_groups: int = 1
    """Experts are chosen from the so many groups whose two best add up to most."""
    scale: float = 1.0
    """Factor of all gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Routes to use in place of the router's own. [N, L, K] for a model, [N, K] for one layer (`layer`)."""

    experts: Tensor
    """int64, in the order in which they were chosen."""
    level: Level = "ids+order"
    gates: Tensor | None = None
    """float32; needed at level `weights`."""
    valid_N: Tensor | None = None
    """bool; a token that is not valid takes the router's own experts. None: all are."""
    plausible: float = 0.0
    """Replayed experts whose live score is below this times the lowest of the router's own K are replaced by the best of its
    own that are not among those kept (Composer 2 technical report, §6.2, which leaves the rule open; docs/replay.md)."""

    def take(self, own_N: Tensor) -> Replay:
        """Those of some tokens."""
        parts = {name: getattr(self, name) for name in ("experts", "gates", "valid_N")}
        return replace(self, **{name: None if x is None else x[own_N] for name, x in parts.items()})

    def layer(self, index: int) -> Replay:
        gates = None if self.gates is None else self.gates[:, index]
        return replace(self, experts=self.experts[:, index], gates=gates)


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router decided for N tokens."""

    experts_NK: Tensor
    """int64, in order of falling score (or in the replayed order)."""
    gates_NK: Tensor
    """float32 or wider; gradients flow through it to the router."""
    margin_N: Tensor
    """Score of the K-th expert minus that of the next, the distance to a flip."""
    probs_NE: Tensor
    """float32 or wider; how a token is shared among all experts: the softmax, or sigmoids over their sum."""
    own_NK: Tensor
    """int64; what the router would have chosen itself. The same as `experts_NK` where nothing is replayed."""
    implausible_NK: Tensor | None = None
    """bool; replayed experts that were replaced. None where nothing is filtered."""


def route(
    x_ND: Tensor,
    router_ED: Tensor,
    rule: Rule,
    bias_E: Tensor | None = None,
    replay: Replay | None = None,
    *,
    tile: int = 0,
) -> Routing:
    """Scores of all experts, the choice of K, and gates.

    softmax: as Qwen3-MoE's; gates are the chosen experts' shares of their sum. sigmoid: as DeepSeek-V3's; `bias_E` moves the
    choice and no gate. Scores are computed in the dtype of `router_ED`, whatever that of `x_ND` is; what follows is float32, or
    float64 where that is. With `replay` the experts are those given while the gates come from the live scores (but at level
    `weights`), so that the router learns (R3, arXiv 2510.11370). Raises ValueError where routes do not fit the tokens.
    """
    logits_NE = linear(x_ND.to(router_ED.dtype), router_ED, tile)
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    if rule.sigmoid:
        score_NE = sigmoid(logits_NE, tile)
        choice_NE = score_NE if bias_E is None else score_NE + bias_E.to(score_NE.device)
        probs_NE = score_NE / score_NE.sum(-1, keepdim=True)
    else:
        score_NE = choice_NE = probs_NE = logits_NE.softmax(-1)
    own_NK, margin_N = _choose(choice_NE.detach(), rule)
    experts_NK, implausible_NK = own_NK, None
    if replay is not None:
        experts_NK, implausible_NK = _replayed(replay, own_NK, score_NE.detach(), choice_NE.detach())
    if rule.sigmoid:
        chosen_NK = score_NE.gather(1, experts_NK)
        gates_NK = chosen_NK / (chosen_NK.sum(-1, keepdim=True) + 1e-20) * rule.scale
    else:
        # A softmax over the chosen logits is the same as dividing their probabilities by their sum, but stays finite when
        # replayed experts have lost all of theirs.
        gates_NK = logits_NE.gather(1, experts_NK).softmax(-1)
        gates_NK = gates_NK * rule.scale if rule.scale != 1 else gates_NK
    if replay is not None and replay.level == "weights":
        gates_NK = _replayed_gates(replay, gates_NK, implausible_NK)
    return Routing(experts_NK, gates_NK, margin_N, probs_NE, own_NK, implausible_NK)


def _choose(choice_NE: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The K best experts, best first, and the distance to the next one."""
    k, experts = rule.chosen, choice_NE.shape[1]
    if rule.groups > rule.kept_groups:
        grouped_NGE = choice_NE.unflatten(1, (rule.groups, -1))
        best_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[2]), -1).values.sum(-1)
        kept_NG = torch.zeros_like(best_NG, dtype=torch.bool)
        kept_NG.scatter_(1, best_NG.topk(rule.kept_groups, -1).indices, True)
        choice_NE = grouped_NGE.masked_fill(~kept_NG[:, :, None], -math.inf).flatten(1)
    top = choice_NE.topk(min(k + 1, experts), dim=-1)
    last_N = top.values[:, k - 1]
    margin_N = last_N - top.values[:, k] if k < experts else last_N
    return top.indices[:, :k], margin_N.clamp_max(1.0)  # no other expert was left where the next is -inf


def _replayed(replay: Replay, own_NK: Tensor, score_NE: Tensor, choice_NE: Tensor) -> tuple[Tensor, Tensor | None]:
    """Experts to use, and which of the given ones were replaced because the live router finds them implausible."""
    experts_NK = replay.experts
    if experts_NK.shape != own_NK.shape:
        raise ValueError(f"replayed routes are {tuple(experts_NK.shape)}, the tokens need {tuple(own_NK.shape)}")
    if replay.valid_N is not None:
        experts_NK = torch.where(replay.valid_N[:, None], experts_NK, own_NK)
    implausible_NK = None
    if replay.plausible > 0:
        least_N = replay.plausible * score_NE.gather(1, own_NK).amin(-1)
        implausible_NK = score_NE.gather(1, experts_NK) < least_N[:, None]
        experts_NK = _fill(experts_NK, implausible_NK, own_NK)
    if replay.level == "ids":
        order_NK = choice_NE.gather(1, experts_NK).argsort(stable=True, dim=-1, descending=True)
        experts_NK = experts_NK.gather(1, order_NK)
    return experts_NK, implausible_NK


def _fill(experts_NK: Tensor, gone_NK: Tensor, own_NK: Tensor) -> Tensor:
    """`experts_NK` with those that are gone replaced, place by place, by the router's own that are not there yet, best first."""
    kept_NK = experts_NK.masked_fill(gone_NK, -1)
    there_NK = (own_NK[:, :, None] == kept_NK[:, None, :]).any(-1)
    spare_NK = own_NK.gather(1, there_NK.to(torch.uint8).argsort(stable=True, dim=-1))
    which_NK = (gone_NK.cumsum(-1) - 1).clamp_min(0)
    return torch.where(gone_NK, spare_NK.gather(1, which_NK), experts_NK)


def _replayed_gates(replay: Replay, live_NK: Tensor, implausible_NK: Tensor | None) -> Tensor:
    """The gates on record; live ones for tokens that are not valid or lost an expert."""
    if replay.gates is None or replay.gates.shape != live_NK.shape:
        raise ValueError(f"replay at level 'weights' needs gates of {tuple(live_NK.shape)} beside the experts")
    use_N = torch.ones(len(live_NK), dtype=torch.bool, device=live_NK.device)
    if replay.valid_N is not None:
        use_N &= replay.valid_N
    if implausible_NK is not None:
        use_N &= ~implausible_NK.any(-1)
    return torch.where(use_N[:, None], replay.gates.to(live_NK.dtype), live_NK)


def moe(x_ND: Tensor, routing: Routing, w_in_EDF: Tensor, w_out_EHD: Tensor, *, tile: int = 0) -> Tensor:
    """The experts' output, [N, D] in the dtype of `x_ND`. `w_in_EDF` holds gate and up side by side, F = 2H. `tile`: as in
    `linear.py`.

    A token's K results are added up in the order of its experts, so that the order on record can matter, and nothing that
    other tokens do can. Where rows are filled up to a multiple (`ALIGN`), those that are nobody's hold some token with gate 0:
    they come out as zeros, and their gradients are zeros.
    """
    chosen = routing.experts_NK.shape[1]
    experts_M = routing.experts_NK.reshape(-1)
    order_M = torch.argsort(experts_M, stable=True)
    counts_E = torch.bincount(experts_M, minlength=w_in_EDF.shape[0])
    align = ALIGN if x_ND.dtype == torch.bfloat16 and x_ND.device.type == "cpu" and not tile else 1
    room_E = -(-counts_E // align) * align
    offsets_E = room_E.cumsum(0)
    shift_E = (offsets_E - room_E) - (counts_E.cumsum(0) - counts_E)
    at_M = torch.arange(len(order_M), device=order_M.device) + shift_E[experts_M[order_M]]
    place_NK = torch.empty_like(order_M).scatter_(0, order_M, at_M).view(-1, chosen)
    rows = int(offsets_E[-1]) if align > 1 else len(order_M)
    token_P = order_M.new_zeros(rows).scatter_(0, at_M, order_M // chosen)
    gate_P = x_ND.new_zeros(rows).scatter(0, at_M, routing.gates_NK.reshape(-1)[order_M].to(x_ND.dtype))
    ends_E = offsets_E.to(torch.int32)
    hidden_PF = grouped_mm(_Dispatch.apply(x_ND, token_P, place_NK), w_in_EDF, ends_E, tile)
    act_PH = swiglu(hidden_PF, gate_P, tile)
    return _Combine.apply(grouped_mm(act_PH, w_out_EHD, ends_E, tile), token_P, place_NK)


def _gathered_sum(x_PD: Tensor, place_NK: Tensor) -> Tensor:
    """[N, D]: each token's K rows added up, in order."""
    if x_PD.dtype == torch.float32 and x_PD.device.type == "cpu":
        out_ND = x_PD.new_empty(len(place_NK), x_PD.shape[1])
        _add_up(x_PD.detach().contiguous().numpy(), place_NK.numpy(), out_ND.numpy())
        return out_ND
    return x_PD.index_select(0, place_NK.reshape(-1)).unflatten(0, place_NK.shape).sum(1)


@compiled("f4[:,::1], i8[:,::1], f4[:,::1]")
def _add_up(x, place, out):  # type: ignore[no-untyped-def]
    for n in range(len(out)):
        out[n] = x[place[n, 0]]
        for k in range(1, place.shape[1]):
            row = x[place[n, k]]
            for d in range(len(row)):
                out[n, d] += row[d]


class _Dispatch(torch.autograd.Function):
    """A row of its token for each choice. Both this and `_Combine` know where each row goes, so neither adds into memory that
    others add into, and the order of sums is that of the choices."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_P: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return x_ND.index_select(0, token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered_sum(gradients[0], *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, token_P: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(token_P)
        return _gathered_sum(x_PD, place_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


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
