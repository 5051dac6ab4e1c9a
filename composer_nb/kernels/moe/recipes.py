"""Recipes: the number formats of the operands in each product of the experts.

                  forward                            gradients of inputs          gradients of weights
    bf16          as they are (bf16, float32, …)     as they are                  as they are
    mxfp8         e4m3, a power of two per 32        the same                     as they are
    fp8_block128  e4m3, a power of two per 128       the same                     as they are
    nvfp4         e2m1, e4m3 per 16, fp32 a row      mxfp8                        as they are

mxfp8 is Cursor's recipe (scales rounded up). nvfp4 is the recipe of Composer 2's RL (technical report §6.1: NVFP4 forward to
match inference, MXFP8 backward). fp8_block128 is fast on Hopper's tensor cores, and its numbers are valid MXFP8. Gradients of
weights sum over tokens, along which blocks would cross from one expert to the next. They are computed in high precision from the
unquantized operands, as in torchao (`wgrad_with_hp`). Quantization itself has gradient 1.

Weights are quantized along the dimension of a product's sum: once for the forward and once, transposed, for the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from composer_nb.kernels.formats.microscaling import MXTensor, NVFP4Tensor, mx_quantize, nvfp4_quantize

Format = Literal["mxfp8", "fp8_block128", "nvfp4", "nvfp4_tensor"]
"""Number format of one operand. nvfp4_tensor shares the float32 scale among all tokens, as NVIDIA's does; it exists to show the
consequences."""

RecipeName = Literal["bf16", "mxfp8", "fp8_block128", "nvfp4"]

Operand = Tensor | MXTensor | NVFP4Tensor

MULTIPLE: dict[Format, int] = {"mxfp8": 32, "fp8_block128": 128, "nvfp4": 32, "nvfp4_tensor": 32}
"""Required divisor of the widths of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Formats of the operands; None: not quantized, in their own dtype."""

    name: str
    forward: Format | None = None
    dgrad: Format | None = None

    @property
    def multiple(self) -> int:
        return max((MULTIPLE[number] for number in (self.forward, self.dgrad) if number), default=1)


RECIPES: dict[RecipeName, Recipe] = {
    "bf16": Recipe(name="bf16"),
    "mxfp8": Recipe(name="mxfp8", forward="mxfp8", dgrad="mxfp8"),
    "fp8_block128": Recipe(name="fp8_block128", forward="fp8_block128", dgrad="fp8_block128"),
    "nvfp4": Recipe(name="nvfp4", forward="nvfp4", dgrad="mxfp8"),
}


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Return a recipe by name. Raises ValueError for a name that is not in `RECIPES`."""
    if isinstance(recipe, Recipe):
        return recipe
    match = next((candidate for name, candidate in RECIPES.items() if name == recipe), None)
    if match is None:
        raise ValueError(f"recipe={recipe!r}: must be one of {', '.join(get_args(RecipeName))}, or a Recipe")
    return match


def quantise_rows(x_RK: Tensor, format: Format | None, backend: str | None = None) -> Operand:
    """Quantize activations or gradients in blocks along the last dimension, with separate scales for each row."""
    if format is None:
        return x_RK
    if format in ("nvfp4", "nvfp4_tensor"):
        return nvfp4_quantize(x_RK, share="token" if format == "nvfp4" else "tensor", backend=backend)
    return mx_quantize(x_RK, block=32 if format == "mxfp8" else 128, backend=backend)


def quantise_weights(w_EBA: Tensor, format: Format | None, backend: str | None = None) -> Operand:
    """Quantize weights [E, out, in] like rows, but blocks of 128 are squares, so that both orientations have the same numbers."""
    if format is None:
        return w_EBA
    if format == "fp8_block128":
        return mx_quantize(w_EBA, block=128, rows=128, backend=backend)
    return quantise_rows(w_EBA, "nvfp4" if format == "nvfp4_tensor" else format, backend)


def as_numbers(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return the numbers to multiply: a tensor unchanged, or a quantized operand in `dtype`."""
    return operand if isinstance(operand, Tensor) else operand.dequantize(dtype)
