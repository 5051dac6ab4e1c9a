"""Scripts whose results documents quote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.slow
def test_bench_measures_everything():
    process = subprocess.run(
        [sys.executable, SCRIPTS / "bench" / "machine_bench.py", "--json"], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    measurements = json.loads(process.stdout)
    figures = {name: value for name, value in measurements.items() if isinstance(value, float)}
    assert len(figures) == 9 and all(value > 0 for value in figures.values()), figures
    assert measurements["sandbox_p50_ms"] <= measurements["sandbox_p95_ms"]
