"""The services of asynchronous RL that hold a model: inference, training, evaluation. They are plain classes, run as Ray actors.

They share only the version store. The trainer publishes every optimizer step there, in the background. An engine fetches a
version while it decodes, and swaps it in between two steps. It hashes the loaded weights and reports the hash.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from composer_nb.harness.agent.chat import ChatRenderer
from composer_nb.harness.agent.hints import hints_of
from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import run_eval
from composer_nb.harness.environment import Sandboxes, carry, make_agent, trained_in
from composer_nb.harness.sandbox.reap import FOLDER
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks, set_up_process
from composer_nb.trainer.models.checkpoint import (
    empty_model,
    from_hugging_face,
    load_pretrained,
    published,
    save_pretrained,
    side_files,
)
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Kernels, Model
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Hinter
from composer_nb.trainer.services.actors import require_seen
from composer_nb.trainer.services.inference import Inference, RunningVersion, Updates, fetch
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.manifest import state_hash
from composer_nb.trainer.versions.publisher import BackgroundPublisher, Publisher
from composer_nb.trainer.versions.receiver import Receiver


class EngineService(Inference):
    """The inference service of an RL run, for any number of environment workers."""

    def __init__(self, run: Path, settings: Settings, version: int, seed: int, name: str) -> None:
        require_seen(run)
        set_up_process(settings.seed, settings.matmul)
        updates = Updates(
            store_url(run, settings),
            name,
            load_pretrained(run / "weights" / "start").config,
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

    def stop(self) -> None:
        if self._front is not None:
            self._front.__exit__(None, None, None)
        super().stop()


def make_learner(run: RunDir, s: Settings, from_start: bool = False) -> tuple[Learner, int, float]:
    """Return the learner of a run, the number of its steps and their seconds, from the newest checkpoint or from the start."""
    model = load_pretrained(run.path / "weights" / "start").to(s.mesh.device)
    model.recompute, model.kernels = s.rl.recompute, s.kernels
    reference = copy.deepcopy(model) if s.loss.beta or s.loss.feedback else None
    optimizer = FlatOptimizer(model, s.optimizer, published=torch.bfloat16)
    learner, checkpoint = Learner(model, optimizer, s.loss, reference, s.replay), run.checkpoint("rl")
    if from_start or checkpoint is None:
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


def learn_batch(
    learner: Learner,
    streams: Sequence[Stream],
    ranks: Ranks,
    s: Settings,
    step: int,
    lr: float,
    after: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Learn from the batch of a step, with the same result in every process. Call `after` after each optimizer step."""
    rl = s.rl
    return learner.learn(
        streams,
        ranks,
        Random(f"minibatches {s.rl_seed} {step}"),
        minibatches=rl.minibatches,
        denominator=rl.denominator(s.loss),
        lr=lr,
        clip=rl.clip,
        budget=rl.microbatch_tokens,
        after=after,
    )


def make_engine(
    model: Model, s: Settings, stop: frozenset[int], *, seed: int, temperature: float = 1.0, version: int = 0
) -> Engine:
    """Return an engine with the sizes in the settings."""
    size = {"slots": s.slots, "max_length": s.limits.tokens, "step_tokens": s.engine.step_tokens}
    return Engine(model, stop=stop, temperature=temperature, seed=seed, version=version, **size)


