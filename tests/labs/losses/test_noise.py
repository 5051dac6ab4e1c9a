"""Noise and signal of gradients, against every resample and every batch that small populations can give."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.labs.losses.noise import (
    bootstrap_variance,
    interval,
    noise_and_signal,
    noise_ratio,
    noise_share,
    resamples,
)


def test_the_bootstrap_s_variance_is_that_of_every_resample():
    random = np.random.default_rng(2)
    for groups in (2, 3, 4):
        vectors_KW = random.normal(size=(groups, 5))
        batches = np.array([vectors_KW[list(p)].sum(0) for p in itertools.product(range(groups), repeat=groups)])
        wanted = ((batches - vectors_KW.sum(0)) ** 2).sum(1).mean()
        products = vectors_KW @ vectors_KW.T
        assert bootstrap_variance(products) == pytest.approx(wanted)
        noise, _ = noise_and_signal(products, np.ones((1, groups)))
        assert noise[0] == pytest.approx(wanted * groups / (groups - 1))
        drawn = resamples(groups, 20_000, seed=1)
        assert (drawn.sum(1) == groups).all()
        spread = ((drawn @ vectors_KW - vectors_KW.sum(0)) ** 2).sum(1).mean()
        assert spread == pytest.approx(wanted, rel=0.05)


def test_noise_and_signal_are_unbiased():
    """Over every batch of three groups that a population of four can give."""
    vectors = np.random.default_rng(5).normal(size=(4, 6)) + 0.4
    found = []
    for picked in itertools.product(range(4), repeat=3):
        chosen = vectors[list(picked)]
        found.append([x[0] for x in noise_and_signal(chosen @ chosen.T, np.ones((1, 3)))])
    mean = vectors.mean(0)
    covariance = ((vectors - mean) ** 2).sum(1).mean()
    assert np.mean(found, 0) == pytest.approx([3 * covariance, 9 * mean @ mean])


@given(st.integers(2, 9), st.integers(0, 10**6))
def test_groups_that_a_resample_repeats_are_no_signal(groups: int, seed: int):
    """Gradients at right angles have none, however often one is drawn."""
    products, counts = np.diag(np.random.default_rng(seed).uniform(0.1, 9, groups)), resamples(groups, 30, seed)
    counts = counts[(counts > 0).sum(1) > 1]
    noise, signal = noise_and_signal(products, counts)
    assert np.abs(signal).max(initial=0.0) < 1e-12 and (noise > 0).all()
    alike = np.ones((groups, groups))
    assert np.abs(noise_and_signal(alike, counts)[0]).max(initial=0.0) < 1e-9, "and equal ones have no noise"


def test_where_no_signal_is_left_the_ratio_is_infinite_and_intervals_stand_it():
    ratio = noise_ratio(np.array([1.0, 1.0, 1.0, -0.1]), np.array([2.0, 0.0, -1.0, 1.0]))
    assert ratio.tolist() == [0.5, math.inf, math.inf, 0.0]
    one_group_alone = noise_and_signal(np.eye(2), np.array([[2.0, 0.0]]))
    assert np.isnan(noise_ratio(*one_group_alone)).all() and np.isnan(noise_share(*one_group_alone)).all()
    assert interval(np.array([0.5, math.inf, math.nan, 0.7])) == (0.5, math.inf)
    assert all(math.isnan(end) for end in interval(np.array([math.nan])))


@pytest.mark.slow
def test_the_interval_holds_the_truth_about_as_often_as_the_page_says():
    random, inside = np.random.default_rng(0), 0
    groups, width, truth = 24, 300, 0.3
    for trial in range(200):
        size = random.lognormal(0, 0.5, (groups, 1)) / math.exp(0.25)
        vectors = math.sqrt(truth / groups / width) * size * random.normal(size=(groups, width))
        vectors[:, 0] += 1 / groups
        noises = noise_and_signal(vectors @ vectors.T, resamples(groups, 300, trial))
        low, high = interval(noise_ratio(*noises))
        inside += low <= truth <= high
    assert 0.75 <= inside / 200 <= 0.99


def test_the_share_of_noise_stays_within_its_bounds():
    share = noise_share(np.array([1.0, 2.0, -0.1, 1.0]), np.array([3.0, -0.5, 1.0, -2.0]))
    assert share[:3].tolist() == [0.25, 1.0, 0.0] and math.isnan(share[3])
