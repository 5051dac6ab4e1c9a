"""Supervised training: mid-training and fine-tuning are one loop over different rows and schedules.

Leaves out: multi-token prediction and the long-context phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.kernels.moe import Routing
from composer_nb.trainer.data import Batch, Row
from composer_nb.trainer.model import Model, PackedRows, balance_loss
from composer_nb.trainer.optimizer import FlatAdamW
from composer_nb.trainer.ranks import Ranks


def train_step(
    model: Model,
    rows: Sequence[Row],
    optimizer: FlatAdamW,
    ranks: Ranks,
    *,
    lr: float,
    balance: float,
    clip: float,
) -> dict[str, float]:
    """One optimiser step on this rank's `rows`: the weighted mean of cross-entropy over the tokens of all ranks, and the mean
    of the ranks' balance losses. A small batch may leave a rank without rows; it takes part all the same."""
    optimizer.zero_()
    counts = dict.fromkeys(("loss", "weight", "agent_loss", "agent_tokens", "tokens"), 0.0)
    if rows:
        batch = Batch.of(rows)
        loss_N, routings = _losses(model, batch)
        weighted = (loss_N * batch.weight_N).sum()
        acted_N = batch.weight_N == 1.0
        counts = {
            "loss": float(weighted.detach()),
            "weight": float(batch.weight_N.sum()),
            "agent_loss": float(loss_N.detach()[acted_N].sum()),
            "agent_tokens": float(acted_N.sum()),
            "tokens": float(len(loss_N)),
        }
    totals = ranks.sums(counts)
    if rows:
        (weighted / totals["weight"] + balance * balance_loss(routings) / ranks.world).backward()
    ranks.sum_(optimizer.gradients)
    norm = optimizer.step(lr, clip)
    return {
        "loss": totals["loss"] / totals["weight"],
        "agent_loss": totals["agent_loss"] / totals["agent_tokens"] if totals["agent_tokens"] else math.nan,
        "tokens": totals["tokens"],
        "grad_norm": norm,
    }


def _losses(model: Model, batch: Batch) -> tuple[Tensor, list[Routing]]:
    """Cross-entropy [N] of each target, and each layer's routing."""
    packed = PackedRows.of_lengths(batch.lengths, model.config)
    hidden_ND, routings = model.trunk(batch.inputs_N, packed.position_N, packed.attend)
    return F.cross_entropy(F.linear(hidden_ND, model.output_weight), batch.targets_N, reduction="none"), routings


def share(rows: Sequence[Row], numbers: Sequence[int], ranks: Ranks) -> list[Row]:
    """This rank's part of a batch: rows dealt out longest first, so that the ranks' parts cost about the same."""
    ordered = sorted(numbers, key=lambda number: (-len(rows[number].token_ids), number))
    parts: list[list[int]] = [[] for _ in range(ranks.world)]
    for number in ordered:
        min(parts, key=lambda part: sum(len(rows[n].token_ids) for n in part)).append(number)
    return [rows[number] for number in parts[ranks.rank]]


@torch.no_grad()
def cross_entropy(model: Model, rows: Sequence[Row], ranks: Ranks, budget: int = 4096) -> float:
    """Mean cross-entropy in nats a token over the tokens that weigh 1."""
    mine = rows[ranks.rank :: ranks.world]
    total = {"loss": 0.0, "tokens": 0.0}
    for part in _chunks(mine, budget):
        batch = Batch.of(part)
        loss_N, _ = _losses(model, batch)
        counted_N = batch.weight_N == 1.0
        total["loss"] += float(loss_N[counted_N].sum())
        total["tokens"] += float(counted_N.sum())
    total = ranks.sums(total)
    return total["loss"] / total["tokens"]


def _chunks(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    part: list[Row] = []
    for row in rows:
        if part and sum(len(r.token_ids) for r in part) + len(row.token_ids) > budget:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
