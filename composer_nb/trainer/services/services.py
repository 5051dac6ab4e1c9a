"""The services of asynchronous RL that hold a model: inference and evaluation, with what they share with the trainer
(`trainer_ranks.py`). They are plain classes, run as Ray actors.

They share only the version store. The trainer publishes every optimizer step there, in the background. An engine fetches a
version while it decodes, and swaps it in between two steps. It hashes the loaded weights and reports the hash.
"""

import copy
import socket
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from composer_nb.harness.agent.chat import ChatRenderer
from composer_nb.harness.agent.hints import hints_of
from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import run_eval
from composer_nb.harness.environment import Sandboxes, make_agent, trained_in
from composer_nb.harness.sandbox.reap import FOLDER
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import deal, load_rows
from composer_nb.trainer.learning.learner import Learner, without_gradient
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks, set_up_process
from composer_nb.trainer.learning.supervised import stream_of
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Kernels, Model
from composer_nb.trainer.models.variants import ENGINES, variant
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Hinter, tuning_scores
from composer_nb.trainer.services.inference import Inference, Updates
from composer_nb.trainer.services.run_copy import local_run
from composer_nb.trainer.settings import Settings


class EngineService(Inference):
    """The inference service of an RL run, for any number of environment workers."""

    def __init__(self, run: Path, settings: Settings, version: int, seed: int, name: str) -> None:
        run = local_run(run, settings.services.store)
        set_up_process(settings.seed, settings.matmul)
        updates = Updates(
            store_url(run, settings),
            name,
            read_config(run / "weights" / "start" / "config.json").model,
            kernels=settings.kernels,
            numerics=settings.engine.numerics,
            device=settings.mesh.device,
        )
        model = updates.first(version)  # which may still be on its way if this engine replaces a dead one
        agent = make_agent(settings.env, load_tokenizer(run / "data", needed=()), settings.limits)
        engine = make_engine(model, settings, agent.renderer.stop, seed=seed, version=version)
        super().__init__(engine, updates, settings.services.lockstep)
        self.__enter__()
        self.between(partial(torch.set_num_threads, 1))
        self._front = self._open(run.name, settings, agent) if settings.services.serve else None

    def _open(self, name: str, s: Settings, agent: Agent) -> Any:
        """Serve users, too. A request without tools gets the tools of training."""
        from composer_nb.production.conversations import Conversations
        from composer_nb.production.serve import ChatServer

        def form(tokenizer: Tokenizer, tools: Any = None) -> ChatRenderer:
            return agent.renderer if tools is None else agent.renderer.offering(tools)

        answer = Conversations(self, agent.renderer.tokenizer, form, s.limits.tokens)
        training = trained_in(s.env, s.limits)
        server = ChatServer(answer, s.services.serve, name, shared=True, version=lambda: self.version, trained=training)
        return server.__enter__()

    def host(self) -> str:
        """Return the name of this host."""
        return socket.gethostname()

    def first_hash(self) -> str:
        """Return the hash of the weights that it began with."""
        assert self.updates is not None
        return self.updates.first_hash

    def stop(self) -> None:
        if self._front is not None:
            self._front.__exit__(None, None, None)
        super().stop()


def make_learner(
    start: Path, s: Settings, sharpness: float = 1.0, checkpoint: tuple[int, dict[str, Tensor], float] | None = None
) -> tuple[Learner, int, float]:
    """Return a learner, the number of its steps and their seconds, from a checkpoint or from the weights in `start`, which were
    calibrated by `sharpness`."""
    model = load_pretrained(start).to(s.mesh.device)
    model.recompute, model.kernels = s.rl.recompute, s.kernels
    if s.rl.uncalibrated:
        with torch.no_grad():
            model.final_norm.div_(sharpness)
    if s.rl.frozen_layers:
        for frozen in (model.embed, *(p for layer in model.layers[: s.rl.frozen_layers] for p in layer.parameters())):
            frozen.requires_grad_(False)
    reference = copy.deepcopy(model) if s.loss.beta or s.loss.feedback else None
    optimizer = FlatOptimizer(model, s.optimizer, published=torch.bfloat16)
    learner = Learner(model, optimizer, s.loss, reference, s.replay)
    if checkpoint is None:
        return learner, 0, 0.0
    step, state, seconds = checkpoint
    optimizer.load(state)
    return learner, step, seconds


