"""Choice of the back end, torch or Triton, and the switches of fused kernels.

    torch     the plain references. Any device.
    triton    kernels in Triton: compiled, on a GPU of compute capability 9.0 or more; on a CPU in its interpreter, for tests.

Triton is imported only where its kernels run. They are in modules named `…_triton`, which are imported inside functions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Literal, get_args

import torch

BackendName = Literal["torch", "triton"]
VARIABLE = "COMPOSER_NB_KERNELS"
# Kernels in which several operations are one pass, compiled for a CPU or in Triton. Names in this variable, with commas between
# them, are computed by torch's single operations instead, in every process that inherits it.
Fusion = Literal["attention", "decode", "experts", "logprob", "norm", "quantize"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
UNFUSED = "COMPOSER_NB_UNFUSED"
# Compute capability of Hopper, the oldest that kernels are compiled for.
OLDEST = (9, 0)
# Set by `scripts/bench/triton_interpreter.py`: as it comes, Triton's interpreter computes wrongly what the kernels rest on.
interpreter_is_repaired = False


@cache
def triton_version() -> str | None:
    """Return the installed version of Triton, or None."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def interpreting() -> bool:
    """Return whether Triton interprets kernels. Its environment says so before it is imported, and for the whole process."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@cache
def _unfused(names: str) -> frozenset[str]:
    unfused = frozenset(filter(None, names.split(",")))
    if strange := sorted(unfused - {*FUSIONS}):
        raise ValueError(
            f"{UNFUSED}={names!r}: there is no fused kernel {strange[0]!r}; there are {', '.join(FUSIONS)}"
        )
    return unfused


def fused(kernel: Fusion) -> bool:
    """Return whether a fused kernel is on. Raises ValueError if COMPOSER_NB_UNFUSED names one that does not exist."""
    return kernel not in _unfused(os.environ.get(UNFUSED, ""))


@contextmanager
def without(*kernels: Fusion) -> Iterator[None]:
    """Switch fused kernels off in this process; all others are on."""
    before = os.environ.get(UNFUSED, "")
    os.environ[UNFUSED] = ",".join(kernels)
    try:
        yield
    finally:
        os.environ[UNFUSED] = before


def choose(device: torch.device, backend: str | None = None, kernel: Fusion | None = None) -> tuple[BackendName, str]:
    """Return the back end and the reason. The default is torch for a kernel that is switched off, the variable
    COMPOSER_NB_KERNELS, then Triton on a GPU that it compiles for, then torch. Raises ValueError for an unknown back end, and for
    Triton where it cannot run."""
    if kernel and not backend and not fused(kernel):
        return "torch", f"{UNFUSED} names {kernel}"
    name = backend or os.environ.get(VARIABLE) or None
    source = "backend" if backend else VARIABLE
    if name is None:
        fault = _no_triton(device, interpreted=False)
        return ("torch", fault) if fault else ("triton", "the default on this GPU")
    if name == "torch":
        return "torch", f"{source} asks for it"
    if name == "triton":
        if fault := _no_triton(device, interpreted=interpreting()):
            raise ValueError(f"{source}='triton': {fault}; 'torch' computes the same numbers on any device")
        return "triton", f"{source} asks for it{', in its interpreter' if interpreting() else ''}"
    raise ValueError(f"{source}={name!r}: must be one of {', '.join(get_args(BackendName))}")


def _no_triton(device: torch.device, interpreted: bool) -> str:
    """Return why Triton's kernels cannot run on tensors of `device`, or an empty string."""
    if triton_version() is None:
        return "triton is not installed"
    if interpreted:
        repaired = "the interpreter is wrong in casts and products; scripts/bench/triton_interpreter.py repairs it"
        return "" if interpreter_is_repaired else repaired
    if interpreting():
        return "TRITON_INTERPRET is set, and interpreted kernels are run only where they are asked for"
    if device.type == "cpu":
        return "the device is a CPU, where kernels run only in Triton's interpreter (TRITON_INTERPRET=1), to be tested"
    if device.type != "cuda" or torch.version.hip:
        return f"the device is {device.type}, the kernels are compiled for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"this GPU has compute capability {capability[0]}.{capability[1]}, kernels need {OLDEST[0]}.{OLDEST[1]}"
    return ""
