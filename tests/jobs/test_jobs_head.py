"""Notebooks as jobs on a head that `composer-nb up` started."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_jobs_fire import Bench

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is an extra")


def command(bench: Bench, *words: str) -> str:
    line, pipes = [sys.executable, "-m", "composer_nb.cli", *words], {"capture_output": True, "text": True}
    return str(subprocess.run(line, env=bench.environment, cwd=bench.folder, check=True, **pipes).stdout)


def test_a_job_runs_on_a_head_by_its_folder_and_keeps_it_alive(tmp_path: Path):
    bench, flag, go = Bench(tmp_path), tmp_path / "flag", tmp_path / "go"
    waits = "import time\nfrom pathlib import Path\nPath(flag).touch()\nwhile not Path(go).exists(): time.sleep(0.1)"
    node: dict[str, Any] = {"notebook": bench.notebook("w", waits, parameters="flag: str = ''\ngo: str = ''")}
    node["parameters"] = {"flag": str(flag), "go": str(go)}
    try:
        head = json.loads(command(bench, "up", "head", "--json"))
        runner = bench.start("run", str(bench.job({"waits": node})), "--ray", "head")
        bench.wait(flag.exists, 400)
        record = bench.folder / "head" / "head.json"
        record.write_text(json.dumps(head | {"until": 0.0}))  # its lease runs out under the job
        go.touch()
        output, _ = runner.communicate(timeout=400)
        assert runner.returncode == 0, output
        bench.wait(lambda: not record.exists(), 400)  # nobody holds it any more
    finally:
        command(bench, "up", "head", "--down")
        for process in bench.alive():
            process.kill()
