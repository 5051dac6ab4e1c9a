"""Supervised training: one loop for mid-training and fine-tuning, which differ in rows and schedule."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from composer_nb.trainer.learning.data import TokenRow, within
from composer_nb.trainer.learning.optimizer import Optimizer
from composer_nb.trainer.learning.packing import FlatBatch, Stream, flatten, forward, moved, score, target_scores
from composer_nb.trainer.learning.ranks import Ranks, deal
from composer_nb.trainer.models.transformer import Model, balance_loss

# Number of evaluations of the watched rows in a stage.
LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The differences between mid-training and fine-tuning, apart from the batches.

    Attributes:
        watch: Rows by the name of their reported loss.
        beside: A `drafts.HeadTrainer`, whose head learns beside the model on the same rows.
    """

    stage: str
    steps: int
    lr: Callable[[int], float]
    clip: float
    watch: Mapping[str, Sequence[TokenRow]]
    balance: float = 0.0
    weight_decay: float = 0.0
    beside: Any = None


def supervise(
    model: Model,
    optimizer: Optimizer,
    batches: Iterable[list[TokenRow]],
    plan: StagePlan,
    ranks: Ranks,
    begin: int = 0,
    looks: int = LOOKS,
) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Run the supervised loop. Yield (steps done, point) at each of about `looks` looks and at the end. A point has the means
    since the previous look of `loss`, `grad_norm`, `tokens` (per step) and `agent_loss` (None without tokens of the agent), and
    the losses of `plan.watch`.

    `batches` are whole batches from the first step on, of which this rank takes its part. Those before `begin` are skipped.
    """
    interval = max(1, plan.steps // looks)
    recent: list[dict[str, float]] = []
    for step, rows in enumerate(batches):
        if step == plan.steps:
            break
        if step < begin:
            continue
        beside = plan.beside.at(step) if plan.beside else None
        options: dict[str, Any] = {"lr": plan.lr(step), "balance": plan.balance, "clip": plan.clip, "beside": beside}
        recent.append(train_step(model, rows_of_rank(rows, ranks), optimizer, ranks, **options))
        if (step + 1) % interval == 0 or step + 1 == plan.steps:
            point: dict[str, float | None] = {
                name: float(np.nanmean([m[name] for m in recent])) for name in ("loss", "grad_norm", "tokens")
            }
            agent_losses = [m["agent_loss"] for m in recent if not math.isnan(m["agent_loss"])]
            point["agent_loss"] = float(np.mean(agent_losses)) if agent_losses else None
            point |= {name: cross_entropy(model, watched, ranks) for name, watched in plan.watch.items()}
            yield step + 1, point
            recent = []


def train_step(
    model: Model,
    rows: Sequence[TokenRow],
    optimizer: Optimizer,
    ranks: Ranks,
    *,
    lr: float,
    balance: float,
    clip: float,
    beside: Any = None,
) -> dict[str, float]:
    """Take one optimizer step on this rank's `rows`. The loss is the weighted mean of cross-entropy over the tokens of all ranks,
    plus the mean over ranks of the balance loss and the mean over tokens of the loss of `beside`. A rank without
    rows, from a small batch, still takes part. Ranks of one `cp` group have the same rows, of which each computes a part."""
    optimizer.zero_()
    local_sums = dict.fromkeys(("loss", "weight", "agent_loss", "agent_tokens", "tokens", "drafts"), 0.0)
    takes_part = bool(rows) or ranks.lockstep
    if takes_part:
        batch = batch_of(model, rows, ranks)
        hidden_ND, routings = forward(model, batch)
        loss_S, weight_S = -target_scores(model, batch, hidden_ND)[0], batch.advantage_S
        weighted_loss = (loss_S * weight_S).sum()
        acted_S = weight_S == 1.0
        draft_loss, local_sums["drafts"] = beside.loss(batch, hidden_ND) if beside else (0.0, 0.0)
        if batch.counts:
            local_sums |= {
                "loss": float(weighted_loss.detach()),
                "weight": float(weight_S.sum()),
                "agent_loss": float(loss_S.detach()[acted_S].sum()),
                "agent_tokens": float(acted_S.sum()),
                "tokens": float(sum(len(row.token_ids) - 1 for row in rows)),
            }
    totals = ranks.sums(local_sums)
    if takes_part:
        loss = weighted_loss / totals["weight"] + balance * balance_loss(routings) / ranks.world
        if totals["drafts"]:
            loss = loss + beside.weight * draft_loss / totals["drafts"]
        loss.backward()
    optimizer.sum_(ranks)
    grad_norm = optimizer.step(lr, clip)
    if beside:
        beside.update(lr)
    return {
        "loss": totals["loss"] / totals["weight"],
        "agent_loss": totals["agent_loss"] / totals["agent_tokens"] if totals["agent_tokens"] else math.nan,
        "tokens": totals["tokens"],
        "grad_norm": grad_norm,
    }


def batch_of(model: Model, rows: Sequence[TokenRow], ranks: Ranks, min_weight: float = 0.0) -> FlatBatch:
    """Return this rank's part of `rows` as a tree, in which shared prefixes are forwarded once. Its targets are the tokens with a
    weight above 0 and at least `min_weight`, with their weights as `advantage_S`."""
    streams = [stream_of(row, min_weight) for row in rows]
    batch: FlatBatch = moved(ranks.split(flatten(streams)), model.embed.device)
    return batch


def stream_of(row: TokenRow, min_weight: float = 0.0, scale: float = 1.0) -> Stream:
    """Return a row as a stream, whose targets have their weights times `scale` as advantages."""
    return Stream(
        token_ids=row.token_ids,
        acted=(row.weight > 0) & (row.weight >= min_weight),
        logprob=row.weight,
        advantage=row.weight * np.float32(scale),
        routes=np.zeros((0, 0, 0), np.uint8),
    )


def rows_of_rank(rows: Sequence[TokenRow], ranks: Ranks) -> list[TokenRow]:
    """Return this rank's part of a batch. Rows are dealt longest first, so that the ranks' parts cost about the same."""
    shard, shard_count = ranks.data_shard
    indices = deal({number: len(row.token_ids) for number, row in enumerate(rows)}, shard_count)[shard]
    return [rows[number] for number in indices]


def parts_of_rank(rows: Sequence[TokenRow], ranks: Ranks, budget: int) -> list[list[TokenRow]]:
    """Return this rank's part of `rows` in lists of at most `budget` tokens, equally many on ranks in lockstep."""
    shard, shard_count = ranks.data_shard
    parts = list(within(budget, rows[shard::shard_count]))
    if ranks.lockstep:
        parts += [[]] * (max(ranks.gather(len(parts))) - len(parts))
    return parts


@torch.no_grad()
def cross_entropy(model: Model, rows: Sequence[TokenRow], ranks: Ranks, budget: int = 4096) -> float:
    """Return the mean cross-entropy, in nats per token, over the tokens of weight 1."""
    sums = {"loss": 0.0, "tokens": 0.0}
    for part in parts_of_rank(rows, ranks, budget):
        batch = batch_of(model, part, ranks, min_weight=1.0)
        logprob_S, _ = score(model, batch)
        sums["loss"] -= float(logprob_S.sum()) * batch.counts
        sums["tokens"] += len(logprob_S) * batch.counts
    sums = ranks.sums(sums)
    return sums["loss"] / sums["tokens"]
