"""The coordinator of asynchronous RL: carries out what the orchestrator commands, tells it what happened, writes it all down.

    python -m composer_nb.trainer.services.coordinator RUN

    environment workers ──outcomes──▶ coordinator ──streams──▶ trainer ──versions──▶ store ──▶ engines ◀──turns── environments
                        ◀─assignments─┘  │ run.db: rollouts, batches, versions, the orchestrator's state

Everything is decided by the orchestrator; everything that must survive is in `run.db` before it is acted on. So any process
may be killed at any time: a worker or an engine is made again and its rollouts are dispatched again, the trainer goes back to
its checkpoint and learns the logged batches again, and the coordinator itself resumes from `run.db`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from composer_nb.harness.sandbox.journal import FOLDER
from composer_nb.harness.sandbox.journal import Journal as ResourceJournal
from composer_nb.harness.store import unpack_attempt
from composer_nb.settings import Settings, from_dict, override
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.records.batches import batch_file, load_batch, save_batch
from composer_nb.trainer.records.rundir import RunDir, full_disk
from composer_nb.trainer.rl import (
    Scored,
    batch_metrics,
    ledger,
    score_groups,
    shuffle_rewards,
    step_point,
    to_stream,
    trains,
)
from composer_nb.trainer.schedule import (
    Alive,
    Cancel,
    Changed,
    Command,
    Dispatch,
    Drained,
    Event,
    Faulted,
    Finished,
    Joined,
    Left,
    Served,
    Stop,
    Tick,
    Train,
    Trained,
    TrainerLost,
)
from composer_nb.trainer.services import LOST
from composer_nb.trainer.services.actors import ActorDied, Actors, RayActors, Remote
from composer_nb.trainer.services.capacity import machines_of_cluster, require_room_for_rl
from composer_nb.trainer.services.environments import Assignment, EnvironmentService, Outcome, prompt_order
from composer_nb.trainer.services.head import resolve
from composer_nb.trainer.services.journal import Journal, change_live
from composer_nb.trainer.services.orchestrator import Orchestrator
from composer_nb.trainer.services.services import EngineService, EvaluationService, Running, TrainerService, store_url
from composer_nb.trainer.services.trainer_group import TrainerGroup
from composer_nb.trainer.versions.manifest import WeightFault
from composer_nb.trainer.versions.store import log

BEGINS_S = 240.0
"""Ray takes ten seconds to start, on a busy machine a minute."""
WORK_S = 0.25
"""An environment worker tells what has ended so often."""


class RunStopped(RuntimeError):
    """RL can not go on; the message says why and what to change."""


def prompt_seed(s: Settings) -> str:
    """What the order of the run's prompts depends on."""
    return f"{s.seed} {s.rl_seed}"


@dataclass(slots=True)
class _Pair:
    """An engine and the environment worker that samples from it; they live and die together."""

    name: str
    engine: Remote
    worker: Remote
    version: int
    """That the engine serves."""
    joined: bool = False
    updating: bool = False
    working: bool = False
    since: float = 0.0
    start: list[Assignment] = field(default_factory=list)
    cancel: list[tuple[int, int]] = field(default_factory=list)
    assigned: dict[tuple[int, int], set[int]] = field(default_factory=dict)


