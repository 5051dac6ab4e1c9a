"""Optimiser steps on stored batches: a copy learns, the model itself does not."""

import torch

from composer_nb.labs.lessons import later, raw_streams
from composer_nb.labs.rewards.rescore import model_before, stored_batch
from composer_nb.trainer.records.rundir import RunDir


def test_later_versions_are_learnt_on_a_copy(tiny_run: RunDir):
    batch, model = stored_batch(tiny_run, 3), model_before(tiny_run, 3)
    before = [weight.clone() for weight in model.parameters()]
    lessons = [raw_streams(stored_batch(tiny_run, number).groups) for number in (1, 2)]
    after_one, after_two = (later(model, lessons, batch, count) for count in (1, 2))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    moved = [
        sum(float((a - b).detach().abs().sum()) for a, b in zip(model.parameters(), before, strict=True))
        for model in (after_one, after_two)
    ]
    assert 0 < moved[0] < moved[1]
