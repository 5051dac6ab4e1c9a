"""What `bench_gpu.py` measures against: torch, `transformers`, Liger, torchao. One that is not there is a hole with a reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from composer_nb.kernels.formats.microscaling import e8m0_to_float, mx_quantize
from composer_nb.kernels.moe.plain import DispatchPlan
from scripts.bench.gpu_bench_tools import Form


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer: tokens, model width, expert width, experts, experts a token."""

    name: str
    n: int
    d: int
    i: int
    e: int
    k: int

    @property
    def flops(self) -> float:
        """Of the products of a forward pass."""
        return 6.0 * self.n * self.k * self.d * self.i


def peer(package: str, make: Callable[[], Form]) -> Form | str:
    """A form that needs a package; else why it is not there."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        return make()
    except Exception as error:  # another version, another API: a hole, not the end
        return f"{package} {metadata.version(package.replace('_', '-'))}: {type(error).__name__}: {str(error)[:100]}"


def loop_mm(a: Tensor, b: Tensor, plan: DispatchPlan) -> Tensor:
    """Return a product for each expert; the host has to know how many rows each has."""
    sizes = plan.ends_E.diff(prepend=plan.ends_E.new_zeros(1)).tolist()
    return torch.cat([rows @ w for rows, w in zip(a.split(sizes), b.unbind(), strict=True)])


def their_layer(s: Shape, backend: str) -> Callable[..., Tensor]:
    """`transformers`' Qwen3-MoE experts, with the arithmetic of their router."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    copied = 6 * s.n * s.k * s.d * s.i
    if backend == "batched_mm" and copied > 32 << 30:
        raise MemoryError(f"batched_mm would copy {copied >> 30} GiB of weights")
    config = Qwen3MoeConfig(
        hidden_size=s.d, moe_intermediate_size=s.i, num_experts=s.e, num_experts_per_tok=s.k, experts_implementation=backend
    )  # fmt: skip
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)

    def layer(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        gates, experts = logits.float().softmax(-1).topk(s.k, dim=-1)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        out: Tensor = torch.func.functional_call(
            module, {"gate_up_proj": w_up, "down_proj": w_down}, (x, experts, gates)
        )
        return out

    return layer


def liger_layer(s: Shape) -> Callable[..., Tensor]:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def layer(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        gates, experts = logits.float().softmax(-1).topk(s.k, dim=-1)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        out: Tensor = LigerFusedMoEFunction.apply(x, w_up, w_down, experts.int(), gates)
        return out

    return layer


def torchao_cast(x: Tensor, *, compiled: bool) -> Form:
    """By their kernel in Triton, or their definition through torch.compile."""
    from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    if not compiled:
        return lambda: triton_to_mxfp8_dim0(x, 32)
    cast = torch.compile(to_mx)
    return lambda: cast(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)


def blockwise_products(x: Tensor, up: Tensor, plan: DispatchPlan) -> Form:
    """torch's FP8 with scales of 1 × 128 and 128 × 128, a product an expert, for it has no grouped one; quantised, cut and laid
    out beforehand as cuBLAS wants it: scales of x columns first, those of w filled up to a multiple of four in a row."""
    from torch.nn.functional import ScalingType, scaled_mm

    qx, qw = mx_quantize(x, block=128), mx_quantize(up, block=128, rows=128)
    sizes = plan.ends_E.diff(prepend=plan.ends_E.new_zeros(1)).tolist()
    across = e8m0_to_float(qw.scale)
    padded = torch.nn.functional.pad(across, (0, -across.shape[-1] % 4))
    operands = [
        (x_RK, s_RB.t().contiguous().t(), w_NK.t(), s_NB.t())
        for x_RK, s_RB, w_NK, s_NB in zip(
            qx.qdata.split(sizes), e8m0_to_float(qx.scale).split(sizes), qw.qdata.unbind(), padded.unbind(), strict=True
        )
        if len(x_RK)
    ]

    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: torch.cat(
        [scaled_mm(x, w, s_x, kinds[0], s_w, kinds[1], output_dtype=torch.bfloat16) for x, s_x, w, s_w in operands]
    )


def rowwise_product(x: Tensor, up: Tensor, plan: DispatchPlan) -> Form:
    """torch's FP8 with a scale a row, quantised beforehand."""
    sx, sw = (t.abs().amax(-1).float() / 448 for t in (x, up))
    qx, qw = ((t / s[..., None]).to(torch.float8_e4m3fn) for t, s in ((x, sx), (up, sw)))
    return lambda: torch._scaled_grouped_mm(
        qx, qw.mT, sx, sw, offs=plan.ends_E, out_dtype=torch.bfloat16, use_fast_accum=True
    )
