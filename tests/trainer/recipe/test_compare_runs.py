"""Two runs side by side, against what one run's own report says and against arithmetic done another way."""

import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from composer_nb.harness.tasks.task import load_tasks, save_tasks
from composer_nb.trainer.recipe.reader import EXAMPLES, ReadOnly, solved_by_task
from composer_nb.trainer.recipe.report import build_report, compare, difference, shared_tasks
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings
from composer_nb.views.charts import Figure, bars
from composer_nb.views.compare import page, table


def scored(folder: Path, solved: Mapping[str, list[bool]], policy: str = "final") -> RunDir:
    """A run of which there is nothing but the stored attempts of one policy."""
    run = RunDir(folder)
    sampled = [(task, passed) for task, tries in solved.items() for passed in tries]
    rows = [{"task_id": task, "status": "graded", "passed": passed} for task, passed in sampled]
    rows += [{"task_id": task, "status": "graded", "passed": True} for task in solved]  # greedy ones, not to be counted
    pq.write_table(pa.Table.from_pylist(rows), run.path / "rollouts" / f"eval_{policy}.parquet")
    return run


def test_what_was_changed_is_what_differs(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run, report = copy_of(tiny_run), build_report(tiny_run)
    comparison = compare(tiny_run, run)
    assert comparison["settings"] == comparison["provenance"] == {} and list(comparison["eval"]) == list(report["eval"])
    for name, part in comparison["eval"].items():
        counts = [report["eval"][name]["n_tasks"]] * 2
        assert part["difference"] == {"pass_at_1": 0.0, "ci95": [0.0, 0.0], "paired": True, "n_tasks": counts}
        assert part["scores"][0] == part["scores"][1] and part["scores"][0]["ci95"] == report["eval"][name]["ci95"]
    assert comparison["train"]["steps"] == [3, 3] and comparison["wall_s"]["rl"] == [report["wall_s"]["rl"]] * 2

    settings = json.loads((run.path / "settings.json").read_text())
    settings["rl"]["lr"], settings["seed"] = 0.5, 7
    (run.path / "settings.json").write_text(json.dumps(settings))
    with run.connect() as db:
        db.execute("DELETE FROM stage WHERE name IN ('eval_final', 'numerics')")
    comparison = compare(tiny_run, run)
    assert comparison["settings"] == {"seed": [0, 7], "rl.lr": [Settings().rl.lr, 0.5]}
    del settings["mesh"], settings["loss"], settings["engine"]["numerics"]  # as in an older run
    settings["data"]["code"] = "<b>[red]"
    (run.path / "settings.json").write_text(json.dumps(settings))
    again = compare(tiny_run, run)
    assert again["settings"] == comparison["settings"] | {"data.code": [Settings().data.code, "<b>[red]"]}
    assert [row["complete"] for row in again["runs"]] == [True, False]
    assert again["eval"]["final"]["scores"][1] is None and "difference" not in again["eval"]["final"]
    Console(file=(out := io.StringIO()), width=160).print(table(again))
    for text in ("data.code", "<b>[red]", "midtrained", "paired by task", "code and machine: none", "staleness_mean"):
        assert text in out.getvalue()
    text = page(again, {"scores": ("A caption.", Figure([bars("x", [{"name": "y", "value": 1.0}])]))})
    assert text.count("<svg") == 1
    assert "&lt;b&gt;[red]" in text and "<b>" not in text and "A caption." in text
    assert not re.search(r"https?://|<script|<link", text) and "not complete" in text


@pytest.mark.parametrize("paired", [True, False])
def test_a_difference_has_the_interval_of_its_standard_error(tmp_path: Path, paired: bool):
    """On shared tasks that of the differences by task, on others that of two independent means."""
    random, shares, counts = np.random.default_rng(0), np.linspace(0.0, 0.7, 300), [300, 300 if paired else 200]
    old = {f"a{n}": [*(random.random(4) < shares[n])] for n in range(300)}
    new = {f"{'ba'[paired]}{n}": [*(random.random(4) < shares[n] + 0.2)] for n in range(counts[1])}
    gap = difference(scored(tmp_path / "1", old), scored(tmp_path / "2", new), "final", old.keys() & new.keys())
    before, after = (np.array([np.mean(tries) for tries in solved.values()]) for solved in (old, new))
    expected = after.mean() - before.mean()
    error = (after - before).std() / 300**0.5 if paired else np.hypot(before.std() / 300**0.5, after.std() / 200**0.5)
    assert gap["pass_at_1"] == pytest.approx(expected) and (gap["paired"], gap["n_tasks"]) == (paired, counts)
    assert gap["ci95"] == pytest.approx([expected - 1.96 * error, expected + 1.96 * error], abs=0.15 * error)


def test_a_task_is_shared_only_if_all_of_it_is_the_same(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    file = run.path / "data" / "heldout.jsonl"
    tasks = load_tasks(file)
    save_tasks(tasks[:5], file)
    assert shared_tasks(tiny_run, run) == shared_tasks(run, tiny_run) == {task.id for task in tasks[:5]}
    save_tasks([*tasks[:4], tasks[4].model_copy(update={"instruction": "another"})], file)
    assert shared_tasks(tiny_run, run) == {task.id for task in tasks[:4]}, "the same name, another task"
    save_tasks([*tasks[:2], *(task.model_copy(update={"instruction": "another"}) for task in tasks[2:5])], file)
    assert shared_tasks(tiny_run, run) == set(), "fewer than half"


def test_scores_and_their_difference_are_of_the_same_tasks() -> None:
    """The two examples share most of their held-out tasks; the excerpts hold fewer than were scored."""
    comparison = compare(*map(ReadOnly, EXAMPLES))
    assert not comparison["same_final"] and compare(*[ReadOnly(EXAMPLES[0])] * 2)["same_final"]
    for name, part in comparison["eval"].items():
        first, second = part["scores"]
        assert second["pass_at_1"] - first["pass_at_1"] == pytest.approx(part["difference"]["pass_at_1"]), name
        assert [first["n_tasks"], second["n_tasks"]] == part["difference"]["n_tasks"]
        quick = [solved_by_task(ReadOnly(path), name, 12) for path in EXAMPLES]
        shared = [task for task in quick[0] if task in quick[1]]
        gain = sum(quick[1][task] - quick[0][task] for task in shared) / len(shared)
        assert part["within_12"]["pass_at_1"] == pytest.approx(gain), name
