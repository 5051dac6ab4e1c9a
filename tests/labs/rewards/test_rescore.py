"""Re-scoring gives back what was trained on, and its gradients are autograd's."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer_nb import cli
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import Reward
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.labs.rewards import rescore as lab_scores
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.loss import policy_loss
from composer_nb.trainer.learning.packing import flatten, score
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.reader import EXAMPLES, ReadOnly
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Scored, to_streams
from composer_nb.trainer.services.journal import Journal, request_change
from composer_nb.trainer.settings import Settings, override
from composer_nb.views import rollouts


@pytest.fixture(scope="module")
def lab(tiny_run: RunDir) -> lab_scores.Lab:
    return lab_scores.open_lab(tiny_run)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_unchanged_terms_give_the_stored_advantages_bit_for_bit(tiny_run: RunDir, step: int):
    batch = lab_scores.stored_batch(tiny_run, step)
    stored, again = lab_scores.stored_scores(batch), lab_scores.rescore(batch, batch.settings.reward)
    assert len(stored.advantage_R) == 16 and stored.live_P.any()
    assert again.advantage_R.tobytes() == stored.advantage_R.tobytes()
    assert again.reward_R.tobytes() == stored.reward_R.tobytes()


def test_a_further_value_counts_in_groups_where_nobody_lacks_it(tiny_run: RunDir):
    batch, stored = lab_scores.stored_batch(tiny_run, 1), lab_scores.stored_scores(lab_scores.stored_batch(tiny_run, 1))
    values: list[float | None] = [float(n % 3) for n in range(16)]
    values[3] = None
    rescored, group = lab_scores.rescore_with(batch, values, 0.5), stored.group_R == stored.group_R[3]
    assert np.array_equal(rescored.reward_R[group], stored.reward_R[group])
    assert np.allclose(rescored.reward_R[~group], (stored.reward_R + 0.5 * (np.arange(16) % 3))[~group])
    assert not np.array_equal(rescored.advantage_R, stored.advantage_R)
    assert np.array_equal(lab_scores.rescore_with(batch, [None] * 16, 1.0).advantage_R, stored.advantage_R)


@pytest.mark.parametrize(("step", "name"), [(1, "start"), (3, "before_final")])
def test_the_gradient_has_the_length_that_the_trainer_logged(tiny_run: RunDir, step: int, name: str):
    lab = lab_scores.open_lab(tiny_run, step)
    logged = tiny_run.steps("rl")[step - 1]
    # The trainer adds up the squares of all weights in float32, which is good for three digits.
    assert lab.gradients.norm(lab.stored.advantage_R) == pytest.approx(logged["grad_norm"], rel=1e-3)


def test_a_setting_is_in_force_from_its_change_on(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    request_change(run, "reward.effort.weight", 0.25)
    journal = Journal(run)
    assert [lab_scores.settings_at(run, step).reward.effort.weight for step in (1, 2, 3)] == [0, 0, 0]
    with journal.transaction():
        journal.judge(1, 1)  # taken up when one step was done
    journal.close()
    request_change(run, "reward.effort.weight", 0.75)
    journal = Journal(run)
    journal.judge(2, None)  # refused: never in force
    journal.close()
    assert [lab_scores.settings_at(run, step).reward.effort.weight for step in (1, 2, 3)] == [0, 0.25, 0.25]


# Gradients


CASES: dict[str, dict[str, Any]] = {
    **{ratio: {"loss.ratio": ratio} for ratio in ("ppo", "gspo", "icepop")},
    "narrow": {"loss.clip_low": 0.01, "loss.clip_high": 0.02},
    "length": {"loss.length_norm": True},
    "replay": {"replay.level": "ids+order"},
}


def batch_of(attempts: list[Attempt], size: int, **values: Any) -> lab_scores.StoredBatch:
    """Return a stored batch of groups of `size`, with advantages of 0."""
    scored = [Scored(attempt=attempt, reward=Reward(total=0.0), advantage=0.0) for attempt in attempts]
    groups = tuple(tuple(scored[at : at + size]) for at in range(0, len(scored), size))
    return lab_scores.StoredBatch(step=1, groups=groups, settings=override(Settings(), values))


def autograd(model: Model, batch: lab_scores.StoredBatch, advantage_R: np.ndarray) -> tuple[torch.Tensor, float]:
    """The gradient of the whole batch's loss in one backward pass, and how many tokens were masked."""
    everyone = [scored for group in batch.groups for scored in group]
    pairs = zip(everyone, advantage_R, strict=True)
    streams = [stream for s, a in pairs for stream in to_streams(s.attempt, float(a))]
    flat = flatten(streams, batch.settings.replay)
    logprob_S, _ = score(model, flat, flat.recorded)
    loss, metrics = policy_loss(
        logprob_S,
        flat.sampled_S,
        flat.advantage_S,
        flat.rollout_S,
        batch.settings.loss,
        batch.settings.rl.denominator(batch.settings.loss),
    )
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in gradient]).double(), metrics["masked"]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_lengths_and_angles_are_those_of_autograd(
    make_model: Callable[..., Model], converse: Callable[..., list[Attempt]], values: dict[str, Any]
):
    """Weights have moved since sampling, so that ratios differ from 1 and clips mask tokens."""
    attempts = converse(Engine(make_model(), stop=[], slots=8, max_length=96, temperature=1.0, seed=1), 6)
    model = make_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)))
    batch = batch_of(attempts, 3, **values)
    gradients = lab_scores.policy_gradients(model, batch)
    random = np.random.default_rng(3)
    first_R, second_R = random.normal(size=(2, 6))
    second_R[2] = 0.0
    (first, masked), (second, _) = autograd(model, batch, first_R), autograd(model, batch, second_R)
    assert masked > 0 or values != CASES["narrow"]
    assert gradients.norm(first_R) == pytest.approx(float(first.norm()), rel=1e-4)
    assert gradients.norm(second_R) == pytest.approx(float(second.norm()), rel=1e-4)
    expected = float(first @ second / (first.norm() * second.norm()))
    assert gradients.cosine(first_R, second_R) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "values",
    [
        {"loss.beta": 0.1},
        {"loss.feedback": 0.1},
        {"loss.clip_cov": 0.02},
        {"loss.ratio": "none", "loss.centre_scores": True, "services.on": False},
    ],
)
def test_a_loss_that_is_no_sum_over_rollouts_is_refused(make_model: Callable[..., Model], values: dict[str, Any]):
    name = next(name for name in values if name.removeprefix("loss.") in lab_scores.APART)
    with pytest.raises(ValueError, match=f"{name} is on"):
        lab_scores.policy_gradients(make_model(), batch_of([], 3, **values))


