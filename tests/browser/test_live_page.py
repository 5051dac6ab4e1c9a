"""The page that follows a run, in a browser."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import SCREENSHOTS

from composer_nb.operations.live import LivePage
from composer_nb.trainer.recipe.reader import example_run

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("scheme", "width", "height"), [("light", 1440, 900), ("dark", 1280, 720)])
def test_a_rollout_is_read_beside_the_curves(page: Any, scheme: str, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    with LivePage(example_run().path) as live:
        page.goto(live.url)
        page.wait_for_selector("#board img")
        page.click("#look")
        page.wait_for_selector("#rollout .cnb")
        first = page.inner_text("#rollout")
        page.select_option("#list", "1")
        page.wait_for_function("first => document.getElementById('rollout').innerText !== first", arg=first)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"live_page_{scheme}.png", full_page=True)
