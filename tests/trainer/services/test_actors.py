"""Services on threads of this process."""

from __future__ import annotations

import threading

import pytest

from composer_nb.trainer.services.actors import ActorDied, Threads


class Slow:
    """Is born when `may`, and tells by `born`."""

    def __init__(self, may: threading.Event, born: threading.Event) -> None:
        may.wait(10)
        born.set()

    def answer(self) -> int:
        return 1


def test_a_service_that_is_ended_while_it_is_born_does_nothing_afterwards():
    actors, may, born = Threads(), threading.Event(), threading.Event()
    remote = actors.make(Slow, may, born, name="slow")
    threading.Timer(0.1, may.set).start()
    remote.kill()
    assert born.is_set(), "it has come to an end before `kill` does"
    with pytest.raises(ActorDied):
        remote.wait("answer")


def test_a_service_may_be_ended_twice_and_where_it_could_not_be_born():
    actors = Threads()
    remote = actors.make(Slow, name="none")
    remote.kill()
    actors.close()
    with pytest.raises(ActorDied):
        remote.wait("answer")
