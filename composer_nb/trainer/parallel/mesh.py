"""The ranks of a run as two grids, one for the experts' weights and one for everything else.

    everything else     replicate × shard × cp                 weights cut over shard · cp ranks, repeated on `replicate`
    experts             expert_replicate × expert_shard × ep   experts dealt over ep, each cut over expert_shard ranks

Both grids lie over the same ranks, the last dimension innermost (neighbours), and neither knows the other: an expert group
borrows ranks from data and context alike, so cp = 2 and ep = 8 fit eight ranks (Composer 2.5's dual-mesh HSDP). The ranks of
one `cp` group work on the same rows, a part of the positions each; `replicate` · `shard` groups work on different rows.

Arithmetic alone: nothing here is started, and nothing needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from composer_nb.harness.plain import Count, Some, require_ranges

Axis = Literal[
    "replicate", "shard", "cp", "fsdp", "data", "expert_replicate", "expert_shard", "ep", "world"
]  # fmt: skip
"""Dimensions in which ranks of one group differ. `fsdp` is shard and cp together, `data` is replicate and shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """The division of work among ranks. By default every rank holds all weights and has rows of its own."""

    shard: Some = 1
    """Groups of different rows that hold one copy of the weights between them; with `cp`, how finely they are cut. What the
    ranks leave over are further copies."""
    cp: Some = 1
    """Context parallelism: ranks that share each row, a part of its positions each."""
    ep: Some = 1
    """Expert parallelism: ranks over which the experts are dealt."""
    expert_shard: Count = 0
    """Ranks over which each expert's weights are cut; 0: so that they are cut as finely as all others, as far as ep allows."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which layers compute, whatever that of their weights; gradients are summed in the dtype of the weights."""
    dispatch: Literal["plain", "mxfp8"] = "plain"
    """Format in which tokens travel to their experts. Results and gradients travel as they are."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of a trainer rank: with cuda each has a GPU of its own, which the cluster has to have."""

    def __post_init__(self) -> None:
        require_ranges(self, "mesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The sizes of both grids. Raises ValueError when they are not over the same number of ranks."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    expert_replicate: int = 1
    expert_shard: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dense_shape + self.expert_shape) < 1 or self.world != math.prod(self.expert_shape):
            raise ValueError(f"grids of {self.dense_shape} and {self.expert_shape}: their products must be equal")

    @classmethod
    def of(cls, settings: MeshSettings, ranks: int) -> Mesh:
        """The mesh of so many ranks. Raises ValueError that names the setting that does not divide them, and one that does."""
        s = settings
        _require_divides("mesh.cp", s.cp, ranks, f"ranks={ranks}")
        _require_divides("mesh.shard", s.shard, ranks // s.cp, f"ranks={ranks} over mesh.cp={s.cp}")
        _require_divides("mesh.ep", s.ep, ranks, f"ranks={ranks}")
        expert_shard = s.expert_shard or math.gcd(max(1, s.shard * s.cp // s.ep), ranks // s.ep)
        _require_divides("mesh.expert_shard", expert_shard, ranks // s.ep, f"ranks={ranks} over mesh.ep={s.ep}")
        return cls(
            replicate=ranks // (s.shard * s.cp),
            shard=s.shard,
            cp=s.cp,
            expert_replicate=ranks // (expert_shard * s.ep),
            expert_shard=expert_shard,
            ep=s.ep,
        )

    @property
    def dense_shape(self) -> tuple[int, int, int]:
        """(replicate, shard, cp)."""
        return self.replicate, self.shard, self.cp

    @property
    def expert_shape(self) -> tuple[int, int, int]:
        """(expert_replicate, expert_shard, ep)."""
        return self.expert_replicate, self.expert_shard, self.ep

    @property
    def world(self) -> int:
        return math.prod(self.dense_shape)

    @property
    def fsdp(self) -> int:
        """Ranks over which a weight that is no expert's is cut."""
        return self.shard * self.cp

    @property
    def data(self) -> int:
        """Groups of ranks that work on different rows."""
        return self.replicate * self.shard

    def place(self, rank: int) -> dict[Axis, int]:
        """The rank's coordinate along every axis: its number within its group of that axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} of {self.world}")
        rows, cp = divmod(rank, self.cp)
        replicate, shard = divmod(rows, self.shard)
        cut, ep = divmod(rank, self.ep)
        expert_replicate, expert_shard = divmod(cut, self.expert_shard)
        return {
            "replicate": replicate, "shard": shard, "cp": cp, "fsdp": shard * self.cp + cp, "data": rows,
            "expert_replicate": expert_replicate, "expert_shard": expert_shard, "ep": ep, "world": rank,
        }  # fmt: skip

    def experts(self, rank: int, experts: int) -> range:
        """Return the experts that a rank computes, of so many."""
        each = experts // self.ep
        first = self.place(rank)["ep"] * each
        return range(first, first + each)

    def require_experts(self, experts: int) -> None:
        """Raises ValueError unless every rank of an expert group gets equally many of the model's experts, at least one."""
        if experts % self.ep:
            fits = _largest_divisor(math.gcd(experts, self.world), self.ep)
            raise ValueError(
                f"mesh.ep={self.ep} does not divide model.num_experts={experts}: each rank needs equally many; "
                f"mesh.ep={fits} would"
            )

    def require_devices(self, devices: Sequence[int]) -> None:
        """Raises ValueError unless the machines, with so many devices each, have one for each rank and no `cp` group is spread
        over two of them."""
        if sum(devices) < self.world:
            raise ValueError(
                f"ranks={self.world}: {len(devices)} machine(s) with {sum(devices)} device(s) in all; "
                f"ranks={sum(devices)} would fit, if mesh.* divides it"
            )
        if odd := [count for count in devices[:-1] if count % self.cp]:
            fits = math.gcd(self.cp, *devices)
            raise ValueError(
                f"mesh.cp={self.cp} does not divide the devices of a machine ({odd[0]}): ranks that share a row would "
                f"lie on two; mesh.cp={fits} would"
            )


def _require_divides(name: str, value: int, whole: int, of: str) -> None:
    if whole % value:
        raise ValueError(f"{name}={value} does not divide {of}; {name}={_largest_divisor(whole, value)} would")


def _largest_divisor(whole: int, most: int) -> int:
    """The largest divisor of `whole` up to `most`."""
    return max(value for value in range(1, min(whole, most) + 1) if whole % value == 0)
