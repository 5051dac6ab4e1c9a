"""The gap between engine and trainer: nothing where they compute alike, something where they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from composer_nb.harness.policy import route_checks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.recipe.mismatch import measure_mismatch

NEVER = frozenset[int]()


def test_float32_on_both_sides_agrees_with_and_without_replay(make_model, converse):
    model = make_model(3)
    attempts = converse(Engine(model, stop=NEVER, slots=8, max_length=96), 8)
    found = measure_mismatch(model, attempts)
    assert found["tokens"] == 8 * 3 * 9
    assert found["routes_differ"] == 0.0
    for name in ("off", "on"):
        assert 0 <= found[name]["logprob_gap_p50"] <= found[name]["logprob_gap_p99"] < 5e-5
        assert 0 <= found[name]["k3"] < 1e-9


def test_a_bf16_engine_shows_a_gap_that_replaying_its_routes_narrows(make_model, converse):
    model = make_model(3)
    engine = Engine(make_model(3).to(torch.bfloat16), stop=NEVER, slots=24, max_length=96)
    attempts = converse(engine, 24)
    found = measure_mismatch(model, attempts)
    assert 0 < found["routes_differ"] < 0.1
    assert found["on"]["logprob_gap_p50"] > 1e-3
    assert found["on"]["logprob_gap_p99"] < found["off"]["logprob_gap_p99"]
    assert 0 < found["on"]["k3"] < found["off"]["k3"]
    again = measure_mismatch(model, attempts, budget=64)
    assert again["routes_differ"] == pytest.approx(found["routes_differ"], rel=0.05), (
        "beginnings are shared differently"
    )
    assert again["off"] == pytest.approx(found["off"], rel=1e-2), "however it is cut"

    gaps, different, pairs = [], 0, 0
    for done in attempts:
        [segment] = done.rollout.segments
        ids = torch.from_numpy(segment.token_ids).long()[None]
        with torch.no_grad():
            logits, routes = model(ids)
        logprob = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        gaps.append((logprob - segment.logprob[1:])[segment.acted[1:]])
        ours, theirs = np.sort(routes[0, :-1].numpy(), -1), np.sort(segment.trace.routes[:-1], -1)
        different, pairs = different + int((ours != theirs).any(-1).sum()), pairs + ours.shape[0] * ours.shape[1]
    gap = np.abs(np.concatenate(gaps))
    assert found["off"]["logprob_gap_p50"] == pytest.approx(np.quantile(gap, 0.5), rel=1e-2)
    assert found["off"]["logprob_gap_p99"] == pytest.approx(np.quantile(gap, 0.99), rel=1e-2)
    assert found["routes_differ"] == pytest.approx(different / pairs, rel=0.05)


def test_wrong_routes_are_seen_in_both_numbers(make_model, converse):
    model = make_model(3)
    attempts = converse(Engine(model, stop=NEVER, slots=4, max_length=96), 4)
    for done in attempts:
        [segment] = done.rollout.segments
        trace, places = segment.trace, np.arange(len(segment.token_ids))
        trace.routes[:] = (trace.routes + 1) % 6
        trace.checks[:] = route_checks(places, segment.token_ids, trace.routes)
    found = measure_mismatch(model, attempts)
    assert found["routes_differ"] > 0.5
    assert found["on"]["logprob_gap_p50"] > 0.01 and found["off"]["logprob_gap_p99"] < 5e-5