class TrainerService:
    """The service of the learner, which turns batches of streams into versions. It has no notion of tasks, rewards or groups. It
    handles one call at a time: calls during a batch wait for its end."""

    def __init__(self, run: Path, settings: Settings, from_start: bool = False) -> None:
        """Load the newest checkpoint of `run`, or its start, and publish these weights."""
        require_seen(run)
        set_up_process(settings.seed, settings.matmul)
        self._run, self._settings = RunDir(run), settings
        self._learner, self.step, _ = make_learner(self._run, settings, from_start)
        model = self._learner.model
        self._files = side_files(model)
        self.version = self.step * settings.rl.minibatches
        self._newest = published(model)
        # The version before the last batch with a signal, and its weights.
        self._before = (self.version, self._newest)
        self._ranks = Ranks()
        publisher = Publisher(store_url(run, settings), owner="trainer", full_every=settings.services.full_every)
        self._publisher, self._background = publisher, BackgroundPublisher(publisher)
        publisher.publish(self.version, self._newest, self._files)

    def at(self) -> int:
        """Return the number of batches learned."""
        return self.step

    def learn(
        self, step: int, lr: float, streams: Sequence[Stream], running: Sequence[RunningVersion], saved: int = 0
    ) -> dict[str, Any]:
        """Learn from a batch in optimizer steps that are published one by one. Return metrics with the final version and its
        hash. `running` are the engines' reports since the last call. Versions since step `saved` stay in the store, because a
        trainer that dies returns there.

        Raises ValueError for a batch out of order, or the error of publishing an earlier version.
        """
        if step != self.step:
            raise ValueError(f"the trainer stands at step {self.step} and was given the batch of step {step}")
        for report in running:
            self._publisher.acknowledge(report.version, report.hash)
        every, minibatches = self._settings.services.full_every, self._settings.rl.minibatches
        if step % every == 0:
            self._background.prune(2 * every, since=saved * minibatches)
        start = time.perf_counter()
        if streams:
            self._before = (self.version, self._newest)
        metrics = learn_batch(self._learner, streams, self._ranks, self._settings, step, lr, self._publish)
        self.step += 1
        while self.version < self.step * minibatches:  # a batch has its fixed number of versions, even without a signal
            self._publish()
        train_s = time.perf_counter() - start
        return {**metrics, "version": self.version, "hash": self._hash(), "train_s": train_s}

    def _publish(self) -> None:
        self.version += 1
        self._hand_over()

    def _hand_over(self) -> None:
        """Publish the current weights in the background."""
        self._newest = published(self._learner.model)
        self._background.publish(self.version, self._newest, self._files)

    def _hash(self) -> str:
        return state_hash(self._newest)

    def tensors(self) -> tuple[int, dict[str, Tensor]]:
        """Return the newest version, for an engine that cannot use the store's."""
        return self.version, self._newest

    def state(self) -> tuple[int, dict[str, Any] | str]:
        """Return the number of steps, and a copy of the state that a resumed trainer needs, or the name of the folder where ranks
        have written it."""
        return self.step, {name: tensor.clone() for name, tensor in self._learner.optimizer.state().items()}

    def close(self) -> None:
        """Stop publishing once all versions are published."""
        self._background.close()

    def finish(self, versions: Mapping[str, int]) -> None:
        """Stop publishing, and save each of these versions under its name."""
        self.close()
        if not self._ranks.first:
            return
        for name, version in versions.items():
            model, path = empty_model(self._learner.model.config), self._run.path / "weights" / name
            from_hugging_face(model, self._weights(version))
            model.companions = self._learner.model.companions
            save_pretrained(model, path, dtype=torch.bfloat16)
            carry(path, self._settings.env, self._settings.limits)

    def _weights(self, version: int) -> Mapping[str, Tensor]:
        """Return the weights of a version from memory, or from the store if another process made them."""
        weights = dict([self._before, (self.version, self._newest)])
        return weights[version] if version in weights else self._stored(version)

    def _stored(self, version: int) -> Mapping[str, Tensor]:
        return Receiver(store_url(self._run.path, self._settings), name="trainer").fetch(version).tensors


class EvaluationService:
    """Scores a published version on the run's tuning tasks, with its own engine and sandboxes."""

    def __init__(self, run: Path, settings: Settings) -> None:
        require_seen(run)
        set_up_process(settings.seed, settings.matmul)
        self._run, self._settings = run, settings

    def look(self, version: int) -> dict[str, float]:
        """Return pass@1 and the greedy score on the tuning tasks."""
        s = self._settings
        receiver = Receiver(store_url(self._run, s), name="evaluation")
        config = load_pretrained(self._run / "weights" / "start").config
        model = empty_model(config)
        model.kernels = Kernels(recipe=s.kernels.recipe) if s.mesh.gpus else s.kernels  # a CPU cannot take Triton
        from_hugging_face(model, fetch(receiver, version).tensors)
        tokenizer = load_tokenizer(self._run / "data", needed=())
        tasks = load_tasks(self._run / "data" / "tune.jsonl")
        scores = {}
        with Sandboxes(s.env.backend, self._run.name, self._run / FOLDER) as sandboxes:
            agent = make_agent(s.env, tokenizer, s.limits, sandboxes)
            make = partial(make_engine, model, s, agent.renderer.stop, seed=s.seed + 17, version=version)
            for name, temperature in (("tune_pass_at_1", 1.0), ("tune_greedy", 0.0)):
                engine = make(temperature=temperature)
                attempts = list(run_eval(engine, agent, tasks, sandboxes, 1))
                scores[name] = float(np.mean([attempt.grade.passed for attempt in attempts]))
        return scores


def store_url(run: Path, settings: Settings) -> str:
    """Return the URL of a run's weight versions: its name under `services.store`, or by default the run directory."""
    store = settings.services.store.rstrip("/")
    return f"{store}/{run.name}" if store else str(run / "weights" / "versions")
