"""Optimizers over one flat vector of all weights.

The model's parameters and gradients are views of flat buffers, so that one all-reduce sums all gradients, one norm covers all
tensors, and a checkpoint is a few vectors. With a published dtype, the optimizer keeps float32 master weights, while the model
holds the engine's weights: rounded to that dtype, for computation in float32. Gradients are computed at the published weights and
applied to the masters, so the trainer scores with exactly the weights that the engine samples from.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composer_nb.trainer.learning.muon import OptimizerSettings, matrices, muon_update
from composer_nb.trainer.learning.ranks import Ranks


class Optimizer(Protocol):
    """The interface of an optimizer for the learner."""

    def zero_(self) -> None:
        """Set the gradients to zero."""

    def sum_(self, ranks: Ranks) -> None:
        """Sum the gradients over `ranks`, unless the backward pass has done so."""

    def step(self, lr: float, clip: float) -> float:
        """Update the weights with the gradients, scaled to a norm of at most `clip`. Return the norm before scaling. Raises
        FloatingPointError, without an update, if the norm is not finite."""

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""


BETAS = (0.9, 0.95)
"""Betas of AdamW."""
ADAMW = OptimizerSettings()


class FlatOptimizer:
    """AdamW (arXiv 1711.05101) with decoupled decay and a learning rate per step. With the settings of Muon, Muon updates the
    parameters that `muon.matrices` finds, with the same rate and decay; they then come first in the flat vectors."""

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

    @torch.no_grad()
    def step(self, lr: float, clip: float) -> float:
        norm = float(torch.linalg.vector_norm(self.gradients, dtype=torch.float64))  # millions of squares
        require_finite(norm)
        if norm > clip:
            self.gradients.mul_(clip / norm)
        s = self._settings
        for weight_EAB, gradient_EAB, momentum_EAB in self._stacks:
            update_EAB = muon_update(momentum_EAB, gradient_EAB, momentum=s.momentum, steps=s.newton_schulz)
            weight_EAB.mul_(1 - lr * self._decay).sub_(update_EAB, alpha=lr)
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs, as flat tensors on the CPU."""
        state = {"master": self.master}
        if moments := self._adam.state.get(self._rest):
            state |= {name: torch.as_tensor(value) for name, value in moments.items()}
            state |= {"momentum": self._momentum} if self._stacks else {}
        return {name: value.cpu() for name, value in state.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Restore `state`. Raises ValueError, before any change, if it belongs to a model of another size or to another
        optimizer."""
        moments = {name: value for name, value in state.items() if name != "master"}
        known = {"step", "exp_avg", "exp_avg_sq", *(["momentum"] if self._stacks else [])}
        if state["master"].shape != self.master.shape:
            raise ValueError(
                f"the checkpoint holds {state['master'].numel()} weights, the model {self.master.numel()}: "
                "the model's settings changed since it was written"
            )
        if moments and moments.keys() != known:  # a state without moments is from before the first step
            raise ValueError(
                f"optimizer.name={self._settings.name!r}: the checkpoint holds {', '.join(sorted(moments))}, not "
                f"{', '.join(sorted(known))}; it was written with another optimiser: go on with that one, or begin a new run"
            )
        momentum = moments.pop("momentum", None)
        self._momentum.zero_() if momentum is None else self._momentum.copy_(momentum)
        self._adam.state[self._rest] = {n: x.to(self.master.device, copy=True) for n, x in moments.items()}
        self.master.copy_(state["master"])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        if self.published is not None:
            self.weights.copy_(self.master.to(self.published))


def require_finite(norm: float) -> None:
    """Raise FloatingPointError if the norm of the gradient is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}: training has diverged; lower lr")


def trapezoid(step: float, steps: float, warmup: float, constant: float, floor: float = 0.03) -> float:
    """Return a factor of the learning rate: rising over `warmup`, 1 until `constant` (shares of `steps`), falling to `floor`."""
    place = (step + 1) / steps
    if place < warmup:
        return place / warmup
    return 1.0 if place <= constant else floor + (1 - floor) * (1 - place) / (1 - constant)
