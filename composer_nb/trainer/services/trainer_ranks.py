"""The trainer service: a group of ranks. A single rank has the whole model; several share it, do the same work in the same order,
and live and die together."""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_nb.harness.environment import carry
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks, set_up_process
from composer_nb.trainer.models.checkpoint import empty_model, from_hugging_face, published, save_pretrained, side_files
from composer_nb.trainer.models.companions import read_companions
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.parallel.team import PATIENCE, interface_of, meeting_place
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services import shards
from composer_nb.trainer.services.actors import ActorDied, RayActors
from composer_nb.trainer.services.inference import RunningVersion
from composer_nb.trainer.services.run_copy import local_run
from composer_nb.trainer.services.services import learn_batch, make_learner, store_url
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.manifest import PayloadFile, Weights, state_hash
from composer_nb.trainer.versions.publisher import BackgroundPublisher, Publisher
from composer_nb.trainer.versions.receiver import Receiver

if TYPE_CHECKING:
    from composer_nb.trainer.services.meshed import MeshShare

# Seconds to wait for the report of a rank's death: when one dies, the others fail too, and may report first.
HEARD_S = 20.0
LOOPBACK = "127.0.0.1"


class TrainerRank:
    """A rank of the learner, which turns batches of streams into versions. It has no notion of tasks, rewards or groups. It is
    uninitialized until `begin` is called."""

    def __init__(self, rank: int, run: Path, settings: Settings) -> None:
        self._rank, self._run, self._settings = rank, local_run(run, settings.services.store, weights=True), settings
        self._meeting: dist.Store | None = None
        # This rank's part of the model, if several share it.
        self._share: MeshShare | None = None

    def host(self) -> str:
        """Return the name of this host. Raises the error of publishing an earlier version."""
        self._background.check()
        return socket.gethostname()

    def meet(self) -> str:
        """Return the "host:port" at which the other ranks find this one."""
        host = self._address()
        self._meeting = store = meeting_place(host)
        return f"{host}:{store.port}"

    def _address(self) -> str:
        """Return the address of this machine for the other ranks."""
        cluster = self._settings.services.address
        if not cluster or cluster.startswith(LOOPBACK):
            return LOOPBACK
        import ray

        return str(ray.util.get_node_ip_address())

    def begin(self, address: str = "", sharpness: float = 1.0, checkpoint: Any = None) -> None:
        """Load the checkpoint or the start, and publish these weights. `address`: where ranks that share a model meet; their
        checkpoint is (steps, name of its folder, its files in the store). The others: see `make_learner`."""
        s = self._settings
        set_up_process(s.seed, s.matmul)
        if not address:
            self._ranks = Ranks()
            self._learner, self.step, _ = make_learner(self._run / "weights" / "start", s, sharpness, checkpoint)
        else:
            from composer_nb.trainer.services.meshed import MeshShare  # with it PyTorch imports for seconds

            self._share = share = MeshShare(self._rank, self._run, s, self._rendezvous(address), checkpoint)
            self._ranks, self._learner, self.step = share.team, share.learner, share.step
        self._files = side_files(self._learner.model)
        self.version = self.step * s.rl.minibatches
        self._newest = self._weights()
        # The version before the last batch with a signal, and its weights.
        self._before = (self.version, self._newest)
        url, full_every = store_url(self._run, s), s.services.full_every
        group = self._share.publishers if self._share else None
        self._publisher = Publisher(url, owner="trainer", full_every=full_every, group=group)
        self._background = BackgroundPublisher(self._publisher)
        self._publisher.publish(self.version, self._newest, self._files)

    def _rendezvous(self, address: str) -> dist.Store:
        """Return the meeting place of the ranks at `address`."""
        host, _, port = address.rpartition(":")
        # By default gloo takes the address that the host's name resolves to, which may be the loopback.
        if interface := interface_of(self._address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        return self._meeting or dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE)

    def _weights(self) -> Mapping[str, Tensor]:
        return published(self._learner.model) if self._share is None else self._share.weights()

    def at(self) -> int:
        """Return the number of batches learned."""
        return self.step

    def learn(
        self,
        step: int,
        lr: float,
        streams: Sequence[Stream],
        running: Sequence[RunningVersion],
        saved: int = 0,
        rehearsed: Sequence[Stream] = (),
    ) -> dict[str, Any]:
        """Learn from a batch, and from what it rehearses, in optimizer steps that are published one by one. Return metrics with
        the final version and its hash. `running` are the engines' reports since the last call. Versions since step `saved` stay
        in the store, because a trainer that dies returns there.

        Raises ValueError for a batch out of order, or the error of publishing an earlier version.
        """
        if step != self.step:
            raise ValueError(f"the trainer stands at step {self.step} and was given the batch of step {step}")
        for report in running:
            self._publisher.acknowledge(report.version, report.hash)
        full_every, minibatches = self._settings.services.full_every, self._settings.rl.minibatches
        if step % full_every == 0:
            self._background.prune(2 * full_every, since=saved * minibatches)
        start = time.perf_counter()
        if streams:
            self._before = (self.version, self._newest)
        metrics = learn_batch(self._learner, streams, self._ranks, self._settings, step, lr, rehearsed, self._publish)
        self.step += 1
        while self.version < self.step * minibatches:  # a batch has its fixed number of versions, even without a signal
            self._publish()
        train_s = time.perf_counter() - start
        # A single rank does not wait here until earlier versions are written.
        hash = self._hash.result() if self._share else state_hash(self._newest)
        return {**metrics, "version": self.version, "hash": hash, "train_s": train_s}

    def _publish(self) -> None:
        """Publish the current weights in the background."""
        self.version += 1
        self._newest = self._weights()
        self._hash = self._background.publish(self.version, self._newest, self._files)

    def tensors(self) -> tuple[int, Mapping[str, Tensor]]:
        """Return the newest version, or this rank's part of it, for an engine that cannot use the store's."""
        return self.version, self._newest

    def state(self) -> tuple[int, dict[str, Any] | str]:
        """Return the number of steps, and a copy of the state that a resumed trainer needs. If ranks share it, begin to write it,
        and return the name of its folder, which is complete once `saved` has returned on all ranks."""
        if self._share is not None:
            return self.step, self._share.begin_saving(self.step)
        return self.step, {name: tensor.clone() for name, tensor in self._learner.optimizer.state().items()}

    def saved(self) -> dict[str, PayloadFile]:
        """Wait until the checkpoint is written, while the next batch is learned. Return this rank's files of it in the store."""
        return self._share.saved() if self._share is not None else {}

    def stop(self) -> None:
        """Publish nothing more, as the end of the process does."""
        if hasattr(self, "_background"):  # it has begun
            self._background.stop()

    def close(self) -> None:
        """Stop publishing once all versions are published."""
        self._background.close()

    def finish(self) -> dict[int, Weights]:
        """Stop publishing once all versions are published. Return the weights of the newest version and of that before the last
        batch with a signal, as far as this process made them; none if it has only a part."""
        self.close()
        return {} if self._share else dict([self._before, (self.version, self._newest)])


