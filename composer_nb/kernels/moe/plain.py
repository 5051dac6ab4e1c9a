"""The steps of an expert layer in plain torch, on any device: the reference for the Triton kernels (`steps_triton.py`), and the
back end that emulates number formats. The docstring of each step specifies its kernel.

Dimensions: N tokens, K experts per token, M = N · K rows sorted by expert, D model width, I expert width, F = 2I, E experts;
A the width of a product's sum, B its output width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.kernels.linear import grouped_mm, matmul
from composer_nb.kernels.moe.recipes import Format, Operand, as_numbers, quantise_rows, quantise_weights
from composer_nb.kernels.moe.routing import choose_experts


@dataclass(frozen=True, slots=True, eq=False)
class DispatchPlan:
    """The rows of N tokens' K choices, sorted by expert, then by token. All tensors are int32. The host never needs the number of
    rows of an expert.

    Attributes:
        ends_E: Expert e has the rows from ends_E[e − 1] to ends_E[e] − 1.
        token_M: Token of each row.
        slot_M: Choice of each row: token · K + place.
        row_NK: The row of each choice.
    """

    ends_E: Tensor
    token_M: Tensor
    slot_M: Tensor
    row_NK: Tensor


class PlainSteps:
    """The steps of a back end for `layer.py`.

    Attributes:
        backend: Back end for quantization.
    """

    backend = "torch"

    def choose(self, logits_NE: Tensor, k: int) -> Tensor:
        """Return int64 [N, K]; see `routing.choose_experts`."""
        return choose_experts(logits_NE, k)

    def plan(self, experts_NK: Tensor, experts: int) -> DispatchPlan:
        """Return the plan of the chosen experts."""
        flat_M = experts_NK.reshape(-1)
        slot_M = torch.argsort(flat_M, stable=True)
        row_NK = torch.empty_like(slot_M).scatter_(0, slot_M, torch.arange(len(slot_M), device=slot_M.device))
        ends_E = F.one_hot(flat_M.long(), experts).sum(0).cumsum(0)
        whole = (ends_E, slot_M // experts_NK.shape[1], slot_M, row_NK.view_as(experts_NK))
        return DispatchPlan(*(tensor.to(torch.int32) for tensor in whole))

    def rows(self, x_RK: Tensor, format: Format | None) -> Operand:
        """Quantize each row by itself."""
        return quantise_rows(x_RK, format, self.backend)

    def weights(self, w_EBA: Tensor, format: Format | None) -> Operand:
        """Quantize along the last dimension."""
        return quantise_weights(w_EBA, format, self.backend)

    def product(self, x: Operand, w: Operand, plan: DispatchPlan, *, gather: bool, dtype: torch.dtype) -> Tensor:
        """Return [M, B]: each row times the transposed weight [B, A] of its expert, summed in float32. With `gather`, x has one
        row per token."""
        wide = torch.promote_types(dtype, torch.float32)
        x_RA, w_EBA = as_numbers(x, wide), as_numbers(w, wide)
        x_MA = x_RA.index_select(0, plan.token_M) if gather else x_RA
        return grouped_mm(x_MA, w_EBA.transpose(1, 2), plan.ends_E).to(dtype)

    def outer(
        self, g: Tensor, x: Tensor, plan: DispatchPlan, *, gather_g: bool, gather_x: bool, like: Tensor
    ) -> Tensor:
        """Return [E, B, A] in the layout of `like`: for each expert, Σ over its rows of g [B] ⊗ x [A]. With `gather_…`, g or x
        has one row per token."""
        g_MB = g.index_select(0, plan.token_M) if gather_g else g
        x_MA = x.index_select(0, plan.token_M) if gather_x else x
        out_EBA = torch.empty_like(like)
        begin = 0
        for expert, end in enumerate(plan.ends_E.tolist()):
            out_EBA[expert] = matmul(g_MB[begin:end].T, x_MA[begin:end])
            begin = end
        return out_EBA

    def swiglu(self, h_MF: Tensor, gate_M: Tensor, format: Format | None) -> Operand:
        """Return silu(h[:, :I]) · h[:, I:] · gate, computed in float32, rounded to the dtype of h, and quantized."""
        wide = torch.promote_types(h_MF.dtype, torch.float32)
        a_MI, b_MI = h_MF.to(wide).chunk(2, dim=-1)
        act_MI = a_MI * a_MI.sigmoid() * b_MI * gate_M.to(wide)[:, None]
        return quantise_rows(act_MI.to(h_MF.dtype), format, self.backend)

    def swiglu_backward(
        self, d_MI: Tensor, h_MF: Tensor, gate_M: Tensor, format: Format | None
    ) -> tuple[Tensor, Operand, Tensor, Tensor]:
        """Return dh [M, F] unquantized and quantized, the activation [M, I], and the gradient of the gates [M] in float32. This
        gradient is the inner product of d and the activation without its gate, so the down projection's output need not be
        kept."""
        wide = torch.promote_types(h_MF.dtype, torch.float32)
        d, gate = d_MI.to(wide), gate_M.to(wide)[:, None]
        a, b = h_MF.to(wide).chunk(2, dim=-1)
        s = a.sigmoid()
        dh_MF = torch.cat([d * gate * b * s * (1 + a * (1 - s)), d * gate * a * s], dim=-1)
        act_MI = a * s * b
        dgate_M = (d * act_MI).sum(-1)
        dh_MF = dh_MF.to(h_MF.dtype)
        return dh_MF, quantise_rows(dh_MF, format, self.backend), (act_MI * gate).to(h_MF.dtype), dgate_M

    def combine(self, y_MD: Tensor, plan: DispatchPlan) -> Tensor:
        """Return [N, D], the sum of each token's K rows in the order of its choices, in float32."""
        wide = torch.promote_types(y_MD.dtype, torch.float32)
        out_ND = y_MD[plan.row_NK[:, 0]].to(wide)
        for rank in range(1, plan.row_NK.shape[1]):
            out_ND = out_ND + y_MD[plan.row_NK[:, rank]].to(wide)
        return out_ND.to(y_MD.dtype)
