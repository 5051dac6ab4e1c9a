"""A baseline per phase: which try of an attempt earned its reward.

Phases of a rollout end at failed tests. V(k) is the mean reward of the rollouts of a group that reached phase k, drawn towards
the mean of the batch where few did. Tokens of phase k have the advantage V(k + 1) − V(k), those of the last phase R − V(last).
Over a rollout they sum to R − V(0), the advantage with the group's mean as the baseline. So a first edit that failed has its own
blame, and the try that mended it has its own credit. VinePPO (arXiv 2410.01679, §4) estimates such values from further samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.rollout import Kind, Rollout

PRIOR = 2.0
"""Rollouts that the mean of the batch counts as."""


def failures_before(rollout: Rollout) -> list[int]:
    """Return the failed tests before each message of a rollout."""
    counts: list[int] = []
    failed = 0
    for place, turn in enumerate(rollout.turns):
        if not turn.beside or not place:
            counts.append(failed)
        failed += bool(turn.tests_run) and (turn.tests_passed or 0) < (turn.tests_run or 0)
    return counts


def token_phases(rollout: Rollout) -> list[NDArray[np.int64]]:
    """Return the phase of every token of each segment of a chain, int64 [T]. What the agent reads belongs to the message before
    it, and so do the summary of a segment and what the next one begins with."""
    counts = np.array([0, *failures_before(rollout)], np.int64)
    found, before = [], 0
    for segment in rollout.segments:
        begins = np.zeros(len(segment.token_ids), np.int64)
        for message in segment.messages:
            begins[message[0]] = segment.kind[message[-1]] != Kind.SUMMARY
        found.append(counts[np.minimum(before + np.cumsum(begins), len(counts) - 1)])
        before += int(begins.sum())
    return found


def phase_advantages(rewards: Sequence[Sequence[float]], last: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """Return the advantage of each phase, of each rollout, of each group of a batch. `last`: each rollout's last phase."""
    deepest = max((n for group in last for n in group), default=0)
    gains: list[list[float]] = [[] for _ in range(deepest + 1)]
    means = [float(np.mean(group)) for group in rewards]
    for group, phases, mean in zip(rewards, last, means, strict=True):
        for reward, phase in zip(group, phases, strict=True):
            for k in range(phase + 1):
                gains[k].append(reward - mean)
    found = []
    for group, phases, mean in zip(rewards, last, means, strict=True):
        values = [mean]
        for k in range(1, max(phases, default=0) + 1):
            own = [reward for reward, phase in zip(group, phases, strict=True) if phase >= k]
            values.append((sum(own) + PRIOR * (mean + float(np.mean(gains[k])))) / (len(own) + PRIOR))
        found.append(
            [
                [*(values[k + 1] - values[k] for k in range(phase)), reward - values[phase]]
                for reward, phase in zip(group, phases, strict=True)
            ]
        )
    return found
