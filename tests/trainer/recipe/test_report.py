"""The report says what the files say."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe.launch import STAGES, stages_of
from composer_nb.trainer.recipe.reader import read_status, solved_by_task, telling_step, weights_before
from composer_nb.trainer.recipe.report import build_report, last_live, reward_trend
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override, to_dict
from composer_nb.views.charts import Figure, bars
from composer_nb.views.report import table, verdict, write_report


@pytest.fixture(scope="module")
def report(tiny_run):
    return build_report(tiny_run)


def test_rl_figures_are_those_of_the_stored_rollouts(tiny_run, report):
    rows = pd.concat(pd.read_parquet(path) for path in sorted((tiny_run.path / "rollouts").glob("rl_*.parquet")))
    train, written = report["train"], rows["policy_version"].map(lambda v: int((np.array(v) >= 0).sum()))
    assert train["samples"] == len(rows) == 3 * 4 * 4 and train["tokens"] == sum(map(len, rows["token_ids"]))
    assert train["sampled"] == written.sum() == sum(report["ledger"].values()) and train["tokens_accounted"] == 1.0
    assert report["ledger"].get("zero_advantage", 0) == written[rows["advantage"].abs() <= 1e-6].sum()
    assert report["rewards"]["mean"] == pytest.approx(rows["reward"].mean())
    assert sum(report["rewards"]["terms"].values()) == pytest.approx(rows["reward"].mean())
    assert train["staleness_max"] == train["staleness_bound"] == 0 < train["trainer_idle"] < 1
    assert report["complete"] and report["fidelity"] is None, "its tasks have no sandboxes of their own"
    assert json.loads(json.dumps(report)) == report


def test_scores_are_those_of_the_stored_attempts(tiny_run, report):
    assert list(report["eval"]) == ["base", "midtrained", "start", "final"]
    for name, scores in report["eval"].items():
        solved = solved_by_task(tiny_run, name)
        assert len(solved) == scores["n_tasks"] and np.mean([*solved.values()]) == pytest.approx(scores["pass_at_1"])
        assert np.mean([share > 0 for share in solved.values()]) == pytest.approx(scores["best_of_k"])
    low, high = report["gain"]["ci95"]
    assert low <= report["gain"]["pass_at_1"] <= high


def test_tampered_and_failed_attempts_are_unsolved_and_lost_ones_do_not_count(tmp_path: Path):
    run, statuses = RunDir(tmp_path), ["graded", "tampered", "agent_failed", "infra_error", "graded"]
    rows = pd.DataFrame({"task_id": "t", "status": statuses, "passed": [True, False, False, False, True]})
    rows.to_parquet(run.path / "rollouts" / "eval_final.parquet")
    assert solved_by_task(run, "final") == {"t": pytest.approx(1 / 3)}
    assert solved_by_task(run, "final", greedy=True) == {"t": 1.0}, "the last"


@pytest.mark.parametrize("reached", [0, 5, 10])
def test_what_has_not_happened_is_absent(tiny_run, copy_of: Callable[[RunDir], RunDir], reached: int):
    run = copy_of(tiny_run)
    order = [name for (name,) in run.query("SELECT name FROM stage ORDER BY rowid")]
    assert order == [name for name in STAGES if name != "draft"] == [*stages_of(run.settings())]
    with closing(sqlite3.connect(run.path / "run.db")) as db, db:
        for name in order[reached:]:
            db.execute("DELETE FROM stage WHERE name = ?", (name,))
            for table_name in ("step", "ledger", "checkpoint"):
                db.execute(f"DELETE FROM {table_name} WHERE stage = ?", (name,))
    report = build_report(run)
    assert report["complete"] is False and set(report["stages"]) == set(order[:reached])
    present = {"eval": "eval_base", "midtrain": "midtrain", "train": "rl", "gain": "eval_final", "replay": "numerics"}
    for part, stage in present.items():
        assert (part in report) == (stage in order[:reached]), part
    Console(file=(run.path / "shown").open("w"), width=130).print(table(report))
    text = " ".join((run.path / "shown").read_text().split())
    assert "still to come" in text and ("What RL gains is not known yet" in text) == ("gain" not in report)


@pytest.mark.parametrize(
    ("changes", "last"), [({"until": "midtrain"}, "midtrain"), ({"until": "sft"}, "sft"), ({"control_steps": 5}, "")]
)
def test_a_run_that_ends_before_rl_is_complete(tmp_path: Path, changes: dict[str, Any], last: str):
    run = RunDir(tmp_path)
    write_json(run.path / "settings.json", to_dict(override(Settings(), changes)))
    before_rl = STAGES[: STAGES.index(last) + 1 if last else STAGES.index("rl")]
    for name in [*before_rl, *([] if last else ["control", "eval_control"])]:
        assert not build_report(run)["complete"] and read_status(run.path).stage == name
        run.finish(name, 1.0, {})
    assert build_report(run)["complete"] and read_status(run.path).state == "complete"
    options = {"rl": {"start_weight": 0.0, "sharpness": []}, "midtrain": {"draft_steps": 9}}
    assert stages_of(options) == tuple(name for name in STAGES if name != "finish")
    Console(file=(run.path / "shown").open("w"), width=130).print(table(build_report(run) | {"eval": {}}))
    assert "still to come" not in (run.path / "shown").read_text()


def test_the_factors_of_the_logits_are_reported(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", to_dict(Settings()))
    (run := RunDir(tmp_path)).finish("sft", 1.0, {"sharpness": 1.4, "seen": 3})
    run.finish("finish", 1.0, {"sharpness": 0.9})
    report = build_report(run)
    assert (report["sft"], report["finish"]) == ({"sharpness": 1.4}, {"sharpness": 0.9})


BOTH = {"recovery": 0.5, "runs_tests": 1.0, "calls_per_turn": None}


@pytest.mark.parametrize(
    ("gain", "ci95", "words"),
    [
        (0.055, [0.021, 0.08], ("5.5 points more of 9 held-out tasks", "tasks: +2.1 to +8.0): beyond chance.")),
        (-0.03, [-0.06, -0.01], ("3.0 points fewer of 9 held-out tasks", "-6.0 to -1.0): beyond chance.")),
        (0.01, [-0.02, 0.04], ("+4.0): within chance.", "new structures: +1.0 over “start” (-2.0 to +4.0), within")),
    ],
)
def test_a_verdict_says_what_rl_gained_and_what_became_worse(gain: float, ci95: list[float], words: tuple[str, ...]):
    within = {"over": "start", "gain": gain, "ci95": ci95, "n_tasks": 9}
    scores = {"start": BOTH | {"best_of_k": 0.8, "invalid_call_rate": 0.1}}
    scores["final"] = BOTH | {"best_of_k": 0.7, "invalid_call_rate": 0.2}
    report = {"complete": True, "eval": scores, "gain": {"within_12": {"heldout": within, "structures": within}}}
    text = verdict(report)
    assert "in 12 calls than “start”, the stronger policy before it" in text and all(phrase in text for phrase in words)
    assert text.endswith("Worse than before RL, without intervals: best of k 0.80 → 0.70, invalid calls 0.10 → 0.20.")


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
    report = build_report(made_up_run(tmp_path))
    train = {"tokens_accounted": 100 / 150, "staleness_max": 1, "staleness_mean": 0.5, "trainer_idle": 1 - 2 / 10}
    assert {name: report["train"][name] for name in train} == pytest.approx(train)
    assert report["train"]["optimizer_steps_per_batch"] == 2 and report["rewards"]["infra_errors"] == 2
    assert report["wall_s"] == {"rl": 10.0, "total": 10.0} and not report["complete"]


FLAT, UP = [0.0] * 40, [step / 40 for step in range(40)]
SENTENCES = {
    "both": (UP, UP, "reward rose from 0.11 to 0.86, and solved rollouts with it, from 11% to 86%"),
    "hacked": (UP, FLAT, "reward rose from 0.11 to 0.86, solved rollouts did not (from 0% to 0%): this is reward hacking"),
    "solved": (FLAT, UP, "solved rollouts rose from 11% to 86%; reward did not"),
    "noise": ([0.4, 0.6] * 20, [0.0, 0.1] * 20, "neither reward"),
    "few": (UP[:7], UP[:7], "7 steps are too few"),
}  # fmt: skip


@pytest.mark.parametrize(("reward", "solved", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_a_reward_that_rises_alone_is_called_hacking(reward: list[float], solved: list[float], sentence: str):
    points = zip(reward, solved, strict=True)
    steps = [{"step": n, "reward": r, "solved": s} for n, (r, s) in enumerate(points, 1)]
    assert reward_trend(steps).startswith(sentence)


def test_the_step_to_look_at_is_the_last_that_taught_and_its_weights_are_those_before_it(
    tiny_run, copy_of: Callable[[RunDir], RunDir]
):
    run = copy_of(tiny_run)
    change = "UPDATE step SET metrics = json_set(metrics, '$.live_groups', ?) WHERE stage = 'rl' AND step = ?"
    cases = ((1, 1, 0), 2, 2, 1), ((0, 0, 0), None, 3, 3), ((0, 1, 1), 3, 3, 3)
    for live, last, number, with_weights in cases:  # the weights before the second step are not kept
        with closing(run.connect()) as db, db:
            db.executemany(change, [(groups, step) for step, groups in enumerate(live, 1)])
        assert last_live(run.steps("rl")) == last and telling_step(run) == number
        assert telling_step(run, weights=True) == with_weights
    assert weights_before(run, 3) == run.path / "weights" / "before_final"
    with closing(run.connect()) as db, db:
        db.execute("DELETE FROM stage WHERE name = 'rl'")
        db.execute("DELETE FROM step WHERE stage = 'rl' AND step = 3")
    assert weights_before(run, 2) is None, "they are those before the third"
    assert telling_step(run, weights=True) == 1


def test_the_page_needs_nothing_but_itself(tiny_run, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    figure = Figure([bars("a dot", [{"name": "x", "value": 1.0}])])
    report = write_report(run, {"dot": ("a <dot>", figure)})
    page = (run.path / "report.html").read_text()
    assert json.loads((run.path / "report.json").read_text()) == report
    assert "://" not in page.replace("http-equiv", "") and "href" not in page and "<script" not in page
    assert page.count("src=") == 0 and page.count("<svg") == 1
    final = f"{report['eval']['final']['pass_at_1']:.3f}"
    parts = [verdict(report), "a &lt;dot&gt;", "<h2>Held-out", final, "<h2>The run", "<h2>A rollout", "Provenance"]
    positions = [page.find(part) for part in parts]
    assert -1 < min(positions) and positions == sorted(positions), (
        "the verdict, a figure, numbers, a rollout, and the rest"
    )
    assert (run.path / "figures" / "dot.svg").read_text().startswith("<svg")
    assert (run.path / "figures" / "dot.csv").read_text().split() == ["panel,name,value", "a", "dot,x,1.0"]


def test_a_damaged_file_is_named(tiny_run, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    (run.path / "rollouts" / "rl_00001_0.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"rl_00001_0\.parquet: damaged"):
        build_report(run)
