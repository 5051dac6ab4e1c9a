"""Global packing: dealing the streams of a batch over ranks and micro-batches so that no rank waits long for another.

Because of attention, the cost of a stream grows faster than its length. Ranks that share a model's weights or experts move
through their micro-batches in lockstep. The cost of a step is then the sum, over micro-batches, of the cost of the busiest rank.
`pack` keeps that sum small under a limit of tokens per micro-batch (memory). This is scheduling on identical machines with a side
condition, by longest first (Graham, "Bounds on multiprocessing timing anomalies", 1969).

Everything here is a pure function of its arguments: every rank computes the whole packing and takes its part.

Dimensions: I items, M micro-batches, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from composer_nb.trainer.learning.packing import Run, Stream, runs, units
from composer_nb.trainer.models.transformer import ModelConfig, weight_counts

Floats = NDArray[np.float64]
Sizes = NDArray[np.int64]
Bins = list[list[int]]
# A packing with fewer micro-batches is preferred if it is at most this much slower, because each has an overhead.
SPARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of training on a row: `linear` per token, and `quadratic` per pair of a token and one that it attends to."""

    linear: float
    quadratic: float

    @classmethod
    def of(cls, c: ModelConfig) -> Cost:
        """Return the cost in floating-point operations, forward and backward: six per multiplied weight (arXiv 2001.08361, §2.1),
        and six per product of queries with keys and of probabilities with values."""
        counts = weight_counts(c)
        per_pair = c.num_hidden_layers * c.num_attention_heads * (c.head_dim + c.value_width)
        return cls(linear=6.0 * (counts["active"] - counts["embedding"]), quadratic=6.0 * per_pair)

    def row(self, tokens: int) -> float:
        """Return the cost of one row by itself."""
        return self.run(Run([], tokens, tokens * (tokens + 1) // 2))

    def run(self, run: Run) -> float:
        """Return the cost of streams that share prefixes."""
        return self.linear * run.tokens + self.quadratic * run.pairs


@dataclass(frozen=True, slots=True)
class Packing:
    """The place of each item, and the cost of each micro-batch.

    Attributes:
        items: [M][R]: indices of the items.
    """

    items: list[list[list[int]]]
    load_MR: Floats

    @property
    def step(self) -> float:
        """Cost of a step in lockstep: the busiest rank of each micro-batch."""
        return float(self.load_MR.max(1).sum())

    @property
    def imbalance(self) -> float:
        """Time that ranks wait in lockstep, as a share of the time that they work; 0: no waiting."""
        return self.step * self.load_MR.shape[1] / float(self.load_MR.sum()) - 1


def pack(tokens: Sequence[int], cost: Sequence[float], ranks: int, limit: int) -> Packing:
    """Pack items with these tokens and costs over `ranks`, in an equal number of micro-batches of at most `limit` tokens. A
    longer item has a micro-batch to itself. The result is at most SPARE slower than `first_fit`. If one micro-batch holds all
    items, it is within a factor of 4/3 − 1/(3R) of the optimum (Graham). Raises ValueError without items, limit or ranks."""
    if not tokens or min(tokens) < 1 or limit < 1 or ranks < 1:
        raise ValueError("packing needs items, each of a token at least, a limit of at least 1, and a rank")
    sizes = np.minimum(np.array(tokens), limit)
    costs = np.array(cost, float)
    fewest = math.ceil(int(sizes.sum()) / (limit * ranks))
    packings = [first_fit(tokens, cost, ranks, limit)]
    for microbatch_count in range(fewest, 2 * fewest + 2):
        bins = _long_beside_long(sizes, costs, ranks, microbatch_count, limit)
        packings += [] if bins is None else [_packing(bins, costs, ranks)]
    least = min(packing.step for packing in packings)
    return min(packings, key=lambda packing: (packing.step > least * (1 + SPARE), len(packing.items), packing.step))


def first_fit(tokens: Sequence[int], cost: Sequence[float], ranks: int, limit: int) -> Packing:
    """Pack items in their order, each into the first micro-batch with room, and deal these round: the baseline of packing."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number, size in enumerate(min(count, limit) for count in tokens):
        target = next((target for target, free in enumerate(room) if free >= size), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(limit)
        bins[target].append(number)
        room[target] -= size
    bins += [[] for _ in range(-len(bins) % ranks)]
    return _packing(bins, np.array(cost, float), ranks)


def _packing(bins: list[list[int]], cost_I: Floats, ranks: int) -> Packing:
    load = np.array([cost_I[items].sum() for items in bins])
    rows = [[sorted(part) for part in bins[at : at + ranks]] for at in range(0, len(bins), ranks)]
    used = [number for number, row in enumerate(rows) if any(row)]
    return Packing([rows[number] for number in used], load.reshape(-1, ranks)[used])


def _long_beside_long(size_I: Sizes, cost_I: Floats, ranks: int, count: int, limit: int) -> Bins | None:
    """While an item exceeds an even share of what is left, make a micro-batch of its cost: fill every rank up to that cost with
    the most expensive items that fit. Pack the rest longest first. None if `count` micro-batches cannot hold the items."""
    remaining = np.argsort(-cost_I, kind="stable").tolist()
    bins: list[list[int]] = []
    for number in range(count - 1):
        if not remaining or cost_I[remaining[0]] * ranks * (count - number) <= cost_I[remaining].sum():
            break
        cost_limit = cost_I[remaining[0]] * (1 + 1e-9)
        for _ in range(ranks):
            bin_items, load, room = set(), 0.0, limit
            for item in remaining:
                if load + cost_I[item] <= cost_limit and size_I[item] <= room:
                    bin_items.add(item)
                    load, room = load + cost_I[item], room - size_I[item]
            bins.append(sorted(bin_items))
            remaining = [item for item in remaining if item not in bin_items]
    rest_bins = _longest_first(remaining, size_I, cost_I, ranks * count - len(bins), limit)
    return None if rest_bins is None else bins + rest_bins


def _longest_first(order: Sequence[int], size_I: Sizes, cost_I: Floats, count: int, limit: int) -> Bins | None:
    """Put each item, in this order, into the cheapest of `count` micro-batches with room. Return them by falling cost; None if an
    item does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load, room = np.zeros(count), np.full(count, limit)
    for item in order:
        target = int(np.where(room >= size_I[item], load, np.inf).argmin())
        if room[target] < size_I[item]:
            return None
        bins[target].append(item)
        load[target] += cost_I[item]
        room[target] -= size_I[item]
    return [bins[target] for target in np.argsort(-load, kind="stable").tolist()]


def deal_out(
    streams: Sequence[Stream],
    families: Sequence[Sequence[int]],
    ranks: int,
    limit: int,
    cost: Cost,
    whole_rollouts: bool = False,
) -> tuple[list[list[list[Stream]]], Packing]:
    """Return [R][M] micro-batches of streams, some possibly empty, and their packing. `families` are indices of streams from
    `packing.families`; `limit` counts tokens of the tree. Streams of a family stay together to share prefixes, unless ranks would
    wait for them: then they are cut into smaller runs, which share less. `whole_rollouts`: as for `microbatches`."""
    lengths = [len(streams[number].token_ids) - 1 for family in families for number in family]
    even_cost = sum(map(cost.row, lengths)) / ranks
    candidates = []
    for max_cost in (math.inf, even_cost / 2, even_cost / 8, 0.0):

        def full(run: Run, most: float = max_cost) -> bool:
            return run.tokens > limit or cost.run(run) > most

        tree_runs = [run for family in families for run in runs(streams, units(streams, family, whole_rollouts), full)]
        packing = pack([run.tokens for run in tree_runs], [cost.run(run) for run in tree_runs], ranks, limit)
        candidates.append((packing, tree_runs))
    packing, tree_runs = min(candidates, key=lambda candidate: candidate[0].step)
    by_rank = [
        [[streams[number] for item in row[rank] for number in tree_runs[item].numbers] for row in packing.items]
        for rank in range(ranks)
    ]
    return by_rank, packing
