"""Gradients as one vector each: to look at, not to learn from."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def flat_gradient(of: Tensor, weights: Sequence[Tensor], slope: Tensor | None = None) -> Tensor:
    """Return the gradient [W] of `of`, times `slope` where it has several elements. The graph stays for further gradients."""
    parts = torch.autograd.grad(of, weights, slope, retain_graph=True)
    return torch.cat([part.reshape(-1) for part in parts])


def cosine(first: Tensor, other: Tensor) -> float:
    """Return the cosine of the angle between two gradients; NaN where one of them is zero."""
    lengths = first.double().norm() * other.double().norm()
    return float(first.double() @ other.double() / lengths)


def inner_products(rows_VD: Tensor, width: int = 1 << 17) -> NDArray[np.float64]:
    """Return the inner products [V, V], summed in float64, one block of columns after another."""
    gram_VV = torch.zeros(len(rows_VD), len(rows_VD), dtype=torch.float64)
    for block in rows_VD.split(width, dim=1):
        wide = block.double()
        gram_VV += wide @ wide.T
    return gram_VV.numpy()
