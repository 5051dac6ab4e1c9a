"""Stored rollouts through another model: what an engine of it would have recorded, checked against plain forwards."""

import numpy as np
import pytest
import torch

from composer_nb.harness.policy import route_checks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning import retrace as module
from composer_nb.trainer.learning.retrace import recompute, reroute, retrace
from composer_nb.trainer.recipe.mismatch import compare
from composer_nb.trainer.rl import to_streams

NEVER = frozenset[int]()


@pytest.fixture
def attempts(make_model, converse):
    return converse(Engine(make_model(3), stop=NEVER, slots=6, max_length=96), 6)


def segments(attempts):
    return [segment for attempt in attempts for segment in attempt.rollout.segments]


def test_the_model_that_sampled_finds_what_it_recorded(make_model, attempts):
    for old, new in zip(segments(attempts), segments(retrace(make_model(3), attempts)), strict=True):
        assert np.allclose(new.logprob, old.logprob, atol=2e-5) and (new.logprob[~new.acted] == 0).all()
        assert np.array_equal(new.trace.routes[:-1], old.trace.routes[:-1])
        assert np.array_equal(new.trace.checks[:-1], old.trace.checks[:-1])
        assert np.array_equal(new.trace.route_valid, old.trace.route_valid)
        assert np.allclose(new.trace.gates[:-1], old.trace.gates[:-1], atol=1e-5)
        assert np.allclose(new.trace.margins[:-1], old.trace.margins[:-1], atol=1e-5)
        assert [x.dtype for x in vars_of(new).values()] == [x.dtype for x in vars_of(old).values()]


def vars_of(segment):
    return {name: getattr(segment.trace, name) for name in ("routes", "gates", "margins", "route_valid", "checks")}


def test_numbers_are_those_of_a_plain_forward_however_rows_are_cut(make_model, attempts, monkeypatch):
    model = make_model(5)
    monkeypatch.setattr(module, "BUDGET", 70)
    for segment, recomputed in zip(segments(attempts), recompute(model, segments(attempts)), strict=True):
        ids = torch.from_numpy(segment.token_ids).long()[None]
        with torch.no_grad():
            logits, routes = model(ids)
        plain = torch.distributions.Categorical(logits=logits[0, :-1])
        assert np.allclose(recomputed.logprob[1:], plain.log_prob(ids[0, 1:]), atol=1e-4) and recomputed.logprob[0] == 0
        assert np.allclose(recomputed.entropy[1:], plain.entropy(), atol=1e-4) and recomputed.entropy[0] == 0
        assert np.array_equal(recomputed.trace.routes[:-1], routes[0, :-1].numpy())


def test_routes_of_others_pass_for_its_own_and_are_wrong(make_model, attempts):
    [segment] = attempts[0].rollout.segments
    shifted = np.concatenate([segment.trace.routes[:1], segment.trace.routes[:-1]])
    [forged] = reroute(attempts[0], shifted).rollout.segments
    positions = np.arange(len(shifted))
    assert np.array_equal(forged.trace.checks[:-1], route_checks(positions, segment.token_ids, shifted)[:-1])
    assert forged.trace.checks[-1] == 0
    rerouted = reroute(attempts[0], shifted)
    [stream] = to_streams(rerouted)
    assert not stream.route_fault()
    comparison = compare(make_model(3), [rerouted])
    assert np.abs(comparison.on_S).max() > 100 * np.abs(comparison.off_S).max()
    with pytest.raises(ValueError, match="for a rollout with routes of"):
        reroute(attempts[0], shifted[1:])
