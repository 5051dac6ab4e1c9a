"""Arithmetic: number formats, grouped GEMM, the mixture-of-experts layer, attention, log-probabilities.

Each kernel lies beside a plain reference in torch; docs/kernels.md tells which runs where.
"""

from composer_nb.kernels.formats.microscaling import mx_quantize, nvfp4_quantize
from composer_nb.kernels.moe.layer import grouped_mm, moe
from composer_nb.kernels.moe.recipes import Recipe, explain

__all__ = ["Recipe", "explain", "grouped_mm", "moe", "mx_quantize", "nvfp4_quantize"]
