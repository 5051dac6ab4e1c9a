"""Imbalance of packed batches against first-fit, as in docs/planning.md: `python scripts/bench/packing_bench.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from composer_nb.trainer.learning.balance import Cost, first_fit, pack

ROOT = Path(__file__).resolve().parents[2]
COST = Cost(linear=18251206656.0, quadratic=2359296.0)  # Cost.of Qwen3-30B-A3B's configuration
RANKS = 8


def main() -> None:
    lines = (ROOT / "data" / "durations.csv").read_text().splitlines()
    recorded = [4 * int(line.split(",")[3]) for line in lines if line[0].isdigit()]
    tailed = np.random.default_rng(0).lognormal(8.5, 1.0, 256).clip(64, 131_072).astype(int).tolist()
    print("| lengths | limit | packed | first-fit | longest, in even shares |\n|---|---|---|---|---|")
    for name, lengths in (("128 drawn", recorded[:128]), ("512 drawn", recorded[:512]), ("256 log-normal", tailed)):
        costs = [COST.row(length) for length in lengths]
        for limit in (max(65_536, *lengths), 131_072):
            ours, plain = (packer(lengths, costs, RANKS, limit) for packer in (pack, first_fit))
            share = max(costs) * RANKS / sum(costs)
            print(f"| {name} | {limit:,} | {ours.imbalance:.2%} | {plain.imbalance:.1%} | {share:.2f} |")


if __name__ == "__main__":
    main()
