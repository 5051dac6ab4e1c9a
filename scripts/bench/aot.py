"""Compile every Triton kernel for GPUs that are absent, and check the machine code.

Triton's wheel carries NVIDIA's assembler and disassembler, so a CPU is enough. `kernel_specs.py` lists what to
compile and what must hold: registers, no spills, shared memory, no narrow loads or stores, and the tensor core instructions.
Neither speed nor correctness of results can be checked this way. `make check-kernels` prints the table.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from composer_nb.kernels.triton_runtime import interpreting

ARCHITECTURES = (90, 100)
"""Compute capability times ten: Hopper, Blackwell."""

SHARED_MEMORY = 232_448
"""Bytes of shared memory per block on both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Conditions on a compiled kernel."""

    registers: int = 255
    """Maximum per thread."""
    stack: int = 0
    """Maximum bytes per thread: spilled registers."""
    shared: int = SHARED_MEMORY
    narrow: int = 0
    """Maximum number of global loads and stores below 64 bits: scales and indices, never data."""
    ptx: Mapping[int, str] = field(default_factory=dict)
    """Regular expression that the PTX must contain, by architecture."""
    never: str = ""
    """Regular expression that the PTX must not contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A kernel with everything that its compilation depends on."""

    name: str
    kernel: Any
    """A `triton.jit` function, or an autotuner around one."""
    types: Mapping[str, str]
    """Types of the arguments that are not constants: `*bf16`, `i32`, `tensordesc<bf16[128, 64]>`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    odd: Sequence[str] = ()
    """Arguments that are not known to be multiples of 16; all others are."""
    warps: int = 4
    stages: int = 3
    architectures: Sequence[int] = ARCHITECTURES
    expect: Expect = field(default_factory=Expect)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel compiled for one architecture."""

    name: str
    architecture: int
    ptx: str
    sass: str
    registers: int
    stack: int
    shared: int
    seconds: float

    @cached_property
    def opcodes(self) -> Counter[str]:
        """Count of each machine instruction, with its modifiers."""
        return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", self.sass))

    @property
    def widths(self) -> Counter[int]:
        """Count of global loads and stores by their bits per thread."""
        counts: Counter[int] = Counter()
        for opcode, count in self.opcodes.items():
            if opcode.split(".")[0] in ("LDG", "STG"):
                width = re.search(r"\.[US]?(8|16|64|128|256)\b", opcode)
                counts[int(width[1]) if width else 32] += count
        return counts

    @property
    def tensor_cores(self) -> dict[str, int]:
        """Count of tensor core instructions: HGMMA, QGMMA (Hopper), UTC… (Blackwell)."""
        counts: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            if re.match(r"[A-Z]*GMMA|UTC[A-Z]*MMA|[A-Z]MMA", opcode):
                counts[opcode.split(".")[0]] += count
        return dict(counts)


def failures(compiled: Compiled, expect: Expect) -> list[str]:
    """Describe the expectations that do not hold."""
    narrow = sum(count for width, count in compiled.widths.items() if width < 64)
    pattern = expect.ptx.get(compiled.architecture, "")
    reasons = []
    if compiled.registers > expect.registers:
        reasons.append(f"{compiled.registers} registers, at most {expect.registers}")
    if compiled.stack > expect.stack:
        reasons.append(f"spills: {compiled.stack} bytes of stack, at most {expect.stack}")
    if compiled.shared > expect.shared:
        reasons.append(f"{compiled.shared} bytes of shared memory, at most {expect.shared}")
    if narrow > expect.narrow:
        widths = ", ".join(f"{count} of {width} bits" for width, count in sorted(compiled.widths.items()))
        reasons.append(f"{narrow} narrow global loads and stores, at most {expect.narrow} ({widths})")
    if pattern and not re.search(pattern, compiled.ptx):
        reasons.append(f"no instruction {pattern}")
    if expect.never and (forbidden := re.search(expect.never, compiled.ptx)):
        reasons.append(f"has {forbidden[0]}")
    return reasons


def compile_spec(spec: Spec, architecture: int) -> Compiled:
    """Compile and disassemble a kernel. Raises RuntimeError if Triton interprets in this process; compiler errors propagate."""
    if interpreting():
        raise RuntimeError("nothing is compiled while TRITON_INTERPRET is set")
    kernel = getattr(spec.kernel, "fn", spec.kernel) if not hasattr(spec.kernel, "arg_names") else spec.kernel
    names = list(kernel.arg_names)
    if missing := set(names) ^ {*spec.types, *spec.constants}:
        raise ValueError(f"{spec.name}: {', '.join(sorted(missing))} must be arguments, each with a type or a value")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # A launch would find out which arguments are multiples of 16.
    sixteen = [name for name, kind in spec.types.items() if name not in spec.odd and kind[0] in "*i"]
    source = ASTSource(
        kernel,
        signature={name: spec.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in spec.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sixteen},
    )
    began = time.perf_counter()
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source, target=target, options={"num_warps": spec.warps, "num_stages": spec.stages})
    sass, usage = _disassemble(built.asm["cubin"])
    return Compiled(
        name=spec.name,
        architecture=architecture,
        ptx=built.asm["ptx"],
        sass=sass,
        registers=_usage(usage, "REG"),
        stack=_usage(usage, "STACK"),
        shared=built.metadata.shared,
        seconds=time.perf_counter() - began,
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Return the machine code and cuobjdump's line of resources."""
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        sass = run([programs / "nvdisasm", "-c", file.name]).stdout
        usage = run([programs / "cuobjdump", "-res-usage", file.name])
    return sass, usage.stdout + usage.stderr


