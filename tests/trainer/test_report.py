"""The report says what the files say."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from composer_nb.trainer.report import STAGES, build_report, open_run, solved_by_task, table, write_report
from composer_nb.trainer.rundir import RunDir, write_json

PROMISED = {
    "eval": ("base", "midtrained", "start", "final"),
    "train": (
        *("steps", "samples", "tokens", "staleness_bound", "staleness_max", "staleness_mean"),
        *("trainer_idle", "tokens_accounted"),
    ),
    "replay": ("off", "on"),
    "weights": ("versions", "full_bytes", "delta_bytes", "changed_fraction"),
    "rewards": ("terms", "infra_errors", "flagged"),
    "wall_s": ("midtrain", "rl", "eval", "total"),
}
SCORES = (
    *("pass_at_1", "pass_greedy", "best_of_k", "k", "n_tasks", "ci95", "tokens_per_task", "tool_calls_per_task"),
    "invalid_call_rate",
)


@pytest.fixture(scope="module")
def report(tiny_run):
    return build_report(tiny_run)


def test_holds_everything_that_others_rely_on(report):
    for part, names in PROMISED.items():
        assert set(names) <= set(report[part]), part
    for name in PROMISED["eval"]:
        assert set(SCORES) <= set(report["eval"][name]), name
    for name in ("off", "on"):
        assert {"logprob_gap_p50", "logprob_gap_p99", "k3"} <= set(report["replay"][name])
    assert report["complete"] is True
    assert report["seed"] == 0 and "torch" in report["versions"]
    assert json.loads(json.dumps(report)) == report


def test_rl_figures_are_those_of_the_stored_rollouts(tiny_run, report):
    rows = pd.concat(pd.read_parquet(path) for path in sorted((tiny_run.path / "rollouts").glob("rl_*.parquet")))
    train = report["train"]
    assert train["samples"] == len(rows) == 3 * 4 * 4
    assert train["sampled"] == sum(int((np.array(v) >= 0).sum()) for v in rows["policy_version"])
    assert train["tokens"] == sum(map(len, rows["token_ids"]))
    assert train["tokens_accounted"] == 1.0
    assert sum(report["ledger"].values()) == train["sampled"]
    dead = rows["advantage"].abs() <= 1e-6
    written = rows["policy_version"].map(lambda v: int((np.array(v) >= 0).sum()))
    assert report["ledger"].get("zero_advantage", 0) == written[dead].sum()
    assert report["rewards"]["mean"] == pytest.approx(rows["reward"].mean())
    assert sum(report["rewards"]["terms"].values()) == pytest.approx(rows["reward"].mean())
    assert train["staleness_max"] == train["staleness_bound"] == 0
    assert 0 < train["trainer_idle"] < 1


def test_scores_are_those_of_the_stored_attempts(tiny_run, report):
    for name, scores in report["eval"].items():
        solved = solved_by_task(tiny_run, name)
        assert len(solved) == scores["n_tasks"]
        assert np.mean(list(solved.values())) == pytest.approx(scores["pass_at_1"])
    low, high = report["gain"]["ci95"]
    assert low <= report["gain"]["pass_at_1"] <= high


def test_seconds_add_up(tiny_run, report):
    seconds = dict(tiny_run.query("SELECT name, seconds FROM stage"))
    assert report["wall_s"]["total"] == pytest.approx(sum(seconds.values()))
    assert report["wall_s"]["eval"] == pytest.approx(sum(v for k, v in seconds.items() if k.startswith("eval_")))
    assert report["wall_s"]["rl"] == seconds["rl"]


@pytest.mark.parametrize("reached", [0, 3, 5, 8, 9])
def test_what_has_not_happened_is_absent(tiny_run, copy_of: Callable[[RunDir], RunDir], reached: int):
    run = copy_of(tiny_run)
    order = [name for (name,) in run.query("SELECT name FROM stage ORDER BY rowid")]
    assert order == list(STAGES)
    with closing(sqlite3.connect(run.path / "run.db")) as db, db:
        for name in order[reached:]:
            db.execute("DELETE FROM stage WHERE name = ?", (name,))
            for other in ("step", "ledger", "checkpoint"):
                db.execute(f"DELETE FROM {other} WHERE stage = ?", (name,))
    found = build_report(run)
    assert found["complete"] is False and list(found["stages"]) == order[:reached]
    present = {"eval": "eval_base", "midtrain": "midtrain", "train": "rl", "gain": "eval_final", "replay": "numerics"}
    for part, stage in present.items():
        assert (part in found) == (stage in order[:reached]), part
    Console(file=(run.path / "shown").open("w"), width=130).print(table(found))
    assert "still to come" in (run.path / "shown").read_text()


def made_up_run(path: Path) -> RunDir:
    """Two RL steps of round numbers; 100 of 150 sampled tokens are in the ledger."""
    run = RunDir(path)
    write_json(run.path / "settings.json", {"seed": 3, "rl": {"minibatches": 2, "shuffle_rewards": False}})
    point = {"sampled": 75.0, "tokens": 200.0, "samples": 8.0, "solved": 0.5, "staleness": 0, "infra_errors": 1.0}
    point |= {"flagged": 0.0, "time": {"wall_s": 5.0, "sample_s": 3.0, "wait_s": 0.5, "train_s": 1.0}}
    steps = [(1, point), (2, {**point, "staleness": 1})]
    run.commit("rl", 2, {}, steps, [(1, {"trained": 60, "zero_advantage": 15}), (2, {"trained": 25})], seconds=10.0)
    return run


def test_a_lost_token_and_a_stale_step_show(tmp_path: Path):
    found = build_report(made_up_run(tmp_path))
    assert found["train"]["tokens_accounted"] == pytest.approx(100 / 150)
    assert found["train"]["staleness_max"] == 1 and found["train"]["staleness_mean"] == 0.5
    assert found["train"]["trainer_idle"] == pytest.approx(1 - 2 / 10)
    assert found["train"]["optimizer_steps_per_batch"] == 2
    assert found["rewards"]["infra_errors"] == 2
    assert found["wall_s"] == {"rl": 10.0, "total": 10.0}
    assert found["complete"] is False


def test_the_page_needs_nothing_but_itself(tiny_run, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    found = write_report(run, {"dot": ("a <dot>", b"\x89PNG\r\n")})
    page = (run.path / "report.html").read_text()
    assert json.loads((run.path / "report.json").read_text()) == found
    assert "http" not in page.replace("http-equiv", "") and "href" not in page and "<script" not in page
    assert page.count("src=") == page.count("src='data:image/png;base64,") == 1
    assert "a &lt;dot&gt;" in page and f"{found['eval']['final']['pass_at_1']:.3f}" in page
    assert (run.path / "figures" / "dot.png").read_bytes() == b"\x89PNG\r\n"


def test_looking_for_a_run_makes_none(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*run\.db is missing"):
        open_run(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tiny_run, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    (run.path / "rollouts" / "rl_00001_0.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"rl_00001_0\.parquet: damaged"):
        build_report(run)
