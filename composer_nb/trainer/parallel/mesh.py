"""The ranks of a run as two grids, one for the experts' weights and one for all other weights.

    other weights       replicate × shard × cp                 weights sharded over shard · cp ranks, repeated on `replicate`
    experts             expert_replicate × expert_shard × ep   experts dealt over ep, each sharded over expert_shard ranks

Both grids cover the same ranks, with the last dimension innermost (neighbours), and are independent: an expert group combines
ranks of data and context, so cp = 2 and ep = 8 fit eight ranks (Composer 2.5's dual-mesh HSDP). The ranks of one `cp` group work
on the same rows, each on part of the positions; `replicate` · `shard` groups work on different rows.

This module is arithmetic alone: it starts nothing and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from composer_nb.harness.plain import Count, Some, require_ranges

# Dimensions along which the ranks of a group differ. `fsdp` is shard and cp together; `data` is replicate and shard.
Axis = Literal["replicate", "shard", "cp", "fsdp", "data", "expert_replicate", "expert_shard", "ep", "world"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """The division of work among ranks. By default, every rank has all weights and its own rows."""

    shard: Some = 1
    """Number of groups with different rows that share one copy of the weights. Weights are sharded over shard · cp ranks; further
    ranks hold further copies."""
    cp: Some = 1
    """Context parallelism: number of ranks that share each row, each with part of its positions."""
    ep: Some = 1
    """Expert parallelism: number of ranks over which the experts are dealt."""
    expert_shard: Count = 0
    """Number of ranks over which each expert's weights are sharded; 0: as finely as all other weights, as far as ep allows."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the layers' computation, whatever that of the weights; gradients are summed in the dtype of the weights."""
    dispatch: Literal["plain", "mxfp8"] = "plain"
    """Format in which tokens are sent to their experts. Results and gradients are sent unquantized."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of every model: in the stages, in the engines and in the trainer. With services, evaluations
    between steps of RL stay on CPUs. With cuda and services, each trainer rank and each engine needs its own GPU; without
    services, the processes of a run share those of the machine."""

    def __post_init__(self) -> None:
        require_ranges(self, "mesh")

    @property
    def gpus(self) -> int:
        """Number of GPUs that each trainer rank and each engine needs."""
        return int(self.device == "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The sizes of both grids. Raises ValueError if they do not have the same number of ranks."""

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
        """Return the mesh of this number of ranks. Raises ValueError, which names a setting that does not divide it, and one that
        does."""
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
        """The sizes (replicate, shard, cp)."""
        return self.replicate, self.shard, self.cp

    @property
    def expert_shape(self) -> tuple[int, int, int]:
        """The sizes (expert_replicate, expert_shard, ep)."""
        return self.expert_replicate, self.expert_shard, self.ep

    @property
    def world(self) -> int:
        return math.prod(self.dense_shape)

    @property
    def fsdp(self) -> int:
        """Number of ranks over which weights other than the experts' are sharded."""
        return self.shard * self.cp

    @property
    def data(self) -> int:
        """Number of groups of ranks that work on different rows."""
        return self.replicate * self.shard

    def place(self, rank: int) -> dict[Axis, int]:
        """Return the rank's coordinate along every axis, which is its index within its group of that axis."""
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
        """Return which of `experts` experts a rank computes."""
        count = experts // self.ep
        first = self.place(rank)["ep"] * count
        return range(first, first + count)

    def require_experts(self, experts: int) -> None:
        """Raise ValueError unless every rank of an expert group gets equally many of the model's experts, at least one."""
        if experts % self.ep:
            fits = _largest_divisor(math.gcd(experts, self.world), self.ep)
            raise ValueError(f"mesh.ep={self.ep} does not divide model.num_experts={experts}; mesh.ep={fits} would")

    def require_devices(self, devices: Sequence[int]) -> None:
        """Raise ValueError unless the machines, given by their numbers of devices, have one for each rank, and no `cp` group is
        spread over two machines."""
        if sum(devices) < self.world:
            raise ValueError(f"ranks={self.world}: {sum(devices)} device(s) in all; ranks={sum(devices)} would fit")
        if odd := [count for count in devices[:-1] if count % self.cp]:
            fits = math.gcd(self.cp, *devices)
            raise ValueError(f"mesh.cp={self.cp} does not divide a machine's devices ({odd[0]}); mesh.cp={fits} would")


def _require_divides(name: str, value: int, whole: int, of: str) -> None:
    if whole % value:
        raise ValueError(f"{name}={value} does not divide {of}; {name}={_largest_divisor(whole, value)} would")


def _largest_divisor(whole: int, most: int) -> int:
    """Return the largest divisor of `whole` up to `most`."""
    return max(value for value in range(1, min(whole, most) + 1) if whole % value == 0)
