"""Many ranks against one process: losses, gradients and updates, on every mesh that its ranks can form."""

from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_nb.harness.policy import route_checks
from composer_nb.kernels.formats.microscaling import mx_quantize
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer, OptimizerSettings
from composer_nb.trainer.learning.packing import ReplaySettings, Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.checkpoint import published
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.parallel.checkpoint import published_share, restore, save
from composer_nb.trainer.parallel.fsdp import shard
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer
from composer_nb.trainer.parallel.team import Team
from tests.tiny_models import LATENT
from tests.trainer.forked import on_ranks

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 8}
GQA = ModelConfig(**SIZES, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, max_position_embeddings=64)
MLA = ModelConfig(
    **SIZES, **LATENT | {"intermediate_size": 40}, moe_intermediate_size=16, max_position_embeddings=64,
    tie_word_embeddings=False,
)  # fmt: skip
ADAMW, MUON = OptimizerSettings(), OptimizerSettings(name="muon")
REPLAY = ReplaySettings(level="ids+order")


def streams(config: ModelConfig, count: int, seed: int = 0) -> list[Stream]:
    """Return rollouts of uneven lengths, two of each prompt, with routes that the router would not choose."""
    rng = np.random.default_rng(seed)
    batch = []
    prompt = np.zeros(0, np.int32)
    for number in range(count):
        if number % 2 == 0:
            prompt = rng.integers(0, config.vocab_size, rng.integers(2, 9)).astype(np.int32)
        completion = rng.integers(0, config.vocab_size, rng.integers(3, 24)).astype(np.int32)
        ids = np.concatenate([prompt, completion])
        acted = np.arange(len(ids)) >= len(prompt)
        acted[len(prompt) + 2 :: 5] = False
        routes = rng.random((len(ids), config.moe_layers, config.num_experts)).argsort(-1)
        routes = routes[..., : config.num_experts_per_tok].astype(np.uint8)
        routes[: len(prompt)] = np.arange(config.num_experts_per_tok)
        positions, logprob = np.arange(len(ids)), rng.normal(-4, 0.3, len(ids)).astype(np.float32)
        advantage = np.where(acted, rng.normal(), 0).astype(np.float32)
        recorded = {
            "routes": routes,
            "route_valid": positions < len(ids) - 1,
            "checks": route_checks(positions, ids, routes),
        }
        batch.append(Stream(token_ids=ids, acted=acted, logprob=logprob, advantage=advantage, **recorded))
    return batch


def seeded_model(config: ModelConfig, dtype: torch.dtype, recompute: bool) -> Model:
    torch.manual_seed(1)
    model = Model(config).to(dtype)
    model.recompute = recompute
    return model


def learn(learner: Learner, ranks: Ranks, batch: list[Stream], steps: range = range(2)) -> list[dict[str, float]]:
    return [
        learner.learn(
            batch, ranks, Random(step), minibatches=2, denominator=500.0, lr=1e-3, clip=0.02, microbatch_tokens=48
        )
        for step in steps
    ]  # fmt: skip


def whole(model: Model) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return all weights and gradients, under the names of the undivided model."""
    tensors = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient"
        pair = [x.full_tensor() if isinstance(x, DTensor) else x for x in (weight.detach(), weight.grad)]
        tensors[name.replace(".experts.", ".")] = (pair[0], pair[1])
    return tensors


def assert_same(actual: Model, expected: Model, within: float) -> None:
    """Assert that weights, and gradients of the last optimiser step, agree to `within` of the largest number of their tensor."""
    ours = whole(actual)
    for name, theirs in whole(expected).items():
        for kind, tensor, expected_tensor in zip(("weight", "gradient"), ours[name], theirs, strict=True):
            error = float((tensor - expected_tensor).abs().max() / expected_tensor.abs().max())
            assert error <= within, f"{name}: a {kind} is off by {error:.1e}"


def same(
    config: ModelConfig,
    mesh: MeshSettings,
    *,
    count: int = 12,
    dtype: torch.dtype = torch.float64,
    within: float = 1e-12,
    recompute: bool = False,
    replay: ReplaySettings | None = None,
    loss: LossSettings | None = None,
    optimizer: OptimizerSettings = ADAMW,
    batches: int = 2,
) -> None:
    """Assert that the ranks together learn batches of two optimiser steps as each rank does alone."""
    team = Team(Mesh.of(mesh, torch.distributed.get_world_size()))
    alone, cut = (seeded_model(config, dtype, recompute) for _ in range(2))
    shard(cut, team)
    batch, settings = streams(config, count), loss or LossSettings(ratio="none")
    learners = [
        Learner(alone, FlatOptimizer(alone, optimizer), settings),
        Learner(cut, ShardedOptimizer(cut, team, optimizer), settings),
    ]
    for learner in learners:
        learner.replay = replay or learner.replay
    [alone_metrics, cut_metrics] = [
        learn(learner, ranks, batch, range(batches)) for learner, ranks in zip(learners, (Ranks(), team), strict=True)
    ]
    for expected, actual in zip(alone_metrics, cut_metrics, strict=True):
        if team.mesh.data > 1:  # shared tokens count once a micro-batch, and micro-batches differ
            expected, actual = ({**point, "replay_overlap": 0.0} for point in (expected, actual))
        actual = {name: value for name, value in actual.items() if not name.startswith("imbalance")}
        assert actual == pytest.approx(expected, rel=max(within, 1e-9), abs=1e-12)
    assert_same(cut, alone, within)


FLOAT32 = 12 * 256**0.5 * 2**-24
"""How far sums in another order may be apart: 1.1e-5. Ranks add in another order than one process, and so do other vector units.

