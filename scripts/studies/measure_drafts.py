#!/usr/bin/env python3
"""Heads trained on a frozen model against heads that learn jointly with it: `scripts/studies/measure_drafts.py [--seeds 0 1]`.

The example's start is trained further on its demonstrations. *Frozen*: the head is trained afterwards. *Joint*: it is begun in
the middle, where the rate begins to fall, and both learn from there (`midtrain.draft_weight`). Both heads see as many tokens.
Prints the share of drafts that were right, on what rollouts of the evaluation on record read, and the model's own loss on
demonstrations held out.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from bench_engine import by, recorded

from composer_nb.trainer.drafts import TOKENS, DraftHead, DraftingEngine, Joint, train_draft
from composer_nb.trainer.learning.data import TokenRow, deal, load_rows
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import cross_entropy, supervise
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.recipe import midtrain_plan
from composer_nb.trainer.settings import MidtrainSettings

EXAMPLE = Path(__file__).parents[2] / "data/example"
HELD = 32


def trained(m: MidtrainSettings, rows: list[TokenRow], seed: int) -> tuple[Model, DraftHead]:
    """Return a model and its head; jointly trained if the head's loss weighs anything."""
    torch.manual_seed(seed)
    model, ranks = load_pretrained(EXAMPLE / "weights/start"), Ranks()
    plan, ids, begin = midtrain_plan(m, {}), [row.token_ids.tolist() for row in rows], round(m.constant * m.steps)
    if m.draft_weight:
        how: dict[str, Any] = {"steps": m.draft_steps, "weight": m.draft_weight, "seed": seed}
        plan = replace(plan, beside=Joint(model, ids, ranks, begin=begin, **how))
    batches = ([rows[n] for n in numbers] for numbers in deal(rows, m.tokens, Random(f"drafts {seed}")))
    for _ in supervise(model, FlatOptimizer(model, weight_decay=m.weight_decay), batches, plan, ranks):
        pass
    if isinstance(plan.beside, Joint) and plan.beside.head:
        return model, plan.beside.head.requires_grad_(False)
    more = (m.steps - begin) * m.tokens // TOKENS
    return model, train_draft(model, ids, m.draft_steps + more, seed=seed)


def right(model: Model, head: DraftHead, temperature: float, seed: int) -> float:
    """Return the share of drafts that were right."""
    size: dict[str, Any] = {"stop": frozenset(), "slots": 16, "max_length": model.config.max_position_embeddings}
    engine = DraftingEngine(model.requires_grad_(False), head, temperature=temperature, seed=seed, **size)
    form = by(engine)
    for number in range(3):
        form(recorded(16, number))
    return engine.accepted / engine.proposed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--draft-steps", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    [clean], [mistaken] = (sorted((EXAMPLE / "data").glob(f"{kind}-*.npz")) for kind in ("clean", "mistaken"))
    rows, held = load_rows(clean)[HELD:] + load_rows(mistaken), load_rows(clean)[:HELD]
    print("| seed | weight | right at temperature 0 | at 1 | held-out loss |\n|---|---|---|---|---|", flush=True)
    for seed in asked.seeds:
        for weight in asked.weights:
            m = MidtrainSettings(steps=asked.steps, lr=1e-3, draft_steps=asked.draft_steps, draft_weight=weight)
            model, head = trained(m, rows, seed)
            shares = [right(model, head, temperature, seed) for temperature in (0.0, 1.0)]
            loss = cross_entropy(model, held, Ranks())
            print(f"| {seed} | {weight:g} | {shares[0]:.1%} | {shares[1]:.1%} | {loss:.4f} |", flush=True)


if __name__ == "__main__":
    main()
