"""Engines on Ray actors behind one front, each with its own weights, on this machine or on the nodes of a cluster.

    Conversations ── start, release ──▶ Replicas ── exchange: orders ──▶ Ray actor: open_engine (policies.py)
                                           ▲                                │
                                           └────── tokens as drawn ─────────┘

A turn goes to the replica that holds its conversation's cache, or, if that has no slot free, to the one with the fewest turns
under way, which reads all tokens of the conversation anew. What a replica had under way when it died is continued by others, and
the replica is started again. A token's random number depends on its conversation and its position alone, so a turn that moves has
the tokens that it would have had. With another version of the weights it goes on in that version, as after any update, and each
token says which one drew it.
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from composer_nb.harness.agent.grammar import Grammar
from composer_nb.harness.policy import Completion, ProviderFailure, Request, SampledToken, Trace
from composer_nb.harness.sandbox.reap import FOLDER, ResourceJournal, reap
from composer_nb.production.policies import OpenEngine, chat_of, open_engine
from composer_nb.production.record import overlaid
from composer_nb.trainer.services.actors import ActorDied, RayActors, RemoteService
from composer_nb.trainer.services.head import held

LOG = logging.getLogger(__name__)
# A replica that has not answered for so long is ended; so is one that has not loaded its weights by then.
HUNG_S, LOAD_S = 60.0, 900.0
# Seconds between two calls of a replica without work, and that a call waits for a token.
IDLE_S, WAIT_S = 0.5, 0.05
# A replica that died so often in a row before it was ready is given up.
STILLBORN = 3
# A turn under which more replicas than this died is refused: it may be the reason.
DEATHS = 2


class ReplicaService:
    """The actor of a replica: an engine that takes turns, and reports each token as it is drawn. One call at a time."""

    def __init__(self) -> None:
        self._stack, self._reports = ExitStack(), SimpleQueue[tuple[Any, ...]]()

    def open(self, options: Mapping[str, Any]) -> tuple[int, int, frozenset[int]]:
        """Open the engine. Return the process, the maximum tokens of one conversation, and the tokens that end a turn."""
        import torch

        self._engine = self._stack.enter_context(open_engine(**options))
        self._engine.shared.between(partial(torch.set_num_threads, 1))
        return os.getpid(), self._engine.tokens, self._engine.shared.policy.stop

    def exchange(self, orders: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Carry out orders, and return what there is to report. Raises ProviderFailure when the engine has failed."""
        service = self._engine.shared
        for kind, *order in orders:
            if kind == "start":
                requests = [self._request(*turn) for turn in order]
                for (stay, request, *_), answer in zip(order, service.start(*requests), strict=True):
                    answer.add_done_callback(partial(self._on_end, request.rollout, stay))
            elif kind == "rule":
                assert service.updates is not None
                [service.updates.rule] = order
            else:
                [number, rollout] = order
                self._reports.put(("trace", number, service.release(rollout)))
        reports: list[tuple[Any, ...]] = []
        with suppress(Empty):
            reports.append(self._reports.get(timeout=WAIT_S))
            while True:
                reports.append(self._reports.get_nowait())
        return [*reports, ("version", service.version)]

    def stop(self) -> None:
        self._stack.close()

    def _request(self, stay: int, request: Request, form: Any, before: list[int]) -> Request:
        """Return a turn that reports its tokens. `before`: those of it that were drawn elsewhere."""
        grammar = form and Grammar.of_form(self._engine.tokenizer, form)

        def on_token(token: SampledToken) -> None:
            self._reports.put(("token", request.rollout, stay, token))

        allowed = grammar and (lambda written: grammar.allowed([*before, *written]))
        return replace(request, on_token=on_token, allowed=allowed or None)

    def _on_end(self, rollout: int, stay: int, answer: Future[Completion]) -> None:
        if not answer.cancelled() and (error := answer.exception()):
            with suppress(ProviderFailure):  # the engine has failed: the turn is continued elsewhere
                self._engine.shared.check()
                self._reports.put(("refused", rollout, stay, error))


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """An actor with an engine, as the front sees it.

    Attributes:
        options: As for `open_engine`.
        orders: What is to be sent with the next call.
        opened: Tokens of one conversation, from its first process.
        traces: Records that it was asked for, by number of the question.
    """

    number: int
    options: dict[str, Any]
    remote: RemoteService | None = None
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    ready: bool = False
    pid: int = 0
    version: int = -1
    opened: Future[int] = field(default_factory=Future)
    traces: dict[int, Future[Trace]] = field(default_factory=dict)
    starts: int = 0
    stillborn: int = 0
    moved: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _ReplicaConversation:
    """A conversation that is alive, its turn under way, if there is one, and the replica that holds its cache.

    Attributes:
        replicas: Those that may take it.
        tokens: All that were read and drawn.
        stay: Number of its turn there: what is reported of an earlier one is not heard.
        earlier: Number of tokens, and their records, for each replica that it left.
    """

    rollout: int
    replicas: Sequence[Replica] = ()
    tokens: list[int] = field(default_factory=list)
    home: Replica | None = None
    stay: int = 0
    earlier: list[tuple[int, Future[Trace]]] = field(default_factory=list)
    request: Request | None = None
    answer: Future[Completion] = field(default_factory=Future)
    sampled: list[SampledToken] = field(default_factory=list)
    deaths: int = 0