def _usage(text: str, name: str) -> int:
    match = re.search(rf"\b{name}:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump does not report {name}: {text!r}")
    return int(match[1])


# -- the gate ------------------------------------------------------------------------------------------------


PACKAGE = "scripts.bench.kernel_specs"
"""Module that lists the package's kernels."""


def specs_of(module: str) -> list[Spec]:
    """Return the specs of a module."""
    return list(importlib.import_module(module).SPECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: one kernel on one architecture."""

    name: str
    architecture: int
    compiled: Compiled | None
    failed: list[str]


def examine(module: str, index: int, architecture: int) -> Row:
    """Compile one spec and check it; a compiler error is a failed expectation."""
    spec = specs_of(module)[index]
    try:
        compiled = compile_spec(spec, architecture)
    except Exception as error:  # the boundary: any compiler error becomes a line of the table
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        return Row(name=spec.name, architecture=architecture, compiled=None, failed=[f"does not compile: {reason}"])
    return Row(name=spec.name, architecture=architecture, compiled=compiled, failed=failures(compiled, spec.expect))


def gate(
    architectures: Sequence[int] = ARCHITECTURES, *, module: str = PACKAGE, only: str = "", processes: int = 2
) -> list[Row]:
    """Compile a module's specs whose names contain `only`, in separate processes that do not interpret. Raises ValueError if
    there are none."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_compile_here) as pool:
        specs = pool.submit(_spec_architectures, module).result()
        work = [
            (module, index, architecture)
            for index, (name, supported) in enumerate(specs)
            for architecture in architectures
            if only in name and architecture in supported
        ]
        if not work:
            on = ", ".join(f"sm_{architecture}" for architecture in architectures)
            every = "".join(f"\n  {name}" for name, supported in specs if set(supported) & set(architectures))
            raise ValueError(f"nothing to compile for {on}: only={only!r} must be in one of{every or ' none'}")
        return list(pool.map(examine, *zip(*work, strict=True)))


def _compile_here() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _spec_architectures(module: str) -> list[tuple[str, Sequence[int]]]:
    return [(spec.name, spec.architectures) for spec in specs_of(module)]


def table(rows: Sequence[Row]) -> str:
    """Format the rows, each followed by its failures."""
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"{'kernel':<{width}}  arch  regs  stack  shared  loads and stores (bits × times)  tensor cores       s"]
    for row in rows:
        line = f"{row.name:<{width}}  {row.architecture:>4}"
        if compiled := row.compiled:
            widths = " ".join(f"{bits}×{times}" for bits, times in sorted(compiled.widths.items(), reverse=True))
            cores = " ".join(f"{name}×{times}" for name, times in sorted(compiled.tensor_cores.items()))
            line += f"  {compiled.registers:>4}  {compiled.stack:>5}  {compiled.shared:>6}"
            line += f"  {widths:<32}  {cores:<16}  {compiled.seconds:>4.1f}"
        lines += [line.rstrip(), *(f"    FAILED: {reason}" for reason in row.failed)]
    return "\n".join(lines)
