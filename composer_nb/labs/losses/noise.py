"""Noise of a batch's gradient, from inner products between the gradients of its K groups.

    products = rows @ rows.T                                              # [K, K]
    noise, signal = noise_and_signal(products, np.ones((1, K)))           # of the batch itself
    noise_and_signal(products, resamples(K, 2000))                        # of batches of groups drawn with replacement

A batch's gradient is the sum over its groups, and that of a resample a sum with other multiplicities: none is taken twice.

Dimensions: K groups, B resamples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def bootstrap_variance(products_KK: Array) -> float:
    """Return E |G* − G|² over resamples of the K groups with replacement, exactly and without drawing any: the variance of the
    batch's gradient from the choice of groups."""
    return float(np.trace(products_KK) - products_KK.sum() / len(products_KK))


def noise_and_signal(products_KK: Array, counts_BK: Array) -> tuple[Array, Array]:
    """Return [B] the trace of the covariance of a batch's gradient, and [B] the squared length of its expectation, each
    estimated without bias from groups that occur so many times (all ones: the batch itself).

    The signal is K² times the mean inner product of two *different* groups, because |G|² holds the noise, too; it may come out
    negative where there is next to none. The noise of the batch itself is K / (K − 1) of its bootstrap variance.
    """
    own_K, groups = np.diag(products_KK), len(products_KK)
    pairs_B = ((counts_BK @ products_KK) * counts_BK).sum(1) - counts_BK**2 @ own_K
    number_B = counts_BK.sum(1) ** 2 - (counts_BK**2).sum(1)
    across_B = pairs_B / np.where(number_B, number_B, np.nan)  # a resample of one group alone says nothing
    return groups * (counts_BK @ own_K / counts_BK.sum(1) - across_B), groups**2 * across_B


def resamples(groups: int, count: int, seed: int = 0) -> Array:
    """Return [B, K] how often each group occurs in batches of K drawn with replacement."""
    return np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), count).astype(np.float64)


def noise_ratio(noise_B: Array, signal_B: Array) -> Array:
    """Return noise over signal; infinite where no signal is left, NaN where it is unknown."""
    ratio_B = np.maximum(noise_B, 0.0) / np.where(signal_B > 0, signal_B, 1.0)
    return np.where(np.isnan(signal_B), np.nan, np.where(signal_B > 0, ratio_B, np.inf))


def noise_share(noise_B: Array, signal_B: Array) -> Array:
    """Return noise / (noise + signal), which is finite without a signal, too; at most 1. The sum estimates E |G|². NaN where it
    is not above 0."""
    total_B = noise_B + signal_B
    return np.where(total_B > 0, noise_B / np.where(total_B > 0, total_B, 1.0), np.nan).clip(0, 1)


def interval(values_B: Array) -> tuple[float, float]:
    """Return the 95 % percentile interval of the finite or infinite values, NaN where there is none. It does not interpolate,
    because infinite ones may be among them."""
    known_B = values_B[~np.isnan(values_B)]
    if not len(known_B):
        return np.nan, np.nan
    low, high = np.quantile(known_B, (0.025, 0.975), method="nearest")
    return float(low), float(high)
