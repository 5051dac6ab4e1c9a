"""RMS norm, and RMS norm followed by RoPE, with a kernel for float32 on a CPU where torch composes them of many small passes.

Dimensions: N tokens, H heads, C head width, R rows of width D.
Elsewhere (other devices, other dtypes, float64 references) `rms_norm` is torch's, and `norm_rope` is put together from it;
the kernels are tested against that form.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.compiled import compiled, dot, dot3
from composer_nb.kernels.linear import compiles
from composer_nb.kernels.triton_runtime import fused


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467)."""
    if compiles(x, weight_D) and fused("norm"):
        return _RmsNorm.apply(x, weight_D, eps)
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


def norm_rope(x_NHC: Tensor, weight_HC: Tensor, rope_N: Tensor, eps: float) -> Tensor:
    """Return each head normalised, scaled by its row of `weight_HC`, and turned by its token's angles.

    `rope_N` is [N, 2, C/2], cosines and sines; pairs are half-split (the layout of Hugging Face checkpoints).
    """
    if compiles(x_NHC, weight_HC, rope_N) and fused("norm"):
        return _NormRope.apply(x_NHC, weight_HC, rope_N, eps)
    return rotate(F.rms_norm(x_NHC, x_NHC.shape[-1:], None, eps) * weight_HC, rope_N)


def rotate(x_NHC: Tensor, rope_N: Tensor) -> Tensor:
    """RoPE on half-split pairs, by its definition (arXiv 2104.09864, eq. 34)."""
    cos, sin = rope_N[:, None, 0], rope_N[:, None, 1]
    first, second = x_NHC.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        # A copy: memory that NumPy has seen cannot be given back, as FSDP gives back that of weights between layers.
        x_RD, weight_D = x.contiguous().view(-1, len(weight_D)), weight_D.clone(memory_format=torch.contiguous_format)
        y_RD, scale_R = torch.empty_like(x_RD), x_RD.new_empty(len(x_RD))
        norm_rows(x_RD.numpy(), weight_D.detach().numpy(), eps, y_RD.numpy(), scale_R.numpy())
        ctx.save_for_backward(x_RD, weight_D, scale_R)
        return y_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, weight_D, scale_R = ctx.saved_tensors
        g_RD = gradients[0].contiguous().view(x_RD.shape)
        dx_RD, dw_D = torch.empty_like(x_RD), torch.zeros_like(weight_D)
        arrays = (x.detach().numpy() for x in (g_RD, x_RD, weight_D, scale_R, dx_RD, dw_D))
        _norm_backward(*arrays)
        return dx_RD.view(gradients[0].shape), dw_D, None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHC: Tensor, weight_HC: Tensor, rope_N: Tensor, eps: float) -> Tensor:
        x_NHC, weight_HC, rope_N = x_NHC.contiguous(), weight_HC.contiguous(), rope_N.contiguous()
        y_NHC, scale_NH = torch.empty_like(x_NHC), x_NHC.new_empty(x_NHC.shape[:2])
        arrays = (x.detach().numpy() for x in (x_NHC, weight_HC, rope_N, y_NHC, scale_NH))
        _norm_rope(eps, *arrays)
        ctx.save_for_backward(x_NHC, weight_HC, rope_N, scale_NH)
        return y_NHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_NHC, weight_HC, rope_N, scale_NH = ctx.saved_tensors
        g_NHC = gradients[0].contiguous()
        dx_NHC, dw_HC = torch.empty_like(x_NHC), torch.zeros_like(weight_HC)
        arrays = (x.detach().numpy() for x in (g_NHC, x_NHC, weight_HC, rope_N, scale_NH, dx_NHC, dw_HC))
        _norm_rope_backward(*arrays)
        return dx_NHC, dw_HC, None, None


@compiled
def norm_row(x, w, eps, y):  # type: ignore[no-untyped-def]
    """Normalise a row, and return what it was multiplied with."""
    k = np.float32(1.0) / np.sqrt(dot(x, x) / np.float32(len(x)) + np.float32(eps))
    for d in range(len(x)):
        y[d] = x[d] * k * w[d]
    return k


@compiled
def norm_turn(x, w, rope, eps, y):  # type: ignore[no-untyped-def]
    """Normalise and turn a head, which may be where the result goes. Return what it was multiplied with."""
    half = len(x) // 2
    k = np.float32(1.0) / np.sqrt(dot(x, x) / np.float32(len(x)) + np.float32(eps))
    for c in range(half):
        a, b = x[c] * k * w[c], x[half + c] * k * w[half + c]
        y[c] = a * rope[0, c] - b * rope[1, c]
        y[half + c] = b * rope[0, c] + a * rope[1, c]
    return k


@compiled("f4[:,::1], f4[::1], f8, f4[:,::1], f4[::1]")
def norm_rows(x, w, eps, y, scale):  # type: ignore[no-untyped-def]
    """Normalise rows, and fill in what each was multiplied with."""
    for r in range(len(x)):
        scale[r] = norm_row(x[r], w, eps, y[r])


@compiled("f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[::1]")
def _norm_backward(g, x, w, scale, dx, dw):  # type: ignore[no-untyped-def]
    """With y = x·k·w and k = (mean x² + eps)^-½: dx = k·(g·w) − x·k³·mean(g·w·x), dw = Σ g·x·k."""
    rows, width = x.shape
    for r in range(rows):
        k = scale[r]
        back = dot3(g[r], w, x[r]) * k * k * k / np.float32(width)
        for d in range(width):
            dx[r, d] = g[r, d] * w[d] * k - x[r, d] * back
            dw[d] += g[r, d] * x[r, d] * k


@compiled("f8, f4[:,:,::1], f4[:,::1], f4[:,:,::1], f4[:,:,::1], f4[:,::1]")
def _norm_rope(eps, x, w, rope, y, scale):  # type: ignore[no-untyped-def]
    for n in range(len(x)):
        for h in range(x.shape[1]):
            scale[n, h] = norm_turn(x[n, h], w[h], rope[n], eps, y[n, h])


@compiled("f4[:,:,::1], f4[:,:,::1], f4[:,::1], f4[:,:,::1], f4[:,::1], f4[:,:,::1], f4[:,::1]")
def _norm_rope_backward(g, x, w, rope, scale, dx, dw):  # type: ignore[no-untyped-def]
    """Turns the gradient back by the same angles, then goes as in `_norm_backward`."""
    tokens, heads, width = x.shape
    half = width // 2
    back = np.empty(width, np.float32)
    for n in range(tokens):
        for h in range(heads):
            for c in range(half):
                a, b = g[n, h, c], g[n, h, half + c]
                back[c] = a * rope[n, 0, c] + b * rope[n, 1, c]
                back[half + c] = b * rope[n, 0, c] - a * rope[n, 1, c]
            k = scale[n, h]
            share = dot3(back, w[h], x[n, h]) * k * k * k / np.float32(width)
            for c in range(width):
                dx[n, h, c] = back[c] * w[h, c] * k - x[n, h, c] * share
                dw[h, c] += back[c] * x[n, h, c] * k
