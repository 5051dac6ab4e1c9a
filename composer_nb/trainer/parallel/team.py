"""Ranks that share one model: process groups over a `Mesh`, and their operations for a learner.

The backend is gloo on CPUs and nccl on GPUs (by `device`); the program is the same. Reductions are sums, never means: a loss is a
sum divided by the denominator of the whole batch, so uneven shares of tokens need no correction.
"""

import socket
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer_nb.trainer.learning.packing import FlatBatch
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.parallel.context import split
from composer_nb.trainer.parallel.mesh import Mesh

# Time limit of one communication. A dead rank is noticed at once, by its closed connections.
PATIENCE = timedelta(minutes=10)


def meeting_place(host: str) -> dist.TCPStore:
    """Open the meeting place of the ranks at a free port of this address. The first rank calls this."""
    listener = socket.create_server((host, 0))  # the store's own would listen on all interfaces
    port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=descriptor
    )


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with an address; empty if none has it."""
    addresses = psutil.net_if_addrs().items()
    return next((name for name, entries in addresses if any(entry.address == address for entry in entries)), "")


def join(rank: int, world: int, store: dist.Store, device: str = "cpu", patience: timedelta = PATIENCE) -> None:
    """Make this process rank `rank` of the `world` ranks that meet at `store`."""
    backend = "gloo" if device == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)


class Team(Ranks):
    """This process among ranks that have joined, placed by `mesh`. Raises ValueError if the mesh has another number of ranks."""

    lockstep = True

    def __init__(self, mesh: Mesh, device: str = "cpu") -> None:
        self.rank, self.world, self.mesh, self.device = dist.get_rank(), dist.get_world_size(), mesh, device
        if mesh.world != self.world:
            raise ValueError(f"a mesh of {mesh.world} ranks, and {self.world} have joined")
        self.place = mesh.place(self.rank)
        self._dense = init_device_mesh(device, (mesh.replicate, mesh.fsdp), mesh_dim_names=("replicate", "fsdp"))
        # Mesh for weights of experts, dealt over the last dimension and sharded over the one before.
        names = ("expert_replicate", "expert_shard", "ep")
        self.experts = init_device_mesh(device, mesh.expert_shape, mesh_dim_names=names)
        rows = init_device_mesh(device, (mesh.data, mesh.cp), mesh_dim_names=("data", "cp"))
        self.context = rows["cp"].get_group()

    @property
    def dense(self) -> DeviceMesh:
        """Mesh for all other weights: (replicate, fsdp), or fsdp alone without replicas."""
        return self._dense if self.mesh.replicate > 1 else self._dense["fsdp"]

    @property
    def cut_experts(self) -> DeviceMesh:
        """The part of `experts` that shards one expert's weights."""
        dims = ("expert_replicate", "expert_shard") if self.mesh.expert_replicate > 1 else ("expert_shard",)
        return self.experts[dims]

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.place["data"], self.mesh.data

    def split(self, batch: FlatBatch) -> FlatBatch:
        """Return this rank's part of a batch."""
        return split(batch, self.place["cp"], self.mesh.cp, self.context) if self.mesh.cp > 1 else batch
