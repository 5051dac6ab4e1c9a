"""Engines in processes of their own behind one front, each with its own weights.

    Conversations ── start, release ──▶ Replicas ══ a pipe each ══▶ process: open_engine (policies.py)
                                           │ ▲                          │
                                           │ └──── tokens as drawn ─────┘
                     knows the tokens of every conversation, and which replica holds its cache

A turn goes where it should end first: its own replica reads its new tokens only, another one reads all of them. A replica without
work takes a turn over from the one that has most, also in the middle, if that ends it sooner. What a replica had under way when
it died is continued by others, and the replica is started again. A token's random number depends on its conversation and its
position alone, so a turn that moves has the tokens that it would have had. With another version of the weights it goes on in
that version, as after any update, and each token says which one drew it.

The clock of these decisions is the number of tokens to read and of turns that share a step. How long a turn will be is not known:
as long as usual, and if it is longer already, as long again.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from composer_nb.harness.agent.grammar import Grammar
from composer_nb.harness.policy import Completion, ProviderFailure, Request, SampledToken, Trace
from composer_nb.production.policies import OpenEngine, chat_of
from composer_nb.production.record import overlaid
from composer_nb.production.replica import serve_replica
from composer_nb.trainer.versions.receiver import VersionRule

LOG = logging.getLogger(__name__)
HUNG_S = 60.0
"""A replica that has told nothing for so long is killed."""
LOAD_S = 900.0
"""One that has not loaded its weights by then is killed too."""
END_S = 10.0
"""Time for a replica to end before it is killed."""
STILLBORN = 3
"""A replica that died so often in a row before it was ready is given up."""
DEATHS = 2
"""A turn under which more replicas than this died is refused: it may be the reason."""
READ = 0.3
"""What reading a token costs against what another turn adds to a step (measured for 1.9 million parameters on a CPU)."""
FIRST_TURN = 64.0
"""Expected tokens of a turn before any has ended."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    number: int
    thread: threading.Thread
    process: Any = None
    pipe: Connection | None = None
    ready: bool = False
    version: int = -1
    born: Future[int] = field(default_factory=Future)
    """Tokens of one conversation, from its first process."""
    traces: dict[int, Future[Trace]] = field(default_factory=dict)
    """Records that it was asked for, by number of the question."""
    starts: int = 0
    stillborn: int = 0
    moved: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _ReplicaConversation:
    """A conversation that is alive, its turn under way, if there is one, and the replica that holds its cache."""

    rollout: int
    tokens: list[int] = field(default_factory=list)
    """All that were read and drawn."""
    home: _Replica | None = None
    place: int = 0
    """Number of its stay there: what was said of an earlier one is not heard."""
    earlier: list[tuple[int, Future[Trace]]] = field(default_factory=list)
    """Number of tokens, and their records, for each replica that it left."""
    request: Request | None = None
    answer: Future[Completion] = field(default_factory=Future)
    drawn: list[SampledToken] = field(default_factory=list)
    unread: int = 0
    """Tokens that its replica has to read before it draws one."""
    deaths: int = 0

    def left(self, usual: float) -> float:
        """Tokens that it should still write. Long turns have a long tail: as many again as there are."""
        assert self.request is not None
        return min(max(usual, len(self.drawn)), self.request.max_tokens - len(self.drawn))


