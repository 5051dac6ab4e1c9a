"""One number more to learn: the scale of all logits.

A policy that imitated an expert who makes mistakes is as unsure as he was, and samples worse than it decodes greedily. What mends
that is one direction in weight space, the final norm's gain as a whole. AdamW moves each weight by about the learning rate a
step whatever the gradient's size, so along that direction it gets on slowly. Here the direction has a parameter of its own, the
logarithm of the scale, with a rate of its own, which is folded into the gain after each step: the checkpoint, the engine and
everything else see nothing new.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LogScale:
    """Adam (arXiv 1412.6980; betas 0.9 and 0.95, as the weights have) on s, where a gain is g · exp(s)."""

    def __init__(self, place: slice, rate: float) -> None:
        """`place`: of the gain in the flat vector of weights; `rate`: times the learning rate of the weights."""
        self.place, self.rate = place, rate
        self._log = nn.Parameter(torch.zeros(()))
        self._adam = torch.optim.Adam([self._log], lr=0.0, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self, master: Tensor, gradients: Tensor, weights: Tensor, lr: float) -> None:
        """Scales the gain in `master`, by the gradients that were taken at `weights`: dL/ds = Σ g · dL/dg."""
        self._log.grad = gradients[self.place] @ weights[self.place]
        self._adam.param_groups[0]["lr"] = self.rate * lr
        self._adam.step()
        master[self.place] *= self._log.exp()
        self._log.zero_()

    def state(self) -> dict[str, Tensor]:
        """Moments, by names beside those of the weights."""
        return {f"scale.{name}": value for name, value in self._adam.state.get(self._log, {}).items()}

    def load(self, state: dict[str, Tensor]) -> None:
        own = {name.removeprefix("scale."): value.clone() for name, value in state.items() if name.startswith("scale.")}
        self._adam.state[self._log] = own
