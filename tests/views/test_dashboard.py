"""The board of a run: what it shows, that it keeps up, and that nothing is left of it."""

import base64
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pixels import inked_share

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.recipe.reader import PromptSlot, read_status
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override, to_dict
from composer_nb.views import dashboard
from composer_nb.views.dashboard import Dashboard
from tests.trainer.recipe.test_status import live

POINT: dict[str, Any] = {
    **{"reward": 0.5, "solved": 0.25, "best_of_group": 0.5, "turns": 3.0, "entropy": 1.0},
    **{"staleness": 0.5, "staleness_max": 1, "time": {"wall_s": 2.0, "train_s": 0.5}},
}
PATIENCE_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "it")
    write_json(run_dir.path / "settings.json", to_dict(override(Settings(), {"rl.steps": 20})))
    return run_dir


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def boards() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("board of")]


def panels(status: Any) -> dict[str, list[Any]]:
    return {chart.title: list(chart.rows) for chart in dashboard.charts(status)}


def test_the_picture_is_the_run(tiny_run: RunDir) -> None:
    status = read_status(tiny_run.path)
    charts = panels(status)
    assert [row["value"] for row in charts["reward"]] == [point["reward"] for point in tiny_run.steps("rl")]
    tokens = {why: n for why, n in tiny_run.ledger().items() if n}
    for name, values in (("sampled tokens", tokens), ("seconds of complete stages", status.stages)):
        assert {row["name"]: row["value"] for row in charts[name]} == values
    scores = {row["name"]: (row["value"], [row["low"], row["high"]]) for row in next(iter(charts.values()))}
    assert scores == {name: (score["pass_at_1"], score["ci95"]) for name, score in status.scores.items()}
    train, wall = (sum(p["time"][name] for p in status.steps) for name in ("train_s", "wall_s"))
    assert dashboard.utilisation(status) == pytest.approx(train / wall)


def test_a_run_says_how_far_it_is_and_what_is_under_way(run: RunDir) -> None:
    status = read_status(run.path)
    assert panels(status) == {}, "a panel without data is not shown"
    assert dashboard.headline(status) == "it: dead, tokenizer"
    assert dict(dashboard.facts(status))["process"].startswith("none")
    for name in ("tokenizer", "data", "midtrain", "sft", "eval_base", "eval_midtrained", "eval_start"):
        run.finish(name, 1.0, {"pass_at_1": 0.5})
    run.commit("rl", 4, {}, [(at, POINT) for at in range(1, 5)])
    with live(run):
        assert dashboard.headline(read_status(run.path)) == "it: live, rl 4 of 20 steps, rl needs about 32 s more"
    slots = (PromptSlot(7, size=4, finished=3, running=1, training=False), PromptSlot(9, 4, 0, 2, training=False))
    status = replace(read_status(run.path), slots=slots, served=3, versions=4)
    heights: dict[str, list[int]] = {}
    for row in panels(status)["rollouts in flight"]:
        heights.setdefault(row["part"], []).append(row["value"])
    assert heights == {"finished": [3, 0], "to sample again": [1, 2], "not dispatched": [0, 2]}
    held_out = next(iter(panels(status).values()))
    assert [(row["name"], row["value"]) for row in held_out][-2:] == [("start", 0.5), ("final", None)], "to come"
    assert "of 8 rollouts 3 finished" in dict(dashboard.facts(status))["in flight"]


def test_the_still_board_needs_nothing_else_and_lets_no_markup_through(run: RunDir) -> None:
    (run.path / "said.log").write_text("<script>alert(1)</script>\n")
    run.commit("rl", 1, {}, [(1, POINT)])
    text = dashboard.board(read_status(run.path)).text
    assert set(re.findall(r"<(\w+)", text)) == {"style", "div", "span", "table", "tr", "th", "td", "img"}
    assert "&lt;script&gt;" in text and not re.search(r"https?://", text)
    [image] = re.findall(r"src='data:image/png;base64,([^']+)'", text)
    assert inked_share(base64.b64decode(image)) > 0.005


def test_a_live_board_keeps_up_and_ends_with_its_run(run: RunDir) -> None:
    with live(run):
        board = Dashboard(run.path, every_s=0.05)
        assert board.live and boards() == ["board of it"]
        run.commit("rl", 1, {}, [(1, POINT)])
        until(lambda: any(chart["title"] == "reward" for chart in board.widget.board["charts"]))
        assert "trainer busy" in str(board.widget.board["tables"])
    until(lambda: not board.live)
    assert board.seen.state == board.widget.board["state"] == "dead" and not board.widget.follows and not boards()
    board.close()
    bundle = board._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and "<img" in bundle["text/html"]
    answer, _ = board.widget.ask({"name": "runs", "values": {}}, [])
    assert [row["run"] for row in answer["rows"]] == ["it"]


@pytest.mark.parametrize("closed", [True, False])
def test_a_board_that_rests_on_a_slow_machine_shows_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch, closed: bool):
    """Closing the board ends its rest, however long, and so does the end of the run."""
    looks: list[Any] = []

    def counted(path: Path) -> Any:
        looks.append(read_status(path))
        return looks[-1]

    monkeypatch.setattr(dashboard, "read_status", counted)
    monkeypatch.setattr(dashboard, "SHARE", 1e-9)  # after a look it rests for hours
    with live(run):
        board = Dashboard(run.path, every_s=0.05)
        until(lambda: len(looks) == 2)
        run.commit("rl", 1, {}, [(1, POINT)])
        if closed:
            board.close()
    until(lambda: not board.live)
    assert len(board.seen.steps) == 1 and board.widget.board["charts"]
    assert board.seen.state == ("live" if closed else "dead")


def test_a_board_whose_run_is_taken_away_says_so_and_ends(run: RunDir) -> None:
    with live(run):
        board = Dashboard(run.path, every_s=0.05)
        shutil.rmtree(run.path)
        until(lambda: not board.live)
    assert "no run here" in board.widget.board["error"] and not boards()
