"""Calls of a user's own tools and rewards, which may block for ever. Python cannot end a thread, so that of a late call is left
behind. A process may leave only a few behind: then it has to be replaced."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# Threads that a process may leave behind.
MOST = 32
# Seconds between two checks whether to give a call up.
LOOK_S = 0.05
Result = TypeVar("Result")
_late = set[threading.Thread]()
_lock = threading.Lock()


class TooManyBlocked(RuntimeError):
    """Custom code blocks too many threads of this process, which should do no more work."""


class CallTimeout(Exception):
    """A call did not return in time."""


class GivenUp(Exception):
    """A call was given up before its time limit, because nobody waits for its result."""


def within(
    left: Callable[[], float], name: str, call: Callable[[], Result], stop: threading.Event | None = None
) -> Result:
    """Return the result of `call()`, which runs in a new thread. Its exceptions are raised here.

    Raises CallTimeout when no seconds are `left`; GivenUp when `stop` is set; TooManyBlocked, without a call, if MOST threads are
    left behind. `name` says in messages what blocks."""
    with _lock:
        _late.difference_update([thread for thread in _late if not thread.is_alive()])
        if len(_late) >= MOST:
            raise TooManyBlocked(
                f"{name}: {MOST} earlier calls of custom code still block in this process; make that code return"
            )
    ended: Future[Result] = Future()

    def work() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # raised again in the caller
            ended.set_exception(error)

    began = time.monotonic()
    thread = threading.Thread(target=work, name=f"blocking {name}", daemon=True)
    thread.start()
    while not ended.done():
        stopped, rest = stop is not None and stop.is_set(), left()
        if stopped or rest <= 0:
            with _lock:
                _late.add(thread)
            if stopped:
                raise GivenUp(name)
            raise CallTimeout(f"{name} did not return within {time.monotonic() - began:.0f} s (limits.seconds)")
        thread.join(min(rest, LOOK_S))
    return ended.result()
