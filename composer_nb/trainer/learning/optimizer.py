"""The optimizers of all training stages: AdamW and Muon.

Muon is momentum with all singular values set to about 1, for every matrix that maps vectors to vectors; AdamW for the rest.

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

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from composer_nb.harness.plain import Some, require_ranges
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.config import ModelConfig

# Betas of AdamW.
BETAS = (0.9, 0.95)
# Jordan's coefficients: steep at 0 rather than exact at 1, so that five steps bring singular values from 0.01 on to about 0.7
# .. 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
# Numbers of equal matrices that ranks orthogonalise at a time, at most, unless one matrix has more.
TOGETHER = 1 << 22
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


def newton_schulz(x_EAB: Tensor, steps: int = 5) -> Tensor:
    """Divide each matrix by its Frobenius norm, which brings its singular values σ to at most 1, and apply the odd polynomial
    a·σ + b·σ³ + c·σ⁵ to them `steps` times. Singular vectors are kept, and zeros stay zeros. Computes in the dtype of `x_EAB`."""
    a, b, c = QUINTIC
    tall = x_EAB.shape[-2] > x_EAB.shape[-1]
    x = x_EAB.mT if tall else x_EAB
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.mT if tall else x


def look_ahead(momentum: Tensor, gradient: Tensor, s: OptimizerSettings) -> Tensor:
    """Add a gradient to its momentum, in place, and return Nesterov's sum of both."""
    momentum.lerp_(gradient, 1 - s.momentum)
    return gradient.lerp(momentum, s.momentum)


def orthogonal(x_EAB: Tensor, s: OptimizerSettings) -> Tensor:
    """Return the update to subtract from a stack of matrices at a learning rate of 1. Its root mean square is about 0.2, as is
    usual for AdamW. Matrices are independent."""
    return newton_schulz(x_EAB, s.newton_schulz) * (0.2 * math.sqrt(max(x_EAB.shape[-2:])))


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


ADAMW = OptimizerSettings()


class Optimizer(ABC):
    """AdamW (arXiv 1711.05101) with decoupled decay and a learning rate per step. With the settings of Muon, Muon updates the
    parameters that `matrices` finds, with the same rate and decay.

    With a published dtype, the optimizer keeps float32 master weights, while the model holds the engine's weights: rounded to
    that dtype, for computation in float32. Gradients are computed at the published weights and applied to the masters, so the
    trainer scores with exactly the weights that the engine samples from."""

    _adam: torch.optim.AdamW
    _decay: float

    @abstractmethod
    def zero_(self) -> None:
        """Set the gradients to zero."""

    @abstractmethod
    def sum_(self, ranks: Ranks) -> None:
        """Sum the gradients over `ranks`, unless the backward pass has done so."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""

    @abstractmethod
    def _clip(self, clip: float) -> float:
        """Scale the gradients to a norm of at most `clip`, and return the norm before."""

    @abstractmethod
    def _updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the masters that Muon updates, each with its update."""

    @abstractmethod
    def _publish(self) -> None:
        """Round the masters into the model."""

    @torch.no_grad()
    def step(self, lr: float, clip: float) -> float:
        """Update the weights with the gradients, scaled to a norm of at most `clip`. Return the norm before scaling. Raises
        FloatingPointError, without an update, if the norm is not finite."""
        norm = self._clip(clip)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}: training has diverged; lower lr")
        for weight, update in self._updates():
            weight.mul_(1 - lr * self._decay).sub_(update, alpha=lr)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._publish()
        return norm


