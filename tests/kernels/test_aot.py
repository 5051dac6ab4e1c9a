"""The compile gate catches what is planted; it reads machine code as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import composer_nb.kernels
from composer_nb.kernels.triton_runtime import triton_version
from scripts.bench.aot import PACKAGE, specs_of

needs_triton = pytest.mark.skipif(triton_version() is None, reason="no Triton here; it has wheels for Linux")


@needs_triton
def test_what_is_planted_is_caught_and_what_is_good_passes():
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    script = folder.parents[1] / "scripts" / "bench" / "check_kernels.py"
    command = [sys.executable, script, "--arch", "90", "--module", "planted_triton"]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    blocks, name = {"": ""}, ""
    for line in result.stdout.splitlines()[1:]:
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
    assert "4 failed" in result.stdout


@needs_triton
def test_every_kernel_of_the_package_is_compiled():
    texts = [path.read_text() for path in Path(composer_nb.kernels.__file__).parent.rglob("*_triton.py")]
    kernels = {name for text in texts for name in re.findall(r"@triton.jit\ndef (\w+_kernel)", text)}
    assert len(kernels) > 10 and kernels == {spec.kernel.__name__ for spec in specs_of(PACKAGE)}
