"""Notebooks as jobs on a head that `composer-nb up` started: by its folder, by its address, and found by Ray itself."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_jobs_fire import Bench

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is an extra")


def command(bench: Bench, *words: str) -> str:
    line, pipes = [sys.executable, "-m", "composer_nb.cli", *words], {"capture_output": True, "text": True}
    return str(subprocess.run(line, env=bench.environment, cwd=bench.folder, check=True, **pipes).stdout)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    command(made, "up", "head", "--down")
    for process in made.alive():
        process.kill()


@pytest.fixture(scope="module")
def head(bench: Bench) -> dict[str, Any]:
    """The one head of this module. The last test ends it."""
    return json.loads(command(bench, "up", "head", "--json"))


@pytest.mark.parametrize("name", ["nothing", ".", "127.0.0.1:{port}"])
def test_no_head_is_a_clear_error(bench: Bench, name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = name.format(port=free.getsockname()[1])
    job = bench.job({"n": {"notebook": bench.notebook("n", "1")}})
    before = list(bench.runs.glob("job-*"))
    code, said = bench.run("run", str(job), "--ray", address)
    wanted = "nothing answers there" if ":" in address else "no head lives in"
    assert code == 2 and wanted in said and len(said.strip().splitlines()) == 1
    assert list(bench.runs.glob("job-*")) == before


def test_a_job_runs_on_a_head_by_its_folder_and_keeps_it_alive(bench: Bench, head: dict[str, Any], tmp_path: Path):
    flag, go = tmp_path / "flag", tmp_path / "go"
    waits = "import time\nfrom pathlib import Path\nPath(flag).touch()\nwhile not Path(go).exists(): time.sleep(0.1)"
    node: dict[str, Any] = {"notebook": bench.notebook("w", waits, parameters="flag: str = ''\ngo: str = ''")}
    node["parameters"] = {"flag": str(flag), "go": str(go)}
    runner = bench.start("run", str(bench.job({"waits": node})), "--ray", "head")
    bench.wait(flag.exists, 400)
    record = bench.folder / "head" / "head.json"
    record.write_text(json.dumps(head | {"until": 0.0}))  # its lease runs out under the job
    go.touch()
    said, _ = runner.communicate(timeout=400)
    assert runner.returncode == 0, said
    bench.wait(lambda: not record.exists(), 400)  # nobody holds it any more
