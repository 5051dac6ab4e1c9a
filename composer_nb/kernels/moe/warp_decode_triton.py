"""Warp decode in Triton: a program of one warp for each output scalar, sums in float32; see `warp_decode.py`.

Dimensions: N tokens, K experts a token, D model width, H expert width; B numbers that a warp reads at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def warp_up_kernel(x_ptr, expert_ptr, gate_ptr, w_ptr, act_ptr, H, D: tl.constexpr, K: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """act [N, K, H] = gate · silu(x·W[e, i]) · (x·W[e, H + i]): neuron program_id(0) of pair program_id(1)."""
    i, pair = tl.program_id(0), tl.program_id(1)
    first = w_ptr + (tl.load(expert_ptr + pair) * 2 * H + i) * D
    x_row = x_ptr + (pair // K).to(tl.int64) * D
    gate, up = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    for start in tl.static_range(0, D, B):
        d = start + tl.arange(0, B)
        x = tl.load(x_row + d, mask=d < D, other=0.0).to(tl.float32)
        gate += x * tl.load(first + d, mask=d < D, other=0.0).to(tl.float32)
        up += x * tl.load(first + H.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    h = tl.sum(gate, axis=0)
    act = h / (1.0 + tl.exp(-h)) * tl.sum(up, axis=0) * tl.load(gate_ptr + pair).to(tl.float32)
    tl.store(act_ptr + pair.to(tl.int64) * H + i, act)


@triton.jit
def warp_down_kernel(act_ptr, expert_ptr, w_ptr, y_ptr, D, H: tl.constexpr, K: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """y [N, D] = Σ over k and i of act[n, k, i] · W[e, d, i]: output program_id(0) of token program_id(1), in one sum."""
    d, n = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([B], tl.float32)
    for k in tl.static_range(K):
        row = w_ptr + (tl.load(expert_ptr + n * K + k) * D + d) * H
        act_row = act_ptr + (n * K + k).to(tl.int64) * H
        for start in tl.static_range(0, H, B):
            i = start + tl.arange(0, B)
            act = tl.load(act_row + i, mask=i < H, other=0.0)
            total += act * tl.load(row + i, mask=i < H, other=0.0).to(tl.float32)
    tl.store(y_ptr + n.to(tl.int64) * D + d, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty))


def warp_decode(x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_up_EFD: Tensor, w_down_EDI: Tensor) -> Tensor:
    """Return [N, D]; see `warp_decode.warp_decode`."""
    (N, K), D, H = experts_NK.shape, x_ND.shape[1], w_down_EDI.shape[2]
    act_NKI = torch.empty(N, K, H, dtype=torch.float32, device=x_ND.device)
    y_ND = torch.empty_like(x_ND)
    tensors = (x.contiguous() for x in (x_ND, experts_NK, gates_NK, w_up_EFD, w_down_EDI))
    x, chosen, gates, w_up, w_down = tensors
    if N:
        wide, narrow = (min(512, triton.next_power_of_2(width)) for width in (D, H))
        warp_up_kernel[(H, N * K)](x, chosen, gates, w_up, act_NKI, H, D=D, K=K, B=wide, num_warps=1)
        warp_down_kernel[(D, N)](act_NKI, chosen, w_down, y_ND, D, H=H, K=K, B=narrow, num_warps=1)
    return y_ND