def save_versions(run: Path, s: Settings, versions: Mapping[str, int], weights: Mapping[int, Weights]) -> None:
    """Save each of these versions under its name in the run directory, from `weights` or the store. Raises WeightFault for one
    that is damaged there."""
    start, receiver = run / "weights" / "start", Receiver(store_url(run, s), name="trainer")
    for name, version in versions.items():
        model, path = empty_model(read_config(start / "config.json").model), run / "weights" / name
        from_hugging_face(model, weights.get(version) or receiver.fetch(version).tensors)
        model.companions = read_companions(start)
        save_pretrained(model, path, dtype=torch.bfloat16)
        carry(path, s.env, s.limits)


class TrainerGroup:
    """A `RemoteService` whose calls are executed by all ranks, one after another in the order of the calls."""

    def __init__(self, actors: RayActors, run: Path, settings: Settings) -> None:
        # With a mesh, `saved` runs beside other calls.
        args: dict[str, Any] = {"threads": 3 if settings.meshed else 1, "gpus": settings.mesh.gpus}
        self._members = actors.make_ranks(TrainerRank, settings.trainers, run, settings, name="trainer", **args)
        self._run, self._meshed = RunDir(run), settings.meshed
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="trainer", daemon=True).start()

    def call(self, method: str, *values: Any) -> Future[Any]:
        """Return the first rank's result once all ranks have returned. Raises ActorDied if a rank is gone. `state` returns once
        the checkpoint is written; `tensors` returns those of all ranks, and `host` a list."""
        reply: Future[Any] = Future()
        self._calls.put((method, values, reply))
        return reply

    def kill(self) -> None:
        """End all ranks at once."""
        for member in self._members:
            member.kill()
        self._calls.put(None)

    def _work(self) -> None:
        """Execute the calls on all ranks, one after another, until `kill`. If the ranks cannot start, every call raises that
        error."""
        start_error: Exception | None = None
        try:
            if self._meshed:
                pointer = self._run.pointer("rl")
                checkpoint = pointer and (pointer[0], pointer[1].name, shards.read(pointer[1]))
                self._everywhere("begin", self._members[0].call("meet").result(), 1.0, checkpoint)
            else:
                self._everywhere("begin", "", self._run.sharpness, self._run.checkpoint("rl"))
        except Exception as error:  # all calls raise it
            start_error = error
        while (call := self._calls.get()) is not None:
            method, values, reply = call
            try:
                if start_error is not None:
                    raise start_error
                first, *others = self._everywhere(method, *values)
            except Exception as error:
                reply.set_exception(error)
                continue
            if method == "state" and self._meshed:  # the next batch is learned meanwhile
                threading.Thread(target=self._save, args=(first, reply), daemon=True).start()
            elif method == "tensors":
                version, tensors = first
                reply.set_result((version, {**tensors, **{n: t for _, part in others for n, t in part.items()}}))
            else:
                reply.set_result([first, *others] if method == "host" else first)

    def _save(self, state: tuple[int, str], reply: Future[Any]) -> None:
        try:
            if files := {name: file for part in self._everywhere("saved") for name, file in part.items()}:
                shards.record(self._run, state[1], files)
            reply.set_result(state)
        except Exception as error:
            reply.set_exception(error)

    def _everywhere(self, method: str, *values: Any) -> list[Any]:
        return together([member.call(method, *values) for member in self._members])


def together(replies: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all replies and return them. Raises as soon as a rank is known to be dead. Another failure may be the first sign
    of a death, so it is raised once all have ended or after `HEARD_S`."""
    waiting, failures = {*replies}, list[BaseException]()
    until: float | None = None
    while waiting:
        left = None if until is None else max(0.0, until - time.monotonic())
        ended, waiting = wait(waiting, left, FIRST_EXCEPTION)
        failures += [error for reply in ended if (error := reply.exception()) is not None]
        if died := [error for error in failures if isinstance(error, ActorDied)]:
            raise died[0]
        if until is not None and time.monotonic() >= until:
            break
        until = time.monotonic() + HEARD_S if until is None else until
    if failures:
        raise failures[0]
    return [reply.result() for reply in replies]
