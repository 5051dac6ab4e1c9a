"""Optimisers over one flat vector of all weights.

The model's parameters and gradients are views of flat buffers, so that one sum serves all ranks, one norm all tensors, and a
checkpoint is a few vectors. With a published dtype the optimiser keeps float32 master weights while the model holds them as
the engine gets them: rounded to that dtype, and computed with in float32. Gradients are taken at the published weights and
applied to the masters, so what the trainer scores is exactly what the engine sampled from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composer_nb.trainer.learning.logit_scale import LogScale
from composer_nb.trainer.learning.ranks import Ranks


class Optimizer(Protocol):
    """What a learner asks of one."""

    def zero_(self) -> None:
        """Forgets the gradients."""

    def sum_(self, ranks: Ranks) -> None:
        """Sums the gradients over `ranks`, if the backward pass has not."""

    def step(self, lr: float, clip: float) -> float:
        """One update with the gradients, scaled to a norm of at most `clip`. Returns the norm before. Raises FloatingPointError,
        with the weights as they were, when it is not a finite number."""

    @property
    def logit_scale(self) -> float:
        """By what the learnt scale has multiplied all logits since the start; 1 where there is none."""

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes up where `state` was taken."""


Scaled = tuple[nn.Parameter, float]
"""A parameter whose scale learns by itself, and how many times as fast as a weight (`sharpness.py`); 0: it does not."""


class FlatOptimizer(ABC):
    """The buffers, the clipping and the masters; how a step moves the masters is the subclass's."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], published: torch.dtype | None, scaled: Scaled | None = None
    ) -> None:
        """The parameters become views of the flat vector, in the order given. `published` is the dtype that the model's weights
        are rounded to after each step, None to leave them as they are."""
        self.published = published
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradients = torch.zeros_like(self.weights)
        offset = 0
        self._scaled: tuple[slice, LogScale] | None = None
        for parameter in parameters:
            cut = slice(offset, offset + parameter.numel())
            parameter.data = self.weights[cut].view_as(parameter)
            parameter.grad = self.gradients[cut].view_as(parameter)
            offset += parameter.numel()
            if scaled is not None and parameter is scaled[0] and scaled[1]:
                self._scaled = cut, LogScale(scaled[1])
        self.master = nn.Parameter(self.weights.clone() if published else self.weights)
        self.master.grad = self.gradients
        self._publish()

    def zero_(self) -> None:
        self.gradients.zero_()

    def sum_(self, ranks: Ranks) -> None:
        """Sums the gradients over `ranks`."""
        ranks.sum_(self.gradients)

    def step(self, lr: float, clip: float) -> float:
        """One update with the gradients that lie in the buffer, scaled to a norm of at most `clip`. Returns the norm
        before. Raises FloatingPointError, with the weights as they were, when it is not a finite number."""
        norm = float(torch.linalg.vector_norm(self.gradients, dtype=torch.float64))  # millions of squares
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}: training has diverged; lower lr")
        if norm > clip:
            self.gradients.mul_(clip / norm)
        if self._scaled is not None:
            cut, scale = self._scaled
            self.master.detach()[cut] *= scale.factor(float(self.gradients[cut] @ self.weights[cut]), lr)
        self._update(lr)
        self._publish()
        return norm

    @abstractmethod
    def _update(self, lr: float) -> None:
        """Moves the masters by the gradients."""

    @abstractmethod
    def _moments(self) -> dict[str, Tensor]:
        """What is kept beside the masters, as flat tensors."""

    @abstractmethod
    def _take(self, moments: dict[str, Tensor]) -> None:
        """The inverse of `_moments`. Raises ValueError for those of another optimiser, before it changes anything."""

    @property
    def logit_scale(self) -> float:
        """See `Optimizer`."""
        return 1.0 if self._scaled is None else self._scaled[1].scale

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as flat tensors."""
        scale = {} if self._scaled is None else {"scale": self._scaled[1].moments}
        return {"master": self.master.detach(), **self._moments(), **scale}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Takes up where `state` was taken. Raises ValueError when it belongs to a model of another size, to another
        optimiser, or to one whose scale learnt where this one's does not."""
        if state["master"].shape != self.master.shape:
            raise ValueError(
                f"the checkpoint holds {state['master'].numel()} weights, the model {self.master.numel()}: "
                "the model's settings changed since it was written"
            )
        if ("scale" in state) != (self._scaled is not None):
            raise ValueError("rl.scale_rate: 0 here and not in the checkpoint, or the other way round; begin a new run")
        self._take({name: value for name, value in state.items() if name not in ("master", "scale")})
        self.master.copy_(state["master"])
        if self._scaled is not None:
            self._scaled[1].moments.copy_(state["scale"])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        if self.published is not None:
            self.weights.copy_(self.master.to(self.published))


class FlatAdamW(FlatOptimizer):
    """AdamW (arXiv 1711.05101) with the learning rate given at each step; betas are 0.9 and 0.95, `weight_decay` is
    decoupled."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        published: torch.dtype | None = None,
        scaled: Scaled | None = None,
    ) -> None:
        super().__init__(list(model.parameters()), published, scaled)
        self._adam = adamw(self.master, weight_decay)

    def _update(self, lr: float) -> None:
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()

    def _moments(self) -> dict[str, Tensor]:
        return {name: torch.as_tensor(value) for name, value in self._adam.state.get(self.master, {}).items()}

    def _take(self, moments: dict[str, Tensor]) -> None:
        require_moments(moments, {"step", "exp_avg", "exp_avg_sq"}, "adamw")
        self._adam.state[self.master] = {name: value.clone() for name, value in moments.items()}


def adamw(flat: nn.Parameter, weight_decay: float) -> torch.optim.AdamW:
    """torch's, of one vector."""
    return torch.optim.AdamW([flat], lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)


def require_moments(moments: dict[str, Tensor], known: set[str], name: str) -> None:
    """Raises ValueError when a checkpoint has other moments than the optimiser `name` (none at all: it has made no step)."""
    if moments and moments.keys() != known:
        raise ValueError(
            f"optimizer.name={name!r}: the checkpoint holds {', '.join(sorted(moments))}, not {', '.join(sorted(known))}; "
            "it was written with another optimiser: go on with that one, or begin a new run"
        )


def trapezoid(step: float, steps: float, warmup: float, constant: float, floor: float = 0.03) -> float:
    """Factor of the learning rate: up linearly over `warmup`, 1 until `constant` (shares of `steps`), down to `floor`."""
    place = (step + 1) / steps
    if place < warmup:
        return place / warmup
    return 1.0 if place <= constant else floor + (1 - floor) * (1 - place) / (1 - constant)
