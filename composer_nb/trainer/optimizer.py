"""AdamW over one flat vector of all weights.

The model's parameters and gradients are views of flat buffers, so that one sum serves all ranks, one norm all tensors, and a
checkpoint is three vectors. With a published dtype the optimiser keeps float32 master weights while the model holds them as
the engine gets them: rounded to that dtype, and computed with in float32. Gradients are taken at the published weights and
applied to the masters, so what the trainer scores is exactly what the engine sampled from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from composer_nb.trainer.ranks import Ranks


class FlatAdamW:
    """AdamW (arXiv 1711.05101) with the learning rate given at each step.

    betas are 0.9 and 0.95; `weight_decay` is decoupled. `published` is the dtype that the model's weights are rounded to
    after each step, None to leave them as they are.
    """

    def __init__(self, model: nn.Module, *, weight_decay: float = 0.0, published: torch.dtype | None = None) -> None:
        parameters = list(model.parameters())
        self.published = published
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradients = torch.zeros_like(self.weights)
        offset = 0
        for parameter in parameters:
            cut = slice(offset, offset + parameter.numel())
            parameter.data = self.weights[cut].view_as(parameter)
            parameter.grad = self.gradients[cut].view_as(parameter)
            offset += parameter.numel()
        self.master = nn.Parameter(self.weights.clone() if published else self.weights)
        self.master.grad = self.gradients
        self._adam = torch.optim.AdamW([self.master], lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
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
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as flat tensors."""
        moments = self._adam.state.get(self.master, {})
        return {
            "master": self.master.detach(),
            **{name: torch.as_tensor(value) for name, value in moments.items()},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Takes up where `state` was taken. Raises ValueError when it belongs to a model of another size."""
        if state["master"].shape != self.master.shape:
            raise ValueError(
                f"the checkpoint holds {state['master'].numel()} weights, the model {self.master.numel()}: "
                "the model's settings changed since it was written"
            )
        self.master.copy_(state["master"])
        self._adam.state[self.master] = {name: value.clone() for name, value in state.items() if name != "master"}
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        if self.published is not None:
            self.weights.copy_(self.master.to(self.published))


def trapezoid(step: float, steps: float, warmup: float, constant: float, floor: float = 0.03) -> float:
    """Factor of the learning rate: up linearly over `warmup`, 1 until `constant` (shares of `steps`), down to `floor`."""
    place = (step + 1) / steps
    if place < warmup:
        return place / warmup
    return 1.0 if place <= constant else floor + (1 - floor) * (1 - place) / (1 - constant)
