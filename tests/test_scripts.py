"""Scripts whose results documents quote."""

import ast
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


def test_a_script_finds_its_neighbours():
    """Python looks beside the script; what lies in another folder is imported from `scripts`."""
    paths = [*SCRIPTS.glob("*/**/*.py")]
    neighbours = {path.stem for path in paths} | {path.parent.name for path in paths}
    for path in paths:
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {str(node.module).partition(".")[0] for node in imports if not node.level}
        assert not names & neighbours - {place.stem for place in path.parent.iterdir()}, path
