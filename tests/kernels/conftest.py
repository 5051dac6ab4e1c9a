"""Triton's interpreter is repaired for all tests of kernels."""

from composer_nb.kernels.triton_runtime import triton_version
from scripts.bench import triton_interpreter

if triton_version() is not None:
    triton_interpreter.repair()
