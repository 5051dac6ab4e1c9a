"""The recipe's parts on a GPU (`mesh.device=cuda`) against the same in float64 on a CPU: a batch of RL that a run has stored, a
step of supervised learning, sampling, the mismatch, and a checkpoint. Without a GPU the CPU takes its place."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from composer_nb.harness.policy import Request
from composer_nb.labs.rewards.rescore import stored_batch
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL, Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.routes import routes_differ
from composer_nb.trainer.learning.supervised import train_step
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import ENGINES, as_engine
from composer_nb.trainer.recipe.mismatch import compare_streams, figures
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.recipe.replay import replay
from composer_nb.trainer.rl import to_streams
from composer_nb.trainer.settings import Settings, override

S = Settings()


@pytest.fixture(scope="module")
def streams() -> list[Stream]:
    batch = stored_batch(example_run(), -1)
    return [x for group in batch.groups[:4] for s in group for x in to_streams(s.attempt, s.advantage)]


def policy(device: str, dtype: torch.dtype = torch.float32) -> Model:
    return load_pretrained(example_run().path / "weights" / "before_final", dtype=dtype).to(device)


def learnt(model: Model, streams: list[Stream]) -> tuple[FlatOptimizer, dict[str, float]]:
    optimizer = FlatOptimizer(model, S.optimizer)
    learner = Learner(model, optimizer, S.loss, None, FULL)
    options = {"minibatches": 1, "denominator": 64.0, "lr": 1e-4, "clip": 1.0, "microbatch_tokens": 4096}
    return optimizer, learner.learn(streams, Ranks(), Random(0), **options)


def test_a_stored_batch_of_rl_is_learnt_alike(device: str, streams: list[Stream]):
    _, exact_metrics = learnt(exact := policy("cpu", torch.float64), streams)
    optimizer, metrics = learnt(model := policy(device), streams)
    for name in ("k3", "entropy", "grad_norm", "replay_overlap"):
        assert metrics[name] == pytest.approx(exact_metrics[name], rel=1e-2, abs=1e-6), name
    before = torch.cat([weight.detach().flatten().double() for weight in policy("cpu").parameters()])
    moved, should = (
        torch.cat([weight.detach().flatten().cpu().double() for weight in net.parameters()]) - before
        for net in (model, exact)
    )
    assert float(torch.nn.functional.cosine_similarity(moved, should, dim=0)) > 0.98, "AdamW's first step is a sign"
    assert all(value.device.type == "cpu" for value in optimizer.state().values())


def test_a_checkpoint_goes_on_alike(device: str, streams: list[Stream]):
    optimizer, _ = learnt(policy(device), streams)
    resumed = FlatOptimizer(policy(device), S.optimizer)
    resumed.load(optimizer.state())
    for flat_optimizer in (optimizer, resumed):
        flat_optimizer.gradients.fill_(1e-3)
        flat_optimizer.step(1e-4, 1.0)
    assert torch.equal(optimizer.weights, resumed.weights) and resumed.weights.device.type == device


def test_a_step_of_supervised_learning(device: str, streams: list[Stream]):
    rows = [TokenRow(token_ids=stream.token_ids, weight=stream.acted.astype(np.float32)) for stream in streams[:8]]
    losses = []
    for model in (policy("cpu", torch.float64), policy(device)):
        options = {"lr": 1e-4, "balance": 0.01, "clip": 1.0}
        losses.append(train_step(model, rows, FlatOptimizer(model, S.optimizer), Ranks(), **options))
    for name, expected in losses[0].items():
        assert losses[1][name] == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("numerics", ENGINES)
def test_an_engine_of_each_numerics_and_its_mismatch(device: str, streams: list[Stream], numerics):
    """A float32 engine's greedy tokens are those of the CPU; with routes replayed, the trainer scores samples of any
    engine about as the engine did."""
    model = policy(device)
    engine = Engine(as_engine(model, numerics).to(device), stop=frozenset(), slots=8, max_length=256, temperature=0.0)
    prompts = [stream.token_ids[: int(stream.acted.argmax())].tolist()[:96] for stream in streams[:8]]
    requests = [Request(rollout=n, token_ids=ids, max_tokens=24) for n, ids in enumerate(prompts)]
    completions = engine.generate(requests)
    if numerics == "float32":
        plain = Engine(policy("cpu"), stop=frozenset(), slots=8, max_length=256, temperature=0.0)
        assert [completion.token_ids for completion in completions] == [
            completion.token_ids for completion in plain.generate(requests)
        ]
    sampled = []
    for completion, prompt in zip(completions, prompts, strict=True):
        trace, ids = engine.release(completion.rollout), [*prompt, *completion.token_ids]
        acted, logprob = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
        logprob[acted] = completion.logprobs
        recorded = {name: getattr(trace, name) for name in ("routes", "gates", "route_valid", "checks")}
        fields = {"token_ids": np.array(ids, np.int32), "acted": acted, "logprob": logprob}
        sampled.append(Stream(**fields, advantage=np.zeros_like(logprob), **recorded))
    mismatch = figures(compare_streams(model, sampled))
    assert mismatch["tokens"] == 24 * 8 and mismatch["on"]["logprob_gap_p50"] < (1e-4 if numerics == "float32" else 0.1)


def test_what_is_made_beside_a_model_is_on_its_device():
    """The device `meta` takes the place of a GPU: torch refuses to compute across either and the CPU."""
    model = Model.planned(replace(policy("cpu").config, num_nextn_predict_layers=0))
    longer = model.on_positions(replace(model.config, max_position_embeddings=4096))
    assert longer.embed.is_meta and len(longer.rope_table(longer.embed)) == 4096
    nothing = torch.zeros(5, 0, 1, dtype=torch.int64, device="meta")
    assert routes_differ([], nothing).is_meta, "a dense model has no routers"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_run_on_gpus_is_not_repeated_without_one():
    with pytest.raises(ValueError, match=r"mesh\.device='cuda', and this machine has no GPU"):
        next(replay(example_run(), override(S, {"mesh.device": "cuda"}), 1))
