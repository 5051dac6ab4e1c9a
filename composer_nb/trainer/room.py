"""Whether the machines that are to carry a run can: asked before anything starts, and answered with the setting to change."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from composer_nb.config import Settings
from composer_nb.doctor import available_memory
from composer_nb.trainer.memory import Load, require_memory
from composer_nb.trainer.mesh import Mesh, MeshSettings
from composer_nb.trainer.rundir import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    name: str
    memory: int
    """Bytes that it has to spare."""
    gpus: int = 0
    code: dict[str, str] = field(default_factory=dict)
    """What has to be the same on all: Python, libraries, this package."""


def this_machine() -> Machine:
    """The machine that this process runs on."""
    told, gpus = provenance(), torch.cuda.device_count()
    code = told["versions"] | {"composer_nb": told["package_digest"][:12]}
    return Machine(name=socket.gethostname(), memory=available_memory(), gpus=gpus, code=code)


def machines_of_cluster() -> list[Machine]:
    """Each node of the Ray cluster that this process is attached to, by its own account."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked = ray.remote(this_machine).options(num_cpus=0, scheduling_strategy=where)
        found.append((asked.remote(), int(node["Resources"].get("GPU", 0))))  # tasks see the GPUs that they asked for
    return [replace(ray.get(machine), gpus=gpus) for machine, gpus in found]


def require_room(settings: Settings, machines: Sequence[Machine]) -> None:
    """Raises ValueError unless `machines` run the same code, have a GPU for each rank where ranks compute on GPUs, and memory for
    the ranks that compute on CPUs. The ranks fill one machine after another; what engines and environments need is not
    counted."""
    _require_same_code(machines)
    if settings.mesh.device == "cuda":
        if not any(machine.gpus for machine in machines):
            raise ValueError("mesh.device='cuda': no machine has a GPU; 'cpu' would run")
        Mesh.of(settings.mesh, settings.ranks).require_devices([machine.gpus for machine in machines])
        return
    least = min(machine.memory for machine in machines)
    each = -(-settings.ranks // len(machines))
    rl = Load(
        tokens=settings.rl.microbatch_tokens,
        longest=settings.limits.tokens,
        optimizer=settings.optimizer.name,
        recompute=settings.rl.recompute,
        half=settings.mesh.compute == "bfloat16",
        mx_dispatch=settings.mesh.dispatch == "mxfp8",
    )
    mesh = settings.mesh if settings.trainers > 1 else MeshSettings()
    require_memory(settings.agent_model, mesh, settings.ranks, rl, least // each)


def _require_same_code(machines: Sequence[Machine]) -> None:
    first = machines[0]
    for other in machines[1:]:
        for name, version in first.code.items():
            if other.code.get(name) != version:
                raise ValueError(
                    f"services.address: {first.name} has {name} {version}, {other.name} has {other.code.get(name)}; "
                    f"install the same on all nodes, or attach to a cluster where it is"
                )
