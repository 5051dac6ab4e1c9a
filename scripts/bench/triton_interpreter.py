"""Triton's interpreter, put right: it computes wrongly what the package's kernels rest on.

`repair` replaces

1. casts to float8 and bfloat16, which lose the carry of rounding, truncate, and are wrong below the normal numbers: by torch's,
   to nearest with ties to even, saturating as the hardware does;
2. `tl.dot` of bfloat16, which multiplies the bits as integers;
3. `tl.dot_scaled`, which is missing: by dequantisation and a product in float32;
4. arithmetic on bfloat16 and float8, which also works on bits as integers: refused. Kernels compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_nb.kernels import triton_runtime
from composer_nb.kernels.formats.microscaling import e2m1_to_float, e8m0_to_float, unpack_e2m1
from composer_nb.kernels.triton_runtime import interpreting, triton_version

KNOWN = ("3.6", "3.7")
"""Versions of Triton whose interpreter was read and is repaired; others are refused."""

ORIGINAL: dict[str, Callable[..., Any]] = {}
"""The replaced functions, by name."""


def repair() -> None:
    """Put the interpreter right, once; without effect where kernels are compiled. Raises RuntimeError for an unknown version."""
    if ORIGINAL or not interpreting():
        return
    version = triton_version() or "none"
    if not version.startswith(tuple(f"{checked}." for checked in KNOWN)):
        raise RuntimeError(f"the interpreter of Triton {version} was never checked; {', '.join(KNOWN)} were")
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    for owner, name, replacement in (
        (interpreter, "_convert_float", convert_float),
        (builder, "create_dot", _create_dot),
        (builder, "binary_op", _binary_op),
        (TritonSemantic, "dot_scaled", _dot_scaled),
    ):
        ORIGINAL[name] = getattr(owner, name)
        setattr(owner, name, replacement)
    builder.create_dot_scaled = _create_dot_scaled
    triton_runtime.interpreter_is_repaired = True


@cache
def _torch_types() -> dict[Any, torch.dtype]:
    import triton.language as tl

    return {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
    }


def as_tensor(data: np.ndarray, dtype: Any) -> Tensor:
    """The interpreter's array of bits or numbers, as a tensor of Triton's type `dtype`."""
    bits = np.array(data, order="C", ndmin=1).view(f"i{data.itemsize}")
    return torch.from_numpy(bits).view(_torch_types()[dtype]).reshape(data.shape)


def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """A cast between floating point types as a GPU does it: to nearest, ties to even, float8 saturating and NaN positive;
    bfloat16 also towards zero. Takes and gives the interpreter's arrays."""
    from triton._C.libtriton import ir

    types = _torch_types()
    if source not in types or target not in types:
        converted: np.ndarray = ORIGINAL["_convert_float"](data, source, target, rounding)
        return converted
    wide = as_tensor(data, source)
    wide = wide.float() if wide.itemsize < 4 else wide
    if types[target].itemsize == 1:
        largest = torch.finfo(types[target]).max
        wide = torch.where(wide.isnan(), wide.abs(), wide.clamp(-largest, largest))
    elif types[target] == torch.bfloat16 and rounding == ir.ROUNDING_MODE.RTZ:
        wide = (wide.float().view(torch.int32) & -0x10000).view(torch.float32)
    out = wide.to(types[target])
    return out.view(getattr(torch, f"int{8 * out.itemsize}")).numpy().view(f"u{out.itemsize}").reshape(data.shape)


def _widened(handle: Any) -> Any:
    """A handle of bfloat16 or float8 as one of float32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not _is_bits(handle):
        return handle
    return TensorHandle(as_tensor(handle.data, handle.dtype.scalar).float().numpy(), tl.float32)


def _is_bits(handle: Any) -> bool:
    """Whether the interpreter holds these numbers as the bits of a type that NumPy has not."""
    dtype = handle.dtype.scalar
    return bool(dtype.is_floating()) and handle.data.dtype.kind == "u"


def _create_dot(self: Any, a: Any, b: Any, *others: Any, **named: Any) -> Any:
    return ORIGINAL["create_dot"](self, _widened(a), _widened(b), *others, **named)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if _is_bits(lhs) or _is_bits(rhs):
        raise TypeError(
            f"{op.__name__} of {lhs.dtype} and {rhs.dtype}: the interpreter has it only in float32 and wider"
        )
    return ORIGINAL["binary_op"](self, lhs, rhs, op)


def _dot_scaled(self: Any, *args: Any) -> Any:
    """Formats come as plain strings from a kernel that is interpreted."""
    import triton.language as tl

    return ORIGINAL["dot_scaled"](
        self, *(tl.constexpr(argument) if isinstance(argument, str) else argument for argument in args)
    )


def _create_dot_scaled(
    self: Any, lhs: Any, lhs_scale: Any, lhs_type: Any, rhs: Any, rhs_scale: Any, rhs_type: Any, *others: Any
) -> Any:
    """acc + (lhs · its scales) @ (rhs · its scales) in float32. lhs [M, K] or packed [M, K / 2], rhs [K, N] or [K / 2, N];
    scales [M, K / block] and [N, K / block], E8M0 as uint8 or e4m3."""
    from triton.runtime.interpreter import TensorHandle

    _fast_math, lhs_k_pack, rhs_k_pack, acc = others
    if not (lhs_k_pack and rhs_k_pack):
        raise NotImplementedError("float4 packed along another dimension than the summed one")
    left = _dequantized(lhs.data, lhs_scale, lhs_type)
    right = _dequantized(np.swapaxes(rhs.data, -1, -2), rhs_scale, rhs_type)
    return TensorHandle((left @ right.mT).numpy() + acc.data, acc.dtype.scalar)


def _dequantized(data: np.ndarray, scale: Any, kind: Any) -> Tensor:
    import triton.language as tl

    form = kind.name.lower()
    if form == "e2m1":
        value = e2m1_to_float(unpack_e2m1(torch.from_numpy(np.array(data, order="C"))))
    else:
        types = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "bf16": tl.bfloat16, "fp16": tl.float16}
        value = as_tensor(data, types[form]).float()
    if scale is None:
        return value
    bits = np.array(scale.data, order="C")
    if scale.dtype.scalar == tl.float8e4nv:
        factor = as_tensor(bits, tl.float8e4nv).float()
    else:
        factor = e8m0_to_float(torch.from_numpy(bits.view(np.uint8)))
    return value * factor.repeat_interleave(value.shape[-1] // factor.shape[-1], -1)
