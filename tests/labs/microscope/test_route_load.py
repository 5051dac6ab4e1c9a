"""Experts that engine and trainer share, how load moves, and the bytes of routes, against counts by hand."""

import base64

import numpy as np

from composer_nb.harness.policy import Trace, route_dtype
from composer_nb.labs.microscope.routes import load_drift, route_bytes, shared_experts


def trace(routes: np.ndarray) -> Trace:
    return Trace(routes=routes, route_valid=np.arange(len(routes)) < len(routes) - 1)


def test_shared_experts_are_counted_as_sets_of_every_forwarded_token():
    random = np.random.default_rng(0)
    pairs = [[np.argsort(random.random((9, 3, 6)))[..., :2].astype(np.uint8) for _ in range(2)] for _ in range(4)]
    expected = [0, 0, 0]
    for first, second in pairs:
        for token in range(8):
            for layer in range(3):
                expected[len({*first[token, layer]} & {*second[token, layer]})] += 1
    engine, trainer = ([trace(pair[side]) for pair in pairs] for side in (0, 1))
    assert shared_experts(engine, trainer).tolist() == expected and min(expected) > 0
    assert shared_experts(engine, engine).tolist() == [0, 0, 4 * 8 * 3]


def test_load_that_moved_is_a_share_of_all_of_it():
    before, after = (
        np.array([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0]]),
        np.array([[1.0, 0.5, 0.25, 0.25], [0.0, 2.0, 0.0, 0.0]]),
    )
    np.testing.assert_allclose(load_drift(before, after), [0.25, 1.0])
    np.testing.assert_allclose(load_drift(after, before), load_drift(before, after))


def test_bytes_are_those_of_the_arrays_and_of_fireworks_wire():
    for layers, chosen, experts in ((58, 8, 256), (60, 8, 384), (4, 2, 8)):
        ids = np.zeros((layers, chosen), route_dtype(experts)).tobytes()
        parts = np.zeros((layers, chosen), np.float32).nbytes, np.zeros(layers, np.float32).nbytes + np.uint64().nbytes
        expected = len(ids), len(base64.b64encode(ids)), len(ids) + parts[0], len(ids) + sum(parts)
        assert tuple(route_bytes(layers, chosen, experts).values()) == expected
    assert route_bytes(58, 8, 256)["experts"] == 464, "as Fireworks documents it for DeepSeek-V3"
