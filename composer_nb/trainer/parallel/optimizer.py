"""AdamW and Muon over a rank's shards of the weights, with the same updates as `FlatOptimizer` on whole weights.

Masters and moments are sharded like the weights. AdamW works element by element. Muon needs whole matrices: those of experts are
whole on their rank. The others are dealt to the ranks that shard them (as in Cursor's "Composer 2.5", 2026):

    parts of all matrices ──▶ all-to-all ──▶ whole matrices of this rank ──▶ orthogonal ──▶ all-to-all ──▶ parts of all updates

A rank receives the matrices that it owns and no other, and works on its experts while they are under way.

For the gradient's norm, the squares of all ranks' parts are summed, and parts on several ranks count once.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from composer_nb.trainer.learning import optimizer as optimizers
from composer_nb.trainer.learning.ranks import Ranks, deal
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.parallel.team import Team


class Block(NamedTuple):
    """A matrix, or the part of it that a rank holds: a rectangle of the rows and columns of a weight."""

    name: str
    top: int
    left: int
    height: int
    width: int

    @property
    def size(self) -> int:
        return self.height * self.width

    def of(self, weight: Tensor) -> Tensor:
        return weight[self.top : self.top + self.height, self.left : self.left + self.width]

    def part(self, rank: int, rows: int) -> Self:
        """Return the part that a rank holds of a weight of which each rank has `rows` rows, or what is left, as FSDP2 divides it.
        Its rows count from the rank's first."""
        top, bottom = (min(max(row - rank * rows, 0), rows) for row in (self.top, self.top + self.height))
        return self._replace(top=top, height=bottom - top)


class MatrixDeal:
    """The deal of Muon's matrices outside the experts: each goes whole to one rank of the group that shards them, evenly by cost.

    Attributes:
        matrices: This rank's.
        parts: This rank's parts of all matrices, by their owners.
        pieces: Parts of this rank's matrices, by the ranks that hold them.
        sent, received: Their sizes for each of the other ranks.
    """

    def __init__(self, weights: Mapping[str, DTensor], c: ModelConfig, group: dist.ProcessGroup) -> None:
        self.group, ranks = group, group.size()
        blocks = list[Block]()
        for name, weight in weights.items():
            for matrix in chain(*optimizers.matrices(name, torch.empty(weight.shape, device="meta"), c)):
                top, left = divmod(int(matrix.storage_offset()), weight.shape[1])
                blocks.append(Block(name, top, left, *matrix.shape))
        # Multiplications of an iteration of Newton–Schulz.
        costs = {n: (2 * b.size + min(b[3:]) ** 2) * min(b[3:]) for n, b in enumerate(blocks)}
        rows = {name: math.ceil(len(weight) / ranks) for name, weight in weights.items()}
        owned = [[blocks[number] for number in numbers] for numbers in deal(costs, ranks)]
        self.matrices = owned[group.rank()]
        parts = [[block.part(group.rank(), rows[block.name]) for block in of_owner] for of_owner in owned]
        pieces = [[block.part(holder, rows[block.name]) for block in self.matrices] for holder in range(ranks)]
        self.parts, self.pieces = [*chain(*parts)], [*chain(*pieces)]
        self.sent, self.received = ([sum(b.size for b in side) for side in sides] for sides in (parts, pieces))


