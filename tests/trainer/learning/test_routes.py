"""Routes that are not those of the stream's own tokens are refused before anything is learnt from them."""

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
from composer_nb.trainer.learning.packing import FULL, ReplaySettings, Stream, flatten, forward
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.config import FOREIGN, ModelConfig
from composer_nb.trainer.recipe.mismatch import measure_mismatch
from tests.tiny_models import streams_of

LEARN: dict[str, Any] = {"minibatches": 2, "denominator": 50.0, "lr": 1e-3, "clip": 1.0, "microbatch_tokens": 64}
NAMES = ("routes", "route_valid", "checks")


@pytest.fixture
def attempts(make_model, converse):
    return converse(Engine(make_model(3), stop=frozenset({7, 8, 9}), slots=4, max_length=96), 4)


@pytest.fixture
def streams(attempts) -> list[Stream]:
    return streams_of(attempts, 1.0)


def rows(stream: Stream, pick: Any) -> Stream:
    """`stream` with other rows of what the engine recorded."""
    return replace(stream, **{name: pick(getattr(stream, name)) for name in NAMES})


def rerouted(stream: Stream, routes: np.ndarray) -> Stream:
    """Return the stream as an engine of another model would have recorded it, with these routes and matching checks."""
    return replace(stream, routes=routes, checks=route_checks(np.arange(len(routes)), stream.token_ids, routes))


def routed(stream: Stream, change: Any) -> Stream:
    routes = stream.routes.copy()
    change(routes)
    return rerouted(stream, routes)


def unknown(stream: Stream, token: int) -> Stream:
    valid = stream.route_valid.copy()
    valid[token] = False
    return replace(stream, route_valid=valid)


def twice(routes: np.ndarray) -> None:
    routes[4, 1, 0] = routes[4, 1, 1]


def moved(stream: Stream, order: Any) -> Stream:
    """Rows of the forwarded tokens in another order, all else in place."""
    return rows(stream, lambda x: np.concatenate([x[:-1][np.asarray(order)], x[-1:]]))