class Replicas:
    """A context manager with the interface of `Shared`, as far as `Conversations` needs it. Thread-safe."""

    def __init__(self, actors: RayActors, options: Sequence[dict[str, Any]]) -> None:
        """`options`: of each replica, as for `open_engine`."""
        self._actors = actors
        self._changed = threading.Condition(threading.RLock())
        # The one that has been idle longest first.
        self._conversations: dict[int, _ReplicaConversation] = {}
        # Turns that no replica has a slot for, in order.
        self._waiting: list[_ReplicaConversation] = []
        self._stays = 0
        self._stop: frozenset[int] = frozenset()
        self._over: ProviderFailure | None = None
        self._replicas = [Replica(number=number, options=replica) for number, replica in enumerate(options)]
        self._threads = [threading.Thread(target=self._keep, args=[replica], daemon=True) for replica in self._replicas]

    @property
    def capacity(self) -> int:
        """Maximum number of live conversations."""
        return sum(replica.options["slots"] for replica in self._replicas)

    def __enter__(self) -> Self:
        """Raises what `open_engine` raises in any of the processes."""
        for thread in self._threads:
            thread.start()
        try:
            self.tokens = min(replica.opened.result() for replica in self._replicas)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._give_up(ProviderFailure("the replicas were closed"))
            remotes = [replica.remote for replica in self._replicas if replica.remote]
        for remote in remotes:
            remote.kill()
        for thread in self._threads:
            thread.join()

    def start(self, *requests: Request) -> list[Future[Completion]]:
        """Begin turns. Raises ProviderFailure when no replica is left."""
        with self._changed:
            self._check()
            started = list[_ReplicaConversation]()
            for request in requests:
                conversation = self._conversations.pop(request.rollout, None) or _ReplicaConversation(
                    rollout=request.rollout, replicas=self._side(request.user)
                )
                assert conversation.request is None, f"rollout {request.rollout} is in the middle of a turn"
                conversation.tokens += request.token_ids
                conversation.request, conversation.answer = request, Future()
                conversation.sampled, conversation.deaths = [], 0
                self._conversations[request.rollout] = conversation
                started.append(conversation)
            self._waiting += started
            self._assign()
            return [conversation.answer for conversation in started]

    def release(self, rollout: int) -> Trace:
        """Forget a conversation, also in the middle of a turn, and return its records."""
        with self._changed:
            if (conversation := self._conversations.pop(rollout, None)) is None:
                return Trace()
            conversation.answer.cancel()
            conversation.request = None
            self._waiting = [waiting for waiting in self._waiting if waiting is not conversation]
            self._leave(conversation)
            self._assign()
        records = Trace()
        for count, trace in reversed(conversation.earlier):
            records = overlaid(trace.result().head(count), records)
        return records

    @property
    def version(self) -> int:
        """The oldest version that a replica runs. Raises ProviderFailure when none is left."""
        return self._oldest(self._replicas)

    def _oldest(self, replicas: Sequence[Replica]) -> int:
        with self._changed:
            self._check()
            alive = [replica for replica in self._replicas if replica.stillborn < STILLBORN]
            return min(replica.version for replica in ([r for r in replicas if r in alive] or alive))

    def health(self) -> dict[str, Any]:
        """Return what each replica does."""
        with self._changed:
            states = [
                {
                    "pid": replica.pid,
                    "ready": int(replica.ready),
                    "policy_version": replica.version,
                    "running": len(self._running(replica)),
                    "held": sum(conversation.home is replica for conversation in self._conversations.values()),
                    "moved_total": replica.moved,
                    "restarts_total": max(replica.starts - 1, 0),
                }
                for replica in self._replicas
            ]
            return {"replicas": states}

    # Where turns go

    def _side(self, user: str) -> Sequence[Replica]:
        """Return the replicas that may take a user's conversation."""
        return self._replicas

    def _running(self, replica: Replica) -> list[_ReplicaConversation]:
        return [talk for talk in self._conversations.values() if talk.home is replica and talk.request]

    def _assign(self) -> None:
        """Give the turns that wait to replicas."""
        turns: dict[Replica, list[Any]] = {}
        waiting, self._waiting = self._waiting, []
        for conversation in waiting:
            if all(candidate.stillborn >= STILLBORN for candidate in conversation.replicas):
                conversation.replicas = self._replicas
            running = {replica: len(self._running(replica)) for replica in conversation.replicas if replica.ready}
            for replica in running:
                running[replica] -= replica is conversation.home  # its own turn counts already
            free = [candidate for candidate, count in running.items() if count < candidate.options["slots"]]
            if not free:
                self._waiting.append(conversation)
                continue
            replica = conversation.home if conversation.home in free else min(free, key=running.__getitem__)
            assert replica is not None and conversation.request is not None
            unread: Sequence[int] = conversation.request.token_ids
            if conversation.home is not replica:
                unread = conversation.tokens
                replica.moved += bool(conversation.home or conversation.earlier)
                self._leave(conversation)
                cached = [candidate for candidate in self._conversations.values() if candidate.home is replica]
                if len(cached) >= replica.options["slots"]:
                    self._leave(next(candidate for candidate in cached if candidate.request is None))
                conversation.home = replica
            self._stays += 1
            conversation.stay = self._stays
            left = conversation.request.max_tokens - len(conversation.sampled)
            grammar = _grammar(conversation.request)
            turn = replace(conversation.request, token_ids=unread, max_tokens=left, on_token=None, allowed=None)
            before = [token.token for token in conversation.sampled]
            turns.setdefault(replica, []).append((self._stays, turn, grammar and grammar.form, before))
        for replica, started in turns.items():
            replica.orders.append(("start", *started))
        self._changed.notify_all()

    def _leave(self, conversation: _ReplicaConversation) -> None:
        if (home := conversation.home) is not None:
            self._stays += 1
            trace = home.traces[self._stays] = Future()
            conversation.earlier.append((len(conversation.tokens), trace))
            home.orders.append(("release", self._stays, conversation.rollout))
            conversation.home = None

    # What replicas report

    def _keep(self, replica: Replica) -> None:
        """Run an actor, and another one when it has died. A thread for each replica."""
        while replica.stillborn < STILLBORN and self._over is None:
            try:
                remote = self._actors.make(ReplicaService, name=f"replica-{replica.number}")
                with self._changed:
                    self._check()
                    replica.remote, replica.starts = remote, replica.starts + 1
                replica.pid, tokens, self._stop = remote.call("open", replica.options).result(LOAD_S)
                self._on_report(replica, *remote.call("exchange", []).result(HUNG_S)[-1])
                with self._changed:
                    replica.ready, replica.stillborn = True, 0
                    if not replica.opened.done():
                        replica.opened.set_result(tokens)
                    self._assign()
                while self._over is None:
                    with self._changed:
                        self._changed.wait_for(lambda: replica.orders or self._running(replica) or self._over, IDLE_S)
                        orders, replica.orders = replica.orders, []
                    for report in remote.call("exchange", orders).result(HUNG_S):
                        self._on_report(replica, *report)
            except Exception as error:
                if self._over is None:
                    LOG.warning("replica %d has ended: %r", replica.number, error)
                if not replica.opened.done():
                    gone = ProviderFailure(f"replica {replica.number} died before it was ready")
                    replica.opened.set_exception(gone if isinstance(error, ActorDied | TimeoutError) else error)
            if replica.remote is not None:
                replica.remote.kill()
            self._on_death(replica)

    def _on_report(self, replica: Replica, kind: str, *report: Any) -> None:
        with self._changed:
            if kind == "version":
                [replica.version] = report
            elif kind == "trace":
                [number, trace] = report
                replica.traces.pop(number).set_result(trace)
            else:
                [rollout, stay, reply] = report
                conversation = self._conversations.get(rollout)
                if conversation is not None and conversation.request is not None and conversation.stay == stay:
                    self._on_token(conversation, conversation.request, reply)

    def _on_token(self, conversation: _ReplicaConversation, request: Request, reply: SampledToken | Exception) -> None:
        """Take the next token of a turn, or why there is none."""
        if isinstance(reply, Exception):
            del conversation.tokens[len(conversation.tokens) - len(request.token_ids) :]  # a refusal changes nothing
            conversation.request = None
            conversation.answer.set_exception(reply)
            return self._assign()
        conversation.tokens.append(reply.token)
        conversation.sampled.append(reply)
        if request.on_token:
            request.on_token(reply)
        if reply.token in self._stop or len(conversation.sampled) >= request.max_tokens:
            tokens, logprobs, versions = (list(column) for column in list(zip(*conversation.sampled, strict=True))[:3])
            if grammar := _grammar(request):
                grammar.follow(tokens)  # what it cannot, its caller sees
            conversation.request = None
            conversation.answer.set_result(
                Completion(rollout=conversation.rollout, token_ids=tokens, logprobs=logprobs, policy_versions=versions)
            )
            self._assign()

    def _on_death(self, replica: Replica) -> None:
        """Have what a replica had under way continued by others, first of all that waits."""
        with self._changed:
            replica.stillborn = 0 if replica.ready else replica.stillborn + 1
            replica.ready, replica.remote, replica.orders = False, None, []
            for trace in replica.traces.values():
                trace.set_result(Trace())
            replica.traces.clear()
            lost = self._running(replica)
            for conversation in self._conversations.values():
                conversation.home = None if conversation.home is replica else conversation.home
            for conversation in lost:
                conversation.deaths += 1
                if conversation.deaths > DEATHS:
                    conversation.request = None
                    conversation.answer.set_exception(ProviderFailure(f"{DEATHS + 1} replicas died at this turn"))
            self._waiting = [*(other for other in lost if other.request), *self._waiting]
            self._assign()
            if all(other.stillborn >= STILLBORN for other in self._replicas):
                self._give_up(ProviderFailure(f"every replica died {STILLBORN} times before it was ready"))

    def _give_up(self, failure: ProviderFailure) -> None:
        """Refuse all turns, from now on."""
        self._over = self._over or failure
        for conversation in self._conversations.values():
            if conversation.request:
                conversation.request = None
                conversation.answer.set_exception(self._over)
        self._waiting = []
        self._changed.notify_all()

    def _check(self) -> None:
        if self._over is not None:
            raise ProviderFailure(str(self._over))


