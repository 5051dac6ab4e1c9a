#!/usr/bin/env python3
"""Measure how often a canary promotes a worse version and withdraws a better one: `scripts/studies/canary_trial.py`.

Simulated users judge two versions, one verdict at a time. How often a user accepts varies around the version's mean, and a
share of the users gets the new version. `composer_nb.production.canary.Trial` decides, after every tenth verdict; the server
asks after each.

Prints a Markdown table: by how much the new version is worse or better, and what became of it.
"""

from __future__ import annotations

import argparse

import numpy as np

from composer_nb.production.canary import Trial, is_early

DIFFERENCES = (-0.2, -0.1, -0.05, -0.02, 0.0, 0.05, 0.1)


def simulate(rng: np.random.Generator, given: argparse.Namespace, difference: float) -> tuple[str, int]:
    """Return the outcome of one trial and the verdicts on the new version that it took."""
    trial = Trial(version=1, verdicts=given.verdicts)
    users = [f"user {number}" for number in rng.integers(0, 1 << 40, given.users)]
    taste = rng.normal(0.0, given.taste, given.users)
    for number in range(10**6):
        at = int(rng.integers(given.users))
        early = is_early(users[at], given.share)
        accepted = np.clip(given.accepted + difference * early + taste[at], 0.0, 1.0)
        side = trial.early if early else trial.usual
        side.setdefault(users[at], {})[str(number)] = float(rng.random() < accepted)
        if number % 10 == 9 and (outcome := trial.outcome):
            return outcome, trial.counts()["early"]
    raise RuntimeError("no decision")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--verdicts", type=int, default=200)
    parser.add_argument("--users", type=int, default=400)
    parser.add_argument("--accepted", type=float, default=0.6, help="acceptance of the trusted version")
    parser.add_argument("--taste", type=float, default=0.15, help="standard deviation of a user's acceptance")
    given = parser.parse_args()
    print("| new version | promoted | withdrawn | verdicts on it, median |\n|---|---|---|---|")
    for difference in DIFFERENCES:
        rng = np.random.default_rng(0)
        found = [simulate(rng, given, difference) for _ in range(given.trials)]
        shares = [np.mean([outcome == name for outcome, _ in found]) for name in ("promoted", "withdrawn")]
        verdicts = np.median([count for _, count in found])
        print(f"| {difference:+.2f} | {shares[0]:.2f} | {shares[1]:.2f} | {verdicts:.0f} |", flush=True)


if __name__ == "__main__":
    main()
