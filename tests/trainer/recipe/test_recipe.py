"""The promises of a run as a whole: one seed gives one result, and a killed run is the run that was not killed."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from composer_nb import cli
from composer_nb.harness.environment import carried
from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.tasks.task import load_tasks, save_tasks
from composer_nb.trainer.models.companions import read_companions, template, token_ids
from composer_nb.trainer.recipe.launch import SAID, RunFailed, fork, start_or_resume
from composer_nb.trainer.recipe.reader import prompts
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.settings import Settings, from_dict, override, to_dict
from composer_nb.views.report import pictures
from tests.conftest import MICRO
from tests.waiting import wait_until

pytestmark = pytest.mark.whole
WEIGHTS = ("midtrained", "start", "final")


def quiet(line: str) -> None:
    """Says nothing."""


def metrics(run: RunDir) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def sampled(run: RunDir) -> dict[str, list[Any]]:
    """Everything that was sampled and how it was scored, by file."""
    columns = ["task_id", "token_ids", "logprob", "policy_version", "passed"]
    files = sorted((run.path / "rollouts").glob("*.parquet"))
    return {file.name: pq.read_table(file, columns=columns).to_pylist() for file in files}


def weights(run: RunDir) -> dict[str, bytes]:
    return {name: (run.path / "weights" / name / "model.safetensors").read_bytes() for name in WEIGHTS}


def same(first: RunDir, second: RunDir) -> None:
    assert metrics(first) == metrics(second)
    assert sampled(first) == sampled(second)
    assert first.ledger() == second.ledger()
    assert weights(first) == weights(second)


def test_every_task_is_trained_on_once_and_every_token_is_accounted_for(micro_run: RunDir) -> None:
    rows = [row for name, part in sampled(micro_run).items() if name.startswith("rl_") for row in part]
    tasks = [row["task_id"] for row in rows]
    assert len(set(tasks)) == 4 * 2 and all(tasks.count(task) == 4 for task in tasks)
    written = sum(sum(value != 0.0 for value in row["logprob"]) for row in rows)
    assert sum(micro_run.ledger().values()) == sum(step["sampled"] for step in micro_run.steps("rl")) >= written > 0
    assert len(set(weights(micro_run).values())) == len(WEIGHTS), "each stage has learnt something"


def test_a_complete_run_returns_at_once_and_changes_nothing(micro_run: RunDir) -> None:
    before = {path: path.stat().st_mtime_ns for path in (micro_run.path / "weights").rglob("*")}
    start_or_resume(micro_run.path, say=quiet)
    with pytest.raises(ValueError, match="other settings"):
        start_or_resume(micro_run.path, override(Settings(), MICRO | {"seed": 9}), say=quiet)
    assert before == {path: path.stat().st_mtime_ns for path in (micro_run.path / "weights").rglob("*")}
    for name in ("base", *WEIGHTS, "before_final"):
        files = read_companions(micro_run.path / "weights" / name)
        end = Tokenizer.from_str(files["tokenizer.json"].decode()).token_to_id("<|end|>")
        assert token_ids(files)["eos_token_id"] == end and files["chat_template.jinja"] == template("compact")
        assert json.loads((micro_run.path / "weights" / name / "config.json").read_text())["eos_token_id"] == end


def test_killed_at_three_random_points_it_is_the_same_run(micro_run: RunDir, tmp_path: Path) -> None:
    run = create(tmp_path, "killed")
    write_json(run.path / "settings.json", to_dict(override(Settings(), MICRO)))
    write_json(run.path / "provenance.json", {})
    rng = random.Random(7)
    program = "import sys, pathlib; from composer_nb.trainer.recipe.launch import start_or_resume as go; "
    command = [sys.executable, "-c", program + "go(pathlib.Path(sys.argv[1]))", str(run.path)]
    for stage, step in (("midtrain", rng.randint(1, 9)), ("rl", rng.randint(1, 2)), ("rl", 3)):
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: len(run.steps(stage)) >= step or process.poll() is not None, 300)  # noqa: B023
        time.sleep(rng.uniform(0.0, 1.0))
        family = process.children(recursive=True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=patience(10))
        assert not alive, f"left behind: {alive}"
    same(start_or_resume(run.path, say=quiet), micro_run)
    assert (run.path / SAID).read_text().count("rl 1/4") == 1, "RL does not begin again"
    assert not list(run.path.rglob("*.part*"))


def test_a_fork_shares_what_came_before_rl(micro_run: RunDir, tmp_path: Path) -> None:
    settings = override(Settings(), MICRO | {"control_steps": 2, "services.on": True})
    forked = start_or_resume(fork(micro_run, settings, runs=tmp_path, name="control").path, say=quiet)
    assert forked.finished("eval_control") is not None and forked.finished("rl") is None
    with pytest.raises(ValueError, match="a fork cannot change seed"):
        fork(micro_run, override(settings, {"seed": 5}), runs=tmp_path, name="other")


def test_rl_alone_from_a_checkpoint_keeps_scores_and_weights_under_all_names(micro_run: RunDir, tmp_path: Path) -> None:
    skipped = dict.fromkeys(("midtrain.steps", "sft.steps", "data.demonstrations", "data.mistaken_demonstrations"), 0)
    values = {"ranks": 1, "rl.steps": 1, "model.start": str(micro_run.path / "weights" / "start")}
    run = start_or_resume(None, override(Settings(), MICRO | values | skipped), runs=tmp_path, say=quiet)
    report = build_report(run)
    assert report["complete"] and report["train"]["steps"] == 1 and not run.steps("midtrain")
    names = ("base", "midtrained", "start")
    assert {(run.path / "weights" / name / "model.safetensors").read_bytes() for name in names} == {
        weights(micro_run)["start"]
    }
    tokenizers = (run.path / "data" / "tokenizer.json", micro_run.path / "weights" / "start" / "tokenizer.json")
    assert len({file.read_bytes() for file in tokenizers}) == 1
    assert carried(run.path / "weights" / "start", "qwen").limits == from_dict(run.settings()).limits
    scores = [{**report["eval"][name], "same_as": ""} for name in names]
    assert scores[0] == scores[1] == scores[2] and scores[0]["n_tasks"] == report["data"]["tasks"]["heldout"]
    assert [report["eval"][name].get("same_as") for name in (*names, "final")] == [None, "base", "base", None]
    assert sampled(run)["eval_start.parquet"] == sampled(run)["eval_base.parquet"]
    assert report["gain"]["from"] == "midtrained" and len(pictures(run)) > 5


def test_own_tasks_go_round_and_no_prompt_counts_twice(micro_run: RunDir, tmp_path: Path) -> None:
    save_tasks(load_tasks(micro_run.path / "data" / "rl.jsonl")[:8], tmp_path / "tasks.jsonl")
    out, model = tmp_path / "runs" / "mine", micro_run.path / "weights" / "start"
    words = ["rl", "--model", str(model), "--tasks", str(tmp_path / "tasks.jsonl"), "--out", str(out)]
    names = ("rl.steps", "rl.group", "rl.prompts", "rl.checkpoint_every", "limits.tokens", "limits.turn_tokens")
    dotted = {name: MICRO[name] for name in names} | {"ranks": 1, "services.on": False, "eval.samples": 1}
    words += [word for name, value in dotted.items() for word in ("--set", f"{name}={value}")]
    assert cli.main(words) == 0
    run = RunDir(out.resolve())
    rows = [row["task_id"] for name, part in sampled(run).items() if name.startswith("rl_") for row in part]
    task_ids = {task.id for task in load_tasks(run.path / "data" / "rl.jsonl")}
    assert len(task_ids) == 6 and len(rows) == 4 * 2 * 4 and set(rows) == task_ids
    fates = prompts(run.path)
    assert fates is not None and fates.trained == tuple(range(8)) and not fates.twice and not fates.skipped
    assert (out / "report.html").is_file() and from_dict(run.settings()).env.renderer == "compact"
    assert cli.main(words) == 0 and out.resolve() == run.path, "the same command goes on with its run"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk that is small enough to fill")
def test_a_full_disk_is_one_clear_line_and_the_run_goes_on_when_there_is_room(
    micro_run: RunDir, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        run = fork(micro_run, from_dict(micro_run.settings()), runs=disk, name="tour")
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(bytes(free - (1 << 20)))
        with pytest.raises(RunFailed, match="the disk is full: free some space"):
            start_or_resume(run.path, say=quiet)
        (disk / "other").unlink()
        start_or_resume(run.path, say=quiet)
        assert run.ledger() == micro_run.ledger() and weights(run) == weights(micro_run)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