# Grades


def test_changed_hidden_tests_judge_stored_rollouts_again(tmp_path: Path, capsys: Any):
    """Each task keeps the first file of its tests alone, which asks one task for something else."""
    stored = rollouts.search(ReadOnly(EXAMPLES[0]))
    harder, tasks = next(one.attempt.task for one in stored if one.attempt.grade.passed), dict[str, Task]()
    for task in (one.attempt.task for one in stored):
        path, text = next(iter(task.tests.items()))
        text = re.sub("== .*", "== 7777", text) if task.id == harder.id else text
        tasks[task.id] = task.model_copy(update={"tests": {path: text}})
    save_tasks(tasks.values(), tmp_path / "tasks.jsonl")
    call = ["rollouts", str(EXAMPLES[0]), "--tests", str(tmp_path / "tasks.jsonl")]
    assert cli.main([*call, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for row, one in zip(rows, stored, strict=True):
        grade, [path] = one.attempt.grade, tasks[row["task"]].tests
        passes = row["task"] != harder.id and all(ok for name, ok in grade.tests.items() if name.startswith(path))
        assert (row["before"], row["now"]) == tuple("yes" if solved else "no" for solved in (grade.passed, passes))
        assert row["reward before"] == one.reward
        assert row["reward now"] == pytest.approx(one.reward + passes - grade.passed)
    pairs = [(row["before"], row["now"]) for row in rows]
    worse, better = pairs.count(("yes", "no")), pairs.count(("no", "yes"))
    assert worse and better and cli.main(call) == 0
    output = capsys.readouterr().out
    assert f"64 of 64 rollouts graded again: {worse} passed and fail now, {better} failed and pass now" in output
    assert output.count("\n") == 2 + worse + better
    save_tasks([harder.model_copy(update={"files": {**harder.files, "new.py": ""}})], tmp_path / "tasks.jsonl")
    assert cli.main(call) == 2 and f"{harder.id} begins with other files" in capsys.readouterr().err
