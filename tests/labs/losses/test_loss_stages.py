"""What a stored batch is held against: each stage is what its name says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from composer_nb.cli import main
from composer_nb.labs.losses.bench import EXACT, LOSSES, bench, group_gradients, group_tokens
from composer_nb.labs.losses.stages import OWN, TRAINED, Stage, later, markdown, raw_streams, stages
from composer_nb.labs.rewards.rescore import stored_batch
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.variants import PAIRS
from composer_nb.trainer.recipe.reader import stored_steps
from composer_nb.trainer.records.batches import batch_file
from composer_nb.trainer.records.rundir import RunDir


@pytest.fixture(scope="module")
def found(tiny_run: RunDir) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages(tiny_run, 3, versions=(1,))}


@torch.no_grad()
def gap(stage: Stage) -> np.ndarray:
    """|Δ log p| of all sampled tokens."""
    seen = [group_tokens(stage.model, group, group, None, replay=stage.replay) for group in stage.groups]
    return np.concatenate([(tokens.logprob_S - tokens.sampled_S).abs().numpy() for tokens in seen])


def test_there_is_a_stage_for_each_way_of_being_apart(found: dict[str, Stage]):
    pairs = [name for pair in PAIRS for name in (pair, f"{pair}, replayed")]
    assert list(found) == [OWN, TRAINED, "1 version later", "RL step 1", *pairs]
    gaps = {name: gap(stage) for name, stage in found.items()}
    assert not gaps[OWN].any(), "a trainer that is the sampler, to the last bit"
    assert 0 < gaps[TRAINED].max() < 1e-3, "the plain loop trains on policy, but for the engine's rounding"
    assert np.median(gaps["1 version later"]) > 10 * np.median(gaps[TRAINED])
    assert gaps["RL step 1"].max() > gaps[TRAINED].max()
    assert np.median(gaps["bf16"]) > 10 * np.median(gaps[TRAINED])


def test_the_own_weights_gradient_is_the_run_s(tiny_run: RunDir, found: dict[str, Stage]):
    stage, settings = found[OWN], stored_batch(tiny_run, 3).settings
    gradients = group_gradients(stage.model, stage.groups, {"ours": LossSettings()})
    tokens = len(gradients.gap_S)
    logged = tiny_run.steps("rl")[2]["grad_norm"]
    norm = float(gradients.of("ours").norm()) * tokens / settings.rl.denominator(settings.loss)
    assert norm == pytest.approx(logged, rel=1e-3)


def test_later_versions_are_learnt_on_a_copy(tiny_run: RunDir, found: dict[str, Stage]):
    stage, batch = found[OWN], stored_batch(tiny_run, 3)
    before = [weight.clone() for weight in stage.model.parameters()]
    lessons = [raw_streams(stored_batch(tiny_run, number).groups) for number in (1, 2)]
    one, two = (later(stage.model, lessons, batch, count) for count in (1, 2))
    assert all(torch.equal(*pair) for pair in zip(before, stage.model.parameters(), strict=True))
    moved = [
        sum(float((a - b).detach().abs().sum()) for a, b in zip(model.parameters(), before, strict=True))
        for model in (one, two)
    ]
    assert 0 < moved[0] < moved[1]


def test_raw_advantages_are_those_of_the_rewards(tiny_run: RunDir):
    for group in stored_batch(tiny_run, 1).groups:
        rewards = np.array([scored.reward.total for scored in group])
        [streams] = raw_streams([group])
        for stream, wanted in zip(streams, rewards - rewards.mean(), strict=True):
            assert stream.advantage[stream.acted] == pytest.approx(wanted, abs=1e-6)


def test_the_reference_is_where_rl_began(tiny_run: RunDir, found: dict[str, Stage]):
    start = load_pretrained(tiny_run.path / "weights" / "start")
    for stage in found.values():
        assert torch.equal(stage.reference.embed, start.embed)


def test_a_table_has_a_line_a_loss(found: dict[str, Stage]):
    stage = found[TRAINED]
    made = bench(stage.model, stage.groups, {"ours": LossSettings(), "tis": LossSettings(ratio="tis")}, count=50)
    _, _, _, _, _, _, *rows = markdown(TRAINED, made).splitlines()
    assert [line.split("|")[1].strip() for line in rows] == ["ours", "tis", EXACT]
    assert all(line.count("|") == 10 for line in rows)


@pytest.mark.slow
def test_the_command_writes_every_stage(tiny_run: RunDir, capsys: pytest.CaptureFixture[str]):
    assert main(["losses", str(tiny_run.path), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert [row["loss"] for row in tables[OWN]] == [*LOSSES, EXACT] and "4 versions later" in tables


def test_steps_that_are_not_kept_are_refused(tiny_run: RunDir, copy_of):
    with pytest.raises(ValueError, match="RL step 9"):
        next(stages(tiny_run, 9))
    with pytest.raises(ValueError, match="weights that RL step 2"):
        next(stages(tiny_run, 2))
    run = copy_of(tiny_run)
    *others, last = stored_steps(run)
    for step in others:
        for file in batch_file(run.path, step - 1).parent.glob(f"rl_{step - 1:05d}_*.parquet"):  # one a rank
            file.unlink()
    with pytest.raises(ValueError, match="one RL step only"):
        list(stages(run, last))
