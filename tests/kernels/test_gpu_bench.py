"""What the GPU bench says about what it measured, and its whole flow on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_nb.kernels.triton_runtime import triton_version

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # two to three minutes in the interpreter
@pytest.mark.skipif(triton_version() is None, reason="no Triton here; it has wheels for Linux")
def test_the_whole_flow_on_a_cpu_is_labelled_a_rehearsal(tmp_path: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "scripts/bench/bench_gpu.py", "--device", "cpu", "--seconds", "600"]
    result = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    report, text = json.loads((tmp_path / "bench_gpu.json").read_text()), (tmp_path / "bench_gpu.md").read_text()
    assert report["rehearsal"] and "REHEARSAL" in text and report["machine"]["gpu"] == "none"
    rows = {case["number"] for case in report["cases"]}
    assert rows >= {"0", "1", "2", "3", "4 to 7", "8", "9", "10", "11", "12", "15", "16"}
    for case in report["cases"]:
        assert "ours" in case["ms"] or case["holes"]["ours"] == "needs a Hopper GPU", case
        for name, error in case["errors"].items():
            assert error < (0.3 if "nvfp4" in case["title"] else 0.1), (case["title"], name)