A sum of n numbers is then off by about sqrt(n) roundings of 2**-24 (Higham and Mary, 2019). Here n is up to 256, the tokens of a
batch, and about a dozen sums follow one another on the way forward and back.
"""


WHOLE_ROLLOUTS = LossSettings(ratio="gspo", clip_low=1.0, clip_high=99, length_norm=True)


def _quantised() -> None:
    """Quantised ranks learn as one process whose experts read the rows after transport."""
    team, batch = Team(Mesh.of(MeshSettings(shard=2, ep=2), 2)), streams(GQA, 12)
    alone, cut = (seeded_model(GQA, torch.float64, False) for _ in range(2))
    shard(cut, team, quantised=True)

    def rounded(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return Model._experts(alone, x + (mx_quantize(x.float()).dequantize(x.dtype) - x).detach(), *values)

    alone._experts = rounded  # type: ignore[method-assign]
    plain = seeded_model(GQA, torch.float64, False)
    runs = ((alone, FlatOptimizer(alone), Ranks()), (cut, ShardedOptimizer(cut, team, ADAMW), team))
    for model, optimizer, ranks in (*runs, (plain, FlatOptimizer(plain), Ranks())):
        learn(Learner(model, optimizer, LossSettings(ratio="none")), ranks, batch, range(1))
    assert_same(cut, alone, 1e-9)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(cut, plain, 1e-6)


def _mixed() -> None:
    """Layers compute in bfloat16; weights and sums of gradients are float32."""
    team, batch = Team(Mesh.of(MeshSettings(shard=2, ep=2), 2)), streams(MLA, 12)
    alone, cut = (seeded_model(MLA, torch.float32, False) for _ in range(2))
    shard(cut, team, torch.bfloat16)
    runs = ((alone, FlatOptimizer(alone), Ranks()), (cut, ShardedOptimizer(cut, team, ADAMW), team))
    [alone_metrics, cut_metrics] = [
        learn(Learner(m, o, LossSettings(ratio="none")), ranks, batch, range(1))[0] for m, o, ranks in runs
    ]
    assert (
        cut_metrics["grad_norm"] == pytest.approx(alone_metrics["grad_norm"], rel=0.05)
        and cut_metrics["grad_norm"] != alone_metrics["grad_norm"]
    )
    assert {weight.dtype for weight in cut.parameters()} == {torch.float32}
    assert {weight.grad.dtype for weight in cut.parameters() if weight.grad is not None} == {torch.float32}


class Received(TorchDispatchMode):
    """The collective operations that run, in order, with the bytes that each brings to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.log = list[tuple[str, int]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.log.append((func.overloadpacket.__name__, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def _dealt() -> None:
    """A step of Muon brings each matrix to one rank, evenly, and nothing else to any rank but the updates of its own parts."""
    team, model = Team(Mesh.of(MeshSettings(shard=3), 3)), seeded_model(MLA, torch.float64, False)
    optimizer = ShardedOptimizer(shard(model, team), team, MUON)
    for weight in optimizer.weights.values():
        weight.grad = weight.detach().clone()
    with Received() as received:
        optimizer.step(1e-3, 1e9)
    momentum = {name: x.to_local() for name, x in optimizer.state().items() if name.startswith("momentum.")}
    parts = sum(x.nbytes for name, x in momentum.items() if not name.endswith(("w_in", "w_out")))
    norm, (_, matrices), updates = received.log
    assert [norm, updates] == [("allreduce_", 8), ("alltoall_base_", parts)]
    on_each = team.gather(matrices)
    assert sum(on_each) == sum(team.gather(parts)) and max(on_each) < 0.4 * sum(on_each)


TWO = {
    "dense": partial(same, GQA, MeshSettings(shard=2)),
    "replicated": partial(same, GQA, MeshSettings()),
    "latent experts": partial(same, MLA, MeshSettings(shard=2, ep=2), recompute=True),
    "latent context": partial(same, MLA, MeshSettings(cp=2, ep=2)),
    "replayed": partial(same, GQA, MeshSettings(cp=2, ep=2), replay=REPLAY, recompute=True),
    "few": partial(same, GQA, MeshSettings(shard=2, ep=2), count=1),
    "float32": partial(same, MLA, MeshSettings(shard=2, ep=2), dtype=torch.float32, within=FLOAT32, batches=1),
    "losses of whole rollouts": partial(same, GQA, MeshSettings(cp=2), count=5, loss=WHOLE_ROLLOUTS),
    "mixed precision": _mixed,
    "dispatch in MXFP8": _quantised,
}
THREE = {"muon": partial(same, GQA, MeshSettings(shard=3), optimizer=MUON), "dealt matrices": _dealt}
FOUR = {
    "muon": partial(same, MLA, MeshSettings(shard=4, ep=2), optimizer=MUON),
    "hybrid": partial(same, GQA, MeshSettings(shard=2, ep=2, expert_shard=1)),
    "experts cut": partial(same, GQA, MeshSettings(shard=4, ep=2), replay=REPLAY),
    "context hybrid": partial(same, MLA, MeshSettings(cp=2, ep=4), recompute=True, replay=REPLAY),
}
EIGHT = {"all": partial(same, GQA, MeshSettings(shard=4, cp=2, ep=8), replay=REPLAY, recompute=True)}


def cut_learner(mesh: MeshSettings) -> tuple[Learner, Team]:
    team = Team(Mesh.of(mesh, torch.distributed.get_world_size()))
    model = shard(seeded_model(MLA, torch.float32, False), team)
    optimizer = ShardedOptimizer(model, team, OptimizerSettings(), published=torch.bfloat16)
    return Learner(model, optimizer, LossSettings(ratio="none")), team


def _saves(folder: Path) -> None:
    """Learn a step, write its checkpoint during the next step, and store the state after that step."""
    learner, team = cut_learner(MeshSettings(shard=2, cp=2, ep=8))
    batch = streams(MLA, 6)
    learn(learner, team, batch, range(1))
    saving = save(learner.optimizer.state(), folder / "saved", torch.distributed.new_group(backend="gloo"))
    learn(learner, team, batch, range(1, 2))
    saving.result()
    divided = learner.optimizer.state()
    state = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in divided.items()}
    if team.first:
        torch.save(state, folder / "next.pt")


def _goes_on(folder: Path) -> None:
    learner, team = cut_learner(MeshSettings(shard=torch.distributed.get_world_size()))
    state = learner.optimizer.state()
    restore(state, folder / "saved")
    learner.optimizer.load(state)
    learn(learner, team, streams(MLA, 6), range(1, 2))
    for name, expected in torch.load(folder / "next.pt").items():
        actual = learner.optimizer.state()[name]
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def _publishes(folder: Path) -> None:
    """The shares of the ranks add up to what one process publishes, with nothing twice."""
    learner, team = cut_learner(MeshSettings(shard=2, cp=2, ep=2, expert_shard=2))
    learn(learner, team, streams(MLA, 6), range(1))
    parts = team.gather(published_share(learner.model, team))
    alone = seeded_model(MLA, torch.float32, False)
    optimizer = FlatOptimizer(alone, ADAMW, published=torch.bfloat16)
    learn(Learner(alone, optimizer, LossSettings(ratio="none")), Ranks(), streams(MLA, 6), range(1))
    expected = published(alone)
    assert sum(map(len, parts)) == len(expected) and {n for part in parts for n in part} == expected.keys()
    assert all(parts), "every rank has a share"
    for name, tensor in ((name, tensor) for part in parts for name, tensor in part.items()):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-6)


def test_two_ranks_are_one_process(tmp_path: Path):
    on_ranks(2, TWO, tmp_path)


@pytest.mark.slow  # likewise
def test_a_checkpoint_of_eight_ranks_goes_on_on_two_and_on_one(tmp_path: Path):
    on_ranks(8, {"saves": _saves, "publishes": _publishes}, tmp_path, tmp_path)
    on_ranks(2, {"goes on": _goes_on}, tmp_path / "2", tmp_path)
    on_ranks(1, {"goes on": _goes_on}, tmp_path / "1", tmp_path)


def test_three_ranks_deal_the_matrices_of_muon(tmp_path: Path):
    on_ranks(3, THREE, tmp_path)


def test_four_ranks_are_one_process(tmp_path: Path):
    on_ranks(4, FOUR, tmp_path)


@pytest.mark.slow  # eight processes on two cores
def test_eight_ranks_are_one_process(tmp_path: Path):
    on_ranks(8, EIGHT, tmp_path)
