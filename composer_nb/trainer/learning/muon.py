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
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from composer_nb.trainer.learning.optimizer import FlatAdamW, FlatOptimizer, Scaled, adamw, require_moments
from composer_nb.trainer.models.transformer import Model, ModelConfig

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: steep at 0 rather than exact at 1, so that in five steps singular values from 0.01 on come to lie
within about 0.7 .. 1.2."""
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Of all stages that train."""

    name: OptimizerName = "adamw"
    """muon: matrices of attention heads, experts and dense layers are moved by Muon; embeddings, routers, norms and the output
    layer by AdamW."""
    momentum: float = 0.95
    """Of Muon."""
    newton_schulz: int = 5
    """Muon's steps towards an orthogonal update."""

    def __post_init__(self) -> None:
        if self.name not in get_args(OptimizerName):
            raise ValueError(f"optimizer.name={self.name!r}: must be one of {', '.join(get_args(OptimizerName))}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum={self.momentum}: must be at least 0 and below 1; 0.95 is usual")
        if self.newton_schulz < 1:
            raise ValueError(f"optimizer.newton_schulz={self.newton_schulz}: must be at least 1; 5 is usual")


def make_optimizer(
    model: Model,
    settings: OptimizerSettings,
    *,
    weight_decay: float = 0.0,
    published: torch.dtype | None = None,
    scale_rate: float = 0.0,
) -> FlatOptimizer:
    """The optimiser that the settings name. `scale_rate` is that of the scale of all logits (`sharpness.py`)."""
    scaled = model.final_norm, scale_rate
    if settings.name == "adamw":
        return FlatAdamW(model, weight_decay=weight_decay, published=published, scaled=scaled)
    return FlatMuon(model, settings, weight_decay=weight_decay, published=published, scaled=scaled)


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
    """Takes the gradients of a stack of matrices into their momentum, in place, and returns what is to be taken off the weights
    at a learning rate of 1: its root mean square is about 0.2, as AdamW's mostly is. Each matrix by itself."""
    momentum_EAB.lerp_(gradient_EAB, 1 - momentum)
    ahead_EAB = gradient_EAB.lerp(momentum_EAB, momentum)
    return newton_schulz(ahead_EAB, steps) * (0.2 * math.sqrt(max(gradient_EAB.shape[-2:])))


def matrices(name: str, weight: Tensor, c: ModelConfig) -> list[Tensor]:
    """The stacks [E, A, B] that a parameter of the model consists of, as views; none where it is AdamW's.

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


class FlatMuon(FlatOptimizer):
    """Muon for what `matrices` finds, AdamW for the rest, with one learning rate and one decay. In the flat vectors Muon's
    parameters come first."""

    def __init__(
        self,
        model: Model,
        settings: OptimizerSettings,
        *,
        weight_decay: float = 0.0,
        published: torch.dtype | None = None,
        scaled: Scaled | None = None,
    ) -> None:
        mine: dict[str, nn.Parameter] = {}
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if matrices(name, parameter, model.config):
                mine[name] = parameter
            else:
                others.append(parameter)
        super().__init__([*mine.values(), *others], published, scaled)
        self._settings, self._decay = settings, weight_decay
        size = sum(parameter.numel() for parameter in mine.values())
        self._momentum = torch.zeros_like(self.weights[:size])
        self._rest = nn.Parameter(self.master.detach()[size:])
        self._rest.grad = self.gradients[size:]
        self._adam = adamw(self._rest, weight_decay)
        flats = (self.master.detach()[:size], self.gradients[:size], self._momentum)
        self._stacks = list(zip(*(_stacks(flat, mine, model.config) for flat in flats), strict=True))

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        s = self._settings
        for weight_EAB, gradient_EAB, momentum_EAB in self._stacks:
            update_EAB = muon_update(momentum_EAB, gradient_EAB, momentum=s.momentum, steps=s.newton_schulz)
            weight_EAB.mul_(1 - lr * self._decay).sub_(update_EAB, alpha=lr)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()

    def _moments(self) -> dict[str, Tensor]:
        rest = {name: torch.as_tensor(value) for name, value in self._adam.state.get(self._rest, {}).items()}
        return {"momentum": self._momentum, **rest} if rest else {}

    def _take(self, moments: dict[str, Tensor]) -> None:
        require_moments(moments, {"momentum", "step", "exp_avg", "exp_avg_sq"}, "muon")
        rest = {name: value.clone() for name, value in moments.items() if name != "momentum"}
        self._momentum.copy_(moments["momentum"]) if moments else self._momentum.zero_()
        self._adam.state[self._rest] = rest


def _stacks(flat: Tensor, parameters: dict[str, nn.Parameter], c: ModelConfig) -> list[Tensor]:
    """The stacks of all `parameters`, as views of a vector in which they lie one after another."""
    parts = flat.split([parameter.numel() for parameter in parameters.values()])
    return [
        stack
        for (name, parameter), part in zip(parameters.items(), parts, strict=True)
        for stack in matrices(name, part.view_as(parameter), c)
    ]
