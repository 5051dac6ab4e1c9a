"""Two runs side by side, against what one run's own report says and against arithmetic done another way."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from composer_nb.harness.tasks.task import load_tasks, save_tasks
from composer_nb.trainer.recipe.reader import EXAMPLES, ReadOnly
from composer_nb.trainer.recipe.report import build_report, compare, difference, differing, gained, shared_tasks
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings
from composer_nb.views.compare import page, table


def scored(folder: Path, solved: Mapping[str, list[bool]], policy: str = "final") -> RunDir:
    """A run of which there is nothing but the stored attempts of one policy."""
    run = RunDir(folder)
    sampled = [(task, passed) for task, tries in solved.items() for passed in tries]
    rows = [{"task_id": task, "status": "graded", "passed": passed} for task, passed in sampled]
    rows += [{"task_id": task, "status": "graded", "passed": True} for task in solved]  # greedy ones, not to be counted
    pq.write_table(pa.Table.from_pylist(rows), run.path / "rollouts" / f"eval_{policy}.parquet")
    return run


def test_differing_leaves_have_dotted_names():
    first = {"a": 1, "same": 2, "b": {"x": 1, "y": {"z": [1, 2]}}, "gone": {"n": None, "m": 4}}
    second = {"a": 1.5, "same": 2, "b": {"x": 1, "y": {"z": [1, 3]}}, "new": "text"}
    assert differing(first, second) == {
        "a": [1, 1.5],
        "b.y.z": [[1, 2], [1, 3]],
        "gone.m": [4, None],
        "new": [None, "text"],
    }
    assert differing(first, first) == {}


def test_a_run_and_a_copy_of_it_differ_in_nothing(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    found = compare(tiny_run, copy_of(tiny_run))
    assert found["settings"] == found["provenance"] == {}
    report = build_report(tiny_run)
    assert list(found["eval"]) == list(report["eval"])
    for name, part in found["eval"].items():
        assert part["difference"] == {
            "pass_at_1": 0.0,
            "ci95": [0.0, 0.0],
            "paired": True,
            "n_tasks": [report["eval"][name]["n_tasks"]] * 2,
        }
        assert part["scores"][0] == part["scores"][1] and part["scores"][0]["ci95"] == report["eval"][name]["ci95"]
    assert found["train"]["steps"] == [3, 3] and found["wall_s"]["rl"] == [report["wall_s"]["rl"]] * 2


def test_what_was_changed_is_what_differs(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    settings = json.loads((run.path / "settings.json").read_text())
    settings["rl"]["lr"], settings["seed"] = 0.5, 7
    (run.path / "settings.json").write_text(json.dumps(settings))
    with run.connect() as db:
        db.execute("DELETE FROM stage WHERE name IN ('eval_final', 'numerics')")
    found = compare(tiny_run, run)
    assert found["settings"] == {"seed": [0, 7], "rl.lr": [Settings().rl.lr, 0.5]}
    del settings["mesh"], settings["loss"], settings["engine"]["numerics"]  # of a run from before there were these
    (run.path / "settings.json").write_text(json.dumps(settings))
    assert compare(tiny_run, run)["settings"] == found["settings"]
    assert [one["complete"] for one in found["runs"]] == [True, False]
    assert found["eval"]["final"]["scores"][1] is None and "difference" not in found["eval"]["final"]


def test_a_paired_difference_is_the_gain_that_a_report_takes_within_one_run(
    tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]
):
    """The same two sets of attempts, once as two policies of one run, once as one policy of two."""
    random = np.random.default_rng(3)
    tasks = [task.id for task in load_tasks(tiny_run.path / "data" / "heldout.jsonl")]
    old, new = ({task: list(random.random(4) < share) for task in tasks} for share in (0.3, 0.6))
    one, other = copy_of(tiny_run), RunDir(tiny_run.path.parent / "other")
    try:
        for run, final in ((one, new), (other, old)):
            made = scored(run.path, final)
            assert made.path == run.path
        scored(one.path, old, "midtrained")
        score = {"pass_at_1": 0.0, "pass_greedy": 0.0, "best_of_k": 0.0}
        gain = gained(one, {"midtrained": score, "final": score})
        found = difference(other, one, "final", set(tasks))
        assert found["ci95"] == gain["ci95"] and found["paired"] and found["n_tasks"] == [len(tasks)] * 2
        expected = np.mean([np.mean(new[task]) - np.mean(old[task]) for task in tasks])
        assert found["pass_at_1"] == pytest.approx(expected)
    finally:
        shutil.rmtree(other.path)


def test_runs_on_other_tasks_are_compared_unpaired(tmp_path: Path):
    random = np.random.default_rng(0)
    old = {f"a{n}": list(random.random(4) < 0.3) for n in range(300)}
    new = {f"b{n}": list(random.random(4) < 0.5) for n in range(200)}
    first, second = scored(tmp_path / "1", old), scored(tmp_path / "2", new)
    found = difference(first, second, "final", set())
    means = [np.array([np.mean(tries) for tries in solved.values()]) for solved in (old, new)]
    expected = means[1].mean() - means[0].mean()
    error = np.sqrt(sum(values.var() / len(values) for values in means))
    assert found["pass_at_1"] == pytest.approx(expected) and not found["paired"] and found["n_tasks"] == [300, 200]
    assert found["ci95"] == pytest.approx([expected - 1.96 * error, expected + 1.96 * error], abs=0.15 * error)


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
    for name, part in compare(*map(ReadOnly, EXAMPLES))["eval"].items():
        first, second = part["scores"]
        assert second["pass_at_1"] - first["pass_at_1"] == pytest.approx(part["difference"]["pass_at_1"]), name
        assert [first["n_tasks"], second["n_tasks"]] == part["difference"]["n_tasks"]


def test_it_is_told_to_people(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    settings = json.loads((run.path / "settings.json").read_text())
    settings["data"]["code"] = "<b>[red]"
    (run.path / "settings.json").write_text(json.dumps(settings))
    found = compare(tiny_run, run)
    out = io.StringIO()
    Console(file=out, width=160).print(table(found))
    told = out.getvalue()
    for text in ("data.code", "<b>[red]", "midtrained", "paired by task", "code and machine: none", "staleness_mean"):
        assert text in told
    text = page(found, {"scores": ("A caption.", b"\x89PNG")})
    assert "&lt;b&gt;[red]" in text and "<b>" not in text and "A caption." in text
    assert not re.search(r"https?://|<script|<link", text) and "not complete" not in text
