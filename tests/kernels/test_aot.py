"""The compile gate catches what is planted; it reads machine code as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import composer_nb.kernels
from composer_nb.kernels.triton_runtime import interpreting, triton_version
from scripts.bench.aot import PACKAGE, Compiled, Expect, Spec, compile_spec, failures, gate, specs_of, table
from scripts.bench.check_kernels import main

needs_triton = pytest.mark.skipif(triton_version() is None, reason="no Triton here; it has wheels for Linux")

SASS = """
        /*0070*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0080*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64+0x10] ;
        /*0090*/               @P1 STG.E R10, desc[UR4][R6.64] ;
        /*00a0*/                   STG.E.64 desc[UR4][R6.64], R4 ;
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8].tnspB, RZ, !UPT, gsb0 ;
        /*00c0*/              @UP0 UTCQMMA.2CTA gdesc[UR4], gdesc[UR6] ;
        /*00d0*/                   FFMA R1, R2, R3, R4 ;
"""
CODE = Compiled(
    name="k", architecture=90, ptx="wgmma.mma_async", sass=SASS, registers=40, stack=0, shared=100, seconds=1.0
)


def test_machine_code_is_read():
    assert CODE.widths == {128: 1, 16: 1, 32: 1, 64: 1}
    assert CODE.tensor_cores == {"HGMMA": 1, "UTCQMMA": 1}
    assert CODE.opcodes["FFMA"] == 1 and CODE.opcodes.total() == 7


@pytest.mark.parametrize(
    "change, expect, said",
    [
        ({}, Expect(narrow=2, ptx={90: r"wgmma\.mma_async"}), None),
        ({}, Expect(narrow=1), "2 narrow global loads and stores, at most 1 (1 of 16 bits, 1 of 32 bits"),
        ({"stack": 8}, Expect(narrow=2), "spills: 8 bytes of stack, at most 0"),
        ({"shared": 300_000}, Expect(narrow=2), "300000 bytes of shared memory, at most 232448"),
        ({}, Expect(narrow=2, registers=32), "40 registers, at most 32"),
        ({}, Expect(narrow=2, ptx={90: "kind::mxf8f6f4"}), "no instruction kind::mxf8f6f4"),
        ({}, Expect(narrow=2, ptx={100: "kind::mxf8f6f4"}), None),
        ({"ptx": "div.full.f32"}, Expect(narrow=2, never=r"div\.full"), "has div.full"),
    ],
)
def test_each_expectation(change: dict[str, object], expect: Expect, said: str | None):
    found = failures(replace(CODE, **change), expect)
    assert not found if said is None else len(found) == 1 and found[0].startswith(said)


@needs_triton
def test_what_is_planted_is_caught_and_what_is_good_passes():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), os.environ["PYTHONPATH"]])
    script = here.parents[1] / "scripts" / "bench" / "check_kernels.py"
    done = subprocess.run(
        [sys.executable, script, "--arch", "90", "--module", "planted_triton"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    blocks, name = {"": ""}, ""
    for line in done.stdout.splitlines()[1:]:
        if line.startswith(" "):
            blocks[name] += line
        else:
            name = line.split("  ")[0]
            blocks[name] = line
    assert "FAILED" not in blocks["good"] + blocks["wide"] and "HGMMA" in blocks["good"] and "128×" in blocks["wide"]
    assert blocks["spill"].count("FAILED") == 1 and "bytes of stack" in blocks["spill"]
    assert blocks["narrow"].count("FAILED") == 1 and "narrow global loads and stores" in blocks["narrow"]
    assert blocks["no tensor core"].count("FAILED") == 1 and "no instruction wgmma" in blocks["no tensor core"]
    assert "FAILED: does not compile" in blocks["broken"]
    assert "4 failed" in done.stdout


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]):
    for arch in ("80", "ninety"):
        with pytest.raises(SystemExit):
            main(["--arch", arch])
        assert "90,100" in capsys.readouterr().err.replace(", ", ",")


@needs_triton
def test_names_that_no_kernel_has_are_refused_with_those_there_are_for_the_architecture():
    with pytest.raises(
        ValueError,
        match=r"^nothing to compile for sm_100: only='tuples' must be in one of\n  attention on a cache, fp32, width 128\n",
    ):
        gate([100], only="tuples", processes=1)


@needs_triton
def test_every_argument_of_a_kernel_needs_a_type_or_a_value(monkeypatch: pytest.MonkeyPatch):
    class Kernel:
        arg_names = ("x_ptr", "N")

    spec = Spec(name="k", kernel=Kernel(), types={"x_ptr": "*fp32", "M": "i32"})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreting()
    with pytest.raises(RuntimeError, match="while TRITON_INTERPRET is set"):
        compile_spec(spec, 90)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="k: M, N must be arguments, each with a type or a value"):
        compile_spec(spec, 90)


@needs_triton
def test_every_kernel_of_the_package_is_compiled():
    texts = [path.read_text() for path in Path(composer_nb.kernels.__file__).parent.rglob("*_triton.py")]
    kernels = {name for text in texts for name in re.findall(r"@triton.jit\ndef (\w+_kernel)", text)}
    assert len(kernels) > 10 and kernels == {spec.kernel.__name__ for spec in specs_of(PACKAGE)}


def test_a_table_of_nothing_is_its_head():
    assert table([]).startswith("kernel") and "\n" not in table([])
