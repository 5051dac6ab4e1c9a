"""A rollout as a person reads it: parts fold, a token tells its numbers, in both themes."""

from __future__ import annotations

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


@pytest.fixture
def reader(lab: Lab, notebook: Callable[[str], Notebook]) -> Notebook:
    path: Path = lab.folder / "reader.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in CELLS], metadata=kernel), path)
    book = notebook(path.name)
    book.run_all()
    book.ran_cleanly()
    return book


def test_a_token_tells_its_numbers(reader: Notebook, page: Any, picture: Callable[[str], None]):
    cell = reader.cell("rollout.read")
    written = cell.locator('pre span[title*="log p"]:visible')
    assert written.count() > 10
    written.nth(5).hover()
    hovered = page.evaluate("[...document.querySelectorAll(':hover')].at(-1).getAttribute('title')")
    assert "log p" in hovered and "policy version" in hovered and "experts" in hovered
    for dark in (False, True):
        reader.theme(dark)
        for number, text in enumerate(("rollout.read", "task.card")):
            reader.cell(text)
            picture(f"reader_{number}_{'dark' if dark else 'light'}")
    reader.theme(False)


def test_what_was_read_folds(reader: Notebook):
    cell = reader.cell("rollout.read")
    everything = cell.locator("details")
    folded = everything.nth(everything.evaluate_all("all => all.findIndex(one => !one.open)"))
    hidden = folded.locator("pre span").first
    assert not hidden.is_visible()
    folded.locator("summary").click()
    hidden.wait_for(state="visible")


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_told_from_its_background(reader: Notebook, page: Any, dark: bool):
    """WCAG's contrast of at least 3 for every token, coloured or not (small text asks for 4.5; marks are decoration)."""
    reader.theme(dark)
    cell = reader.cell("rollout.read")
    worst = cell.evaluate(CONTRAST)
    reader.theme(False)
    assert worst["ratio"] > 3.0, worst


CONTRAST = """cell => {
  const parts = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = (top, below) => { const a = top[3] ?? 1; return [0, 1, 2].map(i => a * top[i] + (1 - a) * below[i]) };
  const light = rgb => { const [r, g, b] = rgb.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b };
  let worst = { ratio: 99 };
  for (const span of cell.querySelectorAll('pre span')) {
    let chain = [], node = span;
    while (node) { chain.unshift(parts(getComputedStyle(node).backgroundColor)); node = node.parentElement }
    const back = chain.reduce((below, top) => over(top, below), [255, 255, 255]);
    const ink = over(parts(getComputedStyle(span).color), back);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < worst.ratio) worst = { ratio, text: span.innerText, ink, back };
  }
  return worst;
}"""
