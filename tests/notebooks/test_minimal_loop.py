"""The minimal loop says the same as the package: same advantages, same loss, same gradients, same updates.

The package computes what rollouts of a prompt have in common once, the page computes it for each of them. So sums of floats
differ in their order, and nothing else: gradients agree to 1e-5, and less than one weight in a hundred differs.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from composer_nb.harness.policy import Request
from composer_nb.jobs.check import parameters_of
from composer_nb.trainer import settings as config
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning import loss as package
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer, trapezoid
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "00_minimal_loop.ipynb"
TINY: dict[str, Any] = {"steps": 6, "prompts": 8, "group": 8, "warmup": 2}
SMOKE: dict[str, Any] = {"steps": 40, "prompts": 16, "group": 8}
ONE_CHUNK = 10**9
"""A microbatch budget that no minibatch exceeds: gradients are then one sum, in one order, on both sides."""


def code_cells() -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]


def solutions(cell: nbformat.NotebookNode) -> list[str]:
    return re.findall(r"```python\n(.*?)```", cell.source, re.S)


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


@pytest.fixture
def loop() -> Iterator[ModuleType]:
    """Return a module of the notebook's parameters, at tiny size, and its functions, including those of the solutions."""
    module = ModuleType("minimal_loop")
    sys.modules[module.__name__] = module
    cells = nbformat.read(NOTEBOOK, 4).cells
    for cell, below in zip(cells, cells[1:], strict=False):
        if {"parameters", "loop", "exercise"} & set(tags(cell)):
            source = solutions(below)[0] if "exercise" in tags(cell) else cell.source
            exec(compile(source, f"{NOTEBOOK.name}:{cell.id}", "exec"), vars(module))
        if "parameters" in tags(cell):
            vars(module).update(TINY)
    yield module
    del sys.modules[module.__name__]


def settings(loop: ModuleType) -> LossSettings:
    return LossSettings(clip_low=loop.clip_low, clip_high=loop.clip_high)


def to_stream(rollout: Any, model: Model) -> Stream:
    """Return a rollout of the loop as the package's trainer gets it."""
    acted = np.arange(len(rollout.token_ids)) >= rollout.prompt_length
    logprob = np.zeros(len(acted), np.float32)
    logprob[acted] = rollout.logprobs
    c = model.config
    return Stream(
        token_ids=np.array(rollout.token_ids, np.int32),
        acted=acted,
        logprob=logprob,
        advantage=np.where(acted, rollout.advantage, 0.0).astype(np.float32),
        routes=np.zeros((len(acted), c.num_hidden_layers, c.num_experts_per_tok), np.uint8),
    )


class PackageLearner:
    """The package's trainer, with the interface of the loop's `learn`."""

    def __init__(self, loop: ModuleType, model: Model) -> None:
        self.loop = loop
        optimizer = FlatOptimizer(model, published=torch.bfloat16)
        self.learner = Learner(model, optimizer, settings(loop))
        self.norms: list[float] = []

    def learn(self, rollouts: list[Any], rng: Random, lr: float) -> None:
        t = self.loop
        metrics = self.learner.learn(
            [to_stream(r, self.learner.model) for r in rollouts],
            Ranks(),
            rng,
            minibatches=t.minibatches,
            denominator=float(t.prompts * t.group * t.tokens_per_rollout),
            lr=lr,
            clip=t.clip,
            microbatch_tokens=ONE_CHUNK,
        )
        self.norms.append(metrics["grad_norm"])

    @property
    def published_W(self) -> Tensor:
        return parameters_to_vector(self.learner.model.parameters()).detach()


