"""The steps of an expert layer in Triton kernels. `plain.PlainSteps` specifies each step; products are in `gemm_triton.py`.

Nothing waits for the GPU: nothing is read back, and all sizes follow from shapes. The plan is a stable counting sort of the
choices by expert, with one histogram per block of choices and a running count within the block, so there are no atomic adds. No
two programs add to the same memory, so the order of every sum is fixed.

Dimensions: N tokens, E experts, K experts per token, M = N · K choices or rows sorted by expert, B blocks of choices, D model
width, I expert width, F = 2I.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.formats.microscaling import MXTensor, NVFP4Tensor, mx_scale_shape
from composer_nb.kernels.formats.quantize_triton import mx_codes, store_mx, widened
from composer_nb.kernels.moe import gemm_triton
from composer_nb.kernels.moe.plain import DispatchPlan, PlainSteps
from composer_nb.kernels.moe.recipes import Format, Operand, quantise_rows
from composer_nb.kernels.triton_runtime import interpreting

# Number of choices per block of the plan.
CHOICES = 256
TAKEN = tl.constexpr(-0x80000000)
# Formats that are quantized in the same pass; NVFP4 needs a whole row first.
MX_BLOCK: dict[Format | None, int] = {"mxfp8": 32, "fp8_block128": 128}


@triton.jit
def choice_kernel(  # type: ignore[no-untyped-def]
    logits, experts, tokens, stride_n, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Compute experts, int32 [N, K]. The kernel compares integers in the order of the floats, so that ties and NaN are resolved
    as in `choose_experts`. Softmax does not change the order, so logits are compared."""
    n, e, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BE), tl.arange(0, BK)
    inside = (n < tokens)[:, None] & (e < E)[None, :]
    value = tl.load(logits + n[:, None].to(tl.int64) * stride_n + e[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)  # no negative zeros
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(inside, key, TAKEN)
    won = tl.zeros([BN, BK], tl.int32)
    for rank in tl.static_range(K):
        best = tl.argmax(key, 1, tie_break_left=True)
        won = tl.where((k == rank)[None, :], best[:, None].to(tl.int32), won)
        key = tl.where(e[None, :] == best[:, None], TAKEN, key)
    valid = (n < tokens)[:, None] & (k < K)[None, :]
    tl.store(experts + n[:, None] * K + k[None, :], won, mask=valid)


@triton.jit
def histogram_kernel(experts, counts, choices, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the choices of expert e in block b, counts[b, e]."""
    b = tl.program_id(0)
    m = b * BM + tl.arange(0, BM)
    chosen = tl.load(experts + m, mask=m < choices, other=0).to(tl.int32)
    e = tl.arange(0, BE)
    histogram = tl.histogram(chosen, BE)
    # The padding of the last block was counted as expert 0.
    histogram -= tl.where(e == 0, tl.sum((m >= choices).to(tl.int32), 0), 0)
    tl.store(counts + b * E + e, histogram, mask=e < E)


@triton.jit
def place_kernel(  # type: ignore[no-untyped-def]
    experts, base, token, slot, row, choices, K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Compute the row of each choice: base[block, expert] plus the number of earlier choices of the same expert in the block.
    CHUNK experts are processed at a time, so that the one-hot matrix fits into registers."""
    b = tl.program_id(0)
    m = b * BM + tl.arange(0, BM)
    inside = m < choices
    chosen = tl.load(experts + m, mask=inside, other=-1).to(tl.int32)
    at = tl.load(base + b * E + chosen, mask=inside, other=0)
    for first in tl.static_range(0, BE, CHUNK):
        hit = (chosen[:, None] == (first + tl.arange(0, CHUNK))[None, :]).to(tl.int32)
        at += tl.sum(hit * (tl.cumsum(hit, 0) - 1), 1)
    tl.store(row + m, at, mask=inside)
    tl.store(slot + at, m, mask=inside)
    tl.store(token + at, m // K, mask=inside)


@triton.jit
def combine_kernel(y, out, row, tokens, D: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BD + tl.arange(0, BD)
    mask = (n < tokens)[:, None] & (d < D)[None, :]
    total = tl.zeros([BN, BD], tl.float32)
    for rank in tl.static_range(K):
        source = tl.load(row + n * K + rank, mask=n < tokens, other=0).to(tl.int64)
        total += tl.load(y + source[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + n[:, None].to(tl.int64) * D + d[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    h, gate, out, q, scale, rows, INNER: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr,
    BI: tl.constexpr,
):  # fmt: skip
    """Compute the activation, unquantized (BLOCK 0) or as MXFP8 with a scale per BLOCK columns."""
    m, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BI + tl.arange(0, BI)
    mask = (m < rows)[:, None] & (i < INNER)[None, :]
    at = m[:, None].to(tl.int64) * (2 * INNER) + i[None, :]
    a = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(h + at + INNER, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + m, mask=m < rows, other=0.0)
    act = (a / (1.0 + tl.exp(-a)) * b * g[:, None]).to(h.dtype.element_ty)
    if BLOCK:
        code, byte = mx_codes(act.to(tl.float32), 1, BLOCK)
        store_mx(q, scale, code, byte, 0, tl.program_id(0) * BM, tl.program_id(1) * BI, rows, INNER, 1, BLOCK, PACKED)
    else:
        tl.store(out + m[:, None].to(tl.int64) * INNER + i[None, :], act, mask=mask)


@triton.jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    d, h, gate, dh, act, dgate, q, scale, rows, INNER: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr,
    BI: tl.constexpr,
):  # fmt: skip
    """Process a block of whole rows, so that one program sums the gate's gradient. With s = sigmoid(a):
    da = d·g·b·s·(1 + a·(1 − s)), db = d·g·a·s, dg = Σ d·a·s·b."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.load(gate + m, mask=m < rows, other=0.0)[:, None]
    total = tl.zeros([BM], tl.float32)
    for i0 in range(0, INNER, BI):
        i = i0 + tl.arange(0, BI)
        mask = (m < rows)[:, None] & (i < INNER)[None, :]
        at_i, at = m[:, None].to(tl.int64) * INNER + i[None, :], m[:, None].to(tl.int64) * (2 * INNER) + i[None, :]
        a = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(h + at + INNER, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(d + at_i, mask=mask, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-a))
        plain = a * s * b
        total += tl.sum(slope * plain, 1)
        da = (slope * g * b * s * (1.0 + a * (1.0 - s))).to(h.dtype.element_ty)
        db = (slope * g * a * s).to(h.dtype.element_ty)
        tl.store(dh + at, da, mask=mask)
        tl.store(dh + at + INNER, db, mask=mask)
        tl.store(act + at_i, (plain * g).to(h.dtype.element_ty), mask=mask)
        if BLOCK:
            row = tl.program_id(0) * BM
            code, byte = mx_codes(da.to(tl.float32), 1, BLOCK)
            store_mx(q, scale, code, byte, 0, row, i0, rows, 2 * INNER, 1, BLOCK, PACKED)
            code, byte = mx_codes(db.to(tl.float32), 1, BLOCK)
            store_mx(q, scale, code, byte, 0, row, INNER + i0, rows, 2 * INNER, 1, BLOCK, PACKED)
    tl.store(dgate + m, total, mask=m < rows)


def columns(width: int) -> int:
    """Return the number of columns of a block: what 128-bit loads by four warps cover, or all in the interpreter, where programs
    are expensive."""
    return min(triton.next_power_of_2(width), 4096 if interpreting() else 1024)


def swiglu_shape(width: int, block: int) -> tuple[int, int]:
    """Return the rows and columns of a tile. A quantized tile must end where half a row ends, because it would otherwise store
    into the other half."""
    most = 4096 if interpreting() else 512
    return 4, min(width & -width if block else triton.next_power_of_2(width), most)


class TritonSteps(PlainSteps):
    """Steps in Triton kernels. `architecture` is 90, 100, …, or 0 in the interpreter. One without block-scaled products widens
    their operands."""

    backend = "triton"

    def __init__(self, architecture: int = 0) -> None:
        super().__init__()
        self.widen = 0 < architecture < 100

    def choose(self, logits_NE: Tensor, k: int) -> Tensor:
        tokens, count = logits_NE.shape
        logits_NE = logits_NE if logits_NE.stride(1) == 1 else logits_NE.contiguous()
        experts_NK = logits_NE.new_empty(tokens, k, dtype=torch.int32)
        wide = triton.next_power_of_2(count)
        block = max(1, min(16, 2048 // wide))
        choice_kernel[(triton.cdiv(tokens, block),)](
            logits_NE, experts_NK, tokens, logits_NE.stride(0), E=count, K=k, BE=wide, BK=triton.next_power_of_2(k), BN=block
        )  # fmt: skip
        return experts_NK.long()

    def plan(self, experts_NK: Tensor, experts: int) -> DispatchPlan:
        # Kernels step from number to number, and `reshape` keeps gaps where K = 1, as in one layer's part of recorded routes.
        flat_M = experts_NK.contiguous().view(-1)
        choices, wide = len(flat_M), triton.next_power_of_2(experts)
        blocks = triton.cdiv(choices, CHOICES)
        counts_BE = flat_M.new_empty(blocks, experts, dtype=torch.int32)
        histogram_kernel[(blocks,)](flat_M, counts_BE, choices, E=experts, BE=max(2, wide), BM=CHOICES)
        through_BE = counts_BE.cumsum(0, dtype=torch.int32)
        ends_E = through_BE[-1].cumsum(0, dtype=torch.int32)
        base_BE = through_BE - counts_BE + (ends_E - through_BE[-1])
        token_M, slot_M, row_M = (torch.empty_like(flat_M, dtype=torch.int32) for _ in range(3))
        place_kernel[(blocks,)](
            flat_M, base_BE, token_M, slot_M, row_M, choices, K=experts_NK.shape[1], E=experts, BE=wide,
            CHUNK=min(wide, 32), BM=CHOICES,
        )  # fmt: skip
        return DispatchPlan(ends_E, token_M, slot_M, row_M.view(experts_NK.shape))

    def product(self, x: Operand, w: Operand, plan: DispatchPlan, *, gather: bool, dtype: torch.dtype) -> Tensor:
        if isinstance(x, Tensor) and isinstance(w, Tensor):
            return gemm_triton.product(x, w, plan, gather=gather, dtype=dtype)
        assert not isinstance(x, Tensor) and not isinstance(w, Tensor), "both sides are of one format"
        if not self.widen or (isinstance(x, MXTensor) and x.block == 128):
            return gemm_triton.scaled_product(x, w, plan, gather=gather, dtype=dtype)
        scales = (gemm_triton.rows_global(x), gemm_triton.rows_global(w)) if isinstance(x, NVFP4Tensor) else None
        return gemm_triton.product(widened(x), widened(w), plan, gather=gather, dtype=dtype, scales=scales)

    def outer(
        self, g: Tensor, x: Tensor, plan: DispatchPlan, *, gather_g: bool, gather_x: bool, like: Tensor
    ) -> Tensor:
        return gemm_triton.outer(g, x, plan, gather_g=gather_g, gather_x=gather_x, like=like)

    def swiglu(self, h_MF: Tensor, gate_M: Tensor, format: Format | None) -> Operand:
        rows, half = h_MF.shape[0], h_MF.shape[1] // 2
        block = MX_BLOCK.get(format, 0)
        high, wide = swiglu_shape(half, block)
        act_MI = h_MF.new_empty(0 if block else rows, half)
        quantized, parts, constants = _mx_room(act_MI, (rows, half), block, half, wide)
        swiglu_kernel[(triton.cdiv(rows, high), triton.cdiv(half, wide))](
            h_MF, gate_M, act_MI, *parts, rows, INNER=half, BM=high, BI=wide, **constants
        )
        return quantized or quantise_rows(act_MI, format, "triton")

    def swiglu_backward(
        self, d_MI: Tensor, h_MF: Tensor, gate_M: Tensor, format: Format | None
    ) -> tuple[Tensor, Operand, Tensor, Tensor]:
        rows, half = d_MI.shape
        block = MX_BLOCK.get(format, 0)
        high, wide = swiglu_shape(half, block)
        dh_MF, act_MI, dgate_M = torch.empty_like(h_MF), torch.empty_like(d_MI), torch.empty_like(gate_M)
        quantized, parts, constants = _mx_room(dh_MF, (rows, 2 * half), block, half, wide)
        swiglu_backward_kernel[(triton.cdiv(rows, high),)](
            d_MI, h_MF, gate_M, dh_MF, act_MI, dgate_M, *parts, rows, INNER=half, BM=high, BI=wide, **constants
        )
        return dh_MF, quantized or quantise_rows(dh_MF, format, "triton"), act_MI, dgate_M

    def combine(self, y_MD: Tensor, plan: DispatchPlan) -> Tensor:
        (tokens, chosen), width = plan.row_NK.shape, y_MD.shape[1]
        out_ND = y_MD.new_empty(tokens, width)
        grid = (triton.cdiv(tokens, 4), triton.cdiv(width, columns(width)))
        combine_kernel[grid](y_MD, out_ND, plan.row_NK, tokens, D=width, K=chosen, BN=4, BD=columns(width))
        return out_ND


def _mx_room(
    like: Tensor, shape: tuple[int, int], block: int, half: int, wide: int
) -> tuple[MXTensor | None, tuple[Tensor, Tensor], dict[str, int]]:
    """Return room for MXFP8 of a shape, its parts as kernels take them, and constants; without a block `like` takes its place.
    Four scales are stored as a word where they fill one in `half` a row and in `wide`, the columns of a tile."""
    if not block:
        return None, (like, like), {"BLOCK": 0, "PACKED": False}
    q = like.new_empty(shape, dtype=torch.float8_e4m3fn)
    scale = like.new_empty(mx_scale_shape(q.shape, block, 1), dtype=torch.uint8)
    constants = {"BLOCK": block, "PACKED": half % (4 * block) == 0 and wide >= 4 * block}
    return MXTensor(qdata=q, scale=scale, block=block), (q.view(torch.uint8), scale), constants