@contextmanager
def open_actors(address: str = "") -> Iterator[RayActors]:
    """Connect to the Ray cluster at `address` (also the folder of a head, `composer-nb up`), or start one on this machine until
    the end. Raises ConnectionError."""
    root, name = Path("~/.cache/composer_nb/serve").expanduser(), f"serve-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    reap(root)  # what a killed server left
    with held(address) as resolved:
        actors = RayActors(resolved, name, ResourceJournal(root / FOLDER, name))
        try:
            yield actors
        finally:
            actors.close()


@contextmanager
def open_replicas(
    path: Path, count: int, *, slots: int, ray: str = "", **options: Any
) -> Iterator[OpenEngine[Replicas]]:
    """Run a checkpoint in `count` actors, which share the `slots`, on the cluster `ray` (as for `open_actors`). Raises like
    `open_engine`, whose other parameters it has."""
    training, tokenizer, form = chat_of(path)
    options |= {"path": path.resolve(), "slots": -(-slots // count)}
    with open_actors(ray) as actors, Replicas(actors, [options] * count) as service:
        yield OpenEngine(shared=service, tokenizer=tokenizer, format=form, tokens=service.tokens, training=training)


def _grammar(request: Request) -> Grammar | None:
    grammar = getattr(request.allowed, "__self__", None)
    if request.allowed and not isinstance(grammar, Grammar):
        raise ValueError("only a Grammar can be sent to another process")
    return grammar
