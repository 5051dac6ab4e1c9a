"""Drafts: whatever a head guesses, what is sampled is what the model alone would have sampled; a trained head guesses well."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import NEVER, Played, ask, prompt, same
from torch.nn import functional as F

from composer_nb.cli import main
from composer_nb.harness.policy import Completion
from composer_nb.production.policies import open_engine
from composer_nb.trainer import drafts
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import forward
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import batch_of, train_step
from composer_nb.trainer.models.transformer import Model, PackedRows


def head_of(model: Model, seed: int = 0, scale: float = 1.0) -> drafts.DraftHead:
    torch.manual_seed(seed)
    head = drafts.DraftHead(model.config.hidden_size).requires_grad_(False)
    head.join.weight.mul_(scale)
    return head


def play(engine: Engine) -> Played:
    """Play rollouts in pairs that begin alike, two turns each, with several sampling options."""
    ids: dict[int, list[int]] = {number: [] for number in range(6)}
    logprobs: dict[int, list[float]] = {number: [] for number in ids}
    options: list[dict[str, Any]] = [{}, {}, {"temperature": 0.0}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 9}]
    options.append({"allowed": lambda written: np.arange(9999) % 2 == len(written) % 2})
    for turn in range(2):
        requests = [ask(n, prompt(9, n // 2 + turn), 11 + n, **options[n]) for n in ids]
        for completion in engine.generate(requests):
            ids[completion.rollout] += [*requests[completion.rollout].token_ids, *completion.token_ids]
            assert completion.rollout < 5 or all(token % 2 == n % 2 for n, token in enumerate(completion.token_ids))
            logprobs[completion.rollout] += completion.logprobs
    return {number: (ids[number], logprobs[number], engine.release(number)) for number in ids}


@pytest.mark.parametrize("step_tokens", [6, 14, 4096])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_whatever_the_head_says_all_that_is_recorded_is_as_without_it(make_model, scale: float, step_tokens: int):
    model = make_model(3)
    with torch.no_grad():
        model.final_norm.mul_(2.5)
    size: dict[str, Any] = {"slots": 6, "max_length": 80, "seed": 4, "step_tokens": step_tokens}
    expected = play(Engine(model, stop=frozenset({7, 11}), **size))
    engine = drafts.DraftingEngine(model, head_of(model, scale=scale), stop=frozenset({7, 11}), **size)
    actual = play(engine)
    assert engine.proposed > 20 and (scale > 0 or engine.accepted > 0)
    same(actual, expected)


def test_a_draft_that_is_right_saves_a_step(make_model):
    model, size = make_model(4), {"stop": NEVER, "slots": 1, "max_length": 80, "temperature": 0.0}
    [expected] = Engine(model, **size).generate([ask(0, [3], 40)])
    engine = drafts.DraftingEngine(model, head_of(model, scale=0.0), **size)
    engine.submit(ask(0, [3], 40))
    completions, steps = [], 0
    while engine.busy:
        completions += engine.step()
        steps += 1
    assert completions == [expected] and steps == 40 - engine.accepted and 0 < engine.accepted <= engine.proposed


def test_a_head_of_another_model_is_named(make_model, tmp_path: Path):
    drafts.save_draft(head_of(make_model(4)), tmp_path)
    with pytest.raises(ValueError, match=f"{drafts.FILE.name}: no head of this model"):
        drafts.load_draft(tmp_path, make_model(4, hidden_size=48))


# Training


def trainer_of(model: Model, **options: Any) -> drafts.HeadTrainer:
    return drafts.HeadTrainer(model, drafts.new_head(model, 0), **options)


def test_a_trained_head_guesses_well_and_the_model_stays_as_it_is(make_model):
    model = make_model(4)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine = Engine(model, stop=NEVER, slots=64, max_length=60, temperature=0.5, seed=8)
    rows = [
        drafts.row_of(np.array([*prompt(4, n), *completion.token_ids], np.int32))
        for n, completion in enumerate(engine.generate([ask(n, prompt(4, n), 50) for n in range(64)]))
    ]
    fresh, trained, again = (trainer_of(model, rows=rows[:48], steps=steps) for steps in (0, 60, 60))
    for trainer in (fresh, trained, again):
        trainer.distil()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert all(torch.equal(a, b) for a, b in zip(trained.head.parameters(), again.head.parameters(), strict=True))
    batch = batch_of(model, rows[48:], Ranks())
    with torch.no_grad():
        hidden_ND, _ = forward(model, batch)
        worse, better = (trainer.loss(batch, hidden_ND)[0] for trainer in (fresh, trained))
    assert better < 0.6 * worse and trained.agreement(rows[48:]) > fresh.agreement(rows[48:])


# Training with the model


def test_a_joint_step_has_the_gradient_of_both_losses_and_no_gradient_of_the_target(make_model):
    model, rng = make_model(3), np.random.default_rng(2)
    batch = [drafts.row_of(rng.integers(0, 12, size).astype(np.int32)) for size in (15, 4, 6, 5)]
    optimizer, joint = FlatOptimizer(model), trainer_of(model, weight=0.3, begin=2, rows=batch, steps=3)
    assert joint.at(1) is None
    beside = joint.at(2)
    assert beside is joint and all(parameter.requires_grad for parameter in model.parameters())
    batch[1].token_ids[:3] = batch[2].token_ids[:3] = batch[0].token_ids[:3]  # forwarded once, and counted three times
    head, total = copy.deepcopy(joint.head), torch.zeros(())
    for row in batch:  # by hand, a row at a time
        ids = torch.from_numpy(row.token_ids).long()
        packed = PackedRows.of_lengths([len(ids)], model.config)
        hidden, _ = model.trunk(ids, packed.position_N, packed.attend)
        logprobs = (hidden @ model.output_weight.T).log_softmax(-1)
        total = total + F.nll_loss(logprobs[:-1], ids[1:], reduction="sum") / sum(
            len(token_row.token_ids) - 1 for token_row in batch
        )
        guess, target = head(model, hidden[:-2], ids[1:-1]).log_softmax(-1), logprobs[1:-1].detach()
        total = total + 0.3 * (target.exp() * (target - guess)).sum() / sum(
            len(token_row.token_ids) - 2 for token_row in batch
        )
    slopes = torch.autograd.grad(total, [*model.parameters(), *head.parameters()])
    joint.update = lambda lr: None  # type: ignore[method-assign]
    train_step(model, batch, optimizer, Ranks(), lr=0.0, balance=0.0, clip=1e9, beside=joint)
    gradients = optimizer.gradients
    size = len(gradients)
    flat = torch.cat([slope.flatten() for slope in slopes])
    torch.testing.assert_close(gradients, flat[:size], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(joint._optimizer.gradients, flat[size:], atol=1e-5, rtol=1e-3)


def test_a_served_checkpoint_drafts_once_it_has_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example = Path(__file__).parents[2] / "data/example"
    shutil.copytree(example / "weights/start", tmp_path / "model")
    run = tmp_path / "run/rollouts"
    run.mkdir(parents=True)
    assert main(["draft", str(tmp_path / "model"), "--rollouts", str(run.parent)]) == 2
    assert "holds no rollouts with tokens" in capsys.readouterr().err
    shutil.copyfile(example / "rollouts/rl_00000_0.parquet", run / "rl_00000_0.parquet")
    expected = completion_of(tmp_path / "model", Engine)
    assert main(["draft", str(tmp_path / "model"), "--rollouts", str(run.parent), "--steps", "3"]) == 0
    assert "on 3 rollouts held out" in capsys.readouterr().out
    assert completion_of(tmp_path / "model", drafts.DraftingEngine) == expected


def completion_of(path: Path, kind: type[Engine]) -> Completion:
    with open_engine(path, slots=2, tokens=200) as engine:
        assert type(engine.shared.policy) is kind
        return engine.shared.ask(ask(0, range(20, 40), 60))
