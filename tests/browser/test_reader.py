"""A rollout as a person reads it: parts fold, a token tells its numbers, in both themes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from screen import Lab, Notebook

pytestmark = pytest.mark.browser
CELLS = (
    "from composer_nb.trainer.recipe.reader import example_run\nfrom composer_nb.views import rollout, task",
    "stored = rollout.sampled(example_run())[0]\nrollout.read(stored, 'advantage')",
    "task.card(stored.attempt.task)",
    "task.turns(stored.attempt)",
)


def test_a_token_tells_its_numbers_and_what_was_read_folds(
    lab: Lab, notebook: Callable[[str], Notebook], page: Any, picture: Callable[[str], None]
):
    path: Path = lab.folder / "reader.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in CELLS], metadata=kernel), path)
    book = notebook(path.name)
    book.run_all()
    book.ran_cleanly()
    cell = book.cell("rollout.read")
    sampled_tokens = cell.locator('pre span[title*="log p"]:visible')
    assert sampled_tokens.count() > 10
    sampled_tokens.nth(5).hover()
    hovered = page.evaluate("[...document.querySelectorAll(':hover')].at(-1).getAttribute('title')")
    assert "log p" in hovered and "policy version" in hovered and "experts" in hovered
    parts = cell.locator("details")
    folded = parts.nth(parts.evaluate_all("all => all.findIndex(one => !one.open)"))
    hidden = folded.locator("pre span").first
    assert not hidden.is_visible()
    folded.locator("summary").click()
    hidden.wait_for(state="visible")
    for dark in (False, True):
        book.theme(dark)
        for number, text in enumerate(("rollout.read", "task.card")):
            book.cell(text)
            picture(f"reader_{number}_{'dark' if dark else 'light'}")
    book.theme(False)
