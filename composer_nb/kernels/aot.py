"""The compile gate: every Triton kernel compiled for GPUs that are not there, and its machine code read.

    python -m composer_nb.kernels.aot --arch 90,100          a table; exit code 1 and the expectations that failed, if any did

Triton's wheel carries NVIDIA's assemblers and disassemblers, so a CPU is enough. Each module `…_triton` or `…_gluon` of the
package lists in `SPECS` what it wants compiled and what must be true of the result: registers, no spills, shared memory, no
narrow loads or stores, and the tensor core instructions that it is there for. What this can not show is speed, and whether the
numbers are right.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
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

from composer_nb.kernels.triton_runtime import interpreting, triton_version

ARCHITECTURES = (90, 100)
"""Compute capability times ten: Hopper, Blackwell."""

SHARED_MEMORY = 232_448
"""Bytes that a block can have on both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What must be true of a compiled kernel."""

    registers: int = 255
    """At most, a thread."""
    stack: int = 0
    """Bytes a thread, at most: registers that were spilled."""
    shared: int = SHARED_MEMORY
    narrow: int = 0
    """Global loads and stores of less than 64 bits, at most: scales and indices, never data."""
    ptx: Mapping[int, str] = field(default_factory=dict)
    """A regular expression that PTX for an architecture must contain."""
    never: str = ""
    """One that PTX must not contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A kernel with everything that its compilation depends on."""

    name: str
    kernel: Any
    """A `triton.jit` or `gluon.jit` function, or an autotuner around one."""
    types: Mapping[str, str]
    """Of the arguments that are not constants: `*bf16`, `i32`, `tensordesc<bf16[128, 64]>`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    odd: Sequence[str] = ()
    """Arguments that are not known to be multiples of 16, as all others are."""
    warps: int = 4
    stages: int = 3
    architectures: Sequence[int] = ARCHITECTURES
    expect: Expect = field(default_factory=Expect)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a kernel became."""

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
        """How often each instruction of the machine code appears, with its modifiers."""
        return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", self.sass))

    @property
    def widths(self) -> Counter[int]:
        """Bits a thread of each global load and store."""
        found: Counter[int] = Counter()
        for opcode, count in self.opcodes.items():
            if opcode.split(".")[0] in ("LDG", "STG"):
                width = re.search(r"\.[US]?(8|16|64|128|256)\b", opcode)
                found[int(width[1]) if width else 32] += count
        return found

    @property
    def tensor_cores(self) -> dict[str, int]:
        """Their instructions in the machine code: HGMMA, QGMMA (Hopper), UTC… (Blackwell)."""
        found: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            if re.match(r"[A-Z]*GMMA|UTC[A-Z]*MMA|[A-Z]MMA", opcode):
                found[opcode.split(".")[0]] += count
        return dict(found)


def failures(compiled: Compiled, expect: Expect) -> list[str]:
    """Expectations that do not hold, each with what was found."""
    narrow = sum(count for width, count in compiled.widths.items() if width < 64)
    wanted = expect.ptx.get(compiled.architecture, "")
    found = []
    if compiled.registers > expect.registers:
        found.append(f"{compiled.registers} registers, at most {expect.registers}")
    if compiled.stack > expect.stack:
        found.append(f"spills: {compiled.stack} bytes of stack, at most {expect.stack}")
    if compiled.shared > expect.shared:
        found.append(f"{compiled.shared} bytes of shared memory, at most {expect.shared}")
    if narrow > expect.narrow:
        widths = ", ".join(f"{count} of {width} bits" for width, count in sorted(compiled.widths.items()))
        found.append(f"{narrow} narrow global loads and stores, at most {expect.narrow} ({widths})")
    if wanted and not re.search(wanted, compiled.ptx):
        found.append(f"no instruction {wanted}")
    if expect.never and (unwanted := re.search(expect.never, compiled.ptx)):
        found.append(f"has {unwanted[0]}")
    return found


def compile_spec(spec: Spec, architecture: int) -> Compiled:
    """Compile and disassemble. Raises RuntimeError in a process whose Triton interprets, and whatever the compiler raises."""
    if interpreting():
        raise RuntimeError("nothing is compiled while TRITON_INTERPRET is set")
    kernel = getattr(spec.kernel, "fn", spec.kernel) if not hasattr(spec.kernel, "arg_names") else spec.kernel
    names = list(kernel.arg_names)
    missing = set(names) ^ {*spec.types, *spec.constants}
    if missing:
        raise ValueError(f"{spec.name}: {', '.join(sorted(missing))} must be arguments, each with a type or a value")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    sixteen = [
        name for name in spec.types if name not in spec.odd and spec.types[name][0] in "*i"
    ]  # what Triton finds out about arguments when a kernel is launched
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
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
        registers=int(_usage(usage, "REG")),
        stack=int(_usage(usage, "STACK")),
        shared=built.metadata.shared,
        seconds=time.perf_counter() - began,
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Machine code, and cuobjdump's line of resources."""
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        sass = run([programs / "nvdisasm", "-c", file.name]).stdout
        usage = run([programs / "cuobjdump", "-res-usage", file.name])
    return sass, usage.stdout + usage.stderr