OTHER = r"the routes at token \d+ of \d+ were recorded at another token or place$"
DAMAGE: dict[str, tuple[Any, str]] = {
    "none recorded": (lambda s: rows(s, lambda x: x[:0]), r"tokens, but routes of 0$"),
    "first dropped": (lambda s: rows(s, lambda x: x[1:]), r"tokens, but routes of \d+$"),
    "routes alone cut": (lambda s: replace(s, routes=s.routes[:-1]), r"tokens, but routes of \d+ and \d+$"),
    "routes alone shifted": (lambda s: replace(s, routes=np.roll(s.routes, 1, 0)), OTHER),
    "shifted within": (lambda s: moved(s, np.roll(np.arange(len(s.token_ids) - 1), 1)), OTHER),
    "one row twice": (lambda s: moved(s, [*range(6), 5, *range(7, len(s.token_ids) - 1)]), OTHER),
    "order of experts": (lambda s: replace(s, routes=s.routes[:, :, ::-1]), OTHER),
    "other tokens": (lambda s: replace(s, token_ids=(s.token_ids + 1) % 61), OTHER),
    "shifted on": (lambda s: rows(s, lambda x: np.roll(x, 1, 0)), r"token 0 of \d+ was forwarded and has no routes$"),
    "a turn lost": (lambda s: rows(s, lambda x: np.concatenate([x[6:], x[-1:].repeat(6, 0)])), r"token \d+ of"),
    "one missing": (lambda s: unknown(s, 5), r"token 5 of \d+ was forwarded and has no routes$"),
    "last recorded": (lambda s: replace(s, route_valid=np.ones_like(s.route_valid)), "routes of the last token"),
    "fewer layers": (
        lambda s: rerouted(s, s.routes[:, :1]),
        r"routes of 1 layers and 2 experts a token, the model has 2 and 2$",
    ),
    "out of range": (lambda s: routed(s, lambda r: r.__setitem__((3, 0, 0), 6)), "expert 6 of a model with 6$"),
    "expert twice": (lambda s: routed(s, twice), "one expert twice for one token$"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damaged_routes_are_refused_before_a_step(make_model, streams, name: str):
    spoil, complaint = DAMAGE[name]
    learner = Learner(model := make_model(3), FlatOptimizer(model), LossSettings(), replay=FULL)
    before = learner.optimizer.weights.clone()
    for index in range(len(streams)):
        batch = [*streams[:index], spoil(streams[index]), *streams[index + 1 :]]
        prefix = rf"stream {index} of 4 cannot be replayed \(replay\.level\): .*"
        with pytest.raises(ValueError, match=prefix + complaint):
            learner.learn(batch, Ranks(), Random(0), **LEARN)
        assert torch.equal(learner.optimizer.weights, before)
    learner.learn(streams, Ranks(), Random(0), **LEARN)
    assert not torch.equal(learner.optimizer.weights, before), "the streams as they are do train"


@pytest.mark.parametrize("name", ["none recorded", "routes alone shifted", "out of range"])
def test_without_replay_routes_do_not_matter(make_model, streams, name: str):
    weights = []
    for batch in (streams, [DAMAGE[name][0](stream) for stream in streams]):
        model = make_model(3)
        learner = Learner(model, FlatOptimizer(model), LossSettings())
        learner.learn(batch, Ranks(), Random(0), **LEARN)
        weights.append(learner.optimizer.weights)
    assert torch.equal(*weights)


@pytest.mark.parametrize("source", ["engine", "trainer"])
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_families_with_and_without_experts_learn_from_their_own_rollouts(make_model, converse, family: str, source):
    sizes = {name: getattr(ModelConfig(), name) for name in FOREIGN[family]}  # type: ignore[index]
    inner = {} if family == "mixtral" else {"intermediate_size": 48}
    model = make_model(3, family=family, **sizes, **inner)
    attempts = converse(Engine(model, stop=frozenset({7, 8, 9}), slots=4, max_length=96), 4)
    streams = streams_of(attempts, 1.0)
    mismatch = measure_mismatch(model, attempts)
    assert mismatch["on"]["logprob_gap_p99"] < 1e-4 and mismatch["routes_differ"] == 0.0
    before = [weight.clone() for weight in model.parameters()]
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=replace(FULL, source=source))
    figures = learner.learn(streams, Ranks(), Random(0), **LEARN)
    assert figures["grad_norm"] > 0
    assert np.isnan(figures["replay_overlap"]) == (family != "mixtral"), "nothing is replayed where nothing is routed"
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


COMPLETION = replace(FULL, completion_only=True)


def test_routes_of_the_completion_alone(make_model, streams) -> None:
    """Routes of tokens that the policy read are neither needed nor used, those of tokens that it wrote are both. Prefixes stay
    shared."""
    model = make_model(3)

    def without(stream: Stream, tokens: np.ndarray) -> Stream:
        """`stream` from an engine that reports no routes of these tokens."""
        routes = np.where(tokens[:, None, None], 0, stream.routes).astype(stream.routes.dtype)
        return replace(stream, routes=routes, route_valid=stream.route_valid & ~tokens)

    def experts(stream: Stream, replay: ReplaySettings) -> np.ndarray:
        batch = flatten([stream], replay)
        _, routings = forward(model, batch, batch.recorded)
        return np.stack([routing.experts_NK.numpy() for routing in routings], 1)

    stream = streams[0]
    read, written = ~stream.acted, stream.acted
    bare = without(stream, read)
    assert bare.route_fault(FULL) and not bare.route_fault(COMPLETION)
    first = int(np.flatnonzero(written)[0])
    assert (
        without(stream, written).route_fault(COMPLETION)
        == f"token {first} of {len(read)} was forwarded and has no routes"
    )
    swapped = rerouted(stream, stream.routes[:, :, ::-1].copy())  # an order that the trainer's router does not have
    replayed = experts(without(swapped, read), COMPLETION)
    live = experts(stream, ReplaySettings())
    assert np.array_equal(replayed[:first], live[:first])
    assert np.array_equal(replayed[written[:-1]], swapped.routes[:-1][written[:-1]])
    assert np.array_equal(experts(swapped, COMPLETION), replayed)
    pair = [stream, without(swapped, read)]
    assert len(flatten(pair, COMPLETION).inputs_N) < len(flatten([stream, swapped], FULL).inputs_N)
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=COMPLETION)
    assert np.isfinite(learner.learn([without(s, ~s.acted) for s in streams], Ranks(), Random(0), **LEARN)["k3"])
    with pytest.raises(ValueError, match="replay.completion_only is of routes on record"):
        ReplaySettings(level="ids", source="trainer", completion_only=True)
