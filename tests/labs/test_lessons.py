"""Optimiser steps on stored batches."""

from __future__ import annotations

import pytest
import torch

from composer_nb.labs.lessons import later, raw_streams
from composer_nb.labs.losses import OURS, bench
from composer_nb.labs.rewards.rescore import model_before, stored_batch
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.records.rundir import RunDir


def test_the_gradient_is_the_run_s(tiny_run: RunDir):
    batch = stored_batch(tiny_run, 3)
    groups, settings = raw_streams(batch.groups), batch.settings
    tokens = sum(int(stream.acted[1:].sum()) for group in groups for stream in group)
    found = bench(model_before(tiny_run, 3), groups, {OURS: LossSettings()})
    norm = found.row(OURS).norm * tokens / settings.rl.denominator(settings.loss)
    assert norm == pytest.approx(tiny_run.steps("rl")[2]["grad_norm"], rel=1e-3)


def test_later_versions_are_learnt_on_a_copy(tiny_run: RunDir):
    batch, model = stored_batch(tiny_run, 3), model_before(tiny_run, 3)
    before = [weight.clone() for weight in model.parameters()]
    lessons = [raw_streams(stored_batch(tiny_run, number).groups) for number in (1, 2)]
    one, two = (later(model, lessons, batch, count) for count in (1, 2))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    moved = [
        sum(float((a - b).detach().abs().sum()) for a, b in zip(model.parameters(), before, strict=True))
        for model in (one, two)
    ]
    assert 0 < moved[0] < moved[1]