class Coordinator:
    """One RL stage as services."""

    def __init__(self, run: RunDir, settings: Settings, actors: Actors, say: Callable[[str], None]) -> None:
        self.run, self.settings, self.actors, self.say = run, settings, actors, say
        self.started_with = settings
        """Without what was changed since: what the trainer goes by, so that what it does again comes out the same."""
        self.journal = Journal(run)
        for name, value in self.journal.taken_up():
            self.settings = change_live(self.settings, name, value)
        self.tasks = prompt_order(run.path / "data" / "rl.jsonl", prompt_seed(settings))
        self.by_id = {task.id: task for task in self.tasks}
        self.pending: dict[Future[Any], tuple[str, Any]] = {}
        self.pairs: dict[str, _Pair] = {}
        self.made = 0
        self.stillborn = 0
        """Pairs in a row that died before they had joined."""
        self.ended = False
        self.running: list[Running] = []
        self.asked: dict[int, tuple[dict[str, Any], dict[str, int]]] = {}
        """Batches given to the trainer: metrics and ledger so far."""
        self.begin = self.last = time.perf_counter()
        self.before = 0.0
        self.saved = 0
        self.live = 0
        """The step that the last batch with a signal began at. Batches without one make versions that change nothing."""
        self.train_s = 0.0
        self.stopped_early = False
        self.notes: list[Callable[[], None]] = []
        """What is to be written down with the events that it belongs to."""
        self.board = SummaryWriter(str(run.path / "tensorboard"), flush_secs=10)
        self.trainer: Remote
        self.orchestrator: Orchestrator

    # The life of a stage

    @property
    def per_step(self) -> int:
        """Versions a batch."""
        return self.settings.rl.minibatches

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.begin

    def go(self) -> dict[str, Any]:
        """Runs to the end, and returns what the stage found. Raises RunStopped."""
        self._restore()
        self._make_trainer()
        for _ in range(self.settings.services.engines):
            self._make_pair()  # beside the trainer, whose version they wait for: all take long to start
        self.trainer.wait("at")
        self._handle([Served(at=self._now(), version=self.orchestrator.version)])
        while not self.ended:
            events: list[Event] = []
            if self.pending:
                for future in wait(self.pending, timeout=0.25, return_when=FIRST_COMPLETED).done:
                    if future in self.pending:  # else it was of a service whose death was heard of just now
                        events += self._heard(*self.pending.pop(future), future)
            self._handle([*events, *self._changed(), *self._time_is_up(), Tick(at=self._now())])
            self._end_hung()
            self._feed()
        return self._finish()

    def _restore(self) -> None:
        schedule = self.settings.schedule()
        found = self.run.pointer("rl")
        self.saved, _, self.before = found if found else (0, None, 0.0)
        self.live = max(0, self.run.last_live_step() - 1)
        snapshot = self.journal.snapshot()
        if snapshot is None:
            self.orchestrator = Orchestrator(schedule)
        else:
            redo = self.journal.batches(self.saved, snapshot["version"])
            self.orchestrator = Orchestrator.restore(schedule, snapshot, redo=redo, stored=self.journal.stored())
        with self.journal.transaction():
            self.journal.save(self.orchestrator.snapshot())

    def _make_trainer(self) -> None:
        run, s = self.run.path, self.started_with
        self.trainer = (
            TrainerGroup(self.actors, run, s) if s.meshed else self.actors.make(TrainerService, run, s, name="trainer")
        )

    def _make_pair(self) -> None:
        self.made += 1
        name, version = f"engine-{self.made}", self._serve()
        seed = self.settings.seed * 10_007 + self.settings.rl_seed
        engine = self.actors.make(
            EngineService, self.run.path, self.settings, version, seed, name, name=name, threads=4
        )
        s = self.settings
        worker = self.actors.make(
            EnvironmentService,
            *(self.run.path, s.limits, prompt_seed(s), s.rl.group, s.engine.slots, engine, name),
            name=f"environment-{self.made}",
        )
        pair = self.pairs[name] = _Pair(name, engine, worker, version)
        self._ask(pair.worker.call("work", [], [], 0.0), "join", pair)

    def _serve(self) -> int:
        """The version that engines should run: that of the last trained batch, which a new trainer has published again."""
        return self.orchestrator.version * self.per_step

    def _now(self) -> float:
        return time.monotonic()

    def _ask(self, future: Future[Any], kind: str, what: Any) -> None:
        self.pending[future] = (kind, what)

    # What happens

    def _heard(self, kind: str, what: Any, future: Future[Any]) -> list[Event]:
        if kind in ("work", "join", "update", "tensors") and self.pairs.get(what.name) is not what:
            return []  # of a pair that was given up
        try:
            result = future.result()
        except ActorDied as died:
            if kind == "look":
                self.say(f"evaluation: {died}")
                return []
            return self._trainer_died(died) if kind in ("learn", "state", "tensors") else self._pair_died(what, died)
        except WeightFault as fault:
            if kind != "update":
                raise
            self.say(f"{what.name} could not use a version ({fault}); it gets the weights themselves")
            self._ask(self.trainer.call("tensors"), "tensors", what)
            return []
        match kind:
            case "join":
                self.stillborn, what.joined = 0, True
                return [Joined(at=self._now(), worker=what.name, capacity=self.settings.engine.slots)]
            case "work":
                return self._worked(what, result)
            case "learn":
                return self._learnt(what, result)
            case "update":
                return self._updated(what, result)
            case "tensors":
                version, tensors = result
                self._ask(what.engine.call("update", version, tensors), "update", what)
            case "state":
                self._saved(what, *result)
            case "look":
                self._looked(what[0], what[1], result)
        return []

    def _worked(self, pair: _Pair, outcomes: Sequence[Outcome]) -> list[Event]:
        pair.working = False
        events: list[Event] = []
        for o in outcomes:
            places = pair.assigned.get((o.slot, o.attempt), set())
            places.discard(o.place)
            if not places:
                pair.assigned.pop((o.slot, o.attempt), None)
            name: dict[str, int] = {"slot": o.slot, "attempt": o.attempt, "place": o.place}
            if o.packed is None:
                events.append(Faulted(at=self._now(), **name, reason=o.reason, sampled=o.sampled))
                continue
            self.notes.append(partial(self.journal.keep, o))
            oldest = o.oldest_version // self.per_step
            events.append(Finished(at=self._now(), **name, oldest_version=oldest, tokens=o.tokens, sampled=o.sampled))
        return events + [Alive(at=self._now(), slot=slot, attempt=number) for slot, number in pair.assigned]

    def _pair_died(self, pair: _Pair, died: Exception) -> list[Event]:
        self.stillborn += not pair.joined
        if self.stillborn > self.settings.services.deaths:
            raise RunStopped(
                f"{died}; so did {self.stillborn - 1} before it, which is more than services.deaths allows"
            )
        self.say(f"{died}; made again")
        del self.pairs[pair.name]
        for remote in (pair.engine, pair.worker):
            remote.kill()
        self._make_pair()
        return [Left(at=self._now(), worker=pair.name), *self._served()]

    def _trainer_died(self, died: Exception) -> list[Event]:
        self.say(f"{died}; it goes back to step {self.saved}")
        self.trainer.kill()
        self.pending = {f: (kind, what) for f, (kind, what) in self.pending.items() if kind not in ("learn", "state")}
        self._make_trainer()
        self.trainer.wait("at")
        return [TrainerLost(at=self._now(), redo=self.journal.batches(self.saved, self.orchestrator.version))]

    def _learnt(self, step: int, found: dict[str, Any]) -> list[Event]:
        version, hash = found.pop("version"), found.pop("hash")
        self.notes.append(partial(self.journal.log_version, version, step, hash))
        self.train_s += found["train_s"]
        metrics, tokens = self.asked.pop(step)
        if step == self.orchestrator.version:
            self._note(step, metrics | found | {"version": version}, tokens)
        events: list[Event] = [Trained(at=self._now(), step=step)]
        rl = self.settings.rl
        last = step + 1 == rl.steps
        if (step + 1) % rl.checkpoint_every == 0 or last:
            self._ask(self.trainer.call("state"), "state", step + 1)
        if rl.evaluate_every and (step + 1) % rl.evaluate_every == 0 and not last and step == self.orchestrator.version:
            evaluator = self.actors.make(EvaluationService, self.run.path, self.settings, name=f"evaluation-{step + 1}")
            self._ask(evaluator.call("look", version), "look", (step + 1, evaluator))
        return events

    def _note(self, step: int, metrics: dict[str, Any], tokens: dict[str, int]) -> None:
        now = time.perf_counter()
        wall, self.last = now - self.last, now
        metrics["time"] = {"wall_s": wall, "train_s": metrics.pop("train_s")}
        self.notes.append(partial(self.journal.log_step, step + 1, metrics, tokens))
        self.run.log("rl", step + 1, metrics)
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.board.add_scalar(f"rl/{name}", value, step + 1)
        if (step + 1) % 5 == 0:
            self.say(
                f"rl {step + 1}/{self.settings.rl.steps}: solved {metrics['solved']:.3f}, {metrics['turns']:.1f} calls, "
                f"staleness {metrics['staleness']:.2f}, entropy {metrics['entropy']:.2f}, {self.seconds:.0f} s"
            )

    def _saved(self, wanted: int, step: int, state: dict[str, Any] | str) -> None:
        self.run.commit("rl", step, state, [], [], self.seconds)
        self.saved = step

    def _looked(self, step: int, evaluator: Remote, scores: dict[str, float]) -> None:
        evaluator.kill()
        [(text,)] = self.run.query("SELECT metrics FROM step WHERE stage = 'rl' AND step = ?", step)
        tokens = dict(self.run.query("SELECT reason, tokens FROM ledger WHERE stage = 'rl' AND step = ?", step))
        self.notes.append(partial(self.journal.log_step, step, json.loads(text) | scores, tokens))
        self.say(f"rl {step}: on tuning tasks {scores['tune_pass_at_1']:.3f}, greedy {scores['tune_greedy']:.3f}")

    def _updated(self, pair: _Pair, report: Running) -> list[Event]:
        pair.updating = False
        known = self.journal.hash_of(report.version)
        if known is not None and known != report.hash:
            raise RunStopped(
                f"{pair.name} runs {report.hash[:12]} as version {report.version}, the trainer made {known[:12]}; "
                "look at services.store"
            )
        self.notes.append(partial(self.journal.log_served, pair.name, report))
        pair.version = report.version
        self.running.append(report)
        return self._served()

    def _served(self) -> list[Event]:
        slowest = min(pair.version for pair in self.pairs.values()) // self.per_step
        return [Served(at=self._now(), version=min(slowest, self.orchestrator.version))]

    def _changed(self) -> list[Event]:
        """Takes up live settings; what is unknown or does not fit is refused with a line, and the run goes on."""
        asked, before = self.journal.asked(), self.settings
        for number, name, value in asked:
            step: int | None = self.orchestrator.version
            try:
                self.settings = change_live(self.settings, name, value)
                self.say(f"{name} is {value!r} from step {self.orchestrator.version + 1} on")
            except ValueError as error:
                step = None
                self.say(f"refused: {error}")
            with self.journal.transaction():
                self.journal.judge(number, step)
        return [Changed(at=self._now(), schedule=self.settings.schedule())] if self.settings != before else []

    def _time_is_up(self) -> list[Event]:
        limit, o = self.settings.rl.max_seconds, self.orchestrator
        if not limit or self.seconds < limit or self.stopped_early or o.version >= self.settings.rl.steps:
            return []
        self.stopped_early = True
        steps = max(1, o.version + (o.training is not None))
        self.settings = override(self.settings, {"rl.steps": steps})
        return [Changed(at=self._now(), schedule=self.settings.schedule())]

    # What is commanded

    def _handle(self, events: Sequence[Event]) -> None:
        """Tells the orchestrator, writes down what came of it, and only then does what it commands."""
        commands: list[Command] = []
        with self.journal.transaction():
            for note in self.notes:
                note()
            for event in events:
                before = self.orchestrator.version
                commands += self.orchestrator.handle(event)
                if isinstance(event, Trained) and self.orchestrator.version > before:
                    [train] = self.journal.batches(before, before + 1)
                    self.journal.forget(train.slots)
            for command in commands:
                if isinstance(command, Train):
                    self.journal.log_batch(command, self.settings.rl.rate(command.step, self.seconds))
            if any(not isinstance(event, Tick | Alive) for event in events):
                self.journal.save(self.orchestrator.snapshot())
        self.notes.clear()
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch(worker=name, slot=slot, attempt=number, places=places):
                pair = self.pairs[name]
                pair.start.append(Assignment(slot=slot, attempt=number, places=places))
                pair.assigned[slot, number] = set(places)
            case Cancel(worker=name, slot=slot, attempt=number):
                if name in self.pairs:
                    self.pairs[name].cancel.append((slot, number))
            case Train():
                self._train(command)
            case Drained():
                self.ended = True
            case Stop(error=error):
                raise RunStopped(error)

    def _feed(self) -> None:
        """Gives every free worker its work, and every engine that lags behind the newest version."""
        wanted = self._serve()
        for pair in list(self.pairs.values()):
            if not pair.working and (pair.start or pair.cancel or pair.assigned):
                pair.working, pair.since = True, time.monotonic()
                self._ask(pair.worker.call("work", pair.start, pair.cancel, WORK_S), "work", pair)
                pair.start, pair.cancel = [], []
            if not pair.updating and pair.version < wanted:
                pair.updating = True
                self._ask(pair.engine.call("update", wanted), "update", pair)

    def _end_hung(self) -> None:
        for pair in list(self.pairs.values()):
            if pair.working and time.monotonic() - pair.since > self.settings.services.hang_s:
                died = ActorDied(f"{pair.name} said nothing for {self.settings.services.hang_s:g} s (services.hang_s)")
                self._handle(self._pair_died(pair, died))

    # Training

    def _train(self, train: Train) -> None:
        groups = self._groups(train)
        streams = self.streams(groups)
        versions = [
            segment.policy_version[segment.acted]
            for group in groups
            for scored in group
            for segment in scored.attempt.rollout.segments
        ]
        ages = [train.step - int(v.min()) // self.per_step for v in versions if len(v)]
        metrics = step_point(batch_metrics(groups)) | {
            "staleness": float(np.mean(ages)),
            "staleness_max": max(ages),
            "mixed_versions": float(np.mean([len(np.unique(v)) > 1 for v in versions if len(v)])),
            "infra_errors": self.orchestrator.books.counts["faulted"],
            "in_flight": sum(len(p) for pair in self.pairs.values() for p in pair.assigned.values()),
        }
        self.asked[train.step] = (metrics, dict(ledger(groups, self.settings.loss)))
        batch = (train.step, self.journal.rate(train.step), streams)
        self.live = train.step if streams else self.live
        kept = min(self.saved, self.live)
        self._ask(self.trainer.call("learn", *batch, self.running, kept), "learn", train.step)
        self.running = []

    def streams(self, groups: Sequence[Sequence[Scored]]) -> list[Stream]:
        """What the trainer gets of a batch."""
        return [to_stream(scored) for group in groups for scored in group if trains(scored, self.settings.loss)]

    def _groups(self, train: Train) -> list[list[Scored]]:
        """The batch's rollouts with their rewards: from the step's file, where it is there already, else from `run.db`."""
        file = batch_file(self.run.path, train.step)
        if file.is_file():
            return load_batch(file, self.by_id)
        size = len(train.rollouts) // len(train.slots)
        packed = self.journal.packed(train.rollouts)
        done = [unpack_attempt(p, self.tasks[slot]) for p, (slot, _, _) in zip(packed, train.rollouts, strict=True)]
        groups = score_groups(
            [done[at : at + size] for at in range(0, len(done), size)], self.settings.reward, self.settings.loss
        )
        if self.settings.rl.shuffle_rewards:
            groups = shuffle_rewards(groups, self.settings.loss, Random(f"shuffle {train.step} 0"))
        names = {
            "slot": [slot for slot, _, _ in train.rollouts],
            "dispatch": [number for _, number, _ in train.rollouts],
        }
        save_batch(file, groups, names)
        return groups

    # The end

    def _finish(self) -> dict[str, Any]:
        while rest := {f: what for f, what in self.pending.items() if what[0] in ("state", "look")}:
            for future in wait(rest, return_when=FIRST_COMPLETED).done:
                self._heard(*self.pending.pop(future), future)
        self._handle([])
        step, state = self.trainer.wait("state")
        self._saved(step, step, state)
        version = self.orchestrator.version * self.per_step
        before = min(version, self.live * self.per_step)
        self.trainer.wait("finish", {"before_final": before, "final": version})
        books = self.orchestrator.report()
        unused = Counter({why: n for why, n in books["ledger"].items() if why != "trained"})
        unused["unused_at_the_end"] += books["held_tokens"]
        with self.journal.transaction():
            self.journal.log_ledger(0, unused)
        self.board.close()
        self.journal.close()
        return {
            "seconds_before": self.before,
            "versions": self.orchestrator.version * self.per_step,
            "stopped_early": self.stopped_early,
            "sampled": books["counts"].get("received_tokens", 0),
            "staleness_bound": self.settings.services.bound,
            "staleness": books["staleness"],
            "lengths": books["lengths"],
            "counts": books["counts"],
            "train_s": self.train_s,
            "store": self._store_sizes(),
        }

    def _store_sizes(self) -> dict[str, float]:
        """Versions in the store, full ones and deltas, with their mean bytes."""
        rows = [row for row in log(store_url(self.run.path, self.settings)) if "bytes" in row]
        found: dict[str, float] = {}
        for name, sizes in (
            ("full", [row["bytes"] for row in rows if row["base"] is None]),
            ("delta", [row["bytes"] for row in rows if row["base"] is not None]),
        ):
            found[name] = len(sizes)
            if sizes:
                found[f"{name}_bytes"] = float(np.mean(sizes))
        return found


def _end_unless_begun(begun: threading.Event) -> None:
    """Ends this process when Ray, which waits for its workers without a limit, does not answer: the launcher tries again."""
    if not begun.wait(BEGINS_S):
        print(f"Ray has not begun within {BEGINS_S:.0f} s", file=sys.stderr, flush=True)
        os._exit(LOST)


def _end_when_lost(actors: RayActors) -> None:
    """Ends this process at once, whatever it waits for, when Ray is gone: the launcher starts it again, and it resumes."""
    while (lost := actors.lost()) is None:
        time.sleep(2.0)
    print(lost, file=sys.stderr, flush=True)
    os._exit(LOST)


def main(arguments: list[str]) -> None:
    [path] = arguments
    run = RunDir(Path(path))
    settings = from_dict(run.settings())
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True)

    if run.finished("rl") is not None:
        return
    say("rl, as services …")
    held = ResourceJournal(run.path / FOLDER, run.path.name)
    address = settings.services.address
    begun = threading.Event()
    threading.Thread(target=_end_unless_begun, args=(begun,), daemon=True).start()
    try:
        actors = RayActors(resolve(address), namespace=run.path.name, journal=held)
    except ConnectionError as error:
        print(f"services.address={address}: {error}" if address else error, file=sys.stderr)
        sys.exit(1 if address else LOST)
    finally:
        begun.set()
    threading.Thread(target=_end_when_lost, args=(actors,), daemon=True).start()
    try:
        if address and not run.steps("rl"):  # where it goes on, what has died may still hold its memory
            require_room_for_rl(settings, machines_of_cluster())
        info = Coordinator(run, settings, actors, say).go()
        seconds = time.perf_counter() - start + info.pop("seconds_before")
        run.finish("rl", seconds, info)
        say(f"rl: done in {seconds:.0f} s")
    except ActorDied as died:  # where nothing was in its place yet, or any more: the launcher starts us again
        print(died, file=sys.stderr)
        sys.exit(LOST)
    except Exception as error:
        if message := full_disk(error, run.path):
            sys.exit(message)
        if not isinstance(error, (RunStopped, ValueError, FloatingPointError, OSError)):
            raise
        sys.exit(str(error) or repr(error))
    finally:
        actors.close()


if __name__ == "__main__":
    main(sys.argv[1:])
