"""The process of a replica: an engine that does what the front (`replicas.py`) asks over a pipe, and tells each token as it is
drawn."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.grammar import Grammar
from composer_nb.harness.policy import Completion, ProviderFailure, Request, SampledToken
from composer_nb.production.policies import OpenEngine, open_engine
from composer_nb.trainer.recipe.child import die_with

TELL_S = 0.5
"""Seconds between two reports of a replica."""


def serve_replica(pipe: Connection, given: dict[str, Any], narrow: bool) -> None:
    """The process of a replica. Signals that end a group of processes are left to the front, which drains, and then ends it."""
    die_with(os.getppid())  # also while it loads
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    said: SimpleQueue[Any] = SimpleQueue()
    sender = threading.Thread(target=_say, args=(pipe, said), daemon=True)
    sender.start()
    try:
        with open_engine(**given) as engine:
            if narrow:
                import torch

                engine.shared.between(partial(torch.set_num_threads, 1))
            said.put(("ready", engine.tokens, engine.shared.version, engine.shared.policy.stop))
            _obey(pipe, engine, said)
    except EOFError:  # the front has gone
        pass
    except Exception as error:
        said.put(("failed", _plain(error)))
    said.put(None)
    sender.join()


def _obey(pipe: Connection, engine: OpenEngine[Any], said: SimpleQueue[Any]) -> None:
    """Carry out what the front asks, until it ends. Raises ProviderFailure when the engine has failed."""
    service = engine.shared

    def refused(rollout: int, place: int, answer: Future[Completion]) -> None:
        if not answer.cancelled() and (error := answer.exception()):
            # An engine that has failed refuses nothing: the front hears of its end, and has the turn continued.
            with suppress(ProviderFailure):
                service.check()
                said.put(("refused", rollout, place, _plain(error)))

    while True:
        if pipe.poll(TELL_S):
            match pipe.recv():
                case "start", orders:
                    for order, answer in zip(
                        orders, service.start(*(_heard(engine, said, *each) for each in orders)), strict=True
                    ):
                        answer.add_done_callback(partial(refused, order[1].rollout, order[0]))
                case "rule", rule:
                    assert service.updates is not None
                    service.updates.rule = rule
                case "release", number, rollout:
                    said.put(("trace", number, service.release(rollout)))
                case _:
                    return
        said.put(("told", service.version))


def _heard(
    engine: OpenEngine[Any], said: SimpleQueue[Any], place: int, request: Request, form: Any, before: list[int]
) -> Request:
    """Return a turn that tells its tokens. `before`: what was written of it elsewhere."""
    allowed: Callable[[Sequence[int]], NDArray[np.bool_]] | None = None
    if form:
        grammar = Grammar.of_form(engine.tokenizer, form)

        def allowed(written: Sequence[int]) -> NDArray[np.bool_]:
            return grammar.allowed([*before, *written])

    def heard(drawn: SampledToken) -> None:
        said.put(("drawn", request.rollout, place, drawn))

    return replace(request, heard=heard, allowed=allowed)


def _plain(error: BaseException) -> BaseException:
    """Return an error that survives a pipe."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


def _say(pipe: Connection, said: SimpleQueue[Any]) -> None:
    """Send what there is to say, all that has come meanwhile at once."""
    while (first := said.get()) is not None:
        messages = [first]
        while not said.empty() and messages[-1] is not None:
            messages.append(said.get())
        with suppress(OSError):
            pipe.send([each for each in messages if each is not None])
        if messages[-1] is None:
            return
