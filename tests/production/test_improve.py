"""Learning from production: what is trained, what is left out, and what the gate stops."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_nb.cli import main
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from composer_nb.production import improve as learning
from composer_nb.production.policies import open_engine, trained_with
from composer_nb.production.record import Verdict, keep_judged, served
from composer_nb.trainer.model import load_pretrained, save_pretrained
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.receiver import Receiver
from tests.production.conftest import serving

START = EXAMPLES[0] / "weights" / "final"
TASKS = EXAMPLES[0] / "data" / "heldout.jsonl"
SETTINGS = Settings()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "tasks.jsonl"
    save_tasks(load_tasks(TASKS)[:6], path)
    return path


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with the checkpoint, judged by users who accept what solves their task."""
    run, model = tmp_path_factory.mktemp("record"), load_pretrained(START)
    attempts = learning.attempts_of(model, trained_with(START), START, load_tasks(TASKS)[6:15], 1, SETTINGS)
    keep_judged(run, attempts, [0.75 if attempt.grade.passed else -0.25 for attempt in attempts])
    last = next((run / "rollouts").glob("served_user8.parquet"))
    undecided = replace(served(run)["user8"], grade=Grade(status="ungraded"))
    save_attempts(last, [undecided], {"instruction": ["fix"]})
    return run


def words(record: Path, gate: Path, out: Path, **settings: Any) -> list[str]:
    args = ["improve", str(record), "--model", str(START), "--gate", str(gate), "--out", str(out), "--samples", "1"]
    return [*args, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]


def test_a_group_is_a_named_task_that_several_conversations_had(record: Path, tmp_path: Path) -> None:
    recorded = served(record)["user0"]
    rows = [("one", "alice", "alice"), ("one", "alice+1", "alice"), ("two", "alice", "alice")]
    rows += [("one", "bob", "issue 1"), ("two", "carol", "issue 1"), ("two", "dave", "issue 2")]
    for run, stored, task in rows:
        (folder := tmp_path / run / "rollouts").mkdir(parents=True, exist_ok=True)
        named = replace(recorded.rollout, task_id=task)
        named = replace(recorded, task=recorded.task.model_copy(update={"id": task}), rollout=named)
        save_attempts(folder / f"served_{stored}.parquet", [named], {"instruction": ["fix"]})
    talks = [talk for run in ("one", "two") for talk in learning.conversations(tmp_path / run)]
    groups = learning.grouped(talks)
    assert [len(group) for group in groups] == [2, 4] and {attempt.task.id for attempt in groups[0]} == {"issue 1"}
    ids = {attempt.task.id for attempt in groups[1]}
    assert len(ids) == 3, "alice's parts are one conversation, and each run has one"


def test_one_update_ships_and_can_be_taken_back(record: Path, gate: Path, tmp_path: Path, capsys: Any) -> None:
    store, out = str(tmp_path / "store"), tmp_path / "out"
    first = learning.publish(store, load_pretrained(START))
    assert main([*words(record, gate, out, **{"rl.lr": 1e-6}), "--store", store]) == 0
    assert "passed" in capsys.readouterr().out
    summary = json.loads((out / "improve.json").read_text())
    assert summary["rollouts"] == {"judged": 8, "drawn_otherwise": 0, "stale": 0, "trained": 8}
    assert summary["gate"]["stopped"] == ""
    judged = [attempt.grade.rewards["reward"] for attempt in served(record).values() if attempt.grade.known]
    assert -0.25 <= summary["reward"] <= sum(judged) / 8 + 1e-6, "invalid calls cost something"
    newest = Receiver(store).fetch(summary["version"]).tensors
    after, before = (load_pretrained(path).state_dict() for path in (out / "weights", START))
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert learning.first_of(out / "weights", summary["gate"]["tasks"]) == summary["gate"]["before"]
    assert summary["version"] == first + 1 and trained_with(out / "weights") == trained_with(START)

    assert main(["weights", "revert", store, "--to", str(first)]) == 0
    reverted = Receiver(store).fetch(first + 2).tensors
    old = Receiver(store).fetch(first).tensors
    assert all(torch.equal(reverted[name], old[name]) for name in old)
    assert any(not torch.equal(reverted[name], newest[name]) for name in old)


def test_the_gate_stops_what_a_bad_update_makes(record: Path, gate: Path, tmp_path: Path, capsys: Any) -> None:
    store, out = str(tmp_path / "store"), tmp_path / "out"
    first = learning.publish(store, load_pretrained(START))
    assert main([*words(record, gate, out, **{"rl.lr": 0.5}), "--store", store]) == 1
    assert "stopped" in capsys.readouterr().out
    assert Receiver(store).newest() == first and (out / "candidate").is_dir() and not (out / "weights").exists()


def test_rollouts_of_other_weights_are_left_out(record: Path, gate: Path, tmp_path: Path) -> None:
    model = load_pretrained(START)
    attempt = next(iter(served(record).values()))
    assert learning.gap(model, attempt, SETTINGS.replay) < 1e-3
    silent = replace(attempt, rollout=replace(attempt.rollout, segments=()))
    assert learning.gap(model, silent, SETTINGS.replay) == float("inf"), "without tokens nothing shows whose they are"
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    assert learning.gap(model, attempt, SETTINGS.replay) > 0.05
    save_pretrained(model, tmp_path / "other", tokenizer=START / "tokenizer.json")
    with pytest.raises(ValueError, match=r"did not sample these rollouts at temperature 1; 0 of 8"):
        learning.improve([record], tmp_path / "other", tmp_path / "out", gate, SETTINGS)


