"""The policy gradient of streams as one vector, at the weights as they are: to look at, not to learn from."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.trainer.learning.loss import LossSettings, policy_loss
from composer_nb.trainer.learning.packing import ReplaySettings, Stream, flatten, microbatches, score
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
    policy = copy.deepcopy(model).requires_grad_()
    weights = list(policy.parameters())
    tokens = max(1.0, float(sum(int(stream.acted[1:].sum()) for stream in streams)))
    total = torch.zeros(sum(weight.numel() for weight in weights))
    metrics: Counter[str] = Counter()
    for chunk in microbatches(streams, budget, settings.together):
        batch = flatten(chunk, replay)
        logprob_S, _ = score(policy, batch, batch.recorded)
        sampled = logprob_S, batch.sampled_S, batch.advantage_S, batch.rollout_S
        loss, chunk_metrics = policy_loss(*sampled, settings, tokens, batch.length_S)
        total += flat_gradient(loss, weights)
        metrics.update(chunk_metrics)
    return total, dict(metrics)


def flat_gradient(of: Tensor, weights: Sequence[Tensor], slope: Tensor | None = None) -> Tensor:
    """Return the gradient [W] of `of`, times `slope` where it has several elements. The graph stays for further gradients."""
    parts = torch.autograd.grad(of, weights, slope, retain_graph=True)
    return torch.cat([part.reshape(-1) for part in parts])


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
