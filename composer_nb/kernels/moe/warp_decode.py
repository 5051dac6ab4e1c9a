"""Warp decode: the experts of a few tokens, organised by outputs in place of experts (Cursor, "Warp decode", 2026).

    expert-centric   plan, gather rows by expert, pad, two grouped products, combine: five stages only move data
    warp decode      act[n, k, i] = silu(x·g) · (x·u)      one warp for each neuron of a (token, expert) pair
                     y[n, d] = Σ_k gate · Σ_i act · w      one warp for each output of a token, one float32 sum over all experts

Nothing is sorted, padded or written per expert, and only the result is rounded. The Triton version is `warp_decode_triton.py`.

Dimensions: N tokens, K experts a token, E experts, D model width, I expert width, F = 2I.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.kernels.moe.layer import experts
from composer_nb.kernels.triton_runtime import choose


def warp_decode(
    x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_up_EFD: Tensor, w_down_EDI: Tensor, backend: str | None = None
) -> Tensor:
    """Return [N, D] in the dtype of `x_ND`, without gradients, for given experts (int64) and gates. `backend` as for `choose`."""
    if choose(x_ND.device, backend)[0] == "triton":
        from composer_nb.kernels.moe import warp_decode_triton

        return warp_decode_triton.warp_decode(x_ND, experts_NK, gates_NK, w_up_EFD, w_down_EDI)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    h_NKF = torch.einsum("nd,nkfd->nkf", x_ND.to(wide), w_up_EFD[experts_NK].to(wide))
    gate_NKI, up_NKI = h_NKF.chunk(2, -1)
    act_NKI = F.silu(gate_NKI) * up_NKI * gates_NK.to(wide)[..., None]
    return torch.einsum("nki,nkdi->nd", act_NKI, w_down_EDI[experts_NK].to(wide)).to(x_ND.dtype)


TILE = 16  # rows of an expert that a grouped product computes at least
# Experts a token, experts, width and expert width of the layer whose errors are measured.
MEASURED = 8, 32, 256, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Bytes of one layer that a decoding step moves. `weights`: of the distinct experts, read once. `buffers`: what is written
    between stages and read again. `stages`: kernels that depend on one another."""

    weights: float
    buffers: float
    stages: int

    def seconds(self, bytes_per_s: float) -> float:
        """Return the time on a memory of this rate, with 2 µs for each dependent stage."""
        return (self.weights + self.buffers) / bytes_per_s + self.stages * 2e-6


def decode_costs(tokens: int, k: int, experts: int, width: int, inner: int) -> dict[str, DecodeCost]:
    """Return the costs of both organisations in bf16 under uniform routing.

    Expert-centric: choices and plan, scatter of rows (2 D) padded to TILE of an expert, product (2 F), activation (2 I), product
    (2 D per choice), combine. Warp decode: activations in float32, written and read."""
    distinct = experts * (1 - (1 - k / experts) ** tokens)
    weights = distinct * 3 * inner * width * 2.0
    rows, padded = tokens * k, max(tokens * k, distinct * TILE)
    by_expert = (
        2.0 * (2 * padded * width + 2 * padded * 2 * inner + 2 * padded * inner + 2 * rows * width) + 16.0 * rows
    )
    return {
        "expert-centric": DecodeCost(weights=weights, buffers=by_expert, stages=8),
        "warp decode": DecodeCost(weights=weights, buffers=2 * 4.0 * rows * inner, stages=3),
    }


def decode_errors(tokens: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the error of both organisations in bf16 against float64: root mean square relative to the output, largest absolute
    error and least cosine of a token. Weights are normal with the usual scales, gates a softmax."""
    (k, count, width, inner), random = MEASURED, torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random) * scale).bfloat16()

    x, up = normal(tokens, width), normal(count, 2 * inner, width, scale=width**-0.5)
    down = normal(count, width, inner, scale=inner**-0.5)
    chosen = torch.rand(tokens, count, generator=random).topk(k).indices
    gates = torch.randn(tokens, k, generator=random).softmax(-1)
    exact = warp_decode(x.double(), chosen, gates.double(), up.double(), down.double(), "torch")
    results = {
        "expert-centric": experts(x, chosen, gates, up, down, backend="torch"),
        "warp decode": warp_decode(x, chosen, gates, up, down, "torch"),
    }
    return {
        name: {
            "relative": float((y - exact).norm() / exact.norm()),
            "largest": float((y - exact).abs().max()),
            "cosine": float(F.cosine_similarity(y.double(), exact).min()),
        }
        for name, y in results.items()
    }
