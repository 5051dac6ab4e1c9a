"""Supervised training on a mesh against one process, and what its ranks save."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_nb.harness.environment import Sandboxes
from composer_nb.trainer.drafts import HeadTrainer, new_head
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.optimizer import FlatOptimizer, OptimizerSettings
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import StagePlan, cross_entropy, rows_of_rank, train_step
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.shards import INDEX
from composer_nb.trainer.models.transformer import Layer, Model, ModelConfig
from composer_nb.trainer.parallel.checkpoint import load_sharded, save_sharded
from composer_nb.trainer.parallel.fsdp import shard
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer
from composer_nb.trainer.parallel.team import Team
from composer_nb.trainer.recipe.meshed import MeshStages
from composer_nb.trainer.recipe.recipe import _train
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override
from tests.trainer.forked import on_ranks
from tests.trainer.parallel.test_sharding import GQA, MLA, assert_same, seeded_model


def rows(count: int, seed: int = 0) -> list[TokenRow]:
    """Return rows of uneven lengths whose tokens have weights 0, 0.25 and 1; the first two begin alike."""
    rng = np.random.default_rng(seed)
    token_ids = [rng.integers(0, GQA.vocab_size, n).astype(np.int32) for n in rng.integers(4, 30, count)]
    if count > 1:
        token_ids[1][:3] = token_ids[0][:3]
    return [
        TokenRow(ids, rng.choice([0.0, 0.25, 1.0], len(ids), p=[0.3, 0.3, 0.4]).astype(np.float32)) for ids in token_ids
    ]


BATCHES = [rows(9), rows(1, seed=1), rows(4, seed=2)]
"""Also one of fewer rows than ranks."""


def same(config: ModelConfig, mesh: MeshSettings) -> None:
    """Assert that each batch's metrics and held-out loss, and the weights afterwards, equal those of one process (float64), also
    those of a draft head that begins at the second batch and trains jointly then. A balance loss is a mean over ranks; in one
    process, over the rows of each rank."""
    team = Team(Mesh.of(mesh, dist.get_world_size()))
    alone, cut = (seeded_model(config, torch.float64, False) for _ in range(2))
    shard(cut, team)
    optimizer = OptimizerSettings()
    pairs = (
        (alone, FlatOptimizer(alone, optimizer, weight_decay=0.1), Ranks()),
        (cut, ShardedOptimizer(cut, team, optimizer, weight_decay=0.1), team),
    )
    joint: dict[str, Any] = {"weight": 0.3, "begin": 1, "rows": BATCHES[0], "steps": 2}
    joints = [HeadTrainer(model, new_head(model, 3).double(), ranks, **joint) for model, _, ranks in pairs]
    for step, batch in enumerate(BATCHES):
        alone_metrics, cut_metrics = (
            {
                "held out": cross_entropy(model, BATCHES[0], ranks, budget=40),
                "drafts": joint.agreement(BATCHES[0]),
                **train_step(
                    model,
                    rows_of_rank(batch, ranks),
                    optimizer,
                    ranks,
                    lr=1e-3,
                    balance=0.0,
                    clip=0.5,
                    beside=joint.at(step),
                ),
            }
            for (model, optimizer, ranks), joint in zip(pairs, joints, strict=True)
        )
        assert cut_metrics == pytest.approx(alone_metrics, rel=1e-9, nan_ok=True)
    assert_same(cut, alone, 1e-11)
    expected, actual = (torch.cat([weight.flatten() for weight in joint.head.parameters()]) for joint in joints)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


DENSE = replace(GQA, family="qwen2", intermediate_size=40, moe_intermediate_size=128)
"""No experts, a bias of queries, keys and values; fields of experts are at their defaults."""


def with_copies() -> Ranks:
    """Ranks that each have the whole model."""
    ranks = Ranks()
    ranks.rank, ranks.world = dist.get_rank(), dist.get_world_size()
    return ranks


def _balanced() -> None:
    """Ranks on a mesh balance experts as ranks with whole copies do."""
    team = Team(Mesh.of(MeshSettings(shard=2, ep=2), 2))
    alone, cut = (seeded_model(GQA, torch.float64, False) for _ in range(2))
    shard(cut, team)
    optimizers = FlatOptimizer(alone), ShardedOptimizer(cut, team, OptimizerSettings())
    for batch in BATCHES:
        for model, optimizer, ranks in zip((alone, cut), optimizers, (with_copies(), team), strict=True):
            train_step(model, rows_of_rank(batch, team), optimizer, ranks, lr=1e-3, balance=0.3, clip=0.5)
    assert_same(cut, alone, 1e-11)


def _saved(folder: Path) -> None:
    """The ranks' files together are the checkpoint that one process writes."""
    team = Team(Mesh.of(MeshSettings(shard=2, ep=2), 2))
    config = replace(MLA, num_nextn_predict_layers=1)
    cut, alone = (biased(seeded_model(config, torch.float32, False)) for _ in range(2))
    shard(cut, team)
    cut.companions = {"tokenizer.json": b"{}"}
    save_sharded(cut, team, folder / "cut")
    assert (folder / "cut" / INDEX).is_file() and (folder / "cut" / "tokenizer.json").read_text() == "{}"
    assert not list(folder.glob("cut*.part")), "the folder appears at once"
    save_pretrained(alone, folder / f"alone-{team.rank}", dtype=torch.bfloat16)
    loaded, expected = load_pretrained(folder / "cut"), load_pretrained(folder / f"alone-{team.rank}")
    assert loaded.config == expected.config
    for name, weight in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name
    resharded = load_sharded(folder / "cut", team, MeshSettings(shard=2, ep=2))
    for model in (loaded, expected, resharded):
        assert biases(model) == {"_layers.1": 0.5, "_aheads.0.layer": 0.5}
    expected_cut = shard(expected, team)
    for tensor, expected_tensor in zip(shards(resharded), shards(expected_cut), strict=True):
        assert torch.equal(tensor, expected_tensor)
    assert resharded.companions == cut.companions
    team.barrier()
    save_sharded(cut, team, folder / "cut")  # replaces the first one
    assert not list(folder.glob("cut*.part"))