OTHERWISE = {"temperature": {"temperature": 0.9}, "top_k": {"extra_body": {"top_k": 40}}, "greedy": {"temperature": 0}}


def test_turns_that_a_request_had_drawn_from_another_distribution_are_left_out(gate: Path, tmp_path: Path) -> None:
    """They are left out however near their log-probabilities are."""
    run, messages = tmp_path / "record", [{"role": "user", "content": "fix f.py"}]
    with open_engine(START, slots=2, tokens=512) as engine, serving(engine, run) as site:
        for name, options in ({"plain": {}, "same": {"temperature": 1, "top_p": 1}} | OTHERWISE).items():
            body = {**options.get("extra_body", {}), "rollout": name}
            site.chat(**{**options, "messages": messages, "max_tokens": 12, "extra_body": body})
            site.answer.grade(name, Verdict(reward=1.0))
    turns = {name: {turn.sampling for turn in attempt.rollout.turns} for name, attempt in served(run).items()}
    assert turns.pop("plain") == turns.pop("same") == {""}
    assert turns == {"temperature": {"temperature=0.9"}, "top_k": {"top_k=40"}, "greedy": {"temperature=0"}}
    summary = learning.improve([run], START, tmp_path / "out", gate, SETTINGS, samples=1)
    assert summary["rollouts"] == {"judged": 5, "drawn_otherwise": 3, "stale": 0, "trained": 2}
    for name in ("plain", "same"):
        (run / "rollouts" / f"served_{name}.parquet").unlink()
    with pytest.raises(ValueError, match=r"at temperature 1; 0 of 0 have .*; 3 were drawn otherwise \(t"):
        learning.improve([run], START, tmp_path / "other", gate, SETTINGS)


def attempts(passed: Sequence[float], edits: float = 1.0) -> list[Attempt]:
    """Return ten attempts at each task, of which these shares pass and this share edits something."""
    edit = Turn(call='{"name": "edit_line", "arguments": {}}', observation="")
    rollouts = []
    for number, share in enumerate(passed):
        task = Task.model_construct(id=str(number), instruction="", files={}, metadata={})
        for repeat in range(10):
            turns = (edit,) if repeat < 10 * edits else (Turn(call="", observation="", said="Shall I?"),)
            rollout = Rollout(task_id=task.id, segments=(), turns=turns, files={}, stop="finished")
            grade = Grade(status="graded", tests={"t": repeat < 10 * share})
            rollouts.append(Attempt(task=task, rollout=rollout, grade=grade))
    return rollouts


@pytest.mark.parametrize(
    ("before", "after", "gain", "stopped"),
    [
        (attempts([0.5] * 8), attempts([0.6] * 8), 0.1, ""),
        (attempts([0.5, 0.6] * 4), attempts([0.6, 0.4] * 4), -0.05, ""),
        (attempts([0.5] * 8), attempts([0.4] * 8), -0.1, "pass@1 falls by 0.100"),
        (
            attempts([0.5] * 8),
            attempts([0.6] * 8, edits=0.9 - learning.FEWER_EDITS),
            0.1,
            "80% of attempts edit something",
        ),
    ],
)
def test_the_gate(before: list[Attempt], after: list[Attempt], gain: float, stopped: str) -> None:
    verdict = learning.judge(before, after)
    assert verdict["gain"] == pytest.approx(gain) and verdict["ci95"][0] <= gain + 1e-9
    assert stopped in verdict["stopped"] if stopped else verdict["stopped"] == ""


def test_small_losses_that_pass_one_by_one_are_stopped_when_they_add_up() -> None:
    first = learning.judge(attempts([0.5] * 8), attempts([0.5] * 8))["first"]
    shares = [(0.5, 0.95), (0.5, 0.9), (0.5, 0.8)]
    steps = [learning.judge(attempts([0.5] * 8), attempts([p] * 8, edits=e), first)["stopped"] for p, e in shares]
    assert steps[:2] == ["", ""] and "80% of attempts edit something, 100% before" in steps[2]
    solved = learning.judge(attempts([0.4, 0.5] * 4), attempts([0.4, 0.4, 0.5, 0.4] * 2), first)["stopped"]
    assert "and was 0.500 before these updates" in solved


def test_tasks_that_a_sandbox_lost_are_compared_nowhere_and_without_any_nothing_ships() -> None:
    lost_attempts = [replace(attempt, grade=Grade(status="infra_error")) for attempt in attempts([0.5])]
    verdict = learning.judge([*lost_attempts, *attempts([0.5] * 8)[10:]], attempts([0.6] * 8))
    assert verdict["gain"] == pytest.approx(0.1) and verdict["stopped"] == ""
    stopped = learning.judge(lost_attempts, attempts([0.6]))["stopped"]
    assert stopped == "no task of the gate has a grade before and after"
