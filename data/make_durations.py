#!/usr/bin/env python3
"""Makes data/durations.csv: how long rollouts take, for the simulator. Drawn, not recorded: `data/make_durations.py OUT`.

A prompt's difficulty and a rollout's luck are log-normal factors; one rollout in `TAIL` runs on for a Pareto-distributed
factor, up to the limit that every harness sets. The shape is set by one reported figure: in synchronous sampling the last
tenth of the requests can take half of the time (Seer, arXiv:2511.14617); a batch of 64 of these does. The script prints it.
The scale (a median of a minute) is a choice and cancels out of every ratio.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PROMPTS, DRAWS = 256, 16
MEDIAN_S = 60.0
PROMPT_SIGMA, ROLLOUT_SIGMA = 0.4, 0.4
TAIL, TAIL_ALPHA = 16, 2.5
LIMIT_S = 600.0
TOKENS_A_SECOND, TOKEN_SIGMA = 30.0, 0.15


def draw(seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Seconds and tokens [PROMPTS, DRAWS]."""
    rng = np.random.default_rng(seed)
    shape = (PROMPTS, DRAWS)
    body = rng.normal(0, PROMPT_SIGMA, (PROMPTS, 1)) + rng.normal(0, ROLLOUT_SIGMA, shape)
    runs_on = np.where(rng.random(shape) < 1 / TAIL, 1 + rng.pareto(TAIL_ALPHA, shape), 1.0)
    seconds = np.minimum(MEDIAN_S * np.exp(body) * runs_on, LIMIT_S)
    tokens = seconds * TOKENS_A_SECOND * np.exp(rng.normal(0, TOKEN_SIGMA, shape))
    return seconds.round(1), tokens.round().astype(np.int64)


def last_tenth(seconds: NDArray[np.float64], batch: int, seed: int) -> float:
    """Share of a batch's sampling time in which only its last tenth still runs; the mean over 1,000 batches."""
    batches = np.sort(np.random.default_rng(seed).choice(seconds.ravel(), (1000, batch)), axis=1)
    return float(1 - (batches[:, int(0.9 * batch) - 1] / batches[:, -1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seconds, tokens = draw(arguments.seed)
    head = [
        f"# drawn, not recorded, by data/make_durations.py --seed {arguments.seed}:",
        f"# log-normal body (median {MEDIAN_S:g} s, sigma {PROMPT_SIGMA} a prompt, {ROLLOUT_SIGMA} a rollout);",
        f"# one in {TAIL} takes a Pareto({TAIL_ALPHA}) factor longer; at most {LIMIT_S:g} s",
        "prompt,draw,seconds,tokens",
    ]
    rows = [f"{p},{d},{seconds[p, d]},{tokens[p, d]}" for p in range(PROMPTS) for d in range(DRAWS)]
    arguments.out.write_text("\n".join(head + rows) + "\n", encoding="utf-8")
    mean = seconds.mean()
    print(
        f"mean {mean:.1f} s, p50 {np.median(seconds):.1f}, p99 {np.quantile(seconds, 0.99):.0f}, max {seconds.max():.0f}"
    )
    print(
        f"the last tenth of a batch takes {last_tenth(seconds, 64, 0):.2f} (64), {last_tenth(seconds, 512, 0):.2f} (512)"
    )


if __name__ == "__main__":
    main()
