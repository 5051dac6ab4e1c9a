"""The part of recorded calls that runs in a grading box: it notes calls while tests run, and answers calls.

`recorded.py` says what both are for. A call comes in as module, qualified name and arguments, and the answer goes out as a value.
What the answer should be is never in the box. Values travel as JSON (`sandbox/guest/values.py`).

Uses the standard library alone and runs on Python 3.9 and newer. Agent code runs in the same process, so an answer is worth what
the host's comparison makes of it.
"""

from __future__ import annotations

import _random
import contextlib
import datetime
import importlib
import inspect
import itertools
import json
import os
import resource
import sys
import time
import types
import typing

from composer_nb.harness.sandbox.guest.values import Json, NotPlain, decode, encode

Say = typing.Callable[[Json], None]

MOST_ITEMS = 1000  # of an iterator
MOST_CALLS, MOST_OF_ONE = 1500, 200  # noted in one run, and of one function
GENERATOR = inspect.CO_GENERATOR
ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
SLOW_S = 0.2  # CPU seconds of one call: sixteen of them stay far below a batch's limit on a busy machine, too


def encode_result(value: typing.Any) -> Json:
    """Return a result as JSON. Of an iterator it is the items, so a generator and a `map` give the same."""
    if isinstance(value, typing.Iterator):
        items = list(itertools.islice(value, MOST_ITEMS + 1))
        if len(items) > MOST_ITEMS:
            raise NotPlain
        return {"iterator": encode(items)["list"]}
    return encode(value)


# Answering.


def run(prepared: typing.Any, say: Say) -> int:
    """Answer every call of a list of batches. Each batch has a process of its own, forked after the import."""
    sys.dont_write_bytecode = True
    batches, cpu_s = prepared.asked["calls"], prepared.asked["batch_cpu_s"]
    for name in dict.fromkeys(module for batch in batches for module, _, _ in batch):
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    number = 0
    for batch in batches:
        pid = os.fork()
        if pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
                for index, (module, name, arguments) in enumerate(batch, number):
                    say(["answer", index, answer(module, name, json.loads(arguments), prepared.asked["watch"])])
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        number += len(batch)
    return 0


def answer(module: str, name: str, encoded: Json, watch: bool) -> Json:
    """Return `[kind, value, arguments afterwards]`; the last is None where the call leaves its arguments as they were.

    kind: returned, raised (the value is the type's name), other (no plain result), missing (no such function), unsteady (only
    when watched: the call asks for the time or for chance, or takes long).
    """
    try:
        function: typing.Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except BaseException:
        return ["missing", None, None]
    arguments, named = decode(encoded[0]), decode(encoded[1])
    watcher = Watcher() if watch else contextlib.nullcontext()
    try:
        with watcher:
            result = ["returned", encode_result(function(*arguments, **named))]
    except NotPlain:
        result = ["other", None]
    except BaseException as error:
        result = ["raised", type(error).__name__]
    if isinstance(watcher, Watcher) and watcher.unsteady:
        return ["unsteady", None, None]
    try:
        after = [encode(arguments), encode(named)]
    except NotPlain:
        return ["other", None, None]
    return [*result, None if json.dumps(after) == json.dumps(encoded) else after]


class Watcher:
    """A profiler that notices calls of the clock and of random numbers, and how much CPU time passes. For honest code."""

    unsteady = False

    def __enter__(self) -> None:
        self.began = time.process_time()
        sys.setprofile(self.note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.unsteady |= time.process_time() - self.began > SLOW_S

    def note(self, frame: types.FrameType, event: str, called: typing.Any) -> None:
        if event == "c_call" and called is not sys.setprofile:
            owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            dated = isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "today", "utcnow")
            outside = called.__module__ in ("posix", "os") and name in ("urandom", "getrandom", "getpid", "times")
            clock = called.__module__ == "time" and called is not time.process_time
            self.unsteady |= dated or outside or clock or isinstance(owner, _random.Random)


# Recording.