def biased(model: Model) -> Model:
    for layer in model.modules():
        if isinstance(layer, Layer) and layer.router_bias is not None:
            layer.router_bias += 0.5
    return model


def biases(model: Model) -> dict[str, float]:
    """The value that all biases of each router have."""
    return {
        name: value
        for name, layer in model.named_modules()
        if isinstance(layer, Layer) and layer.router_bias is not None
        for value in set(layer.router_bias.tolist())
    }


def shards(model: Model) -> list[torch.Tensor]:
    assert isinstance(model, FSDPModule)
    model.reshard()  # a pass without gradients has left some whole
    return [weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)]


def _resumed(folder: Path, *, meshed: bool) -> None:
    """A stage that is cut off between two checkpoints ends with the numbers of one that is not. Its head had joined before."""
    mesh, folder = {"mesh.shard": 2, "mesh.ep": 2} if meshed else {}, folder / f"meshed-{meshed}"
    settings = override(Settings(), {"ranks": 2, "until": "sft"} | mesh)
    ranks: Ranks = Team(Mesh.of(settings.mesh, 2)) if meshed else with_copies()
    results = dict[str, tuple[list[dict[str, float]], Model]]()
    if ranks.first:
        for name in ("whole", "cut"):
            RunDir(folder / name)
    ranks.barrier()
    plan = StagePlan(
        stage="sft", steps=20, lr=lambda step: 1e-3, balance=0.1, clip=1.0, weight_decay=0.0, watch={"own": BATCHES[0]}
    )

    def joint(model: Model) -> StagePlan:
        options: dict[str, Any] = {"weight": 0.3, "begin": 5, "rows": BATCHES[0], "steps": 2}
        return replace(plan, beside=HeadTrainer(model, new_head(model, 0), ranks, **options))

    def batches(last: int) -> Iterator[list[TokenRow]]:
        yield from (rows(4, seed=step) for step in range(last))
        if last < plan.steps:
            raise InterruptedError

    for name, cuts in (("whole", []), ("cut", [7])):
        kind = MeshStages if meshed else Stages
        s = kind(RunDir(folder / name), settings, ranks, Sandboxes(), lambda line: None)
        for last in cuts:
            with pytest.raises(InterruptedError):
                model = s.divided(seeded_model(GQA, torch.float32, False))
                _train(s, model, joint(model), batches(last), {})
            ranks.barrier()
        model = s.divided(seeded_model(GQA, torch.float32, False))
        cross_entropy(model, BATCHES[0], ranks)  # as before rehearsal and before the long-context phase
        _train(s, model, joint(model), batches(plan.steps), {})
        ranks.barrier()
        results[name] = s.run.steps("sft"), model
    assert results["cut"][0] == results["whole"][0] and len(results["cut"][0]) == 10
    weights = (shards(model) if meshed else list(model.parameters()) for _, model in results.values())
    for tensor, expected_tensor in zip(*weights, strict=True):
        assert torch.equal(tensor, expected_tensor)
    [checkpoint] = (folder / "cut" / "checkpoints").iterdir()
    assert checkpoint.name == f"sft-000020.{'ranks' if meshed else 'safetensors'}"


TWO = {
    "sharded": partial(same, GQA, MeshSettings(shard=2, ep=2)),
    "replicated, latent": partial(same, MLA, MeshSettings(ep=2)),
    "context": partial(same, MLA, MeshSettings(cp=2, ep=2)),
    "balanced": _balanced,
    "dense": partial(same, DENSE, MeshSettings(shard=2)),
}


def test_two_ranks_learn_as_one_process(tmp_path: Path):
    on_ranks(2, TWO, tmp_path)


def test_ranks_save_one_checkpoint_and_go_on_from_theirs(tmp_path: Path):
    resumed = {f"resumed, meshed {meshed}": partial(_resumed, meshed=meshed) for meshed in (True, False)}
    on_ranks(2, {"saved": _saved, **resumed}, tmp_path, tmp_path)


def test_four_ranks_learn_as_one_process(tmp_path: Path):
    on_ranks(4, {"context and shards": partial(same, MLA, MeshSettings(shard=2, cp=2, ep=4))}, tmp_path)