def _split(flat: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    """Return the blocks that lie one after the other in a vector."""
    vectors = flat.split([block.size for block in blocks])
    return [vector.view(-1, block.width) for vector, block in zip(vectors, blocks, strict=True)]


class ShardedOptimizer(optimizers.Optimizer):
    """The optimizer of a model sharded by `fsdp.shard`."""

    def __init__(
        self,
        model: Model,
        team: Team,
        settings: optimizers.OptimizerSettings,
        *,
        weight_decay: float = 0.0,
        published: torch.dtype | None = None,
    ) -> None:
        assert isinstance(model, FSDPModule)
        model.reshard()  # if its loss was measured before
        self._model, self._team, self.published = model, team, published
        self._settings, self._decay = settings, weight_decay
        self.weights = {name: weight for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
        locals_ = {name: weight.to_local().detach() for name, weight in self.weights.items()}
        self.masters = {name: nn.Parameter(x.clone() if published else x) for name, x in locals_.items()}
        muon = settings.name == "muon"
        self._momentum = {
            name: torch.zeros_like(master)
            for name, master in self.masters.items()
            if muon and optimizers.matrices(name, torch.empty(self.weights[name].shape, device="meta"), model.config)
        }
        others = {name: self.weights[name] for name in self._momentum if ".experts." not in name}
        self._plan = MatrixDeal(others, model.config, team.dense.get_group("fsdp"))
        rest = [master for name, master in self.masters.items() if name not in self._momentum]
        self._adam = torch.optim.AdamW(rest, lr=0.0, betas=optimizers.BETAS, weight_decay=weight_decay, fused=True)
        self._publish()

    def zero_(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def sum_(self, ranks: Ranks) -> None:
        """Do nothing: FSDP2 has already summed the gradients."""

    def _clip(self, clip: float) -> float:
        """Give the masters this rank's part of the gradients, scaled to a norm of at most `clip`. Return the norm over all
        ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._team.device)
        shards = list[Tensor]()
        for name, weight in self.weights.items():
            assert weight.grad is None or isinstance(weight.grad, DTensor)
            shards.append(torch.zeros_like(self.masters[name]) if weight.grad is None else weight.grad.to_local())
            self.masters[name].grad = shards[-1]
            copies = zip(weight.device_mesh.shape, weight.placements, strict=True)  # ranks that hold the same part
            count = math.prod(size for size, kind in copies if isinstance(kind, Replicate))
            total += torch.linalg.vector_norm(shards[-1], dtype=torch.float64).square() / count
        norm = math.sqrt(float(self._team.sum_(total)))
        if norm > clip:
            torch._foreach_mul_(shards, clip / norm)
        return norm

    def _updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the masters of Muon's matrices, or this rank's parts of them, and their orthogonalised updates. Experts are
        computed while other matrices are on their way, and matrices of one shape together."""
        if not self._momentum:
            return
        s, plan, by_shape = self._settings, self._plan, defaultdict[tuple[int, ...], list[list[Tensor]]](list)
        new = next(iter(self._momentum.values())).new_empty
        parts, pieces = new(sum(plan.sent)), new(sum(plan.received))
        shards = {name: self._ahead(name) for name in self._momentum if ".experts." not in name}
        for block, part in zip(plan.parts, _split(parts, plan.parts), strict=True):
            part.copy_(block.of(shards[block.name]))
        del shards
        arrival = dist.all_to_all_single(pieces, parts, plan.received, plan.sent, plan.group, async_op=True)
        for name in (name for name in self._momentum if ".experts." in name):
            stacks = (optimizers.matrices(name, x, self._model.config) for x in (self.masters[name], self._ahead(name)))
            for master, ahead in zip(*stacks, strict=True):
                yield master, optimizers.orthogonal(ahead, s)
        arrival.wait()
        of_holders = _split(pieces, plan.pieces)
        for number, block in enumerate(plan.matrices):
            by_shape[block[3:]].append(of_holders[number :: len(plan.matrices)])
        for shape, matrices in by_shape.items():
            count = max(1, optimizers.TOGETHER // math.prod(shape))
            for first in range(0, len(matrices), count):
                batch = [*chain(*matrices[first : first + count])]
                update = optimizers.orthogonal(torch.cat(batch).view(-1, *shape), s).reshape(-1, shape[1])
                for piece, rows in zip(batch, update.split([*map(len, batch)]), strict=True):
                    piece.copy_(rows)  # they go back in the memory in which they came
        dist.all_to_all_single(parts, pieces, plan.sent, plan.received, plan.group)
        for block, part in zip(plan.parts, _split(parts, plan.parts), strict=True):
            yield block.of(self.masters[block.name]), part

    def _ahead(self, name: str) -> Tensor:
        gradient = self.masters[name].grad
        assert gradient is not None
        return optimizers.look_ahead(self._momentum[name], gradient, self._settings)

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as DTensors that share memory with this rank's parts. Names are those of the
        unsharded model."""
        tensors: dict[str, Any] = {"step": torch.zeros(())}
        for name, weight in self.weights.items():
            parts = self._parts(name)
            tensors["step"] = parts.pop("step", tensors["step"])
            tensors |= {f"{kind}.{_plain(name)}": _like(weight, part) for kind, part in parts.items()}
        return tensors

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`, from the same mesh or another, as read by `checkpoint.restore`."""
        for name in self.weights:
            for kind, part in self._parts(name).items():
                part.copy_(state["step"] if kind == "step" else state[f"{kind}.{_plain(name)}"].to_local())
        self._publish()

    def _parts(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a weight. AdamW creates its moments, and its count of steps, at the first step only."""
        master = self.masters[name]
        if name in self._momentum:
            return {"master": master.detach(), "momentum": self._momentum[name]}
        moments = self._adam.state[master]
        if not moments:
            moments |= {"step": master.new_zeros(())} | {k: torch.zeros_like(master) for k in ("exp_avg", "exp_avg_sq")}
        return {"master": master.detach(), **moments}

    @torch.no_grad()
    def _publish(self) -> None:
        assert isinstance(self._model, FSDPModule)
        self._model.reshard()  # after a pass without gradients, the root's weights are still gathered, with old values
        if self.published is not None:
            for name, master in self.masters.items():
                self.weights[name].to_local().copy_(master.to(self.published))


def _plain(name: str) -> str:
    return name.replace(".experts.", ".")


def _like(weight: DTensor, shard: Tensor) -> DTensor:
    whole: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(shard, weight.device_mesh, weight.placements, run_check=False, **whole)
