"""A sharded checkpoint read in one piece, for tests."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.checkpoint import Reader, readable
from composer_nb.trainer.parallel.optimizer import KINDS


def whole(folder: Path, model: Model) -> dict[str, Tensor]:
    """A checkpoint as the state of a `FlatOptimizer` of `model`, which is not cut. Raises like `restore`."""
    reader = Reader(folder)
    weights = dict(model.named_parameters())
    state: dict[str, Any] = {f"{kind}.{name}": torch.empty_like(w) for name, w in weights.items() for kind in KINDS}
    state["step"] = torch.zeros(())
    with readable(folder):
        dcp.load(state, storage_reader=reader, no_dist=True)
    flat = {kind: torch.cat([state[f"{kind}.{name}"].detach().reshape(-1) for name in weights]) for kind in KINDS}
    return flat | {"step": state["step"]}
