"""The notebook runner: what papermill alone gets wrong must come out right."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from composer_nb.harness.sandbox.reap import started as living
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.jobs.notebook import run_notebook
from tests.waiting import wait_until

PARAMETERS = "steps: int = 3\nrate: float = 0.5\nname: str = 'a'\ntry_it: bool = False\nmore: dict = {}"


def notebook(path: Path, *sources: str, parameters: str = PARAMETERS) -> Path:
    cells = [new_code_cell(parameters, metadata={"tags": ["parameters"]}), *map(new_code_cell, sources)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    return path


def states(output: Path) -> list[str]:
    return [cell.metadata.papermill["status"] for cell in code(output)]


def code(output: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(output, 4).cells if cell.cell_type == "code"]


def record(output: Path) -> dict[str, Any]:
    return json.loads((output.parent / "run.json").read_text())


def test_a_run_is_kept_and_told(tmp_path: Path):
    cells = ["print('one'); print('steps', steps)", "half = '\\ud83d'\nhalf", "twice = steps * 2\ntwice"]
    source = notebook(tmp_path / "n.ipynb", *cells)
    before, lines = source.read_bytes(), []
    output = tmp_path / "deep" / "out.ipynb"
    parameters = {"steps": 7, "rate": 1, "more": {"a.b": [1]}}
    result = run_notebook(source, output, parameters, say=lines.append, outputs={"n": "twice"})
    assert [re.sub(r"\d+ s", "t", line) for line in lines] == [
        *("cell 1 of 6, t", "cell 2 of 6, t", "one", "steps 7", "cell 3 of 6, t"),
        *("cell 4 of 6, t: '\\ud83d'", "cell 5 of 6, t: 14", "cell 6 of 6, t"),
    ]
    assert result == record(output)
    assert result["state"] == "completed" and result["parameters"] == {"steps": 7, "rate": 1, "more": {"a.b": [1]}}
    assert result["cells"] == result["cells_run"] == 6 and result["cell_states"] == {"completed": 6}
    assert result["outputs"] == {"n": 14} and code(output)[-1].metadata.tags == ["outputs"]
    assert code(output)[-2].outputs[0].data["text/plain"] == "14"
    assert source.read_bytes() == before
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.ipynb", "outputs.json", "run.json"]


def test_parameters_are_checked_before_a_kernel_starts(tmp_path: Path):
    """As those of a job file are (`test_jobs_file.py`)."""
    source = notebook(tmp_path / "n.ipynb", "raise SystemExit")
    with pytest.raises(ValueError, match="try_it=1 must be of type bool"):
        run_notebook(source, tmp_path / "out" / "o.ipynb", {"try_it": 1})
    assert not (tmp_path / "out").exists()


def test_a_signal_after_the_last_cell_changes_nothing(tmp_path: Path):
    at_exit = f"lambda: (os.kill({os.getpid()}, 15), open('signalled', 'w'), time.sleep(0.5))"
    source = notebook(tmp_path / "n.ipynb", f"import atexit, os, time; atexit.register({at_exit})")
    assert run_notebook(source, output := tmp_path / "out.ipynb")["state"] == "completed"
    assert (tmp_path / "signalled").exists() and states(output)[-1] == "completed"


def test_an_interrupt_ends_what_a_script_started_in_the_background() -> None:
    code = (
        "import os, signal; from composer_nb.jobs.processes import terminate_as_interrupt\n"
        "with terminate_as_interrupt():\n    os.kill(os.getpid(), signal.SIGINT)"
    )
    process = subprocess.run(["sh", "-c", '"$0" -c "$1" & wait', sys.executable, code], capture_output=True, text=True)
    assert "KeyboardInterrupt" in process.stderr


def test_sigterm_interrupts_keeps_output_and_leaves_no_process(tmp_path: Path):
    child = "import subprocess, time\np = subprocess.Popen(['sleep', '300'], start_new_session=True)\nprint(p.pid)"
    source = notebook(tmp_path / "n.ipynb", child, "print('begun')\ntime.sleep(300)", "print('never')")
    output = tmp_path / "out.ipynb"
    script = (
        "import sys; from pathlib import Path; from composer_nb.jobs.notebook import run_notebook\n"
        "run_notebook(Path(sys.argv[1]), Path(sys.argv[2]), say=lambda line: print(line, flush=True))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runner = subprocess.Popen([sys.executable, "-c", script, str(source), str(output)], **pipes)
    assert runner.stdout is not None
    lines = [line for line in iter(runner.stdout.readline, "begun\n") if not line.startswith("cell ")]
    pid = int(lines[0])
    started = psutil.Process(runner.pid).children(recursive=True)
    runner.send_signal(signal.SIGTERM)
    _, errors = runner.communicate(timeout=patience(60))
    assert "KeyboardInterrupt" in errors and runner.returncode != 0
    result = record(output)
    assert result["state"] == "interrupted" and result["error"] == "cancelled" and result["cells"] == 4
    assert states(output)[-1] == "pending"
    assert "begun" in code(output)[-2].outputs[0].text
    wait_until(lambda: not any(living(process.pid) for process in started), 10)
    assert not os.path.exists(f"/proc/{pid}")
