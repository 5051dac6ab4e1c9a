"""Explanation of a recipe on a device: back end, formats, instructions, and the reason.

The claims are checked: the ahead-of-time gate searches the compiled kernels for the patterns of `INSTRUCTIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composer_nb.kernels.moe.recipes import Format, Recipe, as_recipe
from composer_nb.kernels.triton_runtime import BackendName, choose, interpreting

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
"""Instructions of the products, by format and architecture, and their pattern in the compiled text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Back end, formats and instructions of a recipe. `str` returns a short text."""

    backend: BackendName
    device: str
    recipe: Recipe
    forward: str
    dgrad: str
    wgrad: str
    why: str

    def __str__(self) -> str:
        rows = (
            ("recipe", self.recipe.name),
            ("back end", f"{self.backend} on {self.device}: {self.why}"),
            ("forward", self.forward),
            ("gradients of inputs", self.dgrad),
            ("gradients of weights", self.wgrad),
        )
        return "\n".join(f"{name + ':':<22}{text}" for name, text in rows)


def architecture(device: torch.device) -> int:
    """Return the architecture: 90, 100, …; 0 if nothing is compiled for the device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def explain(
    recipe: str | Recipe = "bf16", *, device: torch.device | str | None = None, backend: str | None = None
) -> Explanation:
    """Return the back end, formats and instructions that `moe` would use, and why. `device`: by default a GPU if there is one,
    else the CPU.

    Raises ValueError, as `moe` does, for an unknown recipe or a back end that cannot run, and for a missing device."""
    chosen = as_recipe(recipe)
    where = _here(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name, why = choose(where, backend)
    arch = architecture(where)
    if arch:
        device_name = f"{torch.cuda.get_device_name(where)} (sm_{arch})"
    else:
        device_name = str(where)

    def product(format: Format | None) -> str:
        return f"{format or 'operands in their own dtype'}: {_instruction(name, format, arch)}"

    return Explanation(
        backend=name,
        device=device_name,
        recipe=chosen,
        forward=product(chosen.forward),
        dgrad=product(chosen.dgrad),
        wgrad=product(None),
        why=why,
    )


def _here(device: torch.device | str) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return where


def _instruction(name: BackendName, format: Format | None, arch: int) -> str:
    if name == "torch":
        return "torch's grouped GEMM" if format is None else "emulated: quantised, widened again, multiplied in float32"
    if interpreting() or not arch:
        return "Triton's interpreter: NumPy in float32"
    family = 100 if 100 <= arch < 110 else 90 if 90 <= arch < 100 else 0
    key: tuple[Format | None, int] = ("nvfp4" if format == "nvfp4_tensor" else format, family)
    return (
        INSTRUCTIONS[key][0]
        if key in INSTRUCTIONS
        else f"whatever Triton makes of it for sm_{arch}, which no gate has seen"
    )
