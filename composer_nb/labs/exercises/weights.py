"""Exercises about deltas of weights, and the scale of a block of numbers."""

import numpy as np
import torch
from torch import Tensor

from composer_nb.kernels.delta.codec import bits
from composer_nb.kernels.formats.microscaling import Rule, e8m0_to_float, mx_quantize_reference
from composer_nb.labs.exercises.exercise import Exercise, Function, normal
from composer_nb.labs.weights import expected_density, spacing

# A delta


def delta(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    position_C = torch.from_numpy(np.flatnonzero(bits(before) != bits(after)))
    return position_C, after[position_C]


def of_delta(function: Function, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of a delta, and the bits of its values, both also if they come in a column, as from `nonzero`."""
    position_C, value_C = function(before, after)
    return position_C.flatten(), value_C.to(before.dtype).view(torch.int16).flatten()


BEFORE = torch.tensor([1.0, 0.0, -3.0, 0.25, 1e-3, 300.0], dtype=torch.bfloat16)
AFTER = torch.tensor([1.0, -0.0, -3.03125, 0.25, 7.0, 300.0], dtype=torch.bfloat16)


def differences(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """These values are differences. Added in bf16 they are rounded, and the engine ends with other bits. Send the new values."""
    position_C, value_C = delta(before, after)
    return position_C, value_C - before[position_C]


def of_numbers(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """A weight that went from 0 to −0 is missing: as numbers the two are equal, but their bits differ. Compare
    `tensor.view(torch.int16)`."""
    return (before != after).nonzero()[:, 0], after[before != after]


def everything(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """All weights are sent. A delta holds those that changed."""
    return torch.arange(len(after)), after


DELTA = Exercise(
    delta, (BEFORE, AFTER), (BEFORE, BEFORE), observe=of_delta, mistakes=(differences, of_numbers, everything)
)


# The share of weights that a step changes


def unbounded(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """A probability is above 1 here. A step that is longer than the spacing surely changes its weight: cut at 1."""
    return float((lr * directions.abs() / spacing(masters, dtype)).mean())


def downhill(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """A step down counts as less than nothing here. It changes a weight as well as one up: take |u|."""
    return float((lr * directions / spacing(masters, dtype)).clamp_max(1).mean())


def from_the_middle(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """This asks whether a step leaves a cell from its middle. A master may lie anywhere in its cell, so the chance grows with the
    length of the step."""
    return float((lr * directions.abs() > spacing(masters, dtype) / 2).double().mean())


def of_half_a_cell(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """This divides by half a spacing. A cell is a whole spacing wide: a step of half of it leaves the cell from half of its
    places."""
    return float((2 * lr * directions.abs() / spacing(masters, dtype)).clamp_max(1).double().mean())


EXPECTED_DENSITY = Exercise(
    expected_density,
    *((normal(64) / 50, normal(64, seed=1), lr, torch.bfloat16) for lr in (3e-6, 1e-4)),
    mistakes=(unbounded, downhill, from_the_middle, of_half_a_cell),
)


# The scale of a block


def block_scale(x_BK: Tensor, rule: Rule = "rceil") -> Tensor:
    return e8m0_to_float(mx_quantize_reference(x_BK, rule=rule).scale[:, 0])


BLOCKS = normal(6, 32).clamp(-1, 1) * 1e-4
BLOCKS[:, 5] = torch.tensor([1.9, -1.2, 460.0, -448.0, 2.0, 1e-3])


def ocp_floor(x_BK: Tensor) -> Tensor:
    """This is OCP's older rule, 2^(⌊log2 a⌋ − 8). Where the mantissa of a is above 1.75 the largest values saturate: round the
    exponent of a / 448 up."""
    return block_scale(x_BK, "floor")


def any_number(x_BK: Tensor) -> Tensor:
    """The scale must be a power of two, because its byte holds only an exponent."""
    return x_BK.abs().amax(1) / 448


def nearest(x_BK: Tensor) -> Tensor:
    """Rounded to the nearest power of two, every second scale is too small and its block saturates. Round up."""
    return any_number(x_BK).log2().round().exp2()


def signed(x_BK: Tensor) -> Tensor:
    """The largest *magnitude* counts: a large negative number saturates as well."""
    return (x_BK.amax(1) / 448).log2().ceil().exp2()


def exponents(x_BK: Tensor) -> Tensor:
    """These are the exponents of the scales. Return the powers of two themselves: `exp2`."""
    return block_scale(x_BK).log2()


def factors(x_BK: Tensor) -> Tensor:
    """These are factors, one over the scales. A block is *divided* by its scale."""
    return 1 / block_scale(x_BK)


BLOCK_SCALE = Exercise(block_scale, (BLOCKS,), mistakes=(ocp_floor, any_number, nearest, signed, exponents, factors))
