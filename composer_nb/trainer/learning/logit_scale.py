"""One number more to learn: the scale of all logits.

A policy that imitated an expert who makes mistakes is as unsure as he was, and samples worse than it decodes greedily. What mends
that is one direction in weight space, the final norm's gain as a whole. AdamW moves each weight by about the learning rate a
step whatever the gradient's size, so along that direction it gets on slowly. Here the direction has a parameter of its own, the
logarithm of the scale, with a rate of its own, which is folded into the gain after each step: the checkpoint, the engine and
everything else see nothing new.
"""

from __future__ import annotations

import math

import torch

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8
"""Adam's betas, as the weights have them."""


class LogScale:
    """Adam (arXiv 1412.6980, algorithm 1) on s, where a gain is g · exp(s)."""

    def __init__(self, rate: float) -> None:
        """`rate`: times the learning rate of the weights."""
        self.rate = rate
        self.moments = torch.zeros(4, dtype=torch.float64)
        """The slope's mean, that of its square, the steps made, and where they have led. All that a resumed run needs."""

    @property
    def scale(self) -> float:
        """The product of all factors so far."""
        return math.exp(float(self.moments[3]))

    def factor(self, slope: float, lr: float) -> float:
        """Return the factor of the gain after a step along the slope dL/ds = Σ g · dL/dg."""
        mean, square, steps, log = self.moments.tolist()
        mean, square, steps = FIRST * mean + (1 - FIRST) * slope, SECOND * square + (1 - SECOND) * slope**2, steps + 1
        unbiased = mean / (1 - FIRST**steps), square / (1 - SECOND**steps)
        move = -self.rate * lr * unbiased[0] / (math.sqrt(unbiased[1]) + EPS)
        self.moments.copy_(torch.tensor([mean, square, steps, log + move], dtype=torch.float64))
        return math.exp(move)
