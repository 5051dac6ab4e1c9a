"""The coordinator of asynchronous RL: the `Services` of the loop in `rl.py`. It executes the orchestrator's commands, reports
events to it, and records both.

    environment workers ──outcomes──▶ coordinator ──streams──▶ trainer ──versions──▶ store ──▶ engines ◀──turns── environments
                        ◀─dispatches──┘  │ run.db: rollouts, batches, versions, the orchestrator's state

The loop waits in `take` for a batch and in `learn` for the trainer; meanwhile `_turn` serves everything else. The orchestrator
decides, and its state is in `run.db` before a command is executed. So any process may be killed at any time. A worker or an
engine is made again, and its rollouts are dispatched again. The trainer returns to its checkpoint and learns the logged batches
again. The coordinator itself resumes from `run.db`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial, reduce
from typing import Any

from composer_nb.harness.blocking import TooManyBlocked
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.store import unpack_attempt
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.prompts import Order, prompt_order, tasks_by_id
from composer_nb.trainer.records.batches import batch_file, load_batch, save_batch
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Batch, Scored, reinforce, reward_of, scores_line, time_is_up
from composer_nb.trainer.services.actors import ActorDied, RayActors, RemoteService
from composer_nb.trainer.services.environments import EnginePair, EnvironmentService, RolloutOutcome
from composer_nb.trainer.services.inference import RunningVersion
from composer_nb.trainer.services.journal import Journal, change_live
from composer_nb.trainer.services.orchestrator import (
    WORK_S,
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
    Orchestrator,
    Served,
    Stop,
    Tick,
    Train,
    Trained,
    TrainerLost,
)
from composer_nb.trainer.services.services import EngineService, EvaluationService, TrainerService, hinter_of, store_url
from composer_nb.trainer.services.trainer_ranks import TrainerGroup
from composer_nb.trainer.settings import Settings, override
from composer_nb.trainer.versions.manifest import WeightFault
from composer_nb.trainer.versions.store import stored_bytes


class RunStopped(RuntimeError):
    """RL cannot continue. The message says why, and what to change."""


class Coordinator:
    """One RL stage as services."""

    def __init__(self, run: RunDir, settings: Settings, actors: RayActors, say: Callable[[str], None]) -> None:
        self.run, self.actors, self.say = run, actors, say
        # Settings without live changes. The trainer uses them, so that it repeats a batch exactly.
        self.started_with = settings
        self.journal = Journal(run)
        self.settings = reduce(override, run.changed_live().values(), settings)
        self.journal.plan(settings.services.changes)
        self.tasks = prompt_order(run.path, Order.of(settings))
        self.pending: dict[Future[Any], tuple[str, Any]] = {}
        self.pairs: dict[str, EnginePair] = {}
        # Pairs made, pairs in a row that died before they joined, and rollouts lost up to the last batch.
        self.made = self.stillborn = self.lost = 0
        self.ended = self.stopped_early = self.learning = False
        self.ranks, self.hinter = Ranks(), hinter_of(run, settings)
        # The trainer's next batch.
        self.due: Train | None = None
        # The trainer's answer to its last batch.
        self.found: dict[str, Any] | None = None
        # `seen`: the rollouts of the last batch, on which new reward terms are tried.
        self.running, self.seen = list[RunningVersion](), list[tuple[Rollout, Grade]]()
        self.waits, self.took = list[dict[str, float]](), dict[tuple[int, int, int], float]()
        # When the first worker was ready; the start of Ray and of its services does not count.
        self.begin: float | None = None
        self.last = time.perf_counter()
        self.before = self.train_s = 0.0
        # `live`: the step of the last batch with a signal. Batches without a signal make versions with unchanged weights.
        self.saved = self.live = 0
        # Records to write in the transaction of the next events.
        self.notes: list[Callable[[], None]] = []
        self.trainer: RemoteService
        self.orchestrator: Orchestrator

    # The life of a stage

    @property
    def per_step(self) -> int:
        """Weight versions per batch."""
        return self.settings.rl.minibatches

    @property
    def seconds(self) -> float:
        return self.before + (time.perf_counter() - self.begin if self.begin is not None else 0.0)

    def go(self) -> dict[str, Any]:
        """Run to the end, and return the results of the stage. Raises RunStopped if RL cannot continue."""
        self._restore()
        self._make_trainer()
        for _ in range(self.settings.services.engines):
            self._make_pair()  # while the trainer starts, because all are slow to start; they wait for its version
        self.trainer.wait("at")
        self._handle([Served(at=time.monotonic(), version=self.orchestrator.version), *self._changed()])
        reinforce(self)
        return self._finish()

    def _turn(self) -> None:
        """Wait a moment for events, and handle them."""
        events: list[Event] = []
        if self.pending:
            for future in wait(self.pending, timeout=0.25, return_when=FIRST_COMPLETED).done:
                if future in self.pending:  # else its service has just been found dead
                    events += self._heard(*self.pending.pop(future), future)
        self._handle([*events, *self._changed(), *self._time_is_up(), Tick(at=time.monotonic())])
        self._end_hung()
        self._feed()

    def _restore(self) -> None:
        schedule = self.settings.schedule()
        self.saved, _, self.before = self.run.pointer("rl") or (0, None, 0.0)
        self.live = max(0, self.run.last_live_step() - 1)
        snapshot = self.journal.snapshot()
        if snapshot is None:
            self.orchestrator = Orchestrator(schedule)
        else:
            redo = self.journal.batches(self.saved, snapshot["version"])
            self.orchestrator = Orchestrator.restore(schedule, snapshot, redo=redo, stored=self.journal.stored())
            self.lost = self.orchestrator.books.counts["faulted"]
        with self.journal.transaction():
            self.journal.save(self.orchestrator.snapshot())

    def _make_trainer(self) -> None:
        run, s = self.run.path, self.started_with
        if s.meshed:
            self.trainer = TrainerGroup(self.actors, run, s)
        else:
            self.trainer = self.actors.make(TrainerService, run, s, name="trainer", gpus=s.mesh.gpus)

    def _make_pair(self) -> None:
        self.made += 1
        name, version = f"engine-{self.made}", self._serve()
        s = self.settings
        engine_args = self.run.path, s, version, s.sampling_seed, name
        engine = self.actors.make(EngineService, *engine_args, name=name, threads=4, gpus=s.mesh.gpus)
        run_args = self.run.path, s.env, s.limits, Order.of(self.started_with), s.rl.group
        policy_args = (engine, name, s.slots), s.services.lockstep
        worker = self.actors.make(EnvironmentService, *run_args, *policy_args, name=f"environment-{self.made}")
        pair = self.pairs[name] = EnginePair(name, engine, worker, version)
        self._ask(pair.worker.call("work", [], [], 0.0), "join", pair)

    def _serve(self) -> int:
        """The version for engines: that of the last trained batch, which a new trainer publishes again."""
        return self.orchestrator.version * self.per_step

    def _ask(self, future: Future[Any], kind: str, what: Any) -> None:
        self.pending[future] = (kind, what)

    # What happens

    def _heard(self, kind: str, what: Any, future: Future[Any]) -> list[Event]:
        if kind in ("work", "join", "update", "tensors") and self.pairs.get(what.name) is not what:
            return []  # from a pair that was given up
        try:
            result = future.result()
        except (ActorDied, TooManyBlocked) as died:
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
                if self.begin is None:
                    self.begin = self.last = time.perf_counter()
                return [Joined(at=time.monotonic(), worker=what.name, capacity=self.settings.slots)]
            case "work":
                return self._on_worker_report(what, *result)
            case "learn":
                self._on_train_step(what, result)
            case "update":
                return self._updated(what, result)
            case "tensors":
                version, tensors = result
                self._ask(what.engine.call("update", version, tensors), "update", what)
            case "state":
                self._saved(what, *result)
            case "look":
                self._on_evaluation(what[0], what[1], result)
        return []

    def _on_worker_report(
        self, pair: EnginePair, outcomes: Sequence[RolloutOutcome], alive: set[tuple[int, int]]
    ) -> list[Event]:
        pair.working = False
        events: list[Event] = []
        for outcome in outcomes:
            places = pair.assigned.get((outcome.slot, outcome.attempt), set())
            places.discard(outcome.place)
            if not places:
                pair.assigned.pop((outcome.slot, outcome.attempt), None)
            rollout_key: dict[str, int] = {"slot": outcome.slot, "attempt": outcome.attempt, "place": outcome.place}
            if outcome.packed is None:
                events.append(
                    Faulted(at=time.monotonic(), **rollout_key, reason=outcome.reason, sampled=outcome.sampled)
                )
                continue
            self.notes.append(partial(self.journal.keep, outcome))
            self.took[outcome.slot, outcome.attempt, outcome.place] = outcome.seconds
            oldest, s, total = outcome.oldest_version // self.per_step, self.settings, None
            if s.rl.refill:
                attempt = unpack_attempt(outcome.packed, self.tasks[outcome.slot])
                total = reward_of(attempt, s.reward, s.env.reward_function(s.limits.seconds)).total
            events.append(
                Finished(
                    at=time.monotonic(), **rollout_key, oldest_version=oldest, sampled=outcome.sampled, reward=total
                )
            )
        return events + [Alive(at=time.monotonic(), slot=slot, attempt=number) for slot, number in alive]

    def _pair_died(self, pair: EnginePair, died: Exception) -> list[Event]:
        self.stillborn += not pair.joined
        if self.stillborn > self.settings.services.deaths:
            raise RunStopped(f"{died}; so did {self.stillborn - 1} before it: more than services.deaths allows")
        self.say(f"{died}; made again")
        del self.pairs[pair.name]
        for remote in (pair.engine, pair.worker):
            remote.kill()
        self._make_pair()
        return [Left(at=time.monotonic(), worker=pair.name), *self._served()]

    def _trainer_died(self, died: Exception) -> list[Event]:
        self.say(f"{died}; resuming from step {self.saved}")
        self.trainer.kill()
        self.pending = {f: (kind, what) for f, (kind, what) in self.pending.items() if kind not in ("learn", "state")}
        self._make_trainer()
        self.trainer.wait("at")
        self.learning, self.due = False, None
        return [TrainerLost(at=time.monotonic(), redo=self.journal.batches(self.saved, self.orchestrator.version))]

    def _on_train_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.learning, self.found = False, metrics

    def _saved(self, requested: int, step: int, state: dict[str, Any] | str) -> None:
        self.run.commit("rl", step, state, [], [], self.seconds)
        self.saved = step

    def _on_evaluation(self, step: int, evaluator: RemoteService, scores: dict[str, float]) -> None:
        evaluator.kill()
        [(text,)] = self.run.query("SELECT metrics FROM step WHERE stage = 'rl' AND step = ?", step)
        tokens = dict(self.run.query("SELECT reason, tokens FROM ledger WHERE stage = 'rl' AND step = ?", step))
        self.notes.append(partial(self.journal.log_step, step, json.loads(text) | scores, tokens))
        self.say(scores_line(step, scores))

    def _updated(self, pair: EnginePair, report: RunningVersion) -> list[Event]:
        pair.updating = False
        trained_hash = self.journal.hash_of(report.version)
        if trained_hash is not None and trained_hash != report.hash:
            raise RunStopped(
                f"{pair.name} runs {report.hash[:12]} as version {report.version}, the trainer made {trained_hash[:12]}; "
                "look at services.store"
            )
        self.notes.append(partial(self.journal.log_served, pair.name, report))
        pair.version = report.version
        self.running.append(report)
        self.waits.append(pair.waits(report.idle))
        return self._served()

    def _served(self) -> list[Event]:
        slowest = min(pair.version for pair in self.pairs.values()) // self.per_step
        return [Served(at=time.monotonic(), version=min(slowest, self.orchestrator.version))]

    def _changed(self) -> list[Event]:
        """Apply live settings. Unknown or unfit ones are refused with a log line, and the run continues."""
        before, at = self.settings, self.orchestrator.version
        at += batch_file(self.run.path, at).is_file()  # this batch has its rewards
        for number, name, value in self.journal.asked(at):
            try:
                self.settings = change_live(self.settings, name, value, self.seen)
                self.journal.judge(number, at)
                self.say(f"{name} is {value!r} from step {at + 1} on")
            except ValueError as error:
                self.journal.judge(number, None)
                self.say(f"refused: {error}")
        return [Changed(at=time.monotonic(), schedule=self.settings.schedule())] if self.settings != before else []

    def _time_is_up(self) -> list[Event]:
        limit, o = self.settings.rl.max_seconds, self.orchestrator
        if not limit or self.seconds < limit or self.stopped_early or o.version >= self.settings.rl.steps:
            return []
        self.stopped_early, steps = True, max(1, o.version + (o.training is not None))
        self.say(time_is_up(limit, steps, self.settings.rl.steps))
        self.settings = override(self.settings, {"rl.steps": steps})
        return [Changed(at=time.monotonic(), schedule=self.settings.schedule())]

    # What is commanded

    def _handle(self, events: Sequence[Event]) -> None:
        """Report events to the orchestrator, record the result, and only then execute its commands."""
        commands: list[Command] = []
        with self.journal.transaction():
            for note in self.notes:
                note()
            for event in events:
                before = self.orchestrator.version
                commands += self.orchestrator.handle(event)
                if isinstance(event, Trained) and self.orchestrator.version > before:
                    self.journal.keep_only(self.orchestrator.groups)
            for command in commands:
                if isinstance(command, Train):
                    self.journal.log_batch(command, self.settings.rl.rate(command.step, self.seconds))
            if any(not isinstance(event, Tick | Alive) for event in events):
                self.journal.save(self.orchestrator.snapshot())
        self.notes.clear()
        for command in commands:
            self._carry_out(command)
        for pair in self.pairs.values():
            pair.note()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch(worker=name, slot=slot, attempt=number, places=places):
                pair, _ = self.pairs[name], self.tasks[slot]  # its task is recorded before the worker looks for it
                pair.start.append(command)
                pair.assigned[slot, number] = set(places)
            case Cancel(worker=name, slot=slot, attempt=number):
                if name in self.pairs:
                    self.pairs[name].cancel.append((slot, number))
            case Train():
                self.due = command
            case Drained():
                self.ended = True
            case Stop(error=error):
                raise RunStopped(error)

    def _feed(self) -> None:
        """Give every free worker its work, and every lagging engine the newest version."""
        newest = self._serve()
        for pair in list(self.pairs.values()):
            if not pair.working and (pair.start or pair.cancel or pair.assigned):
                pair.working, pair.since = True, time.monotonic()
                self._ask(pair.worker.call("work", pair.start, pair.cancel, WORK_S), "work", pair)
                pair.start, pair.cancel = [], []
            if not pair.updating and pair.version < newest:
                pair.updating = True
                self._ask(pair.engine.call("update", newest), "update", pair)

    def _end_hung(self) -> None:
        for pair in list(self.pairs.values()):
            if pair.working and time.monotonic() - pair.since > self.settings.services.hang_s:
                died = ActorDied(f"{pair.name} said nothing for {self.settings.services.hang_s:g} s (services.hang_s)")
                self._handle(self._pair_died(pair, died))

    # The loop's services

    def past(self) -> list[dict[str, Any]]:
        return self.run.steps("rl")

    def take(self) -> Batch | None:
        while self.due is None and not self.ended:
            self._turn()
        train, self.due = self.due, None
        if train is None:
            return None
        faulted = self.orchestrator.books.counts["faulted"]
        lost = faulted - self.lost
        if train.step == self.orchestrator.version:
            self.lost = faulted
        in_flight = sum(len(places) for pair in self.pairs.values() for places in pair.assigned.values())
        more = {"refilled": self.orchestrator.books.counts["refilled"]} if self.settings.rl.refill else {}
        batch = partial(Batch, step=train.step, lost=lost, more={"in_flight": in_flight, **more})
        file = batch_file(self.run.path, train.step)
        if file.is_file():
            return batch(scored=load_batch(file, tasks_by_id(self.run.path)))
        size = len(train.rollouts) // len(train.slots)
        packed = self.journal.packed(train.rollouts)
        attempts = [unpack_attempt(p, self.tasks[slot]) for p, (slot, _, _) in zip(packed, train.rollouts, strict=True)]
        return batch(groups=[attempts[at : at + size] for at in range(0, len(attempts), size)])

    def keep(self, batch: Batch, groups: list[list[Scored]]) -> None:
        self.seen = [(scored.attempt.rollout, scored.attempt.grade) for group in groups for scored in group]
        [train] = self.journal.batches(batch.step, batch.step + 1)
        slots, dispatches, _ = zip(*train.rollouts, strict=True)
        columns = {"slot": slots, "dispatch": dispatches}
        save_batch(batch_file(self.run.path, batch.step), groups, columns, self.journal.packed(train.rollouts))

    def learn(self, batch: Batch, streams: list[Stream]) -> dict[str, Any] | None:
        self.live = batch.step if streams else self.live
        values = (batch.step, self.journal.rate(batch.step), streams, self.running, min(self.saved, self.live))
        self.learning, self.found, self.running = True, None, []
        self._ask(self.trainer.call("learn", *values), "learn", batch.step)
        while self.learning:
            self._turn()
        return self.found

    def evaluate(self, batch: Batch, metrics: dict[str, Any]) -> dict[str, float]:
        """Begin an evaluation beside the run. Its scores are recorded when it ends."""
        if batch.step == self.orchestrator.version:
            step = batch.step + 1
            evaluator = self.actors.make(EvaluationService, self.run.path, self.settings, name=f"evaluation-{step}")
            self._ask(evaluator.call("look", metrics["version"]), "look", (step, evaluator))
        return {}

    def record(self, batch: Batch, point: dict[str, Any], tokens: dict[str, int]) -> None:
        step, hash = batch.step, point.pop("hash")
        self.notes.append(partial(self.journal.log_version, point["version"], step, hash))
        train_s = point.pop("train_s")
        self.train_s += train_s
        if step == self.orchestrator.version:
            # otherwise it was recorded before the trainer returned to its checkpoint
            wall, self.last = time.perf_counter() - self.last, time.perf_counter()
            [train] = self.journal.batches(step, step + 1)
            took = [self.took.pop(key, None) for key in train.rollouts]  # unknown for rollouts from before a restart
            point["time"] = {"wall_s": wall, "train_s": train_s, "rollouts_s": took}
            if waits := self.waits:
                mean = {name: sum(wait[name] for wait in waits) / len(waits) for name in waits[0]}
                point["time"]["engine_waits"], self.waits = mean, []
            self.notes.append(partial(self.journal.log_step, step + 1, point, tokens))
            self.run.log("rl", step + 1, point)
        self._handle([Trained(at=time.monotonic(), step=step)])

    def save(self, step: int) -> None:
        self._ask(self.trainer.call("state"), "state", step)

    # The end

    def _finish(self) -> dict[str, Any]:
        while rest := {f: what for f, what in self.pending.items() if what[0] in ("state", "look")}:
            for future in wait(rest, return_when=FIRST_COMPLETED).done:
                self._heard(*self.pending.pop(future), future)
        self._handle([])
        step, state = self.trainer.wait("state")
        self._saved(step, step, state)
        version = self.orchestrator.version * self.per_step
        self.trainer.wait("finish", {"before_final": min(version, self.live * self.per_step), "final": version})
        books = self.orchestrator.report()
        unused = Counter({why: n for why, n in books["ledger"].items() if why != "trained"})
        unused["unused_at_the_end"] += books["held_tokens"]
        with self.journal.transaction():
            self.journal.log_ledger(0, unused)
        self.journal.close()
        return {
            "seconds_before": self.before,
            "versions": version,
            "stopped_early": self.stopped_early,
            "sampled": books["counts"].get("received_tokens", 0),
            "staleness_bound": self.settings.services.bound,
            "staleness": books["staleness"],
            "counts": books["counts"],
            "train_s": self.train_s,
            "store": stored_bytes(store_url(self.run.path, self.settings)),
        }
