"""The coordinator of asynchronous RL: the `Services` of the loop in `rl.py`. It executes the orchestrator's commands, reports
events to it, and records both.

    environment workers ──reports───▶ coordinator ──streams──▶ trainer ──versions──▶ store ──▶ engines ◀──turns── environments
         │              ◀─dispatches──┘   │    └▶ run.db: batches, versions, the orchestrator's state
         └─▶ rollouts/finished ───────────┴─────▶ rollouts/rl_<step>_0

The loop waits in `next_batch` for a batch and in `learn` for the trainer; meanwhile `_turn` serves everything else. The
orchestrator decides, and its state is in `run.db` before a command is executed. So any process may be killed at any time. A
worker or an engine is made again, and its rollouts are dispatched again. The trainer returns to its checkpoint and learns the
logged batches again. The coordinator itself resumes from `run.db`, on another machine
from its copy in the store (`run_copy.py`).
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial, reduce
from itertools import groupby
from operator import itemgetter
from typing import Any

from composer_nb.harness.blocking import TooManyBlocked
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.policy import ProviderFailure
from composer_nb.harness.rollout import Rollout
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.prompts import Order, prompt_order
from composer_nb.trainer.records.batches import batch_file, load_batch, save_batch
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Batch, Scored, reinforce, reward_of, scores_line, time_is_up
from composer_nb.trainer.services import orchestrator as fsm
from composer_nb.trainer.services import shards
from composer_nb.trainer.services.actors import ActorDied, RayActors, RemoteService, StartFailed
from composer_nb.trainer.services.capacity import planned_engines
from composer_nb.trainer.services.environments import EnginePair, EnvironmentService, Report
from composer_nb.trainer.services.finished import FinishedRollouts
from composer_nb.trainer.services.inference import RunningVersion
from composer_nb.trainer.services.journal import Journal, change_live
from composer_nb.trainer.services.run_copy import RunCopy
from composer_nb.trainer.services.services import EngineService, EvaluationService, hinter_of, rehearsal_of, store_url
from composer_nb.trainer.services.trainer_ranks import TrainerGroup, save_versions
from composer_nb.trainer.settings import Settings, override
from composer_nb.trainer.versions.manifest import WeightFault
from composer_nb.trainer.versions.store import VersionStore, stored_bytes

# Handles the reply of a service, and returns the resulting events.
OnReply = Callable[[Any], list[fsm.Event] | None]


# Errors by which a service shows that it, or what it depends on, is gone.
DEATHS = (ActorDied, TooManyBlocked, TimeoutError, ProviderFailure)
# Engines that end by one and the same error of their own, without a rollout in between, before the run ends.
SAME_FAILURES = 4
# Numbers and addresses in an error, in which two failures for one reason may differ.
NUMBERS = re.compile(r"\b(0x)?[0-9a-f]{8,}\b|\d+")


class RunStopped(RuntimeError):
    """RL cannot continue. The message says why, and what to change."""


class Coordinator:
    """One RL stage as services."""

    def __init__(self, run: RunDir, settings: Settings, actors: RayActors, say: Callable[[str], None]) -> None:
        self.run, self.actors, self.say = run, actors, say
        # Settings without live changes. The trainer uses them, so that it repeats a batch exactly.
        self.started_with = settings
        self.journal, self.finished = Journal(run), FinishedRollouts(run.path, settings.services.store)
        self.copy = RunCopy(run.path, settings.services.store) if settings.services.store else None
        self.settings = reduce(override, run.changed_live().values(), settings)
        self.journal.plan(settings.services.changes)
        self.tasks = prompt_order(run.path, Order.of(settings))
        # Calls under way, with the service that was called, and what handles the reply.
        self.pending: dict[Future[Any], tuple[EnginePair | RemoteService, OnReply]] = {}
        self.pairs: dict[str, EnginePair] = {}
        # Weight versions per batch.
        self.per_step = settings.rl.minibatches
        # Hosts of services, by name, once they have answered.
        self.hosts: dict[str, str] = {}
        # Number of pairs that are to work, by the load.
        self.engines = self.settings.services.engines
        # Pairs made, pairs in a row that died before they were ready, and since the last batch the trainer's deaths and lost
        # rollouts.
        self.made = self.stillborn = self.trainer_deaths = self.lost = 0
        # Errors of engines, without numbers, since the last finished rollout.
        self.failures = Counter[str]()
        self.ended = self.stopped_early = False
        self.ranks, self.hinter, self.rehearsal = Ranks(), hinter_of(run, settings), rehearsal_of(run, settings)
        # The batch that is due next, the one that the loop has, and the trainer's answer to it.
        self.due: fsm.Train | None = None
        self.train: fsm.Train
        self.metrics: dict[str, Any] | None = None
        # `graded`: the rollouts of the last batch, on which new reward terms are tried.
        self.running, self.graded = list[RunningVersion](), list[tuple[Rollout, Grade]]()
        self.waits, self.rollout_seconds = list[dict[str, float]](), dict[tuple[int, int, int], float]()
        # When the first worker was ready; the start of Ray and of its services does not count.
        self.begin: float | None = None
        self.last = time.perf_counter()
        self.before = self.train_s = 0.0
        # `live`: the step of the last batch with a signal. Batches without a signal make versions with unchanged weights.
        self.saved = self.live = 0
        # Records to write in the transaction of the next events.
        self.records: list[Callable[[], None]] = []
        self.trainer: TrainerGroup
        self.orchestrator: fsm.Orchestrator

    # The life of a stage

    @property
    def seconds(self) -> float:
        return self.before + (time.perf_counter() - self.begin if self.begin is not None else 0.0)

    def go(self) -> dict[str, Any]:
        """Run to the end, and return the results of the stage. Raises RunStopped if RL cannot continue."""
        self._restore()
        self._make_trainer()
        self._staff()  # while the trainer starts, because all are slow to start; they wait for its version
        self.trainer.call("at").result()
        self._handle([fsm.Served(version=self.orchestrator.version), *self._changed()])
        reinforce(self)
        return self._finish()

    def _turn(self) -> None:
        """Wait a moment for events, and handle them."""
        events: list[fsm.Event] = []
        if self.pending:
            for future in wait(self.pending, timeout=0.25, return_when=FIRST_COMPLETED).done:
                if future in self.pending:  # else its service has just been found dead
                    events += self._on_reply(future)
        self._handle([*events, *self._changed(), *self._time_is_up(), fsm.Tick()])
        if events := self._staff():
            self._handle(events)
        self._end_hung()
        self._feed()

    def _restore(self) -> None:
        """Make the orchestrator: a new one, or the one of the stored state, which is then stored again."""
        schedule = self.settings.schedule()
        self.saved, _, self.before = self.run.pointer("rl") or (0, None, 0.0)
        self.live = max(self.run.forked_at_step, self.run.last_live_step() - 1)
        snapshot = self.journal.snapshot()
        if snapshot is None:
            self.orchestrator = fsm.Orchestrator(schedule)
        else:
            redo, stored = self.journal.batches(self.saved, snapshot["version"]), self.finished.names()
            for train in self.journal.batches(snapshot["version"], snapshot["version"] + 1):
                if batch_file(self.run.path, train.step).is_file():  # it is whole, whatever the store lists
                    stored |= {*train.rollouts}
            self.orchestrator = fsm.Orchestrator.restore(schedule, snapshot, redo=redo, stored=stored)
            self.lost = self.orchestrator.books.counts["faulted"]
            if self.orchestrator.training is None:  # some of the rollouts are gone: it will be another batch
                batch_file(self.run.path, self.orchestrator.version).unlink(missing_ok=True)
        with self.journal.transaction():
            self.journal.save(self.orchestrator.snapshot())

    def _make_trainer(self) -> None:
        self.trainer = TrainerGroup(self.actors, self.run.path, self.started_with)
        self._ask_trainer()

    def _make_pair(self) -> None:
        """Start an engine and its environment worker. The pair is ready once the engine has weights and the worker answers."""
        self.made += 1
        name, version = f"engine-{self.made}", self._serve()
        s = self.settings
        engine_args = self.run.path, s, version, s.sampling_seed, name
        engine = self.actors.make(EngineService, *engine_args, name=name, threads=4, gpus=s.mesh.gpus)
        run_args = self.run.path, s.env, s.limits, s.reward, self.started_with.rl.group
        policy_args = (engine, name, s.slots), s.services.lockstep, s.services.store
        worker = self.actors.make(EnvironmentService, *run_args, *policy_args, name=f"environment-{self.made}")
        pair = self.pairs[name] = EnginePair(name, engine, worker, version, since=time.monotonic())
        self._expect(engine.call("host"), pair, partial(self._on_host, name))
        self._expect(engine.call("first_hash"), pair, partial(self._on_engine_ready, pair))
        self._expect(worker.call("host"), pair, partial(self._on_host, pair.worker_name))

    def _staff(self) -> list[fsm.Event]:
        """Start, join, drain and end pairs, so that `engines` work and `services.standby` are ready to take over."""
        events, served = list[fsm.Event](), self.orchestrator.served * self.per_step
        for pair in [pair for pair in self.pairs.values() if pair.state == "draining"]:
            if pair.work not in self.pending and not self.orchestrator.running(pair.name):
                self.say(f"{pair.name} has left")
                events.append(self._end(pair))
        working = [pair for pair in self.pairs.values() if pair.state == "working"]
        others = [pair for pair in self.pairs.values() if pair.state in ("starting", "standby")]
        for pair in working[self.engines :]:
            events += self._drain(pair, "services.engines")
        for pair in [pair for pair in others if pair.state == "standby" and pair.version >= served]:
            if len(working) < self.engines:
                pair.state = "working"
                self.say(f"{pair.name} joins")
                working.append(pair)
                others.remove(pair)
                # It may have taken the newest version before it could join.
                events += [fsm.Joined(worker=pair.name, capacity=self.settings.slots), *self._served()]
        lacking = max(0, self.engines - len(working)) + self.settings.services.standby - len(others)
        for _ in range(lacking):
            self._make_pair()
        for pair in others[lacking:] if lacking < 0 else ():
            self._end(pair)
        return events

    def _drain(self, pair: EnginePair, reason: object) -> list[fsm.Event]:
        """Give a pair no more rollouts. It ends with its last one."""
        self.say(f"{pair.name} drains: {reason}")
        pair.state = "draining"
        return [fsm.Draining(worker=pair.name), *self._served()]

    def _end(self, pair: EnginePair) -> fsm.Left:
        del self.pairs[pair.name]
        for remote in (pair.engine, pair.worker):
            remote.kill()
        return fsm.Left(worker=pair.name)

    def _serve(self) -> int:
        """The version for engines: that of the last trained batch, which a new trainer publishes again."""
        return self.orchestrator.version * self.per_step

    def _expect(self, reply: Future[Any], service: EnginePair | RemoteService, on_reply: OnReply) -> Future[Any]:
        self.pending[reply] = service, on_reply
        return reply

    # What happens

    def _on_reply(self, reply: Future[Any]) -> list[fsm.Event]:
        """Handle a reply, or the death of the service that was called; return the resulting events. Raises what a service raised
        and nothing here handles."""
        service, on_reply = self.pending.pop(reply)
        if isinstance(service, EnginePair) and self.pairs.get(service.name) is not service:
            return []  # from a pair that was given up
        try:
            result = reply.result()
        except Exception as error:
            if isinstance(service, EnginePair):
                return self._pair_failed(service, error)
            if not isinstance(error, DEATHS if service is self.trainer else (*DEATHS, WeightFault)):
                raise
            if service is self.trainer:
                return self._trainer_died(error)
            self.say(f"evaluation: {error}")
            service.kill()
            return []
        return on_reply(result) or []

    def _pair_failed(self, pair: EnginePair, error: Exception) -> list[fsm.Event]:
        """Give an engine the weights themselves if it cannot use the store's, drain it if a version does not come, or replace the
        pair. Raises other errors."""
        if isinstance(error, WeightFault):
            self.say(f"{pair.name} could not use a version ({error}); it gets the weights themselves")
            weights = self.trainer.call("tensors")
            pair.update = self._expect(weights, self.trainer, lambda version: self._update(pair, *version))
            return []
        if not isinstance(error, DEATHS):
            raise error
        if pair.state == "starting" or not isinstance(error, TimeoutError):
            return self._pair_died(pair, error)
        self._ask_trainer()
        return self._drain(pair, error)  # it still samples

    def _ask_trainer(self) -> None:
        """Find out whether the trainer lives and has written its versions: between two batches nothing else would show it, and
        engines would wait."""
        self._expect(self.trainer.call("host"), self.trainer, self._on_trainer_hosts)

    def _on_engine_ready(self, pair: EnginePair, weights_hash: str) -> None:
        self._require_hash(pair.name, pair.version, weights_hash)
        self._expect(pair.worker.call("work", [], [], 0.0), pair, partial(self._on_ready, pair))

    def _on_ready(self, pair: EnginePair, reports: Sequence[Report]) -> None:
        self.stillborn = 0
        if pair.state == "starting":  # else it drains
            pair.state = "standby"
        if self.begin is None:
            self.begin = self.last = time.perf_counter()

    def _on_host(self, name: str, host: str) -> None:
        self.hosts[name] = host
        self.records.append(partial(self.journal.log_service, name, host))

    def _on_trainer_hosts(self, hosts: Sequence[str]) -> None:
        for rank, host in enumerate(hosts):
            self._on_host(f"trainer-{rank}", host)

    def _on_work(self, pair: EnginePair, reports: Sequence[Report]) -> list[fsm.Event]:
        """Return the events of a worker's reports. Workers count by weight version, the orchestrator by step."""
        events, s = list[fsm.Event](), self.settings
        if tokens := [report.sampled for report in reports if isinstance(report, fsm.Finished)]:
            self.failures.clear()
            work = pair.worker_name, self.hosts.get(pair.worker_name, ""), len(tokens), sum(tokens)
            self.records.append(partial(self.journal.log_work, *work))
        for report in reports:
            if isinstance(report, fsm.Finished):
                rollout_key, reward_total = (report.slot, report.attempt, report.member), None
                self.rollout_seconds[rollout_key] = report.seconds
                if s.rl.refill and self.orchestrator.awaits(*rollout_key):  # the file of a late one may be gone
                    attempt = self.finished.load(rollout_key, self.tasks[report.slot])
                    reward_total = reward_of(attempt, s.reward, s.env.reward_function(s.limits.seconds)).total
                    if s.loss.gate == "mixed":  # only outcomes are a signal
                        reward_total = float(attempt.grade.passed)
                report = replace(report, oldest_version=report.oldest_version // self.per_step, reward=reward_total)
            events.append(report)
        return events

    def _pair_died(self, pair: EnginePair, error: Exception) -> list[fsm.Event]:
        if isinstance(error, ProviderFailure | StartFailed):  # not the end of a process, which may have any reason
            self.failures[reason := NUMBERS.sub("", str(error))] += 1
            if self.failures[reason] >= SAME_FAILURES:
                raise RunStopped(f"{error}; so ended {SAME_FAILURES} engines without a finished rollout in between")
        # While the trainer repeats batches, a version may come late.
        self.stillborn += pair.state == "starting" and not self.orchestrator.redo
        if self.stillborn > self.settings.services.deaths:
            raise RunStopped(f"{error}; so did {self.stillborn - 1} before it: more than services.deaths allows")
        self.say(f"{error}; made again")
        self._ask_trainer()
        return [self._end(pair), *self._served()]

    def _trainer_died(self, error: Exception) -> list[fsm.Event]:
        self.trainer_deaths += 1
        if self.trainer_deaths > self.settings.services.deaths:
            raise RunStopped(
                f"{error}; the trainer died {self.trainer_deaths} times at one batch: more than services.deaths allows"
            )
        self.say(f"{error}; resuming from step {self.saved}")
        self.trainer.kill()
        self.pending = {reply: call for reply, call in self.pending.items() if call[0] is not self.trainer}
        self._make_trainer()
        self.due = self.metrics = None
        return [fsm.TrainerLost(redo=self.journal.batches(self.saved, self.orchestrator.version))]

    def _on_train_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def _on_state(self, checkpoint: tuple[int, dict[str, Any] | str]) -> None:
        self.saved, state = checkpoint
        self.run.commit("rl", self.saved, state, [], [], self.seconds)

    def _on_evaluation(self, step: int, evaluator: RemoteService, scores: dict[str, float]) -> None:
        evaluator.kill()
        [(text,)] = self.run.query("SELECT metrics FROM step WHERE stage = 'rl' AND step = ?", step)
        tokens = dict(self.run.query("SELECT reason, tokens FROM ledger WHERE stage = 'rl' AND step = ?", step))
        self.records.append(partial(self.journal.log_step, step, json.loads(text) | scores, tokens))
        self.say(scores_line(step, scores))

    def _update(self, pair: EnginePair, version: int, *tensors: Any) -> None:
        """Have an engine take a version, from the store or as its tensors."""
        pair.update_since = time.monotonic()
        reply = pair.engine.call("update", version, *tensors)
        pair.update = self._expect(reply, pair, partial(self._on_update, pair))

    def _require_hash(self, engine: str, version: int, weights_hash: str) -> None:
        """Raise RunStopped if an engine runs other weights as a version than the trainer made."""
        trained_hash = self.journal.hash_of(version)
        if trained_hash is not None and trained_hash != weights_hash:
            raise RunStopped(
                f"{engine} runs {weights_hash[:12]} as version {version}, the trainer made {trained_hash[:12]}; "
                "look at services.store"
            )

    def _on_update(self, pair: EnginePair, report: RunningVersion) -> list[fsm.Event]:
        self._require_hash(pair.name, report.version, report.hash)
        self.records.append(partial(self.journal.log_served, pair.name, report))
        work = pair.name, self.hosts.get(pair.name, ""), 1, report.read_bytes
        self.records.append(partial(self.journal.log_work, *work))
        pair.version = report.version
        self.running.append(report)
        waits = pair.waits(report.idle)
        self.waits += [waits] if pair.state == "working" else []
        return self._served()

    def _served(self) -> list[fsm.Event]:
        """Return the version of the slowest engine that gets rollouts, if there is one."""
        versions = [pair.version // self.per_step for pair in self.pairs.values() if pair.state == "working"]
        return [fsm.Served(version=min([*versions, self.orchestrator.version]))] if versions else []

    def _changed(self) -> list[fsm.Event]:
        """Apply live settings. Unknown or unfit ones are refused with a log line, and the run continues."""
        step, events = self.orchestrator.version, list[fsm.Event]()
        step += batch_file(self.run.path, step).is_file()  # this batch has its rewards
        for request_number, name, value in self.journal.asked(step):
            try:
                changed = change_live(self.settings, name, value, self.graded)
                if name == "services.drain":
                    if value not in self.pairs:
                        raise ValueError(f"{name}: no engine {value!r}; there are {', '.join(self.pairs)}")
                    events += self._drain(self.pairs[value], name)
                self.settings = changed
                events.append(fsm.Changed(schedule=changed.schedule()))
                self.engines = changed.services.engines if name == "services.engines" else self.engines
                self.journal.judge(request_number, step)
                self.say(f"{name} is {value!r} from step {step + 1} on")
            except ValueError as error:
                self.journal.judge(request_number, None)
                self.say(f"refused: {error}")
        return events

    def _time_is_up(self) -> list[fsm.Event]:
        s, orchestrator = self.settings.rl, self.orchestrator
        if not s.max_seconds or self.seconds < s.max_seconds or self.stopped_early or orchestrator.version >= s.steps:
            return []
        self.stopped_early, steps = True, max(1, orchestrator.version + (orchestrator.training is not None))
        self.say(time_is_up(s.max_seconds, steps, s.steps))
        self.settings = override(self.settings, {"rl.steps": steps})
        return [fsm.Changed(schedule=self.settings.schedule())]

    # What is commanded

    def _handle(self, events: Sequence[fsm.Event]) -> None:
        """Report events to the orchestrator, record the result, and only then execute its commands."""
        commands: list[fsm.Command] = []
        now = time.monotonic()
        with self.journal.transaction():
            for record in self.records:
                record()
            for event in events:
                commands += self.orchestrator.handle(replace(event, at=now))
            for command in commands:
                if isinstance(command, fsm.Train):
                    self.journal.log_batch(command, self.settings.rl.rate(command.step, self.seconds))
            if commands or any(not isinstance(event, fsm.Tick | fsm.Alive) for event in events):
                self.journal.save(self.orchestrator.snapshot())
        self.records.clear()
        if any(isinstance(event, fsm.Trained) for event in events):
            self.finished.remove_others(self.orchestrator.groups, below=self.orchestrator.next_slot)
        for command in commands:
            self._carry_out(command)
        for pair in self.pairs.values():
            pair.update_waits(self.orchestrator.running(pair.name) > 0)

    def _carry_out(self, command: fsm.Command) -> None:
        """Carry out a command of the orchestrator. Raises RunStopped for `Stop`."""
        match command:
            case fsm.Dispatch(worker=name, slot=slot):
                if name in self.pairs:  # else it has just died, and `Left` dispatches them again
                    self.pairs[name].start.append((command, self.tasks[slot]))
            case fsm.Cancel(worker=name, slot=slot, attempt=number):
                if name in self.pairs:
                    self.pairs[name].cancel.append((slot, number))
            case fsm.Train():
                self.due = command
            case fsm.Drained():
                self.ended = True
            case fsm.Stop(error=error):
                raise RunStopped(error)

    def _feed(self) -> None:
        """Give every free worker its work, and every lagging engine the newest version."""
        newest = self._serve()
        for pair in list(self.pairs.values()):
            if pair.work not in self.pending and (pair.cancel or self.orchestrator.running(pair.name)):
                reply = pair.worker.call("work", pair.start, pair.cancel, fsm.WORK_S)
                pair.work, pair.since = self._expect(reply, pair, partial(self._on_work, pair)), time.monotonic()
                pair.start, pair.cancel = [], []
            if pair.update not in self.pending and pair.version < newest and pair.state != "draining":
                self._update(pair, newest)

    def _end_hung(self) -> None:
        """End pairs whose worker is silent, drain those whose version does not come, and name those that do not begin."""
        newest = max((pair.version for pair in self.pairs.values() if pair.state == "working"), default=0)
        now, hang_s = time.monotonic(), self.settings.services.hang_s
        for pair in list(self.pairs.values()):
            is_behind = pair.state == "working" and pair.version < newest and pair.update in self.pending
            if pair.work in self.pending and now - pair.since > hang_s:
                died = ActorDied(f"{pair.name} said nothing for {hang_s:g} s (services.hang_s)")
                self._handle(self._pair_died(pair, died))
            elif is_behind and now - pair.update_since > hang_s:
                late = f"no version after {pair.version} within {hang_s:g} s (services.hang_s)"
                self._handle(self._drain(pair, late))
            elif pair.state == "starting" and now - pair.since > hang_s:
                pair.since = now
                self.say(
                    f"{pair.name} has waited {hang_s:g} s for a node (up --roles, services.engines) or for its weights"
                )

    # The loop's services

    def past(self) -> list[dict[str, Any]]:
        return self.run.steps("rl")

    def next_batch(self) -> Batch | None:
        """Wait for the next batch and return it, with its stored rewards if it is repeated; None after the last one."""
        while self.due is None and not self.ended:
            self._turn()
        if self.due is None:
            return None
        self.train, self.due = self.due, None
        train = self.train
        faulted = self.orchestrator.books.counts["faulted"]
        lost = faulted - self.lost
        if train.step == self.orchestrator.version:
            self.lost = faulted
        in_flight = sum(map(self.orchestrator.running, self.pairs))
        refill_metrics = {"refilled": self.orchestrator.books.counts["refilled"]} if self.settings.rl.refill else {}
        make_batch = partial(Batch, step=train.step, lost=lost, more={"in_flight": in_flight, **refill_metrics})
        stored_file = batch_file(self.run.path, train.step)
        if stored_file.is_file():
            tasks = [self.tasks[slot] for slot in {slot for slot, _, _ in train.rollouts}]
            return make_batch(scored=load_batch(stored_file, {task.id: task for task in tasks}))
        by_slot = groupby(train.rollouts, itemgetter(0))  # of sizes that differ after a live change of `rl.group`
        return make_batch(
            groups=[[self.finished.load(name, self.tasks[slot]) for name in names] for slot, names in by_slot]
        )

    def store_batch(self, batch: Batch, groups: list[list[Scored]]) -> None:
        self.graded = [(scored.attempt.rollout, scored.attempt.grade) for group in groups for scored in group]
        rollout_keys = self.train.rollouts
        slots, dispatches, _ = zip(*rollout_keys, strict=True)
        columns = {"slot": slots, "dispatch": dispatches}
        save_batch(batch_file(self.run.path, batch.step), groups, columns, self.finished.packed(rollout_keys))

    def push(self) -> None:
        """Bring the run's copy in the store up to date."""
        if self.copy is not None:
            self.copy.push()
            if self.started_with.meshed and all(on_reply != self._on_state for _, on_reply in self.pending.values()):
                shards.prune(self.run, VersionStore(store_url(self.run.path, self.started_with)))

    def learn(self, batch: Batch, streams: list[Stream]) -> dict[str, Any] | None:
        self.push()
        self.live = batch.step if streams else self.live
        rate, shared = self.journal.rate(batch.step), self.actors.share(streams)
        saved, rehearsed = min(self.saved, self.live), self.rehearsal(batch.step)
        reply = self.trainer.call("learn", batch.step, rate, shared, self.running, saved, rehearsed)
        self.metrics, self.running = None, []
        self._expect(reply, self.trainer, partial(self._on_train_step, batch.step))
        while reply in self.pending:
            self._turn()
        return self.metrics

    def evaluate(self, batch: Batch, metrics: dict[str, Any]) -> dict[str, float]:
        """Begin an evaluation beside the run. Its scores are recorded when it ends."""
        if batch.step == self.orchestrator.version:
            step = batch.step + 1
            evaluator = self.actors.make(EvaluationService, self.run.path, self.settings, name=f"evaluation-{step}")
            reply = evaluator.call("look", metrics["version"])
            self._expect(reply, evaluator, partial(self._on_evaluation, step, evaluator))
        return {}

    def record(self, batch: Batch, point: dict[str, Any], tokens: dict[str, int]) -> None:
        """Record the version of a trained batch and, unless it is repeated, its metrics, times and ledger of tokens; report it to
        the orchestrator."""
        step, weights_hash = batch.step, point.pop("hash")
        self.records.append(partial(self.journal.log_version, point["version"], step, weights_hash))
        train_s = point.pop("train_s")
        self.train_s += train_s
        if step == self.orchestrator.version:
            # otherwise it was recorded before the trainer returned to its checkpoint
            self.trainer_deaths = 0
            wall_s, self.last = time.perf_counter() - self.last, time.perf_counter()
            # Unknown for rollouts from before a restart.
            rollout_seconds = [self.rollout_seconds.pop(name, None) for name in self.train.rollouts]
            point["time"] = {"wall_s": wall_s, "train_s": train_s, "rollouts_s": rollout_seconds}
            if waits := self.waits:
                mean_waits = {name: sum(wait[name] for wait in waits) / len(waits) for name in waits[0]}
                point["time"]["engine_waits"], self.waits = mean_waits, []
                idle = 1 - train_s / wall_s
                self.engines = planned_engines(self.settings.services, self.engines, idle, mean_waits["trainer"])
            self.records.append(partial(self.journal.log_step, step + 1, point, tokens))
            self.run.log("rl", step + 1, point)
        self._handle([fsm.Trained(step=step)])

    def save(self, step: int) -> None:
        self._expect(self.trainer.call("state"), self.trainer, self._on_state)

    # The end

    def _finish(self) -> dict[str, Any]:
        """Wait for evaluations and checkpoints, publish the last versions and close the journal; return the stage's results."""
        while replies := [reply for reply, (service, _) in self.pending.items() if not isinstance(service, EnginePair)]:
            for reply in wait(replies, return_when=FIRST_COMPLETED).done:
                if reply in self.pending and self._on_reply(reply):  # else its service has just been found dead
                    raise ActorDied("the trainer died at the end, and repeats its last batches")
        self._handle([])
        self._on_state(self.trainer.call("state").result())
        version = self.orchestrator.version * self.per_step
        version_by_name = {"before_final": min(version, self.live * self.per_step), "final": version}
        weights = self.trainer.call("finish").result()
        save_versions(self.run.path, self.settings, version_by_name, weights)
        books = self.orchestrator.report()
        unused_tokens = Counter({reason: count for reason, count in books["ledger"].items() if reason != "trained"})
        unused_tokens["unused_at_the_end"] += books["held_tokens"]
        with self.journal.transaction():
            self.journal.log_ledger(0, unused_tokens)
        self.journal.close()
        for pair in self.pairs.values():
            pair.worker.kill()
        self.finished.remove_others(())  # those that are left over are in the ledger
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