class Recorder:
    """A pytest plugin that says which calls with plain arguments cross a boundary, with what they gave, while tests run.

    A boundary lies between a test and the workspace, and between a changed file and other files of the workspace; there, names
    with a leading underscore do not count, since an answer may do without them. Only functions that can be called by module and
    qualified name are noted: of methods, static ones and those of classes. Other threads are not seen.
    """

    def __init__(self, prepared: typing.Any, say: Say) -> None:
        self.say = say
        self.inside = prepared.root + os.sep
        self.sealed = {os.path.join(prepared.root, path) for path in prepared.names}
        self.changed = {os.path.join(prepared.root, path) for path in prepared.asked["record"]}
        self.named: dict[types.CodeType, tuple[str, types.FunctionType | None]] = {}
        self.starts: dict[types.CodeType, int] = {}
        self.seen: set[tuple[str, str, str]] = set()
        self.counts: dict[types.CodeType, int] = {}

    def pytest_runtest_setup(self) -> None:
        sys.settrace(self.note)

    def pytest_runtest_teardown(self) -> None:
        sys.settrace(None)

    def note(self, frame: types.FrameType, event: str, _: object) -> typing.Any:
        """Trace calls; the function that is returned sees how this one ends."""
        code = frame.f_code
        if code.co_filename in self.sealed or not code.co_filename.startswith(self.inside):
            return None
        if code not in self.named:
            self.named[code], self.starts[code] = qualified(code, frame.f_globals), frame.f_lasti
        name, function = self.named[code]
        if function is None or self.counts.get(code, 0) >= MOST_OF_ONE or len(self.seen) >= MOST_CALLS:
            return None
        if frame.f_lasti != self.starts[code] or not self.crosses(frame, name):  # a generator that goes on is no call
            return None
        try:
            arguments = json.dumps(arguments_of(frame, function, drop_first=name.endswith("()")))
        except NotPlain:
            return None
        call = (str(frame.f_globals["__name__"]), name[:-2] if name.endswith("()") else name, arguments)
        if call in self.seen:
            return None
        self.seen.add(call)
        self.counts[code] = self.counts.get(code, 0) + 1
        inside = code.co_filename in self.changed
        if code.co_flags & GENERATOR:
            self.say(["call", *call, inside, [["iterator", None]]])
            return None
        frame.f_trace_lines = False
        return Ending(call, inside, self.say).note

    def crosses(self, frame: types.FrameType, name: str) -> bool:
        at = frame.f_back
        while at is not None and not at.f_code.co_filename.startswith(self.inside):
            at = at.f_back
        if at is None:
            return False
        here, caller = frame.f_code.co_filename, at.f_code.co_filename
        private = any(part.startswith("_") for part in name.split("."))
        return caller in self.sealed or (caller != here and here in self.changed and not private)


class Ending:
    """A tracer that reports one call's end."""

    def __init__(self, call: tuple[str, str, str], inside: bool, say: Say) -> None:
        self.place, self.inside, self.say = call, inside, say
        self.raised = ""

    def note(self, frame: types.FrameType, event: str, value: typing.Any) -> typing.Any:
        if event == "exception":
            self.raised = value[0].__name__
        elif event == "return":
            # None is returned, or an exception goes on: a trace function is not told which.
            ends: list[list[Json]] = [["raised", self.raised]] if value is None and self.raised else []
            try:
                ends.append(["returned", encode(value)])
            except NotPlain:
                ends.append(["iterator" if isinstance(value, typing.Iterator) else "other", None])
            self.say(["call", *self.place, self.inside, ends])
        return self.note


def qualified(code: types.CodeType, names: dict[str, typing.Any]) -> tuple[str, types.FunctionType | None]:
    """Return the function of `code` and the name by which a module's namespace leads to it. A class method's ends with ()."""
    if code.co_flags & ASYNCHRONOUS:
        return "", None
    if function := _behind(names.get(code.co_name), code):
        return code.co_name, function
    for kind in list(names.values()):
        if isinstance(kind, type) and kind.__module__ == names.get("__name__") and "<" not in kind.__qualname__:
            member = vars(kind).get(code.co_name)
            if isinstance(member, (staticmethod, classmethod)) and (function := _behind(member.__func__, code)):
                return kind.__qualname__ + "." + code.co_name + "()" * isinstance(member, classmethod), function
    return "", None


def _behind(value: typing.Any, code: types.CodeType) -> types.FunctionType | None:
    """Return the function of `code` that `value` is, or wraps."""
    for _ in range(10):
        if isinstance(value, types.FunctionType) and value.__code__ is code:
            return value
        value = getattr(value, "__wrapped__", None)
    return None


def arguments_of(frame: types.FrameType, function: types.FunctionType, drop_first: bool) -> Json:
    """Return the arguments of a call that begins: positional ones, and those by name, without defaults. Raises NotPlain."""
    code, variables = frame.f_code, frame.f_locals
    count = code.co_argcount
    places = code.co_varnames[: count + code.co_kwonlyargcount]
    positional = [variables[name] for name in places[drop_first:count]]
    defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    named = {
        name: variables[name] for name in places[count:] if not (name in by_name and variables[name] is by_name[name])
    }
    rest = list(code.co_varnames[len(places) :])
    more = variables[rest.pop(0)] if code.co_flags & inspect.CO_VARARGS else ()
    if code.co_flags & inspect.CO_VARKEYWORDS:
        named.update(variables[rest.pop(0)])
    least = len(positional) if more else len(positional) - len(defaults)
    while len(positional) > least and positional[-1] is defaults[len(positional) - least - 1]:
        positional.pop()
    return [encode([*positional, *more]), encode(named)]
