"""The policy gradient of streams as one vector, at the weights as they are: to look at, not to learn from."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.trainer.learning.loss import LossSettings, policy_loss
from composer_nb.trainer.learning.packing import Stream, flatten, microbatches, score
from composer_nb.trainer.learning.replay_settings import ReplaySettings
from composer_nb.trainer.learning.routes import require_routes
from composer_nb.trainer.models.transformer import Model


def policy_gradient(
    model: Model, streams: Sequence[Stream], settings: LossSettings, *, replay: ReplaySettings, budget: int = 4096
) -> tuple[Tensor, dict[str, float]]:
    """Return the gradient [W] of the loss over `streams` (its denominator their number of sampled tokens) with respect to all W
    weights, and the metrics of `policy_loss` as sums. The model is left as it is. Raises ValueError for routes that cannot be
    replayed, and for a KL weight, which would need a reference."""
    if settings.beta:
        raise ValueError("loss.beta is above 0: this gradient is that of the advantages alone")
    if replay.recorded:
        require_routes(streams, model.config, replay)
    made = copy.deepcopy(model).requires_grad_()
    weights = list(made.parameters())
    tokens = float(sum(int(stream.acted[1:].sum()) for stream in streams))
    total = torch.zeros(sum(weight.numel() for weight in weights))
    metrics: Counter[str] = Counter()
    for chunk in microbatches(streams, budget):
        batch = flatten(chunk, replay)
        logprob_S, _ = score(made, batch, batch.recorded)
        loss, found = policy_loss(
            logprob_S, batch.sampled_S, batch.advantage_S, batch.rollout_S, settings, max(1.0, tokens)
        )
        total += flat_gradient(loss, weights)
        metrics.update(found)
    return total, dict(metrics)


def flat_gradient(of: Tensor, weights: Sequence[Tensor], slope: Tensor | None = None) -> Tensor:
    """Return the gradient [W] of `of`, times `slope` where it has several elements. The graph stays for further gradients."""
    parts = torch.autograd.grad(of, weights, slope, retain_graph=True)
    return torch.cat([part.reshape(-1) for part in parts])


class Pulled(NamedTuple):
    """A sampled token that a mismatch gives another weight in the loss."""

    stream: int
    token: int
    """Its place in the stream."""
    ratio: float
    """The trainer's probability over that on record."""
    advantage: float
    excess: float
    """Change of the token's weight, which is 1 without a mismatch: ratio − 1, or −1 where the loss drops the token."""


def most_pulled(
    streams: Sequence[Stream], own: Sequence[Stream], settings: LossSettings, count: int
) -> tuple[list[Pulled], list[Stream]]:
    """Return the `count` tokens whose part in the loss is furthest from that without a mismatch, furthest first, and `streams`
    with the log-probabilities of `own`, which are the trainer's, at these. Raises ValueError where the two are not of the same
    tokens."""
    if [len(stream.token_ids) for stream in streams] != [len(stream.token_ids) for stream in own]:
        raise ValueError("`own` must hold the same streams as `streams`")
    at_S = [(number, int(t)) for number, each in enumerate(streams) for t in np.flatnonzero(each.acted[1:]) + 1]
    sampled_S, logprob_S, advantage_S = (
        torch.tensor([float(getattr(held[number], name)[token]) for number, token in at_S])
        for held, name in ((streams, "logprob"), (own, "logprob"), (streams, "advantage"))
    )
    rollout_S = torch.tensor([number for number, _ in at_S], dtype=torch.int64)

    def slope_S(sampled_S: Tensor) -> Tensor:
        leaf_S = logprob_S.clone().requires_grad_()
        loss, _ = policy_loss(leaf_S, sampled_S, advantage_S, rollout_S, settings, 1.0)
        return torch.autograd.grad(loss, leaf_S)[0]

    exact_S = slope_S(logprob_S)
    moved_S = slope_S(sampled_S) - exact_S
    ratio_S = (logprob_S - sampled_S).exp()
    found, calmed = [], [replace(stream, logprob=stream.logprob.copy()) for stream in streams]
    for place in moved_S.abs().argsort(descending=True, stable=True)[:count].tolist():
        number, token = at_S[place]
        excess = float(moved_S[place] / exact_S[place]) if exact_S[place] else 0.0
        found.append(Pulled(number, token, float(ratio_S[place]), float(advantage_S[place]), excess))
        calmed[number].logprob[token] = own[number].logprob[token]
    return found, calmed


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of the angle between two gradients; NaN where one of them is zero."""
    lengths = one.double().norm() * other.double().norm()
    return float(one.double() @ other.double() / lengths)


def inner_products(rows_VD: Tensor, width: int = 1 << 17) -> NDArray[np.float64]:
    """Return the inner products [V, V], summed in float64, one block of columns after another."""
    gram_VV = torch.zeros(len(rows_VD), len(rows_VD), dtype=torch.float64)
    for block in rows_VD.split(width, dim=1):
        wide = block.double()
        gram_VV += wide @ wide.T
    return gram_VV.numpy()
