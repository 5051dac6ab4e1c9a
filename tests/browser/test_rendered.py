"""Rendered notebooks opened from disk: nothing is fetched, both colour schemes can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_nb.jobs.render import render

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
BOOK = "10_compare_runs"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make render` has left, if it is there; else one notebook, rendered now."""
    if (ROOT / "build" / "render" / f"{BOOK}.html").is_file():
        return ROOT / "build" / "render"
    out = tmp_path_factory.mktemp("render")
    _, told = render([ROOT / "notebooks" / f"{BOOK}.ipynb"], out, runs=out / "runs")
    assert told["state"] == "completed"
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_from_disk(rendered: Path, scheme: str, page: Any, picture: Callable[[str], None]):
    page.emulate_media(color_scheme=scheme)
    page.goto((rendered / "index.html").as_uri())
    picture(f"rendered_index_{scheme}")
    page.locator(f'[id="{BOOK}"] h2 a').click()
    assert page.url.endswith(f"{BOOK}.html")
    assert page.locator("dd .completed").inner_text() == "completed"
    picture(f"rendered_top_{scheme}")
    for number, image in enumerate(page.locator("main img").all()[:3]):
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.complete && image.naturalWidth > 100")
        picture(f"rendered_{number}_{scheme}")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(24, 24, 24)")
