"""The steps of an expert layer in Triton kernels. `plain.PlainSteps` specifies each step."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_nb.kernels.formats.microscaling import MXTensor, NVFP4Tensor
from composer_nb.kernels.formats.quantize_triton import widened
from composer_nb.kernels.moe import grouped_gemm_triton, routing_triton, rows_triton
from composer_nb.kernels.moe.plain import DispatchPlan, PlainSteps
from composer_nb.kernels.moe.recipes import Format, Operand
from composer_nb.kernels.moe.scaled_gemm_triton import rows_global, scaled_product


class TritonSteps(PlainSteps):
    """Steps in Triton kernels. `architecture` is 90, 100, …, or 0 in the interpreter. One without block-scaled products widens
    their operands."""

    backend = "triton"

    def __init__(self, architecture: int = 0) -> None:
        super().__init__()
        self.widen = 0 < architecture < 100

    def choose(self, logits_NE: Tensor, k: int) -> Tensor:
        return routing_triton.choose(logits_NE, k).long()

    def plan(self, experts_NK: Tensor, experts: int) -> DispatchPlan:
        return routing_triton.plan(experts_NK, experts)

    def product(self, x: Operand, w: Operand, plan: DispatchPlan, *, gather: bool, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor) and isinstance(w, Tensor):
            return grouped_gemm_triton.product(x, w, plan, gather=gather, dtype=dtype)
        assert not isinstance(x, Tensor) and not isinstance(w, Tensor), "both sides are of one format"
        if not self.widen or (isinstance(x, MXTensor) and x.block == 128):
            return scaled_product(x, w, plan, gather=gather, dtype=dtype)
        scales = (rows_global(x), rows_global(w)) if isinstance(x, NVFP4Tensor) else None
        return grouped_gemm_triton.product(widened(x), widened(w), plan, gather=gather, dtype=dtype, scales=scales)

    def outer(
        self, g: Tensor, x: Tensor, plan: DispatchPlan, *, gather_g: bool, gather_x: bool, like: Tensor
    ) -> Tensor:
        return grouped_gemm_triton.outer(g, x, plan, gather_g=gather_g, gather_x=gather_x, like=like)

    def swiglu(self, h_MF: Tensor, gate_M: Tensor, format: Format | None) -> Operand:
        return rows_triton.swiglu(h_MF, gate_M, format)

    def swiglu_backward(
        self, d_MI: Tensor, h_MF: Tensor, gate_M: Tensor, format: Format | None
    ) -> tuple[Tensor, Operand, Tensor, Tensor]:
        return rows_triton.swiglu_backward(d_MI, h_MF, gate_M, format)

    def combine(self, y_MD: Tensor, plan: DispatchPlan) -> Tensor:
        return rows_triton.combine(y_MD, plan)