class Replicas:
    """A context manager with the interface of `Shared`, as far as `Conversations` needs it. Thread-safe."""

    def __init__(self, count: int, *, slots: int, narrow: bool = False, **given: Any) -> None:
        """`slots`: conversations held at a time by all together. `narrow`: one torch thread in a process, also if there is only
        one. `given`: as for `open_engine`."""
        self._narrow = narrow or count > 1
        self.each = -(-slots // count)
        self.capacity = count * self.each
        self._given = {**given, "slots": self.each}
        self._lock = threading.RLock()
        self._talks: dict[int, _ReplicaConversation] = {}
        """The one that has been idle longest first."""
        self._waiting: list[_ReplicaConversation] = []
        """Turns that no replica has a place for, in order."""
        self._usual, self._places = FIRST_TURN, 0
        self._stop: frozenset[int] = frozenset()
        self._over: ProviderFailure | None = None
        self._replicas = [
            _Replica(number=n, thread=threading.Thread(target=self._keep, args=(n,), daemon=True)) for n in range(count)
        ]

    def __enter__(self) -> Self:
        """Raises what `open_engine` raises in any of the processes."""
        for replica in self._replicas:
            replica.thread.start()
        try:
            self.tokens = min(replica.born.result() for replica in self._replicas)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def start(self, *requests: Request) -> list[Future[Completion]]:
        """Begin turns. Raises ProviderFailure when no replica is left."""
        with self._lock:
            self._check()
            talks = [self._talks.pop(each.rollout, _ReplicaConversation(rollout=each.rollout)) for each in requests]
            for request, talk in zip(requests, talks, strict=True):
                assert talk.request is None, f"rollout {talk.rollout} is in the middle of a turn"
                talk.tokens += request.token_ids
                talk.request, talk.answer, talk.drawn, talk.deaths = request, Future(), [], 0
                self._talks[talk.rollout] = talk
            self._waiting += talks
            self._place()
            return [talk.answer for talk in talks]

    def release(self, rollout: int) -> Trace:
        """Forget a conversation, also in the middle of a turn, and return its records."""
        with self._lock:
            if (talk := self._talks.pop(rollout, None)) is None:
                return Trace()
            talk.answer.cancel()
            talk.request = None
            self._waiting = [each for each in self._waiting if each is not talk]
            self._leave(talk)
            self._balance()
        found = Trace()
        for count, trace in reversed(talk.earlier):
            found = overlaid(trace.result().head(count), found)
        return found

    @property
    def version(self) -> int:
        """The oldest version that a replica runs. Raises ProviderFailure when none is left."""
        with self._lock:
            self._check()
            return min(replica.version for replica in self._replicas if replica.stillborn < STILLBORN)

    @property
    def ready(self) -> bool:
        """Return whether any replica can answer at once."""
        return any(replica.ready for replica in self._replicas)

    def take(self, rule: VersionRule) -> None:
        """Have every process run the version that `rule` gives."""
        with self._lock:
            self._given["rule"] = rule
            for replica in self._replicas:
                self._send(replica, "rule", rule)

    def states(self) -> list[dict[str, int]]:
        """Return what each replica does."""
        with self._lock:
            return [
                {
                    "pid": replica.process.pid if replica.process else 0,
                    "ready": int(replica.ready),
                    "policy_version": replica.version,
                    "running": len(self._busy(replica)),
                    "held": sum(talk.home is replica for talk in self._talks.values()),
                    "moved_total": replica.moved,
                    "restarts_total": max(replica.starts - 1, 0),
                }
                for replica in self._replicas
            ]

    # Where turns go

    def _busy(self, replica: _Replica) -> list[_ReplicaConversation]:
        return [talk for talk in self._talks.values() if talk.home is replica and talk.request]

    def _cost(self, talk: _ReplicaConversation, replica: _Replica, read: int) -> float:
        """Return when a turn should end at a replica, but for what it costs anywhere: all that is read goes first, and each step
        then writes a token of every turn."""
        others = [each for each in self._busy(replica) if each is not talk]
        return READ * (read + sum(each.unread for each in others)) + talk.left(self._usual) * len(others)

    def _place(self) -> None:
        """Give the turns that wait to replicas."""
        sent: dict[_Replica, list[_ReplicaConversation]] = {replica: [] for replica in self._replicas}
        later = list[_ReplicaConversation]()
        for talk in self._waiting:
            free = [each for each in self._replicas if each.ready and len(self._busy(each)) < self.each]
            if not free:
                later.append(talk)
                continue

            def cost(replica: _Replica, talk: _ReplicaConversation = talk) -> tuple[float, bool]:
                """The same prompt is read once, as by the choices of one request."""
                known = any(talk.tokens == other.tokens for other in sent[replica])
                read = 0 if known else len(self._unread(talk, replica))
                return self._cost(talk, replica, read), replica is not talk.home

            best = min(free, key=cost)
            self._settle(talk, best)
            sent[best].append(talk)
        self._waiting = later
        for replica, talks in sent.items():
            self._send(replica, "start", [self._order(talk) for talk in talks])

    def _balance(self) -> None:
        """Give replicas without work turns of others, if these end sooner there."""
        self._place()
        for idle in self._replicas:
            if not idle.ready or self._busy(idle):
                continue
            behind = max(self._replicas, key=lambda replica: len(self._busy(replica)))

            def gain(talk: _ReplicaConversation, idle: _Replica = idle, behind: _Replica = behind) -> float:
                return self._cost(talk, behind, 0) - self._cost(talk, idle, len(talk.tokens))

            talk = max(self._busy(behind), key=gain, default=None)
            if talk is not None and gain(talk) > 0:
                self._settle(talk, idle)
                self._send(idle, "start", [self._order(talk)])

    def _unread(self, talk: _ReplicaConversation, replica: _Replica) -> Sequence[int]:
        """Return what a replica has to read for a turn."""
        assert talk.request is not None
        return talk.request.token_ids if replica is talk.home else talk.tokens

    def _settle(self, talk: _ReplicaConversation, replica: _Replica) -> None:
        """Let a conversation go on at a replica; another one that is idle makes room."""
        unread = self._unread(talk, replica)
        if talk.home is not replica:
            replica.moved += bool(talk.home or talk.earlier)
            self._leave(talk)
            held = [each for each in self._talks.values() if each.home is replica]
            if len(held) >= self.each:
                self._leave(next(each for each in held if each.request is None))
            talk.home = replica
        self._places += 1
        talk.place, talk.unread = self._places, len(unread)

    def _leave(self, talk: _ReplicaConversation) -> None:
        if talk.home is not None:
            self._places += 1
            trace = talk.home.traces[self._places] = Future()
            talk.earlier.append((len(talk.tokens), trace))
            self._send(talk.home, "release", self._places, talk.rollout)
            talk.home = None

    def _order(self, talk: _ReplicaConversation) -> tuple[int, Request, Any, list[int]]:
        """Return a turn, or what is left of it, in a form that can be sent."""
        assert talk.request is not None
        left, grammar = talk.request.max_tokens - len(talk.drawn), _grammar(talk.request)
        ids = talk.tokens[len(talk.tokens) - talk.unread :]
        request = replace(talk.request, token_ids=ids, max_tokens=left, heard=None, allowed=None)
        return talk.place, request, grammar and grammar.form, [each.token for each in talk.drawn]

    def _send(self, replica: _Replica, *message: Any) -> None:
        with suppress(OSError):  # the thread that hears it knows of its end too
            if replica.pipe is not None and message[1:] != ([],):
                replica.pipe.send(message)

    # What replicas say

    def _keep(self, number: int) -> None:
        """Run a process, and another one when it has died. A thread for each replica."""
        replica, context = self._replicas[number], multiprocessing.get_context("spawn")
        while replica.stillborn < STILLBORN:
            ours, theirs = context.Pipe()
            arguments = (theirs, self._given, self._narrow)
            process = context.Process(target=serve_replica, args=arguments, name=f"replica-{number}", daemon=True)
            with self._lock:
                if self._over is not None:
                    return
                process.start()
                replica.process, replica.pipe, replica.starts = process, ours, replica.starts + 1
            theirs.close()
            with suppress(EOFError, OSError):
                while ours.poll(HUNG_S if replica.ready else LOAD_S):
                    for message in ours.recv():
                        self._heard(replica, *message)
            process.kill()
            process.join()
            self._died(replica)

    def _heard(self, replica: _Replica, kind: str, *said: Any) -> None:
        with self._lock:
            match kind, said:
                case "ready", (int(tokens), int(version), stop):
                    replica.ready, replica.version, replica.stillborn, self._stop = True, version, 0, stop
                    if not replica.born.done():
                        replica.born.set_result(tokens)
                    self._balance()
                case "told", (int(version),):
                    replica.version = version
                case "failed", (error,):
                    LOG.warning("replica %d has failed: %r", replica.number, error)
                    if not replica.born.done():
                        replica.born.set_exception(error)
                case "trace", (int(number), trace):
                    replica.traces.pop(number).set_result(trace)
                case (("drawn" | "refused"), (int(rollout), int(place), what)):
                    talk = self._talks.get(rollout)
                    if talk is not None and talk.request is not None and talk.place == place:
                        self._told(talk, what)

    def _told(self, talk: _ReplicaConversation, what: SampledToken | Exception) -> None:
        """Take the next token of a turn, or why there is none."""
        request = talk.request
        assert request is not None
        if isinstance(what, Exception):
            del talk.tokens[len(talk.tokens) - len(request.token_ids) :]  # a refusal changes nothing
            self._ended(talk, what)
            return
        talk.tokens.append(what.token)
        talk.drawn.append(what)
        talk.unread = 0
        if request.heard:
            request.heard(what)
        if what.token in self._stop or len(talk.drawn) >= request.max_tokens:
            self._usual += (len(talk.drawn) - self._usual) / 16
            if grammar := _grammar(request):
                grammar.follow([each.token for each in talk.drawn])  # what it cannot, its caller sees
            tokens, logprobs, versions = ([each[place] for each in talk.drawn] for place in range(3))
            known: dict[str, Any] = {"token_ids": tokens, "logprobs": logprobs, "policy_versions": versions}
            self._ended(talk, Completion(rollout=talk.rollout, **known))

    def _ended(self, talk: _ReplicaConversation, found: Completion | Exception) -> None:
        talk.request = None
        if isinstance(found, Exception):
            talk.answer.set_exception(found)
        else:
            talk.answer.set_result(found)
        self._balance()

    def _died(self, replica: _Replica) -> None:
        """Have what it had under way continued by others, first of all that waits."""
        with self._lock:
            replica.stillborn = 0 if replica.ready else replica.stillborn + 1
            replica.ready, replica.pipe = False, None
            for trace in replica.traces.values():
                trace.set_result(Trace())
            replica.traces.clear()
            if not replica.born.done():
                replica.born.set_exception(ProviderFailure(f"replica {replica.number} died before it was ready"))
            lost = self._busy(replica)
            for talk in [talk for talk in self._talks.values() if talk.home is replica]:
                talk.home = None
            if self._over is None:
                LOG.warning("replica %d has ended; %d turns move, and it starts again", replica.number, len(lost))
            for talk in lost:
                talk.deaths += 1
            self._waiting = [*lost, *self._waiting]
            for talk in [talk for talk in lost if talk.deaths > DEATHS]:
                self._waiting.remove(talk)
                self._ended(talk, ProviderFailure(f"{talk.deaths} replicas died at this turn"))
            self._balance()
            if all(each.stillborn >= STILLBORN for each in self._replicas):
                self._give_up(ProviderFailure(f"every replica died {STILLBORN} times before it was ready"))

    def _give_up(self, why: ProviderFailure) -> None:
        """Refuse all turns, from now on."""
        self._over = self._over or why
        for talk in [talk for talk in self._talks.values() if talk.request]:
            talk.request = None
            talk.answer.set_exception(self._over)
        self._waiting = []

    def _check(self) -> None:
        if self._over is not None:
            raise ProviderFailure(str(self._over))

    def _close(self) -> None:
        with self._lock:
            self._give_up(ProviderFailure("the replicas were closed"))
            for replica in self._replicas:
                if replica.ready:
                    self._send(replica, "end")
                elif replica.process is not None:
                    replica.process.kill()
        for replica in self._replicas:
            replica.thread.join(END_S)
            if replica.thread.is_alive():
                replica.process.kill()
                replica.thread.join()


@contextmanager
def open_replicas(path: Path, count: int, **given: Any) -> Iterator[OpenEngine[Replicas]]:
    """Run a checkpoint in `count` processes. Raises like `open_engine`, whose other parameters it has."""
    known, tokenizer, form = chat_of(path)
    with Replicas(count, path=path, **given) as service:
        yield OpenEngine(shared=service, tokenizer=tokenizer, format=form, tokens=service.tokens, known=known)


def _grammar(request: Request) -> Grammar | None:
    grammar = getattr(request.allowed, "__self__", None)
    if request.allowed and not isinstance(grammar, Grammar):
        raise ValueError("only a Grammar can be sent to another process")
    return grammar
