#!/usr/bin/env python3
"""Trains a tiny model in each recipe, and in NVFP4 with other divisions; a table in Markdown, and with --json all curves.

OMP_NUM_THREADS=1 .venv/bin/python scripts/format_trial.py --steps 300 --json build/format_trial.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from composer_nb.labs.formats.trial import train

RUNS = [("bf16", "ieee"), ("mxfp8", "ieee"), ("nvfp4", "ieee"), ("nvfp4", "inverse"), ("nvfp4", "approximate")]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--seeds", type=int, nargs="+", default=[0])
parser.add_argument("--json", type=Path)
asked = parser.parse_args()
torch.set_num_threads(1)

curves = []
print(
    "| seed | recipe | division | held-out loss | to the first | farthest | weights away | gap of log p | of the cast | CPU s |"
)
print("|---|---|---|---|---|---|---|---|---|---|")
for seed in asked.seeds:
    of_seed = []
    for recipe, division in RUNS:
        began = time.process_time()
        curve = train(recipe, division=division, steps=asked.steps, seed=seed)
        of_seed.append(curve)
        first, exact = of_seed[0], next(one for one in of_seed if one.recipe == recipe)
        smooth = [torch.tensor(one.losses).unfold(0, min(20, asked.steps), 1).mean(1) for one in (curve, first)]
        farthest = float(((smooth[0] - smooth[1]) / smooth[1]).abs().max())
        away = float((curve.weights - exact.weights).norm() / exact.weights.norm())
        gap, cast = curve.gap[-1][1:] if curve.gap else (0.0, 0.0)
        print(
            f"| {seed} | {recipe} | {division} | {curve.held_out:.4f} | {curve.held_out / first.held_out - 1:+.2%} "
            f"| {farthest:.2%} | {away:.2g} | {gap:.2g} | {cast:.2g} | {time.process_time() - began:.0f} |",
            flush=True,
        )
    curves += [{"seed": seed} | {k: v for k, v in asdict(one).items() if k != "weights"} for one in of_seed]
if asked.json:
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(curves))
