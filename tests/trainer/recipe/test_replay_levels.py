"""Engine and trainer on the same tokens: the gap between them, and replay in the trainer: levels, the trainer's own routes,
tokens without routes, recomputed layers."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from composer_nb.harness.policy import route_checks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL, NO_REPLAY, ReplaySettings, Stream, flatten, forward, score
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.routes import require_routes
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import Numerics, variant
from composer_nb.trainer.recipe.mismatch import gap_figures, measure_mismatch
from tests.tiny_models import streams_of

NEVER = frozenset[int]()


def test_the_gap_of_a_bf16_engine_is_that_of_a_loop_over_its_rollouts(make_model, converse):
    model = make_model(3)
    engine = Engine(make_model(3).to(torch.bfloat16), stop=NEVER, slots=24, max_length=96)
    attempts = converse(engine, 24)
    mismatch = measure_mismatch(model, attempts)
    assert mismatch["on"]["logprob_gap_p50"] > 1e-3
    again = measure_mismatch(model, attempts, budget=64)
    assert again["routes_differ"] == pytest.approx(mismatch["routes_differ"], rel=0.05), "beginnings are cut otherwise"
    assert again["off"] == pytest.approx(mismatch["off"], rel=1e-2), "however it is cut"

    gaps, different, pairs = [], 0, 0
    for attempt in attempts:
        [segment] = attempt.rollout.segments
        ids = torch.from_numpy(segment.token_ids).long()[None]
        with torch.no_grad():
            logits, routes = model(ids)
        logprob = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        gaps.append((logprob - segment.logprob[1:])[segment.acted[1:]])
        ours, theirs = np.sort(routes[0, :-1].numpy(), -1), np.sort(segment.trace.routes[:-1], -1)
        different, pairs = different + int((ours != theirs).any(-1).sum()), pairs + ours.shape[0] * ours.shape[1]
    gap = np.abs(np.concatenate(gaps))
    assert mismatch["off"]["logprob_gap_p50"] == pytest.approx(np.quantile(gap, 0.5), rel=1e-2)
    assert mismatch["off"]["logprob_gap_p99"] == pytest.approx(np.quantile(gap, 0.99), rel=1e-2)
    assert mismatch["routes_differ"] == pytest.approx(different / pairs, rel=0.05)


def test_wrong_routes_are_seen_in_both_numbers(make_model, converse):
    model = make_model(3)
    attempts = converse(Engine(model, stop=NEVER, slots=4, max_length=96), 4)
    for attempt in attempts:
        [segment] = attempt.rollout.segments
        trace, positions = segment.trace, np.arange(len(segment.token_ids))
        trace.routes[:] = (trace.routes + 1) % 6
        trace.checks[:] = route_checks(positions, segment.token_ids, trace.routes)
    mismatch = measure_mismatch(model, attempts)
    assert mismatch["routes_differ"] > 0.5
    assert mismatch["on"]["logprob_gap_p50"] > 0.01 and mismatch["off"]["logprob_gap_p99"] < 5e-5


LEARN: dict[str, Any] = {"minibatches": 2, "denominator": 50.0, "lr": 1e-3, "clip": 1.0, "microbatch_tokens": 64}
SHARP = {"num_experts": 8, "num_experts_per_tok": 3}


@pytest.fixture
def streams(make_model, converse) -> list[Stream]:
    """Of an engine in bf16, whose routers now and then think otherwise."""
    engine = variant(make_model(3, **SHARP), Numerics(dtype=torch.bfloat16))
    attempts = converse(Engine(engine, stop=frozenset({7, 8, 9}), slots=24, max_length=96), 24)
    return streams_of(attempts, 1.0, 0.0, -1.0)


def learnt(model: Model, streams: list[Stream], replay: ReplaySettings) -> tuple[Learner, dict[str, float]]:
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=replay)
    return learner, learner.learn(streams, Ranks(), Random(0), **LEARN)


def gap(model: Model, streams: list[Stream], replay: ReplaySettings) -> float:
    batch = flatten(streams, replay)
    with torch.no_grad():
        logprob_S, _ = score(model, batch, batch.recorded)
    return gap_figures((logprob_S - batch.sampled_S).double().numpy())["k3"]


def test_every_level_narrows_the_gap_and_trains(make_model, streams):
    model = make_model(3, **SHARP)
    off = gap(model, streams, NO_REPLAY)
    for level in ("ids", "ids+order", "weights"):
        replay = ReplaySettings(level=level)
        assert gap(model, streams, replay) < off
        _, metrics = learnt(make_model(3, **SHARP), streams, replay)
        assert 0.9 < metrics["replay_overlap"] < 1 and metrics["replay_implausible"] == 0


def test_a_filter_that_keeps_nothing_foreign_is_no_replay_of_sets(make_model, streams):
    """At 1 what is kept is what the router scores at least as high as its own last choice."""
    _, strict = learnt(make_model(4, **SHARP), streams, ReplaySettings(level="ids", plausible=1.0))  # of other weights
    assert strict["replay_overlap"] == 1.0 and strict["replay_implausible"] > 0.1


def test_the_trainer_s_own_routes_hold_through_all_minibatches(make_model, streams, monkeypatch):
    """R2: a model that learns at a high rate still trains the second minibatch on the experts from before the first."""
    used: list[torch.Tensor] = []
    model = make_model(3, **SHARP)
    trunk = model.trunk

    def watched(ids: Any, at: Any, attend: Any, replay: Any = None, *args: Any) -> Any:
        if replay is not None and torch.is_grad_enabled():
            used.append(replay.experts)
        return trunk(ids, at, attend, replay, *args)

    fresh, order = make_model(3, **SHARP), []
    model.trunk = watched  # type: ignore[method-assign]
    bare = [replace(s, routes=s.routes[:0], route_valid=s.route_valid[:0], checks=s.checks[:0]) for s in streams]
    settings = ReplaySettings(level="ids+order", source="trainer")
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=settings)
    make_batch = Learner._batch

    def noted(self: Learner, chunk: Any, ranks: Ranks) -> Any:
        order.append(chunk)
        return make_batch(self, chunk, ranks)

    monkeypatch.setattr(Learner, "_batch", noted)
    metrics = learner.learn(bare, Ranks(), Random(0), **{**LEARN, "lr": 0.05})
    assert len(used) == len(order) > 2 and metrics["replay_overlap"] < 1, "the router has moved on"
    for experts, chunk in zip(used, order, strict=True):
        with torch.no_grad():
            _, routings = forward(fresh, flatten(chunk))
        assert torch.equal(experts, torch.stack([r.experts_NK for r in routings], 1))


def test_tokens_without_routes_are_allowed_up_to_a_share(make_model, streams):
    model = make_model(3, **SHARP)
    holes = []
    for stream in streams:
        valid = stream.route_valid.copy()
        valid[1:3] = False
        holes.append(replace(stream, route_valid=valid))
    with pytest.raises(ValueError, match="token 1 of .* was forwarded and has no routes$"):
        require_routes(holes, model.config, FULL)
    tolerant = replace(FULL, missing=0.5)
    require_routes(holes, model.config, tolerant)
    with pytest.raises(ValueError, match="replay.missing is 1.0%"):
        require_routes(holes, model.config, replace(FULL, missing=0.01))
    batch = flatten(holes, tolerant)
    assert batch.recorded is not None and batch.recorded.valid_N is not None
    assert int((~batch.recorded.valid_N).sum()) > 0
    _, metrics = learnt(model, holes, tolerant)
    assert np.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize("replay", [NO_REPLAY, FULL, ReplaySettings(level="weights")])
def test_recomputed_layers_give_the_same_gradients_on_the_same_routes(make_model, streams, replay: ReplaySettings):
    results = []
    for recompute in (False, True):
        model = make_model(3, **SHARP)
        model.recompute = recompute
        learner, metrics = learnt(model, streams, replay)
        results.append((learner.optimizer.weights.clone(), metrics))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_at_level_weights_gates_on_record_part_beginnings(make_model, streams):
    stream = streams[0]
    halved = replace(stream, gates=stream.gates * np.float32(0.5))
    assert len(flatten([stream, halved], FULL).inputs_N) == len(stream.token_ids) - 1
    assert len(flatten([stream, halved], ReplaySettings(level="weights")).inputs_N) == 2 * (len(stream.token_ids) - 1)
    bare = replace(stream, gates=stream.gates[:0])
    weights = ReplaySettings(level="weights")
    for wrong in (bare, replace(stream, gates=stream.gates.astype(np.float64))):
        with pytest.raises(ValueError, match=r"stream 0 of 1 cannot be replayed: gates of .*replay.level is 'weights'"):
            flatten([wrong], weights)
    for wrong in (
        replace(stream, gates=stream.gates * np.float32("nan")),
        replace(stream, gates=stream.gates * np.float32(0.5)),
    ):
        with pytest.raises(ValueError, match="do not add up to 1"):
            require_routes([wrong], make_model(3, **SHARP).config, weights)
