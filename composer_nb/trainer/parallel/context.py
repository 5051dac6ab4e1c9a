"""Context parallelism: the tokens of a batch are dealt over ranks, and each rank attends from its own tokens to all of them.

In every layer, keys and values are gathered from all ranks of the context (for latent attention, the much smaller latents). All
other computation is local to the token's rank. Of 2R chunks of the batch, rank r of R takes chunks r and 2R − 1 − r, which
balances causal attention (Composer 2 technical report, §6.1, after Megatron-LM).

Dimensions: N tokens of the batch, n of them on this rank, Q query heads, S sampled tokens, s of them predicted on this rank, B
rows of a bucket, T positions, t of them with a query on this rank.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from composer_nb.trainer.learning.packing import Bucket, FlatBatch, attend_none
from composer_nb.trainer.models.transformer import Gather


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a bucket in which this rank has queries.

    Attributes:
        key_M: [B · T]: token of the batch at each position.
        query_M: [B · t]: index of the query among this rank's tokens.
        mask: bool [B, 1, t, T]: attention mask, False for masked positions.
        own_M: Places in [B · t] of queries, without padding.
    """

    rows: int
    key_M: Tensor
    query_M: Tensor
    mask: Tensor
    own_M: Tensor


@dataclass(frozen=True, slots=True)
class ContextShard(FlatBatch):
    """The part of a batch that one rank computes. Fields of tokens are of this rank; fields of sampled tokens, which enter the
    loss, are of all ranks. Each rank computes the same loss, and the gradient of its own tokens.

    Attributes:
        whole: N.
        longest: Maximum number of tokens of a rank.
        place_N: Place of each token of the batch in the concatenated tokens of the ranks, each padded to `longest`.
        from_each: Number of sampled tokens that each rank predicts.
        place_S: Place of each sampled token of the batch in their concatenation over ranks.
    """

    whole: int
    longest: int
    place_N: Tensor
    mine: list[_Rows]
    from_each: list[int]
    place_S: Tensor
    rank: int
    group: dist.ProcessGroup

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        parts = []
        for m in self.mine:
            k_B, v_B = (x.index_select(0, m.key_M).unflatten(0, (m.rows, -1)).transpose(1, 2) for x in (k, v))
            q_B = q.index_select(0, m.query_M).unflatten(0, (m.rows, -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q_B, k_B, v_B, m.mask, scale=scale, enable_gqa=True)
            parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, m.own_M))
        return torch.cat(parts).index_select(0, self.order_N) if parts else attend_none(q, k, v)

    @property
    def gather(self) -> Gather:
        return self._gathered

    def _gathered(self, x: Tensor) -> Tensor:
        """Gather [n, …] of each rank as [N, …]. Gradients are summed over the ranks."""
        if not self.whole:
            return x
        padded = torch.cat([x, x.new_zeros(self.longest - len(x), *x.shape[1:])])
        gathered: Tensor = all_gather_tensor_autograd(padded, 0, self.group)
        return gathered.index_select(0, self.place_N)

    def collect(self, x_s: Tensor) -> Tensor:
        collected: Tensor = _Collect.apply(x_s, self)
        return collected


class _Collect(torch.autograd.Function):
    """Gather the values of the sampled tokens that each rank predicts as [S]. All ranks compute the same from them, so each has
    the gradient of its own part already."""

    @staticmethod
    def forward(ctx: Any, x_s: Tensor, part: ContextShard) -> Tensor:
        ctx.part = part
        most = max(part.from_each)
        padded = torch.cat([x_s, x_s.new_zeros(most - len(x_s))])
        everyone = x_s.new_empty(len(part.from_each) * most)
        if most:
            dist.all_gather_into_tensor(everyone, padded, group=part.group)
        parts = [everyone[r * most :][:count] for r, count in enumerate(part.from_each)]
        return torch.cat(parts).index_select(0, part.place_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        part: ContextShard = ctx.part
        ordered = torch.empty_like(gradients[0]).index_copy_(0, part.place_S, gradients[0])
        return ordered.split(part.from_each)[part.rank], None


def zigzag(tokens: int, ranks: int) -> list[Tensor]:
    """Return the tokens that each rank computes."""
    chunks = torch.arange(tokens).tensor_split(2 * ranks)
    return [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]


def split(batch: FlatBatch, rank: int, ranks: int, group: dist.ProcessGroup) -> ContextShard:
    """Return the part of `batch` for rank `rank` of the context."""
    shares, whole = zigzag(len(batch.inputs_N), ranks), len(batch.inputs_N)
    longest = max(map(len, shares))
    owner_N, local_N = torch.empty(whole, dtype=torch.int64), torch.empty(whole, dtype=torch.int64)
    for number, share in enumerate(shares):
        owner_N[share], local_N[share] = number, torch.arange(len(share))
    own_N = shares[rank]
    owner_S = owner_N[batch.place_U[batch.from_S]]
    own_S = (owner_S == rank).nonzero()[:, 0]
    place_U, from_S = local_N[batch.place_U[batch.from_S[own_S]]].unique(return_inverse=True)
    mine, computed = _rows(batch.buckets, owner_N == rank, local_N)
    order_N = torch.empty_like(computed)
    order_N[computed] = torch.arange(len(computed))
    batch_fields = {entry.name: getattr(batch, entry.name) for entry in fields(FlatBatch)} | {
        "inputs_N": batch.inputs_N[own_N],
        "position_N": batch.position_N[own_N],
        "recorded": None if batch.recorded is None else batch.recorded.take(own_N),
        "rows": batch.rows if rank == 0 else 0,
        "counts": batch.counts and rank == 0,
        "order_N": order_N,
        "parent_N": batch.parent_N[own_N],
        "streams_N": batch.streams_N[own_N],
        "place_U": place_U,
        "from_S": from_S,
        "token_S": batch.token_S[own_S],
    }
    return ContextShard(
        **batch_fields,
        whole=whole,
        longest=longest,
        place_N=owner_N * longest + local_N,
        mine=mine,
        from_each=torch.bincount(owner_S, minlength=ranks).tolist(),
        place_S=owner_S.argsort(stable=True).argsort(),
        rank=rank,
        group=group,
    )


def _rows(buckets: list[Bucket], own_N: Tensor, local_N: Tensor) -> tuple[list[_Rows], Tensor]:
    """Return the rows with queries of this rank, and the tokens that they compute, in order."""
    rows_of_rank, computed = [], [torch.zeros(0, dtype=torch.int64)]
    for bucket in buckets:
        longest = len(bucket.token_M) // bucket.rows
        at_M = bucket.own_M[own_N[bucket.token_M[bucket.own_M]]]
        if not len(at_M):
            continue
        rows, row_M, count_B = (at_M // longest).unique_consecutive(return_inverse=True, return_counts=True)
        most = int(count_B.max())
        place_M = row_M * most + torch.arange(len(at_M)) - (count_B.cumsum(0) - count_B)[row_M]
        query_M, position_M = torch.zeros(2, len(rows) * most, dtype=torch.int64)
        query_M[place_M] = local_N[bucket.token_M[at_M]]
        position_M[place_M] = at_M % longest
        mask = torch.arange(longest) <= position_M.view(len(rows), 1, most, 1)
        keys = bucket.token_M.view(bucket.rows, longest)[rows].reshape(-1)
        rows_of_rank.append(_Rows(len(rows), keys, query_M, mask, place_M))
        computed.append(query_M[place_M])
    return rows_of_rank, torch.cat(computed)
