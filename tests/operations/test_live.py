"""The page that follows a run."""

import html
from collections.abc import Iterator

import httpx
import pytest

from composer_nb.operations.live import LivePage
from composer_nb.trainer.recipe.reader import example_run, read_status, telling_step
from composer_nb.views.dashboard import headline
from composer_nb.views.rollout import sampled


@pytest.fixture(scope="module")
def page() -> Iterator[LivePage]:
    with LivePage(example_run().path) as live_page:
        yield live_page


def test_it_shows_the_run_and_rollouts_to_read(page: LivePage) -> None:
    run = example_run()
    first, script = httpx.get(page.url), httpx.get(page.url + "desk.js", timeout=120).text
    assert "script-src 'self'" in first.headers["Content-Security-Policy"] and "<script type=module" in first.text
    assert "vegaEmbed" in script and "render({ model" in script
    board = httpx.get(page.url + "ask/board").json()
    assert board["headline"] == headline(read_status(page.path)) and board["sources"][0] == "step 160"
    chart = next(chart for chart in board["charts"] if chart["title"] == "reward")
    assert [row["value"] for row in chart["rows"]] == [point["reward"] for point in run.steps("rl")]

    rollouts = sampled(run, telling_step(run))
    rows = httpx.get(page.url + "ask/rollouts").json()["rows"]
    assert [row["task"] for row in rows] == [stored.attempt.task.id for stored in rollouts]
    params = {"source": "step 160", "where": "not solved and advantage < -.2"}
    rows = httpx.get(page.url + "ask/rollouts", params=params).json()["rows"]
    fitting = [s for s in rollouts if not s.attempt.grade.passed and (s.advantage or 0) < -0.2]
    assert fitting and [row["advantage"] for row in rows] == [stored.advantage for stored in fitting]
    httpx.get(page.url + "ask/rollouts?where=solved")  # from another window
    rollout_html = httpx.get(page.url + "ask/rollout", params={"number": len(rows) - 1, **params}).json()["html"]
    assert html.escape(fitting[-1].heading) in rollout_html
    assert "the list has" in httpx.get(page.url + "ask/rollout?number=99").json()["error"]
    assert "more: no parameter of board" in httpx.get(page.url + "ask/board?more=1").json()["error"]
    assert "no such value" in httpx.get(page.url + "ask/rollouts?where=x<1").json()["error"]


def test_runs_beside_it_are_laid_over_it(page: LivePage) -> None:
    rows = httpx.get(page.url + "ask/runs", params={"where": "seed = 1"}).json()["rows"]
    assert [(row["run"], row["name"]) for row in rows] == [("example_seed_1", "seed 1")]
    [row] = rows
    assert row["final_low"] < row["final"] < row["final_high"]
    for over, count in ((row["path"], 2), ("/etc", 1), ("", 1)):
        charts = httpx.get(page.url + "ask/board", params={"over": over}).json()["charts"]
        [chart] = [chart for chart in charts if chart["title"] == "reward"]
        assert len({point["line"] for point in chart["rows"]}) == count


def test_another_site_gets_nothing_and_a_port_in_use_is_named(page: LivePage) -> None:
    assert httpx.get(page.url, headers={"Host": "evil.example"}).status_code == 400
    assert httpx.get(page.url + "ask/board", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 404
    port = httpx.URL(page.url).port
    assert port is not None
    with pytest.raises(ValueError, match=f"--port {port}: "):
        LivePage(page.path, port)
