"""Every notebook keeps the conventions, and runs."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from extremes import CHECKS

from composer_nb.jobs.check import parameters_of
from composer_nb.jobs.notebook import run_notebook
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.records.rundir import RunDir

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONGEST_CELL, LONGEST_DEFINITION = 12, 10
MOST_ASSERTS = 12
SHORTER = {
    "01_tour": {"run_dir": str(EXAMPLES[0])},
    "02_mid_training": {"steps": 80, "tokens": 256, "demonstrations": 96},
    "08_product": {"tasks_wanted": 5},
    "09_bench": {"tasks_wanted": 6},
    "10_router_replay": {"rollouts": 16},
    "11_mismatch_and_losses": {"rollouts": 16},
}
"""Parameters with which a notebook shows the same in less time. `make docs` runs it with its own."""
ON_ONE_PAGE = ("00_minimal_loop",)
"""Notebooks whose subject is the code itself: they define what others import, in cells that follow one another."""
SEE = "*What you should see here:*"
WALKTHROUGHS = [path for path in NOTEBOOKS if path.stem not in ON_ONE_PAGE]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def book(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, 4)


def code(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS[0].name == "00_minimal_loop.ipynb"
    assert all(re.fullmatch(r"\d\d_[a-z_]+", path.stem) for path in NOTEBOOKS)
    assert len({path.stem[:2] for path in NOTEBOOKS}) == len(NOTEBOOKS), "a number is used twice"


def test_it_is_clean(book: nbformat.NotebookNode):
    nbformat.validate(book)
    assert set(book.metadata) <= {"kernelspec", "language_info"}
    assert book.metadata.kernelspec.name == "python3"
    for cell in book.cells:
        assert set(cell.metadata) <= {"tags"}
    for cell in code(book):
        assert not cell.outputs and cell.execution_count is None


def test_it_begins_with_what_a_reader_needs(book: nbformat.NotebookNode):
    opening = book.cells[0].source
    assert book.cells[0].cell_type == "markdown" and opening.startswith("# ")
    assert "*You will*" in opening
    assert "*You will have learnt* " in opening and "*Know before*: " in opening
    assert re.search(r"\*Needs\*.*minute.*memory", opening)
    everything = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    for heading in ("## Recap", "## Exercises", "Solutions", "## What next"):
        assert heading in everything


def test_it_leads_to_its_neighbours_at_both_ends(path: Path, book: nbformat.NotebookNode):
    here = NOTEBOOKS.index(path)
    near = [NOTEBOOKS[place].name for place in (here - 1, here + 1) if 0 <= place < len(NOTEBOOKS)]
    for cell in (book.cells[0], book.cells[-1]):
        assert re.findall(r"\[\d\d · [^]]+\]\((\w+\.ipynb)\)", cell.source.splitlines()[-1]) == near


def test_its_first_code_cell_holds_the_parameters(path: Path, book: nbformat.NotebookNode):
    assert "parameters" in code(book)[0].metadata.get("tags", [])
    assert parameters_of(path)


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
def test_cells_are_short_and_prose_stands_before_them(book: nbformat.NotebookNode):
    for before, cell in zip(book.cells, book.cells[1:], strict=False):
        if cell.cell_type == "code":
            assert cell.source.count("\n") < LONGEST_CELL, cell.source
            introduced = before.cell_type == "markdown" or "parameters" in before.metadata.get("tags", [])
            assert introduced, f"no prose before:\n{cell.source}"


@pytest.mark.parametrize("path", WALKTHROUGHS, ids=lambda path: path.stem)
def test_logic_lives_in_the_package(book: nbformat.NotebookNode):
    for cell in code(book):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(
                node, ast.FunctionDef | ast.ClassDef
            ):  # a class is what a reader gives the package, as an environment
                assert (node.end_lineno or 0) - node.lineno < LONGEST_DEFINITION, node.name


def test_it_installs_fetches_and_points_at_nothing(book: nbformat.NotebookNode):
    for cell in book.cells:
        assert not re.search(r"^\s*[!%]", cell.source, re.M) or cell.cell_type == "markdown", cell.source
        assert not re.search(r"https?://|hf_hub|from_pretrained\(\s*[\"']", cell.source), cell.source
        assert not re.search(r"(?<![\w./])/(?:home|root|tmp|usr|opt|mnt|Users)/", cell.source), cell.source


def test_it_checks_its_own_claims(path: Path, book: nbformat.NotebookNode):
    """In sight of the reader where a check states the claim of a section, in CHECKS or another test where it teaches nothing."""
    asserts = [node for cell in code(book) for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assert)]
    sections = [cell for cell in book.cells if re.search(r"^## \d+ · ", cell.source, re.M)]
    assert 0 < len(asserts) <= MOST_ASSERTS, "asserts that are no lesson stand between it and its reader"
    assert len(asserts) + len(CHECKS.get(path.stem, ())) >= len(sections) // 2


def test_a_name_means_one_thing(book: nbformat.NotebookNode):
    """Cells can be run again in any order that makes sense, because none rebinds what another has bound."""
    seen: dict[str, int] = {}
    for number, cell in enumerate(code(book)):
        targets = [
            target
            for statement in ast.parse(cell.source).body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        ]
        bound = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        for name in bound:
            assert seen.setdefault(name, number) == number, f"{name} is bound in two cells"


@pytest.mark.whole
def test_the_tour_runs_on_a_finished_run(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    said: list[str] = []
    parameters = {"run_dir": str(run.path)}
    record = run_notebook(FOLDER / "01_tour.ipynb", run.path / "01_tour.ipynb", parameters, say=said.append)
    assert record["state"] == "completed" and record["cells_run"] == record["cells"] >= 30
    assert any("the run is complete" in line for line in said)
    done = nbformat.read(run.path / "01_tour.ipynb", 4)
    errors = [
        out for cell in code(done) for out in cell.outputs if out.output_type == "error" or out.get("name") == "stderr"
    ]
    assert errors == []
    pictures = [out for cell in code(done) for out in cell.outputs if "image/png" in out.get("data", {})]
    assert len(pictures) >= 8
    assert not list(FOLDER.glob("runs/*"))


@pytest.mark.whole
@pytest.mark.parametrize("path", [p for p in WALKTHROUGHS if p.stem != "05_rl_run"], ids=lambda path: path.stem)
def test_it_runs_on_the_example(path: Path, tmp_path: Path):
    """It runs with its own parameters, or SHORTER ones, and leaves nothing beside the notebook and in the example."""
    before = [files_below(folder) for folder in EXAMPLES]
    record = run_notebook(path, tmp_path / path.name, SHORTER.get(path.stem, {}), say=lambda line: None)
    assert record["state"] == "completed" and record["cells_run"] == record["cells"]
    done = nbformat.read(tmp_path / path.name, 4)
    outputs = [out for cell in code(done) for out in cell.outputs]
    assert [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"] == []
    drawn = [place for place, cell in enumerate(done.cells) if "image/png" in str(cell.get("outputs"))]
    assert drawn
    assert [done.cells[place].source for place in drawn if not done.cells[place + 1].source.startswith(SEE)] == []
    assert [files_below(folder) for folder in EXAMPLES] == before


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
