"""Routing of tokens to experts: the router's choice, its replay, and the balance of the load on experts.

Dimensions: N tokens, D model width, E experts, K experts per token, L MoE layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from composer_nb.kernels.compiled import compiled
from composer_nb.kernels.linear import compiles, linear
from composer_nb.kernels.triton_runtime import fused

# The replayed part of recorded routes: the set of experts (in the order of the live scores), also their order, or also their
# gates, through which no gradient reaches the router.
Level = Literal["ids", "ids+order", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The rule of a router's choice. `chosen` is K.

    Attributes:
        sigmoid: Whether scores are sigmoids instead of a softmax (DeepSeek-V3, arXiv 2412.19437, eq. 13 to 16).
        kept_groups: Number of groups from which experts are chosen: those with the largest sums of their two best scores.
        scale: Factor of all gates.
        normalised: Whether gates are divided by a token's sum.
    """

    chosen: int
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    normalised: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Routes to use instead of the router's own: [N, L, K] for a model, [N, K] for one layer (`layer`).

    Attributes:
        experts: int64, in the order of choice.
        gates: float32; required at level `weights`.
        valid_N: bool; an invalid token uses the router's own experts. None: all tokens are valid.
        plausible: Replayed experts whose live score is below this times the lowest score of the router's own K are replaced
            by its best ones that are not kept (Composer 2 technical report, §6.2, which leaves the rule open;
            docs/replay.md).
    """

    experts: Tensor
    level: Level = "ids+order"
    gates: Tensor | None = None
    valid_N: Tensor | None = None
    plausible: float = 0.0

    def take(self, own_N: Tensor) -> Replay:
        """Return the routes of a selection of tokens."""
        gates, valid_N = (None if x is None else x[own_N] for x in (self.gates, self.valid_N))
        return replace(self, experts=self.experts[own_N], gates=gates, valid_N=valid_N)

    def layer(self, index: int) -> Replay:
        gates = None if self.gates is None else self.gates[:, index]
        return replace(self, experts=self.experts[:, index], gates=gates)


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's decisions for N tokens.

    Attributes:
        experts_NK: int64, by falling score or in the replayed order.
        gates_NK: float32 or wider; gradients flow through it to the router.
        margin_N: Score of the K-th expert minus that of the next: the distance to a flip.
        probs_NE: float32 or wider; distribution of a token over all experts: the softmax, or sigmoids divided by their sum.
        own_NK: int64; the router's own choice, equal to `experts_NK` without replay.
        implausible_NK: bool; mask of replayed experts that were replaced. None without a filter.
    """

    experts_NK: Tensor
    gates_NK: Tensor
    margin_N: Tensor
    probs_NE: Tensor
    own_NK: Tensor
    implausible_NK: Tensor | None = None


def route(
    x_ND: Tensor, router_ED: Tensor, rule: RoutingRule, bias_E: Tensor | None = None, replay: Replay | None = None
) -> Routing:
    """Compute the scores of all experts, choose K of them, and compute their gates.

    softmax: as in Qwen3-MoE; gates are the chosen experts' shares of their sum. sigmoid: as in DeepSeek-V3; `bias_E` affects the
    choice but no gate. Scores are computed in the dtype of `router_ED`, whatever that of `x_ND`; the rest is float32, or float64
    if the scores are. With `replay`, the experts are given, while the gates come from the live scores (except at level
    `weights`), so that the router learns (R3, arXiv 2510.11370). Raises ValueError for routes that do not fit the tokens.
    """
    logits_NE = linear(x_ND.to(router_ED.dtype), router_ED)
    logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
    if rule.sigmoid:
        score_NE = logits_NE.sigmoid()
        choice_NE = score_NE if bias_E is None else score_NE + bias_E.to(score_NE.device)
        probs_NE = score_NE / score_NE.sum(-1, keepdim=True)
    else:
        score_NE = choice_NE = probs_NE = logits_NE.softmax(-1)
    own_NK, margin_N = _choose(choice_NE.detach(), rule)
    experts_NK, implausible_NK = own_NK, None
    if replay is not None:
        experts_NK, implausible_NK = _replayed(replay, own_NK, score_NE.detach(), choice_NE.detach())
    if rule.sigmoid and rule.normalised:
        chosen_score_NK = score_NE.gather(1, experts_NK)
        gates_NK = chosen_score_NK / (chosen_score_NK.sum(-1, keepdim=True) + 1e-20)
    elif rule.normalised:
        # A softmax over the chosen logits equals dividing their probabilities by their sum, but stays finite if the
        # probabilities of replayed experts vanish.
        gates_NK = logits_NE.gather(1, experts_NK).softmax(-1)
    else:
        gates_NK = score_NE.gather(1, experts_NK)
    gates_NK = gates_NK * rule.scale if rule.scale != 1 else gates_NK
    if replay is not None and replay.level == "weights":
        gates_NK = _replayed_gates(replay, gates_NK, implausible_NK)
    return Routing(experts_NK, gates_NK, margin_N, probs_NE, own_NK, implausible_NK)


