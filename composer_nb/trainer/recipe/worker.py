"""One rank of a run: `python -m composer_nb.trainer.recipe.worker RUN WORLD RENDEZVOUS RANK`. Started by `launch.py`."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.sandbox.reap import FOLDER
from composer_nb.trainer.learning.ranks import ALONE, Ranks, set_up_process
from composer_nb.trainer.parallel.mesh import Mesh
from composer_nb.trainer.parallel.team import Team, join
from composer_nb.trainer.recipe.recipe import run_recipe
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import RunDir, full_disk
from composer_nb.trainer.settings import Settings, from_dict


def main(arguments: list[str]) -> None:
    """Run the recipe on one rank; `arguments` are the run, the number of ranks, the rendezvous file and the rank."""
    path, world, rendezvous, rank = arguments
    run = RunDir(Path(path))
    settings = from_dict(run.settings())
    set_up_process(settings.seed, settings.matmul)
    if settings.mesh.gpus:
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    start = time.perf_counter()

    def say(text: str) -> None:
        if rank == "0":
            print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True)

    try:
        with Sandboxes(settings.env, run.path.name, run.path / FOLDER) as sandboxes:
            stages_of_rank, ranks = _joined(settings, int(rank), int(world), Path(rendezvous))
            run_recipe(stages_of_rank(run, settings, ranks, sandboxes, say))
            ranks.close()
    except Exception as error:
        if not (message := full_disk(error, run.path)):
            raise
        sys.exit(message)


def _joined(s: Settings, rank: int, world: int, rendezvous: Path) -> tuple[type[Stages], Ranks]:
    """Join the other ranks, and return them with the stages of a rank."""
    on_mesh = s.meshed and s.supervised
    if on_mesh or world > 1:
        join(rank, world, dist.FileStore(str(rendezvous), world), s.mesh.device if on_mesh else "cpu", ALONE)
    if not on_mesh:
        return Stages, Ranks(rank, world)
    from composer_nb.trainer.recipe.meshed import MeshStages

    return MeshStages, Team(Mesh.of(s.mesh, world), s.mesh.device)


if __name__ == "__main__":
    main(sys.argv[1:])
