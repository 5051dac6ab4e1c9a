"""Muon: momentum whose singular values are all made about 1, for every matrix that maps vectors to vectors; AdamW for the rest.

    M ← μ M + (1 − μ) G                                        momentum
    O ← newton_schulz((1 − μ) G + μ M)                         about U Vᵀ of its singular value decomposition U Σ Vᵀ
    W ← (1 − η λ) W − η · 0.2 · sqrt(max(A, B)) · O            for matrices of A × B

K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), from which are μ = 0.95 with Nesterov's
look ahead and the polynomial; Moonlight (arXiv 2502.16982, §2.2), from which are the decay λ and the factor that gives updates
the size of AdamW's, so that both share a learning rate.

A matrix is what is multiplied at once by its nature, not by how it is stored: one attention head's projection, one expert's
gate, up or down (as in Cursor's "Composer 2.5", 2026). All of a kind are one stack [E, A, B], and a matrix's update depends on
that matrix alone, so that whoever holds some heads or experts whole can update them alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from composer_nb.harness.plain import Some, require_ranges
from composer_nb.trainer.models.config import ModelConfig

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: steep at 0 rather than exact at 1, so that in five steps singular values from 0.01 on come to lie
within about 0.7 .. 1.2."""
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer of all stages that train."""

    name: OptimizerName = "adamw"
    """muon: matrices of attention heads, experts and dense layers are moved by Muon; embeddings, routers, norms and the output
    layer by AdamW."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of Muon."""
    newton_schulz: Some = 5
    """Steps of Muon towards an orthogonal update."""

    def __post_init__(self) -> None:
        require_ranges(self, "optimizer")


def newton_schulz(
    x_EAB: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = QUINTIC, eps: float = 1e-7
) -> Tensor:
    """An odd polynomial a·σ + b·σ³ + c·σ⁵ of the singular values σ of each matrix, `steps` times over, after division by its
    Frobenius norm (which brings all σ to 1 at most); singular vectors stay. Zeros stay zeros. In the dtype of `x_EAB`."""
    a, b, c = coefficients
    tall = x_EAB.shape[-2] > x_EAB.shape[-1]
    x = x_EAB.mT if tall else x_EAB
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.mT if tall else x


def muon_update(momentum_EAB: Tensor, gradient_EAB: Tensor, *, momentum: float = 0.95, steps: int = 5) -> Tensor:
    """Take the gradients of a stack of matrices into their momentum, in place, and return what is to be taken off the weights
    at a learning rate of 1. Its root mean square is about 0.2, as AdamW's mostly is. Each matrix by itself."""
    momentum_EAB.lerp_(gradient_EAB, 1 - momentum)
    ahead_EAB = gradient_EAB.lerp(momentum_EAB, momentum)
    return newton_schulz(ahead_EAB, steps) * (0.2 * math.sqrt(max(gradient_EAB.shape[-2:])))


def matrices(name: str, weight: Tensor, c: ModelConfig) -> list[Tensor]:
    """Return the stacks [E, A, B] that a parameter of the model consists of, as views; none where AdamW moves it.

    `name` as in `named_parameters`. `weight` may be the parameter, its gradient, its momentum, or a part of either that holds
    whole heads (dimension 0 of queries, keys and values, dimension 1 of `o`) or whole experts (dimension 0).
    """
    match name.rpartition(".")[2]:
        case "qkv" | "q_b":
            return [weight.unflatten(0, (-1, c.head_dim))]
        case "kv_b":
            widths = [c.qk_nope_head_dim, c.v_head_dim]
            return list(weight.unflatten(0, (-1, sum(widths))).split(widths, dim=1))
        case "o":
            return [weight.unflatten(1, (-1, c.value_width)).transpose(0, 1)]
        case "w_in":
            return list(weight.chunk(2, dim=-1))
        case "w_out":
            return [weight]
        case "dense_in" | "shared_in":
            return [half[None] for half in weight.chunk(2, dim=-1)]
        case "dense_out" | "shared_out" | "q_a" | "kv_a" | "join":
            return [weight[None]]
    return []
