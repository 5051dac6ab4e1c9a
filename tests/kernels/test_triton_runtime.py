"""What the interpreter computes once it is repaired; and who computes what."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from composer_nb.kernels import triton_runtime
from composer_nb.kernels.triton_runtime import choose

pytest.importorskip("triton", reason="no Triton here; it has wheels for Linux")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton_runtime.interpreting(), reason="kernels are compiled here, not interpreted")


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + i * N + j), tl.load(b_ptr + i * N + j)
    tl.store(c_ptr + i * N + j, tl.dot(a, b))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, y, N=len(x))
    return y


def hard(count: int = 1024) -> Tensor:
    """Numbers where casts go wrong: carries, ties, and what is below the normal numbers."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    x[: count // 2] *= 2.0 ** torch.randint(-10, 9, (count // 2,), generator=torch.Generator().manual_seed(1))
    x[0], x[1], x[2] = 127.7, 1.0625, 0.0029
    return x


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_casts_round_to_nearest(dtype: torch.dtype):
    x = hard()
    assert torch.equal(cast(x, dtype).float(), x.to(dtype).float())
    beyond = torch.tensor([1e9, -1e9, float("nan"), -float("nan")])
    if dtype != torch.bfloat16:
        largest = torch.finfo(dtype).max
        rounded = cast(beyond, dtype)
        assert rounded.float()[:2].tolist() == [largest, -largest], "float8 saturates"
        assert rounded.view(torch.uint8)[2:].tolist() == [0x7F, 0x7F], "and its NaN has no sign"


def test_bfloat16_products_are_of_numbers():
    a, b = torch.randn(2, 16, 16).bfloat16()
    c = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, c, N=16)
    assert (c - a.double() @ b.double()).abs().max() < 1e-5


# -- who computes --------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(triton_runtime.VARIABLE, raising=False)
    yield


def test_on_a_cpu_it_is_torch_unless_the_interpreter_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    assert choose(CPU)[0] == "torch"
    assert choose(CPU, "triton") == ("triton", "backend asks for it, in its interpreter")
    monkeypatch.setenv(triton_runtime.VARIABLE, "triton")
    assert choose(CPU) == ("triton", f"{triton_runtime.VARIABLE} asks for it, in its interpreter")
    assert choose(CPU, "torch")[0] == "torch"
    with monkeypatch.context() as unrepaired:
        unrepaired.setattr(triton_runtime, "interpreter_is_repaired", False)
        with pytest.raises(ValueError, match="the interpreter is wrong in casts and products"):
            choose(CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="the device is a CPU, where kernels run only in Triton's interpreter"):
        choose(CPU)
    with pytest.raises(ValueError, match="backend='gpu': must be one of torch, triton"):
        choose(CPU, "gpu")
    monkeypatch.setattr(triton_runtime, "triton_version", lambda: None)
    with pytest.raises(ValueError, match="triton is not installed; 'torch' computes the same"):
        choose(CPU, "triton")


@pytest.mark.parametrize("capability, expected", [((8, 9), "torch"), ((9, 0), "triton"), ((10, 0), "triton")])
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda", 0)
    assert choose(gpu)[0] == expected
    if expected == "torch":
        with pytest.raises(ValueError, match=r"this GPU has compute capability 8\.9, kernels need 9\.0"):
            choose(gpu, "triton")


def test_nothing_imports_triton_before_a_kernel_runs():
    import subprocess

    program = """
import sys, torch
from composer_nb.kernels.formats.microscaling import mx_quantize, nvfp4_quantize
x = torch.randn(2, 32)
mx_quantize(x), nvfp4_quantize(x)
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
