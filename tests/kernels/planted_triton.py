"""Kernels with what the compile gate must catch, and one with nothing; `SPECS` as in the package."""

import triton
import triton.language as tl

from scripts.bench.aot import Expect, Spec


@triton.jit
def scaled_by_sum_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """All of x is needed until all of it was read: 256 numbers a thread."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * tl.sum(x))


@triton.jit
def copy_kernel(x_ptr, y_ptr, rows, width, N: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    c = tl.dot(tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j), input_precision="ieee")
    tl.store(c_ptr + i * N + j, c)


@triton.jit
def broken_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).nothing())


WGMMA = Expect(ptx={90: r"wgmma\.mma_async"})


def dot(name: str, dtype: str, width: int) -> Spec:
    types = {"a_ptr": dtype, "b_ptr": dtype, "c_ptr": "*fp32"}
    return Spec(name=name, kernel=dot_kernel, types=types, constants={"N": width}, architectures=(90,), expect=WGMMA)


def pointers(kernel: object, name: str, *numbers: str, odd: tuple[str, ...] = (), width: int, warps: int) -> Spec:
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", **dict.fromkeys(numbers, "i32")}
    return Spec(
        name=name, kernel=kernel, types=types, constants={"N": width}, odd=odd, warps=warps, architectures=(90,)
    )


SPECS = (
    dot("good", "*bf16", 64),
    pointers(copy_kernel, "wide", "rows", "width", odd=("rows",), width=1024, warps=4),
    pointers(scaled_by_sum_kernel, "spill", width=8192, warps=1),
    pointers(copy_kernel, "narrow", "rows", "width", odd=("rows", "width"), width=1024, warps=4),
    dot("no tensor core", "*fp32", 32),
    Spec(name="broken", kernel=broken_kernel, types={"x_ptr": "*fp32"}, architectures=(90,)),
)