def _usage(text: str, name: str) -> str:
    found = re.search(rf"\b{name}:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {name}: {text!r}")
    return found[1]


# -- the gate ------------------------------------------------------------------------------------------------


def modules() -> list[str]:
    """Those of the package that hold kernels in Triton, and in Gluon, its lower language."""
    import composer_nb.kernels as package

    return sorted(
        f"{package.__name__}.{one.name}"
        for one in pkgutil.iter_modules(package.__path__)
        if one.name.endswith(("_triton", "_gluon"))
    )


def specs_of(names: Sequence[str]) -> list[Spec]:
    """All that these modules want compiled."""
    return [spec for name in names for spec in importlib.import_module(name).SPECS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a kernel for an architecture."""

    name: str
    architecture: int
    compiled: Compiled | None
    failed: list[str]


def examine(names: Sequence[str], index: int, architecture: int) -> Row:
    """Compile one and judge it; a compiler that fails is a failed expectation."""
    spec = specs_of(names)[index]
    try:
        compiled = compile_spec(spec, architecture)
    except Exception as error:  # the boundary: whatever compilers raise is a line of the table
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        return Row(name=spec.name, architecture=architecture, compiled=None, failed=[f"does not compile: {reason}"])
    return Row(name=spec.name, architecture=architecture, compiled=compiled, failed=failures(compiled, spec.expect))


def gate(names: Sequence[str], architectures: Sequence[int], *, only: str = "", processes: int = 2) -> list[Row]:
    """The specs of these modules whose names contain `only`, in order, in processes of their own, which compile also where this
    one interprets. Raises ValueError where there are none."""
    names = list(names)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_compile_here) as pool:
        known = pool.submit(_known, names).result()
        work = [
            (names, index, architecture)
            for index, (name, wanted) in enumerate(known)
            for architecture in architectures
            if only in name and architecture in wanted
        ]
        if not work:
            on = ", ".join(f"sm_{architecture}" for architecture in architectures)
            every = "".join(f"\n  {name}" for name, wanted in known if set(wanted) & set(architectures))
            raise ValueError(f"nothing to compile for {on}: only={only!r} must be in one of{every or ' none'}")
        return list(pool.map(examine, *zip(*work, strict=True)))


def _compile_here() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _known(names: Sequence[str]) -> list[tuple[str, Sequence[int]]]:
    return [(spec.name, spec.architectures) for spec in specs_of(names)]


def excerpt(text: str, pattern: str, around: int = 1) -> str:
    """Lines of a listing that match a regular expression, each with so many before and after it; with any, dots stand for what is
    left out."""
    lines = text.splitlines()
    hits = {at for at, line in enumerate(lines) if re.search(pattern, line)}
    shown = sorted({at + by for at in hits for by in range(-around, around + 1) if 0 <= at + by < len(lines)})
    out: list[str] = []
    for before, at in zip([-1, *shown], shown, strict=False):
        out += ["    …"] if around and at > before + 1 else []
        out += [lines[at]]
    return "\n".join(out)


def table(rows: Sequence[Row]) -> str:
    """To read: a line a kernel and architecture, under it what failed."""
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"{'kernel':<{width}}  arch  regs  stack  shared  loads and stores (bits × times)  tensor cores       s"]
    for row in rows:
        line = f"{row.name:<{width}}  {row.architecture:>4}"
        if found := row.compiled:
            widths = " ".join(f"{bits}×{times}" for bits, times in sorted(found.widths.items(), reverse=True))
            cores = " ".join(f"{name}×{times}" for name, times in sorted(found.tensor_cores.items()))
            line += f"  {found.registers:>4}  {found.stack:>5}  {found.shared:>6}"
            line += f"  {widths:<32}  {cores:<16}  {found.seconds:>4.1f}"
        lines += [line.rstrip(), *(f"    FAILED: {reason}" for reason in row.failed)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m composer_nb.kernels.aot", description="compile every Triton kernel"
    )
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="comma-separated: 90,100")
    parser.add_argument("--module", action="append", help="a module with SPECS, in place of the package's own")
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    try:
        architectures = [int(each) for each in asked.arch.split(",")]
    except ValueError:
        parser.error(f"--arch {asked.arch!r}: must be numbers such as 90,100")
    if unknown := set(architectures) - set(ARCHITECTURES):
        parser.error(f"--arch {sorted(unknown)}: must be of {', '.join(map(str, ARCHITECTURES))}")
    began = time.perf_counter()
    try:
        rows = gate(asked.module or modules(), architectures, only=asked.only, processes=asked.processes)
    except ValueError as error:
        parser.error(str(error))
    failed = sum(bool(row.failed) for row in rows)
    print(table(rows))
    print(f"{len(rows)} compiled by Triton {triton_version()} in {time.perf_counter() - began:.0f} s, {failed} failed")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
