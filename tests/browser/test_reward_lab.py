"""The reward lab as a person uses it: run the notebook, move a slider, bring everything back."""

from collections.abc import Callable
from typing import Any

import pytest
from screen import Notebook

pytestmark = pytest.mark.browser
BOOK = "04_reward_design.ipynb"


def test_a_slider_moves_the_numbers_and_nothing_else(
    notebook: Callable[[str], Notebook], page: Any, picture: Callable[[str], None]
):
    from playwright.sync_api import expect

    book = notebook(BOOK)
    book.run_all()
    book.ran_cleanly()
    before = book.outputs()
    cell = book.cell("rewards.sliders(lab)")
    line = cell.locator("code", has_text="cosine").last
    as_trained = line.inner_text()
    assert as_trained.startswith("cosine +1.0000")
    image = cell.locator(".jp-OutputArea img").last
    source = image.get_attribute("src")

    weight = cell.locator(".widget-slider", has_text="effort.weight")
    readout = weight.locator(".widget-readout").inner_text()
    weight.locator(".noUi-handle").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(line).not_to_have_text(as_trained)
    assert float(weight.locator(".widget-readout").inner_text()) > float(readout)
    assert image.get_attribute("src") != source
    for dark in (False, True):
        book.theme(dark)
        book.cell("rewards.sliders(lab)")
        picture(f"reward_lab_{'dark' if dark else 'light'}")
        book.cell("rewards.look(lab, judge(lab, costly))")
        picture(f"reward_look_{'dark' if dark else 'light'}")
    book.theme(False)

    cell = book.cell("rewards.sliders(lab)")
    cell.get_by_role("button", name="reset").click()
    expect(cell.locator("code", has_text="cosine").last).to_have_text(as_trained)
    after = book.outputs()
    assert [str(o) for o in after] == [str(o) for o in before], "a control has changed what a cell had put out"