class FlatOptimizer(Optimizer):
    """The optimizer over one flat vector of all weights.

    The model's parameters and gradients are views of flat buffers, so that one all-reduce sums all gradients, one norm covers all
    tensors, and a checkpoint is a few vectors. The matrices of Muon come first in the flat vectors."""

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings = ADAMW,
        *,
        weight_decay: float = 0.0,
        published: torch.dtype | None = None,
    ) -> None:
        """Make the parameters of `model` views of the flat vector. `published` is the dtype to which its weights are rounded
        after each step; None: they are not rounded."""
        self._settings, self._decay, self.published = settings, weight_decay, published
        config: Any = getattr(model, "config", None)
        muon = settings.name == "muon"
        mine = {n: p for n, p in model.named_parameters() if muon and matrices(n, p, config)}
        parameters = [*mine.values(), *(p for n, p in model.named_parameters() if n not in mine)]
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradients = torch.zeros_like(self.weights)
        offset = 0
        for parameter in parameters:
            cut = slice(offset, offset + parameter.numel())
            parameter.data = self.weights[cut].view_as(parameter)
            parameter.grad = self.gradients[cut].view_as(parameter)
            offset += parameter.numel()
        self.master = self.weights.clone() if published else self.weights
        size = sum(parameter.numel() for parameter in mine.values())
        self._momentum = torch.zeros_like(self.weights[:size])
        self._stacks: list[tuple[Tensor, Tensor, Tensor]] = []
        offset = 0
        for name, parameter in mine.items():
            cut = slice(offset, offset + parameter.numel())
            views = [flat[cut].view_as(parameter) for flat in (self.master, self.gradients, self._momentum)]
            self._stacks += zip(*(matrices(name, view, config) for view in views), strict=True)
            offset += parameter.numel()
        self._rest = nn.Parameter(self.master[size:])
        self._rest.grad = self.gradients[size:]
        self._adam = torch.optim.AdamW([self._rest], lr=0.0, betas=BETAS, weight_decay=weight_decay, fused=True)
        self._publish()

    def zero_(self) -> None:
        self.gradients.zero_()

    def sum_(self, ranks: Ranks) -> None:
        ranks.sum_(self.gradients)

    def _clip(self, clip: float) -> float:
        norm = float(torch.linalg.vector_norm(self.gradients, dtype=torch.float64))  # millions of squares
        if norm > clip:
            self.gradients.mul_(clip / norm)
        return norm

    def _updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        for weight_EAB, gradient_EAB, momentum_EAB in self._stacks:
            yield weight_EAB, orthogonal(look_ahead(momentum_EAB, gradient_EAB, self._settings), self._settings)

    def state(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs, as flat tensors on the CPU."""
        moments = self._adam.state[self._rest]
        if not moments:  # AdamW creates them at the first step
            zeros = {name: torch.zeros_like(self._rest) for name in ("exp_avg", "exp_avg_sq")}
            moments |= {"step": torch.zeros((), device=self.master.device), **zeros}
        state = {"master": self.master, **moments} | ({"momentum": self._momentum} if self._stacks else {})
        return {name: value.cpu() for name, value in state.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Restore `state`. Raises ValueError, before any change, if it belongs to a model of another size or to another
        optimizer."""
        moments = {name: value for name, value in state.items() if name != "master"}
        expected = {"step", "exp_avg", "exp_avg_sq", *(["momentum"] if self._stacks else [])}
        if state["master"].shape != self.master.shape:
            weights = f"{state['master'].numel()} weights, the model {self.master.numel()}"
            raise ValueError(f"the checkpoint holds {weights}: the model's settings changed since it was written")
        if moments and moments.keys() != expected:  # AdamW of older checkpoints had none before its first step
            raise ValueError(
                f"optimizer.name={self._settings.name!r}: the checkpoint holds {', '.join(sorted(moments))}, not "
                f"{', '.join(sorted(expected))}; it was written with another optimiser: go on with that one, or begin a new run"
            )
        self._momentum.copy_(moments.pop("momentum", self._momentum))
        if moments:
            self._adam.state[self._rest] = {n: x.to(self.master.device, copy=True) for n, x in moments.items()}
        self.master.copy_(state["master"])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        if self.published is not None:
            self.weights.copy_(self.master.to(self.published))


def trapezoid(step: float, steps: float, warmup: float, constant: float, floor: float = 0.03) -> float:
    """Return a factor of the learning rate: rising over `warmup`, 1 until `constant` (shares of `steps`), falling to `floor`."""
    progress = (step + 1) / steps
    if progress < warmup:
        return progress / warmup
    return 1.0 if progress <= constant else floor + (1 - floor) * (1 - progress) / (1 - constant)