def hinter_of(run: RunDir, s: Settings) -> Hinter | None:
    """Return a function that writes hints for failed turns; None if `loss.feedback` is 0."""
    if not s.loss.feedback:
        return None
    agent = make_agent(s.env, load_tokenizer(run.path / "data", needed=()), s.limits)
    return partial(hints_of, renderer=agent.renderer, tools=agent.tools)


def rehearsal_of(run: RunDir, s: Settings) -> Callable[[int], list[Stream]]:
    """Return a function from a step to the demonstrations that RL rehearses in it, with the advantage `rl.rehearsal`; none if
    that or `sft.steps` is 0."""
    if not (s.rl.rehearsal and s.sft.steps):
        return lambda step: []
    rows = [row for path in sorted((run.path / "data").glob("mistaken-*.npz")) for row in load_rows(path)]
    dealt, batches = deal(rows, s.sft.tokens, Random(f"rehearsal {s.seed}")), list[list[int]]()

    def batch(step: int) -> list[Stream]:
        batches.extend(islice(dealt, max(0, step + 1 - len(batches))))
        return [stream_of(rows[number], min_weight=1.0, scale=s.rl.rehearsal) for number in batches[step]]

    return batch


def learn_batch(
    learner: Learner,
    streams: Sequence[Stream],
    ranks: Ranks,
    s: Settings,
    step: int,
    lr: float,
    rehearsed: Sequence[Stream] = (),
    after: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Learn from the batch of a step, and from what it rehearses, with the same result in every process. Call `after` after each
    optimizer step."""
    rl = s.rl
    if s.loss.centre_scores:
        learner.sampler = variant(learner.model, ENGINES[s.engine.numerics])
    if streams and s.loss.clip_cov:
        streams = without_gradient(streams, s.loss.clip_cov)
    return learner.learn(
        streams,
        ranks,
        Random(f"minibatches {s.rl_seed} {step}"),
        minibatches=rl.minibatches,
        denominator=rl.denominator(s.loss),
        lr=lr,
        clip=rl.clip,
        microbatch_tokens=rl.microbatch_tokens,
        rehearsed=rehearsed,
        after=after,
    )


def make_engine(
    model: Model, s: Settings, stop: frozenset[int], *, seed: int, temperature: float = 1.0, version: int = 0
) -> Engine:
    """Return an engine with the sizes and transitions of the settings."""
    size: Any = {"slots": s.slots, "max_length": s.limits.tokens, "step_tokens": s.engine.step_tokens}
    size |= {"reset_cache": s.engine.reset_cache, "transition": s.engine.transition}
    return Engine(model, stop=stop, temperature=temperature, seed=seed, version=version, **size)


class EvaluationService:
    """Scores a published version on the run's tuning tasks, with its own engine and sandboxes."""

    def __init__(self, run: Path, settings: Settings) -> None:
        self._run, self._settings = local_run(run, settings.services.store), settings
        set_up_process(settings.seed, settings.matmul)

    def look(self, version: int) -> dict[str, float]:
        """Return the scores on the tuning tasks, `eval.samples` attempts at each."""
        s = self._settings
        config = read_config(self._run / "weights" / "start" / "config.json").model
        kernels = Kernels(recipe=s.kernels.recipe) if s.mesh.gpus else s.kernels  # a CPU cannot take Triton
        model = Updates(store_url(self._run, s), "evaluation", config, kernels=kernels).first(version)
        tokenizer = load_tokenizer(self._run / "data", needed=())
        tasks = load_tasks(self._run / "data" / "tune.jsonl")
        with Sandboxes(s.env, self._run.name, self._run / FOLDER) as sandboxes:
            agent = make_agent(s.env, tokenizer, s.limits, sandboxes)
            engine = make_engine(model, s, agent.renderer.stop, seed=s.seed + 17, version=version, temperature=1.0)
            return tuning_scores(list(run_eval(engine, agent, tasks, sandboxes, s.eval.samples)))


def store_url(run: Path, settings: Settings) -> str:
    """Return the URL of a run's weight versions: its name under `services.store`, or by default the run directory."""
    store = settings.services.store.rstrip("/")
    return f"{store}/{run.name}" if store else str(run / "weights" / "versions")
