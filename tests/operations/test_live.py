"""The page that follows a run."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx
import pytest

from composer_nb.operations.live import LivePage
from composer_nb.trainer.recipe.reader import example_run, read_status, telling_step
from composer_nb.views.dashboard import headline
from composer_nb.views.rollout import sampled


@pytest.fixture(scope="module")
def page() -> Iterator[LivePage]:
    with LivePage(example_run().path) as made:
        yield made


def test_it_shows_the_run_and_rollouts_to_read(page: LivePage) -> None:
    first, board = httpx.get(page.url), httpx.get(page.url + "board").text
    assert 'id="board"' in first.text and "default-src 'none'" in first.headers["Content-Security-Policy"]
    assert html.escape(headline(read_status(page.path))) in board and board.count("data:image/png;base64,") == 1
    assert httpx.get(page.url + "rollouts/0").status_code == 404  # none is listed yet
    run = example_run()
    there = sampled(run, telling_step(run))
    listed = httpx.get(page.url + "rollouts").text
    assert re.findall(r'<option value="(\d+)">', listed) == [str(place) for place in range(len(there))]
    assert html.escape(there[1].heading) in listed
    assert html.escape(there[1].attempt.task.instruction) in httpx.get(page.url + "rollouts/1").text


def test_another_host_gets_nothing_and_a_port_in_use_is_named(page: LivePage) -> None:
    assert httpx.get(page.url, headers={"Host": "evil.example"}).status_code == 400
    port = httpx.URL(page.url).port
    assert port is not None
    with pytest.raises(ValueError, match=f"--port {port}: "):
        LivePage(page.path, port)
