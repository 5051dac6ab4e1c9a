"""Recipes: the number formats of the operands in each product of the experts.

                  forward                            gradients of inputs          gradients of weights
    bf16          as they are (bf16, float32, …)     as they are                  as they are
    mxfp8         e4m3, a power of two per 32        the same                     as they are
    fp8_block128  e4m3, a power of two per 128       the same                     as they are
    nvfp4         e2m1, e4m3 per 16, fp32 a row      mxfp8                        as they are
    nvfp4_fast    the same, divided by reciprocals   mxfp8                        as they are

mxfp8 is Cursor's recipe (scales rounded up). nvfp4 is the recipe of Composer 2's RL (technical report §6.1: NVFP4 forward to
match inference, MXFP8 backward). fp8_block128 is fast on Hopper's tensor cores, and its numbers are valid MXFP8. Gradients of
weights sum over tokens, along which blocks would cross from one expert to the next. They are computed in high precision from the
unquantized operands, as in torchao (`wgrad_with_hp`). Quantization itself has gradient 1.

Weights are quantized along the dimension of a product's sum: once for the forward and once, transposed, for the backward.

`explain` tells the back end, formats and instructions of a recipe on a device, and the reason. The claims are checked: the
ahead-of-time gate searches the compiled kernels for the patterns of `INSTRUCTIONS`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from composer_nb.kernels.formats.microscaling import MXTensor, NVFP4Tensor, Share, mx_quantize, nvfp4_quantize
from composer_nb.kernels.triton_runtime import BackendName, choose, interpreting

# Number format of one operand. nvfp4_tensor shares the float32 scale among all tokens, as NVIDIA's does; it exists to show the
# consequences, and nvfp4_fast divides by a reciprocal.
Format = Literal["mxfp8", "fp8_block128", "nvfp4", "nvfp4_tensor", "nvfp4_fast"]

RecipeName = Literal["bf16", "mxfp8", "fp8_block128", "nvfp4", "nvfp4_fast"]

Operand = Tensor | MXTensor | NVFP4Tensor

# Required divisor of the widths of a layer.
MULTIPLE: dict[Format, int] = {"mxfp8": 32, "fp8_block128": 128, "nvfp4": 32, "nvfp4_tensor": 32, "nvfp4_fast": 32}


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
    "nvfp4_fast": Recipe(name="nvfp4_fast", forward="nvfp4_fast", dgrad="mxfp8"),
}


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Return a recipe by name. Raises ValueError for a name that is not in `RECIPES`."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: must be one of {', '.join(RECIPES)}, or a Recipe")
    return RECIPES[recipe]


def quantise_rows(x_RK: Tensor, format: Format | None, backend: str | None = None) -> Operand:
    """Quantize activations or gradients in blocks along the last dimension, with separate scales for each row."""
    if format is None:
        return x_RK
    if format.startswith("nvfp4"):
        share: Share = "tensor" if format == "nvfp4_tensor" else "token"
        return nvfp4_quantize(x_RK, share=share, division="fast" if format == "nvfp4_fast" else "ieee", backend=backend)
    return mx_quantize(x_RK, block=32 if format == "mxfp8" else 128, backend=backend)


def quantise_weights(w_EBA: Tensor, format: Format | None, backend: str | None = None) -> Operand:
    """Quantize weights [E, out, in] like rows, but blocks of 128 are squares, so that both orientations have the same numbers."""
    if format == "fp8_block128":
        return mx_quantize(w_EBA, block=128, rows=128, backend=backend)
    return quantise_rows(w_EBA, "nvfp4" if format == "nvfp4_tensor" else format, backend)


def as_numbers(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return the numbers to multiply: a tensor unchanged, or a quantized operand in `dtype`."""
    return operand if isinstance(operand, Tensor) else operand.dequantize(dtype)


# Explanation

# Instructions of the products, by format and architecture, and their pattern in the compiled text.
INSTRUCTIONS: dict[tuple[Format | None, int], tuple[str, str]] = {
    (None, 90): ("wgmma in bf16, multiply-adds in float32", r"wgmma\.mma_async\S*\.bf16\.bf16"),
    (None, 100): ("tcgen05.mma in bf16, multiply-adds in float32", r"tcgen05\.mma\S*kind::f16"),
    ("mxfp8", 90): (
        "wgmma in bf16, on operands widened exactly in memory: Hopper has no block-scaled tensor core",
        r"wgmma\.mma_async\S*\.bf16\.bf16",
    ),
    ("mxfp8", 100): ("block-scaled tcgen05.mma (mxf8f6f4)", r"kind::mxf8f6f4\.block_scale"),
    ("fp8_block128", 90): ("wgmma in e4m3, sums moved to float32 every 128 of K", r"wgmma\.mma_async\S*\.e4m3\.e4m3"),
    ("fp8_block128", 100): ("tcgen05.mma in e4m3 (f8f6f4)", r"tcgen05\.mma\S*kind::f8f6f4"),
    ("nvfp4", 90): (
        "wgmma in bf16, on operands widened exactly in memory: Hopper has no FP4",
        r"wgmma\.mma_async\S*\.bf16\.bf16",
    ),
    ("nvfp4", 100): ("block-scaled tcgen05.mma (mxf4nvf4)", r"kind::mxf4nvf4\.block_scale"),
}


def architecture(device: torch.device) -> int:
    """Return the architecture: 90, 100, …; 0 if nothing is compiled for the device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def explain(
    recipe: str | Recipe = "bf16", *, device: torch.device | str | None = None, backend: str | None = None
) -> str:
    """Return a text about the back end, formats and instructions that `moe` would use, and why. `device`: by default a GPU if
    there is one, else the CPU.

    Raises ValueError, as `moe` does, for an unknown recipe or a back end that cannot run, and for a missing device."""
    formats = as_recipe(recipe)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    (backend_name, reason), arch = choose(target, backend), architecture(target)
    device_name = f"{torch.cuda.get_device_name(target)} (sm_{arch})" if arch else str(target)
    rows = {"recipe": formats.name, "back end": f"{backend_name} on {device_name}: {reason}"}
    products = {"forward": formats.forward, "gradients of inputs": formats.dgrad, "gradients of weights": None}
    for product, format in products.items():
        rows[product] = f"{format or 'operands in their own dtype'}: {_instruction(backend_name, format, arch)}"
    return "\n".join(f"{row + ':':<22}{text}" for row, text in rows.items())


def _instruction(name: BackendName, format: Format | None, arch: int) -> str:
    if name == "torch":
        return "torch's grouped GEMM" if format is None else "emulated: quantised, widened again, multiplied in float32"
    if interpreting() or not arch:
        return "Triton's interpreter: NumPy in float32"
    family = 100 if 100 <= arch < 110 else 90 if 90 <= arch < 100 else 0
    unseen = f"whatever Triton makes of it for sm_{arch}, which no gate has seen", ""
    return INSTRUCTIONS.get(("nvfp4" if format and format.startswith("nvfp4") else format, family), unseen)[0]
