"""Check before anything starts that the machines can carry a run; an error names the setting to change."""

import math
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from composer_nb.kernels.linear import HALF_IS_SLOW
from composer_nb.trainer.parallel.memory import RankLoad, estimate, require_memory
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.records.rundir import provenance
from composer_nb.trainer.schedule import ServicesSettings
from composer_nb.trainer.services.machine import available_memory
from composer_nb.trainer.services.run_copy import NotSeen, local_run
from composer_nb.trainer.settings import Settings

# A node that has to start a worker and import torch first answers within so long.
ANSWER_S = 120.0
# Share of a step that counts as no wait.
SPARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCapacity:
    """A machine: bytes that it has to spare, its GPUs, and the versions of `code` that must be the same on all machines (Python,
    libraries, this package)."""

    name: str
    memory: int
    gpus: int = 0
    code: dict[str, str] = field(default_factory=dict)


def this_machine() -> MachineCapacity:
    """Return what the machine of this process has."""
    origin, gpus = provenance(), torch.cuda.device_count()
    code = origin["versions"] | {"composer_nb": origin["package_digest"][:12]}
    return MachineCapacity(name=socket.gethostname(), memory=available_memory(), gpus=gpus, code=code)


def machines_of_cluster(run: Path, store: str = "") -> list[MachineCapacity]:
    """Each node of the Ray cluster that this process is attached to, by its own account. Raises NotSeen for one that does not see
    the run directory or its inputs in `store`, and ValueError for one that does not answer, as nodes without this package do."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def machine_with(run: Path) -> MachineCapacity:
        local_run(run, store)
        return this_machine()

    nodes = [node for node in ray.nodes() if node["Alive"]]
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    task = ray.remote(machine_with)
    replies = [task.options(num_cpus=0, scheduling_strategy=strategy).remote(run) for strategy in strategies]
    machines = []
    for node, reply in zip(nodes, replies, strict=True):
        try:
            answer = ray.get(reply, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, NotSeen):
                raise error.cause from None
            raise ValueError(
                f"services.address: node {node['NodeManagerAddress']} cannot run this package; install the same on all nodes "
                f"({' '.join(str(error).split())[-300:]})"
            ) from None
        machines.append(replace(answer, gpus=int(node["Resources"].get("GPU", 0))))  # a task sees what it asked for
    return machines


def require_room(settings: Settings, machine: MachineCapacity) -> None:
    """Raises ValueError unless `machine` has memory for the stages before RL, and for RL without services: a copy of the model,
    or its part on the mesh, for each of `ranks`. On GPUs, it must have any, and one for each rank of a mesh."""
    s = settings
    if s.mesh.gpus:
        _require_gpus(s, [machine], s.meshed and s.supervised)
        return
    mesh_settings = s.mesh if s.meshed and s.supervised else MeshSettings()
    row = s.midtrain.row_tokens if s.midtrain.steps else 0
    tokens = max([1, row, *(stage.tokens for stage in (s.midtrain, s.sft, s.extend) if stage.steps)])

    def need(ranks: int, again: bool) -> int:
        """Return what each of so many ranks needs. Whole rows are dealt, so its part of a batch may be longer by one of them."""
        mesh, half = Mesh.of(mesh_settings, ranks), mesh_settings.compute == "bfloat16" and not HALF_IS_SLOW
        tokens_per_rank = (
            tokens if s.extend.steps else min(tokens, math.ceil(tokens / mesh.data) + max(row, s.limits.tokens))
        )
        joint = any((s.midtrain.draft_weight, s.extend.draft_weight, s.sft.draft_weight))
        load = RankLoad(tokens=tokens_per_rank, optimizer=s.optimizer.name, half=half, recompute=again, draft=joint)
        whole = estimate(s.agent_model, Mesh(), load).weights  # is evaluated; the long-context phase begins with two
        return max(estimate(s.agent_model, mesh, load).peak, whole * (2 if s.extend.steps else 1))

    def fit(ranks: int, again: bool = s.midtrain.recompute) -> bool:
        with suppress(ValueError):  # the mesh does not divide them
            return ranks * need(ranks, again) <= machine.memory
        return False

    if not fit(s.ranks):
        fitting_ranks = (f"ranks={ranks}" for ranks in range(s.ranks - 1, 0, -1) if fit(ranks))
        fits = next(fitting_ranks, "midtrain.recompute=true" if fit(s.ranks, again=True) else "")
        advice = f"{fits} would fit" if fits else "a smaller model.* or midtrain.tokens, or more memory, would do"
        gib_needed, gib_free = need(s.ranks, s.midtrain.recompute) / 2**30, machine.memory / 2**30
        raise ValueError(
            f"ranks={s.ranks}: each needs {gib_needed:,.2f} GiB before RL, of {gib_free:,.2f} GiB; {advice}"
        )


def require_same_code(machines: Sequence[MachineCapacity]) -> None:
    """Raises ValueError, which names two machines that run different code."""
    for other in machines[1:]:
        reference = machines[0]
        if name := next((name for name in reference.code if reference.code[name] != other.code.get(name)), ""):
            raise ValueError(
                f"services.address: {reference.name} has {name} {reference.code[name]}, {other.name} has {other.code.get(name)}; "
                "install the same on all nodes, or attach to a cluster where it is"
            )


def require_room_for_rl(settings: Settings, machines: Sequence[MachineCapacity]) -> None:
    """Raises ValueError unless `machines` have a GPU for each rank and engine where these compute on GPUs, or else memory for
    ranks that compute on CPUs, which Ray may all place on one. The memory of engines and environments is not counted."""
    s = settings
    if s.mesh.gpus:
        gpus = _require_gpus(s, machines, s.meshed)
        engines = max(s.services.engines, s.services.max_engines) + s.services.standby
        if s.services.on and s.trainers + engines > sum(gpus):
            raise ValueError(
                f"mesh.device='cuda': {s.trainers} trainer rank(s) and {engines} engine(s) need a GPU each, and there are "
                f"{sum(gpus)}; fewer services.engines, standby or ranks, or services.on=false, which shares them"
            )
        return
    load = RankLoad(
        tokens=s.rl.microbatch_tokens,
        longest=s.limits.tokens,
        optimizer=s.optimizer.name,
        recompute=s.rl.recompute,
        half=s.mesh.compute == "bfloat16" and not HALF_IS_SLOW,
    )
    ranks = s.trainers if s.services.on else s.ranks
    memory_per_rank = min(machine.memory for machine in machines) // ranks  # more ranks would have less each
    require_memory(s.agent_model, s.mesh, ranks, load, memory_per_rank, more_ranks=False)


def planned_engines(services: ServicesSettings, engines: int, trainer_wait: float, engine_wait: float) -> int:
    """Return the number of engines for the next step, by the shares of the last one in which the trainer waited for rollouts, and
    an engine for the trainer: one more if only the trainer waited, one less if the others could have done the work."""
    if engine_wait < SPARE < trainer_wait:
        return max(engines, min(engines + 1, services.max_engines))
    others_suffice = engines * (1 - engine_wait) < (engines - 1) * (1 - SPARE)
    return max(services.engines, engines - 1) if others_suffice else engines


def _require_gpus(settings: Settings, machines: Sequence[MachineCapacity], meshed: bool) -> list[int]:
    """Return the machines' numbers of GPUs. Raises ValueError if there is none, or if the ranks of a mesh lack one."""
    gpus = [machine.gpus for machine in machines]
    if not any(gpus):
        raise ValueError(f"mesh.device='cuda': no GPU on {', '.join(m.name for m in machines)}; 'cpu' would run")
    if meshed:
        Mesh.of(settings.mesh, settings.ranks).require_devices(gpus)
    return gpus