def _choose(choice_NE: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Return the K best experts, best first, and the margin to the next one."""
    k, experts = rule.chosen, choice_NE.shape[1]
    if rule.groups > rule.kept_groups:
        grouped_NGE = choice_NE.unflatten(1, (rule.groups, -1))
        best_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[2]), -1).values.sum(-1)
        is_kept_NG = torch.zeros_like(best_NG, dtype=torch.bool)
        is_kept_NG.scatter_(1, best_NG.topk(rule.kept_groups, -1).indices, True)
        choice_NE = grouped_NGE.masked_fill(~is_kept_NG[:, :, None], -math.inf).flatten(1)
    top_NK = _best(choice_NE, min(k + 1, experts))
    score_NK = choice_NE.gather(1, top_NK)
    last_N = score_NK[:, k - 1]
    margin_N = last_N - score_NK[:, k] if k < experts else last_N
    return top_NK[:, :k], margin_N.clamp_max(1.0)  # the next is -inf if no other expert is left


def _best(score_NE: Tensor, count: int) -> Tensor:
    """Return the indices, int64 [N, count], of the largest scores, largest first. In float32 on a CPU, equal scores are in the
    order of their indices, as in the engine."""
    if not (compiles(score_NE) and fused("experts")):
        return score_NE.topk(count, dim=-1).indices
    best_NK = score_NE.new_empty(len(score_NE), count, dtype=torch.int64)
    _fill_best(score_NE.contiguous().numpy(), best_NK.numpy())
    return best_NK


@compiled
def _fill_best(score, best):  # type: ignore[no-untyped-def]
    """Fill `best` by insertion; torch's `topk` takes twice as long on 64 scores. NaN comes first."""
    count = best.shape[1]
    keys = np.empty(count, np.float32)
    for n in range(len(score)):
        filled = 0
        for e in range(score.shape[1]):
            key = score[n, e]
            key = key if key == key else np.float32(np.inf)
            if filled == count and not key > keys[count - 1]:
                continue
            filled = min(filled + 1, count)
            rank = filled - 1
            while rank > 0 and key > keys[rank - 1]:
                keys[rank], best[n, rank] = keys[rank - 1], best[n, rank - 1]
                rank -= 1
            keys[rank], best[n, rank] = key, e


def choose_experts(logits_NE: Tensor, k: int) -> Tensor:
    """Return the indices, int64 [N, K], of the k largest logits in float32, largest first. Of equal ones the lower index comes
    first, which torch's `topk` does not guarantee; NaN counts as the largest."""
    value_NE = logits_NE.float() + 0.0  # no negative zeros
    bits_NE = value_NE.contiguous().view(torch.int32)
    order_NE = torch.where(value_NE.isnan(), 0x7FFFFFFF, bits_NE ^ ((bits_NE >> 31) & 0x7FFFFFFF))
    last = logits_NE.shape[1] - 1
    place_E = torch.arange(last, -1, -1, device=logits_NE.device)
    key_NE = (order_NE.to(torch.int64) << 16) | place_E
    return last - (key_NE.topk(k, dim=-1).values & 0xFFFF)


def _replayed(replay: Replay, own_NK: Tensor, score_NE: Tensor, choice_NE: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the experts to use, and a mask of the given ones that were replaced as implausible by the live router."""
    experts_NK = replay.experts
    if experts_NK.shape != own_NK.shape:
        raise ValueError(f"replayed routes are {tuple(experts_NK.shape)}, the tokens need {tuple(own_NK.shape)}")
    if replay.valid_N is not None:
        experts_NK = torch.where(replay.valid_N[:, None], experts_NK, own_NK)
    implausible_NK = None
    if replay.plausible > 0:
        threshold_N = replay.plausible * score_NE.gather(1, own_NK).amin(-1)
        implausible_NK = score_NE.gather(1, experts_NK) < threshold_N[:, None]
        # Place by place, the router's own unused experts replace them, best first.
        kept_NK = experts_NK.masked_fill(implausible_NK, -1)
        is_used_NK = (own_NK[:, :, None] == kept_NK[:, None, :]).any(-1)
        spare_NK = own_NK.gather(1, is_used_NK.to(torch.uint8).argsort(stable=True, dim=-1))
        spare_index_NK = (implausible_NK.cumsum(-1) - 1).clamp_min(0)
        experts_NK = torch.where(implausible_NK, spare_NK.gather(1, spare_index_NK), experts_NK)
    if replay.level == "ids":
        order_NK = choice_NE.gather(1, experts_NK).argsort(stable=True, dim=-1, descending=True)
        experts_NK = experts_NK.gather(1, order_NK)
    return experts_NK, implausible_NK


def _replayed_gates(replay: Replay, live_NK: Tensor, implausible_NK: Tensor | None) -> Tensor:
    """Return the recorded gates, or live ones for tokens that are invalid or lost an expert."""
    if replay.gates is None or replay.gates.shape != live_NK.shape:
        raise ValueError(f"replay at level 'weights' needs gates of {tuple(live_NK.shape)} beside the experts")
    use_N = torch.ones(len(live_NK), dtype=torch.bool, device=live_NK.device)
    if replay.valid_N is not None:
        use_N &= replay.valid_N
    if implausible_NK is not None:
        use_N &= ~implausible_NK.any(-1)
    return torch.where(use_N[:, None], replay.gates.to(live_NK.dtype), live_NK)


def load_balance(routing: Routing) -> Tensor:
    """Return the auxiliary loss of one layer, E · Σ_e f_e · P_e (Switch, arXiv 2101.03961, eq. 4, with f counted over the K
    choices as in Qwen3-MoE): K if experts are used evenly, E if all tokens use the same ones, 0 without tokens."""
    experts = routing.probs_NE.shape[1]
    counts_E = torch.bincount(routing.experts_NK.reshape(-1), minlength=experts).float()
    tokens = max(1, routing.experts_NK.shape[0])
    return experts * (counts_E / tokens * (routing.probs_NE.sum(0) / tokens)).sum()
