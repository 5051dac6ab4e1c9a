"""Every notebook keeps the conventions, and runs."""

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from extremes import CHECKS
from test_any_run import OFTEN

from composer_nb.jobs.check import parameters_of
from composer_nb.jobs.notebook import run_notebook
from composer_nb.trainer.recipe.reader import EXAMPLES

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONGEST_CELL, LONGEST_DEFINITION = 12, 10
MOST_ASSERTS = 12
SHORTER = {
    "00_minimal_loop": {"steps": 40, "prompts": 16, "group": 8},
    "01_tour": {"run_dir": str(EXAMPLES[0])},
    "02_mid_training": {"steps": 80, "tokens": 256, "demonstrations": 96},
    "08_product": {"tasks_wanted": 5},
    "09_bench": {"tasks_wanted": 6},
    "09b_real_use": {"requests": 6},
    "10_router_replay": {"rollouts": 16},
    "11_mismatch": {"rollouts": 16},
}
"""Parameters with which a notebook shows the same in less time. `make docs` runs it with its own."""
ON_ONE_PAGE = ("00_minimal_loop",)
"""Notebooks whose subject is the code itself: they define what others import, in cells that follow one another."""
Capture = pytest.CaptureFixture[str]
SEE = "*What you should see here:*"
WALKTHROUGHS = [path for path in NOTEBOOKS if path.stem not in ON_ONE_PAGE]
READ_IN_PROCESS = {book for book, _ in OFTEN}
"""Notebooks whose code `test_any_run.py` runs each time, on a run that went to an extreme."""
RUN_HERE = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in READ_IN_PROCESS else [])
    for path in NOTEBOOKS
    if path.stem != "05_rl_run"
]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def book(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, 4)


def code(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_it_is_clean_and_points_at_nothing_outside(path: Path, book: nbformat.NotebookNode):
    nbformat.validate(book)
    assert re.fullmatch(r"\d\db?_[a-z_]+", path.stem)
    assert set(book.metadata) <= {"kernelspec", "language_info"} and book.metadata.kernelspec.name == "python3"
    for cell in book.cells:
        assert set(cell.metadata) <= {"tags"}
        assert not re.search(r"https?://|hf_hub|from_pretrained\(\s*[\"']", cell.source), cell.source
        assert not re.search(r"(?<![\w./])/(?:home|root|tmp|usr|opt|mnt|Users)/", cell.source), cell.source
    for cell in code(book):
        assert not cell.outputs and cell.execution_count is None
        assert not re.search(r"^\s*[!%]", cell.source, re.M), cell.source
    assert "parameters" in code(book)[0].metadata.get("tags", []) and parameters_of(path)


def test_it_begins_with_what_a_reader_needs_and_leads_to_its_neighbours(path: Path, book: nbformat.NotebookNode):
    opening = book.cells[0].source
    assert book.cells[0].cell_type == "markdown" and opening.startswith("# ")
    assert all(words in opening for words in ("*You will*", "*You will have learnt* ", "*Know before*: "))
    assert re.search(r"\*Needs\*.*minute.*memory", opening)
    prose = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    assert all(heading in prose for heading in ("## Recap", "## Exercises", "Solutions", "## What next"))
    position = NOTEBOOKS.index(path)
    near = [NOTEBOOKS[index].name for index in (position - 1, position + 1) if 0 <= index < len(NOTEBOOKS)]
    for cell in (book.cells[0], book.cells[-1]):
        assert re.findall(r"\[\d\db? · [^]]+\]\((\w+\.ipynb)\)", cell.source.splitlines()[-1]) == near


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
def test_cells_are_short_with_prose_before_them_and_logic_lives_in_the_package(book: nbformat.NotebookNode):
    for before, cell in zip(book.cells, book.cells[1:], strict=False):
        if cell.cell_type == "code":
            assert cell.source.count("\n") < LONGEST_CELL, cell.source
            introduced = before.cell_type == "markdown" or "parameters" in before.metadata.get("tags", [])
            assert introduced, f"no prose before:\n{cell.source}"
            for node in ast.walk(ast.parse(cell.source)):
                # A class is what a reader gives the package, as an environment.
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    assert (node.end_lineno or 0) - node.lineno < LONGEST_DEFINITION, node.name


def test_it_checks_its_own_claims_and_a_name_means_one_thing(path: Path, book: nbformat.NotebookNode):
    """A check that states the claim of a section stands in sight of the reader, others in CHECKS or another test. Cells can be
    run again in any order that makes sense, because none rebinds what another has bound."""
    sections = [cell for cell in book.cells if re.search(r"^## \d+ · ", cell.source, re.M)]
    homes, asserts = dict[str, int](), 0
    for number, cell in enumerate(code(book)):
        tree = ast.parse(cell.source)
        asserts += sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
        for statement in tree.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            for node in [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]:
                assert homes.setdefault(node.id, number) == number, f"{node.id} is bound in two cells"
    assert 0 < asserts <= MOST_ASSERTS, "asserts that are no lesson stand between it and its reader"
    assert asserts + len(CHECKS.get(path.stem, ())) >= len(sections) // 2


def test_a_learner_writes_functions_that_are_judged_at_once(path: Path, book: nbformat.NotebookNode, capsys: Capture):
    """A stub runs and is not finished; the folded solution below it is right. There are three exercises or more, each with its
    difficulty and minutes, and at least one function to write."""
    prose = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    titles = re.findall(r"^(?:\*\*Write it|\d+\. \*\*).*$", prose, re.M)
    assert len(titles) >= 3 and all(re.search(r"\*\* · (easy|medium|hard) · \d+ minutes", title) for title in titles)
    names: dict[str, Any] = {"np": np, "torch": torch, "Tensor": torch.Tensor}
    for stub, below in zip(book.cells, book.cells[1:], strict=False):
        if "exercise" in stub.metadata.get("tags", []):
            exec(stub.source, names)
            assert "not finished yet" in capsys.readouterr().out
            [solution] = re.findall(r"```python\n(.*?)```", below.source, re.S)
            exec(re.sub("^def ", "@check\ndef ", solution, flags=re.M), names)
            assert "right: it agrees" in capsys.readouterr().out
    assert "check" in names, "there is nothing to write"


@pytest.mark.whole
@pytest.mark.parametrize("path", RUN_HERE, ids=lambda path: path.stem)
def test_it_runs_on_the_example(path: Path, tmp_path: Path):
    """It runs with its own parameters, or SHORTER ones, and leaves nothing beside the notebook and in the example."""
    folders = [FOLDER, *EXAMPLES]
    before = [files_below(folder) for folder in folders]
    record = run_notebook(path, tmp_path / path.name, SHORTER.get(path.stem, {}), say=lambda line: None)
    assert record["state"] == "completed" and record["cells_run"] == record["cells"]
    executed = nbformat.read(tmp_path / path.name, 4)
    outputs = [out for cell in code(executed) for out in cell.outputs]
    assert [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"] == []
    pictures = [index for index, cell in enumerate(executed.cells) if "image/png" in str(cell.get("outputs"))]
    assert pictures
    assert [
        executed.cells[index].source for index in pictures if not executed.cells[index + 1].source.startswith(SEE)
    ] == []
    assert [files_below(folder) for folder in folders] == before


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
