"""The notebook of a live run: on a run that is over within seconds, and with a run of its own."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from composer_nb.jobs.notebook import run_notebook
from composer_nb.trainer.recipe.reader import read_status
from composer_nb.trainer.records.rundir import RunDir

pytestmark = pytest.mark.whole
NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "05_rl_run.ipynb"


def execute(out: Path, parameters: dict[str, Any]) -> nbformat.NotebookNode:
    """Run the notebook and return it; every cell must have run, and none may have printed an error."""
    record = run_notebook(NOTEBOOK, out, parameters, say=lambda line: None)
    assert record["state"] == "completed" and record["cells_run"] == record["cells"]
    executed = nbformat.read(out, 4)
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    errors = [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert errors == []
    with_picture = {cell.id for cell in cells if "image/png" in str(cell.outputs)}
    assert with_picture & {"run-15", "run-33", "run-curves"} == {"run-15", "run-curves"}, "one board, and its curves"
    return executed


@pytest.mark.slow
def test_a_run_that_is_over_is_looked_at_and_left_as_it_is(tiny_run: RunDir, tmp_path: Path) -> None:
    before = {str(f): f.stat().st_mtime_ns for f in tiny_run.path.rglob("*")}
    execute(tmp_path / "06.ipynb", {"run_dir": str(tiny_run.path), "runs": str(tmp_path / "runs")})
    assert {str(f): f.stat().st_mtime_ns for f in tiny_run.path.rglob("*")} == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_of_its_own_is_stopped_resumed_and_loses_nothing(tmp_path: Path) -> None:
    execute(tmp_path / "06.ipynb", {"runs": str(tmp_path / "runs")})
    status = read_status(tmp_path / "runs" / "watched")
    log = (status.path / "said.log").read_text()
    assert status.state == "complete" and log.count("KeyboardInterrupt") == 1, "it was stopped once"
    assert [(change.name, change.value) for change in status.changes] == [("services.bound", 3)]
    assert status.trained == 60 and sum(status.ledger.values()) == status.sampled
    assert json.loads((status.path / "settings.json").read_text())["services"]["on"]
    assert not list((status.path / "journal").iterdir()), "nothing is left on the machine"
