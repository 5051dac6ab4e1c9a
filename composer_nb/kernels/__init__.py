"""Arithmetic: number formats, grouped GEMM, the mixture-of-experts layer, attention, log-probabilities.

Each kernel lies beside a plain reference in torch. What is named here is for users; see docs/kernels.md.
"""
