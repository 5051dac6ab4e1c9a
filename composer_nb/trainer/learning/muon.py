"""Muon: momentum with all singular values set to about 1, for every matrix that maps vectors to vectors; AdamW for the rest.

    M ← μ M + (1 − μ) G                                        momentum
    O ← newton_schulz((1 − μ) G + μ M)                         about U Vᵀ of its singular value decomposition U Σ Vᵀ
    W ← (1 − η λ) W − η · 0.2 · sqrt(max(A, B)) · O            for matrices of A × B

μ = 0.95 with Nesterov momentum and the polynomial are from K. Jordan et al., "Muon: an optimizer for hidden layers in neural
networks" (2024). The decay λ, and the factor that gives updates the size of AdamW's so that both share a learning rate, are from
Moonlight (arXiv 2502.16982, §2.2).

A matrix is a mathematical unit, however it is stored: the projection of one attention head, or the gate, up or down projection of
one expert (as in Cursor's "Composer 2.5", 2026). All matrices of a kind form one stack [E, A, B]. The update of a matrix depends
on that matrix alone, so a rank that holds whole heads or experts can update them by itself.
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

Coefficients = tuple[float, float, float]
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: steep at 0 rather than exact at 1, so that five steps bring singular values from 0.01 on to about
0.7 .. 1.2."""
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer of all training stages."""

    name: OptimizerName = "adamw"
    """muon: Muon updates the matrices of attention heads, experts and dense layers; AdamW updates embeddings, routers, norms and
    the output layer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of Muon."""
    newton_schulz: Some = 5
    """Newton–Schulz iterations of Muon towards an orthogonal update."""

    def __post_init__(self) -> None:
        require_ranges(self, "optimizer")


def newton_schulz(x_EAB: Tensor, steps: int = 5, coefficients: Coefficients = QUINTIC) -> Tensor:
    """Divide each matrix by its Frobenius norm, which brings its singular values σ to at most 1, and apply the odd polynomial
    a·σ + b·σ³ + c·σ⁵ to them `steps` times. Singular vectors are kept, and zeros stay zeros. Computes in the dtype of `x_EAB`."""
    a, b, c = coefficients
    tall = x_EAB.shape[-2] > x_EAB.shape[-1]
    x = x_EAB.mT if tall else x_EAB
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.mT if tall else x


def muon_update(momentum_EAB: Tensor, gradient_EAB: Tensor, *, momentum: float = 0.95, steps: int = 5) -> Tensor:
    """Add the gradients of a stack of matrices to their momentum, in place, and return the update to subtract from the weights at
    a learning rate of 1. Its root mean square is about 0.2, as is usual for AdamW. Matrices are independent."""
    momentum_EAB.lerp_(gradient_EAB, 1 - momentum)
    ahead_EAB = gradient_EAB.lerp(momentum_EAB, momentum)
    return newton_schulz(ahead_EAB, steps) * (0.2 * math.sqrt(max(gradient_EAB.shape[-2:])))


def matrices(name: str, weight: Tensor, c: ModelConfig) -> list[Tensor]:
    """Return a parameter of the model as stacks [E, A, B], which are views; none if AdamW updates it.

    `name` is as in `named_parameters`. `weight` is the parameter, its gradient, its momentum, or a part of one of them with whole
    heads (dimension 0 of queries, keys and values, dimension 1 of `o`) or whole experts (dimension 0).
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
