"""The page that follows a run, in a browser."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import SCREENSHOTS

from composer_nb.operations.live import LivePage
from composer_nb.trainer.recipe.reader import EXAMPLES

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_a_run_is_read_from_its_curves_to_a_token(page: Any, tmp_path: Path, scheme: str, width: int) -> None:
    from playwright.sync_api import expect

    for run in EXAMPLES:
        shutil.copytree(run, tmp_path / run.name)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    with LivePage(tmp_path / "example") as live:
        page.goto(live.url)
        reward = page.locator("figure", has_text="reward").first
        reward.locator("svg").first.wait_for()
        assert "complete, 160 RL steps" in page.get_by_role("status").inner_text()
        box = reward.locator(".chart").bounding_box()
        for x in (0.5, 0.52, 0.54):  # hovering tells the values of a step
            page.mouse.move(box["x"] + x * box["width"], box["y"] + 80)
        expect(page.locator("#vg-tooltip-element")).to_contain_text(re.compile(r"step\s*\d+"))
        with page.expect_download() as saved:
            reward.locator(".chart summary").click()
            reward.get_by_text("Save as CSV").click()
        assert Path(saved.value.path()).read_text().startswith("step,line,value\n1,reward,")

        page.get_by_label("search rollouts").fill("not solved and advantage < -.2")
        page.get_by_role("button", name="Search").click()
        rows = page.locator("section", has_text="Rollouts").locator("tr.clicks")
        expect(page.locator(".desk form .quiet")).to_have_text("10 rollouts")
        assert all(text.split("\t")[2] == "no" for text in rows.all_inner_texts())
        rows.first.press("Enter")
        page.locator(".reader pre span[title*='log p']:visible").first.wait_for()

        page.get_by_text("Runs in this folder").click()
        page.get_by_role("button", name="final").click()  # sorts
        page.get_by_label("lay example_seed_1 over").check()
        reward.get_by_text("seed", exact=False).or_(reward.get_by_text("same settings")).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"live_page_{scheme}.png", full_page=True)
