"""The board of a run in JupyterLab: the front end of the page, with a kernel behind it."""

from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from screen import Lab, Notebook

from composer_nb.trainer.recipe.reader import EXAMPLES

pytestmark = pytest.mark.browser
CELLS = (
    "from pathlib import Path\nfrom composer_nb.trainer.recipe.reader import read_status\n"
    "from composer_nb.views import curves\nfrom composer_nb.views.dashboard import Dashboard as Board\n"
    f"path = Path({str(EXAMPLES[0])!r})",
    "Board(path)",
    "curves.reinforcement(read_status(path))",
)


def test_the_board_answers_in_a_notebook(
    lab: Lab, notebook: Callable[[str], Notebook], page: Any, picture: Callable[[str], None]
) -> None:
    from playwright.sync_api import expect

    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(
        new_notebook(cells=[new_code_cell(cell) for cell in CELLS], metadata=kernel), lab.folder / "desk.ipynb"
    )
    book = notebook("desk.ipynb")
    book.run_all()
    book.ran_cleanly()
    board = book.cell("Board(path)").locator(".desk")
    expect(board.get_by_role("status")).to_contain_text("complete, 160 RL steps")
    board.locator("figure", has_text="reward").locator("svg").first.wait_for()
    board.get_by_label("search rollouts").fill("solved and calls < 10")
    board.get_by_role("button", name="Search").click()
    board.locator("tr.clicks").first.click()
    board.locator(".reader details").first.wait_for()
    for dark in (False, True):
        book.theme(dark)
        book.cell("Board(path)")
        picture(f"desk_{'dark' if dark else 'light'}")
    book.theme(False)
    book.cell("curves.reinforcement").locator(".vega-embed").first.wait_for()
    picture("curves_in_lab")
