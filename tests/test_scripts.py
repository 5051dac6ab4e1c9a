"""Scripts whose results documents quote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.slow
def test_bench_measures_everything():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench" / "machine_bench.py", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = {name: value for name, value in found.items() if isinstance(value, float)}
    assert len(figures) == 9 and all(value > 0 for value in figures.values()), figures
    assert found["sandbox_p50_ms"] <= found["sandbox_p95_ms"]