def two_models(loop: ModuleType, seed: int = 0) -> tuple[Model, Model]:
    """Return two models with the same random weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(seed)
        models.append(Model(loop.CONFIG))
    return models[0], models[1]


@pytest.mark.parametrize("clip", [100.0, 0.02])
def test_the_whole_loop_is_the_package_s(loop: ModuleType, clip: float):
    """The package's parts, called as in its own loop, draw the same rollouts as `run` at every step, and end with its
    weights, also where gradients are clipped."""
    loop.clip = clip
    policy, history = loop.run(loop.steps)
    assert len(history) == loop.steps
    torch.manual_seed(loop.seed)
    rng, dice = Random(loop.seed), torch.Generator().manual_seed(loop.seed)
    theirs = PackageLearner(loop, Model(loop.CONFIG))
    share = loop.warmup / loop.steps
    for step in range(loop.steps):
        tasks = [loop.draw_prompt(rng) for _ in range(loop.prompts)]
        rollouts_P_G = loop.sample(theirs.learner.model, tasks, loop.group, dice)
        for rollouts_G in rollouts_P_G:
            rewards = [loop.reward(r.token_ids[: r.prompt_length], r.token_ids[r.prompt_length :]) for r in rollouts_G]
            shares = package.advantages(torch.tensor(rewards)).tolist()
            for r, advantage in zip(rollouts_G, shares, strict=True):
                r.advantage = advantage
        assert loop.measure(rollouts_P_G) == history[step]
        live = [r for rollouts_G in rollouts_P_G for r in rollouts_G if abs(r.advantage) > 1e-6]
        factor = trapezoid(step, loop.steps, share, share, 0.05)
        assert loop.lr_at(step, loop.steps) == pytest.approx(loop.lr * factor, rel=1e-12)
        theirs.learn(live, rng, loop.lr_at(step, loop.steps))
    apart_W = (parameters_to_vector(policy.parameters()) - theirs.published_W).detach().abs()
    # Sums in another order round a few weights otherwise, more of them on some processors: .02 on an AMD EPYC.
    assert (apart_W > 0).float().mean() < 0.1 and apart_W.max() < loop.lr
    assert all((norm > clip) == (clip < 1) for norm in theirs.norms), "clipping was not put to the test on both sides"


def test_full_forwards_sample_from_what_the_engine_samples_from(loop: ModuleType):
    """The engine's log-probabilities of its own tokens are those that the loop finds for them, with its cache or without."""
    model, _ = two_models(loop)
    loop.publish(model, parameters_to_vector(model.parameters()))
    prompts = [loop.draw_prompt(Random(n)) for n in range(24)]
    engine = Engine(model, stop=frozenset(), slots=len(prompts), max_length=16, seed=3)
    requests = [Request(rollout=n, token_ids=p, max_tokens=len(p) - 1) for n, p in enumerate(prompts)]
    outputs = engine.generate(requests)
    rollouts = [
        loop.Rollout([*p, *d.token_ids], len(p), list(d.logprobs)) for p, d in zip(prompts, outputs, strict=True)
    ]
    sampled_N = torch.tensor([logprob for r in rollouts for logprob in r.logprobs])
    assert torch.allclose(loop.score(model, rollouts).detach(), sampled_N, atol=1e-5)


def test_sampled_tokens_follow_the_distribution(loop: ModuleType):
    """4,000 first tokens after one prompt: each as often as its probability says, within five standard errors."""
    model, _ = two_models(loop)
    prompt = [3, 0, 2, loop.ASK]
    [rollouts] = loop.sample(model, [prompt], 4000, torch.Generator().manual_seed(0))
    counts = np.bincount([r.token_ids[4] for r in rollouts], minlength=7) / 4000
    with torch.no_grad():
        probability = model(torch.tensor([prompt]))[0][0, -1].softmax(-1).double().numpy()
    assert (np.abs(counts - probability) <= 5 * np.sqrt(probability * (1 - probability) / 4000)).all()


def test_reward_and_learning_rate(loop: ModuleType):
    """The share of right positions; also a run shorter than its warm-up goes uphill."""
    for steps in (1, loop.warmup, loop.warmup + 1, 20):
        assert all(0 < loop.lr_at(step, steps) <= loop.lr for step in range(steps))
    assert loop.reward([5, 0, 5, 1, loop.ASK], [0, 1, 5, 5]) == 1.0
    assert loop.reward([5, 0, 5, 1, loop.ASK], [0, 1, 1, loop.ASK]) == 0.5
    assert loop.reward([1, 0, loop.ASK], [1, 0]) == 0.0
    with pytest.raises(ValueError):
        loop.reward([1, 0, loop.ASK], [0])


def test_it_is_one_page_that_stands_alone():
    """Torch, the standard library and the model; matplotlib for the one figure."""
    imported, lines = set[str](), 0
    for cell in code_cells():
        lines += len([line for line in cell.source.splitlines() if line.strip()])
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 20, node.name
                assert {"loop", "exercise"} & set(tags(cell)), f"{node.name} is not tagged, so nothing holds it equal"
    ours = {name for name in imported if name.startswith("composer_nb")}
    assert ours == {"composer_nb.trainer.models.transformer", "composer_nb.labs.exercises.check"}
    foreign = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert foreign == {"composer_nb", "torch", "matplotlib"} and 150 < lines <= 300


def test_its_settings_are_the_package_s():
    names = config.to_flat(config.Settings())
    for name in parameters_of(NOTEBOOK):
        assert {name, f"rl.{name}", f"loss.{name}"} & names.keys(), name


def test_its_solutions_are_right(loop: ModuleType):
    """The solutions are text; here they run after the cells that they follow."""
    exercises = next(cell for cell in nbformat.read(NOTEBOOK, 4).cells if "<summary>Solutions" in cell.source)
    assert len(solutions(exercises)) == 2
    vars(loop).update(SMOKE)
    mean = partial(lambda part, window: sum(h["reward"] for h in part) / window, window=4)
    loop.window, loop.end_reward = 4, mean(loop.run(loop.steps)[1][-4:])
    for solution in solutions(exercises):
        exec(compile(solution, "solution", "exec"), vars(loop))
