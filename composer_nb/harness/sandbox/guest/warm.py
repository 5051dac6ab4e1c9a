"""Inside a sandbox: runs of Python in copies of the resident program, which has pytest imported before there is an agent.

The process that makes sandboxes imports pytest once (`load`). A command that asks for it is then no new interpreter but a copy of
the resident program, which leaves all that program's frames (`Become`) before it runs anything. What a copy has in memory is what
its sandbox was asked before, and nothing of any other's.

Covers `python3 … -c TEXT` and `python … -m pytest`. Does not cover commands for which a new interpreter would differ (`suits`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import threading
import time
import types
import typing

from composer_nb.harness.sandbox.system.linux import hide_memory

SEED = "PYTHONHASHSEED"  # of the process that makes sandboxes it is 0
COMMON = ("ast", "datetime", "importlib.util", "inspect", "json", "linecache", "traceback")  # what most copies import
TRIAL = "test_nothing"  # name of the module with the test that does nothing
OPTIONS = (
    ["--tb=short"],
    ["--assert=plain", "--import-mode=importlib", "--noconftest", "-p", "no:terminal", "-p", "no:doctest"],
)
HARMLESS = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
STARTING = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")  # variables that an interpreter reads when it starts


Words = typing.Sequence[str]


class Become(BaseException):
    """Leads out of the resident program, in a copy of it that is to run a command. `args`: those of `run`."""


@functools.lru_cache(maxsize=1)
def load(archive: str, trial: str) -> bool:
    """Import pytest from an archive, and run a test that does nothing, after which later runs find everything ready."""
    path, finders = list(sys.path), list(sys.meta_path)
    sys.path.insert(0, archive)
    try:
        pytest = importlib.import_module("pytest")
        config = importlib.import_module("_pytest.config")
        plugins = ["_pytest." + name for name in config.default_plugins]
        for name in [*plugins, "packaging.requirements", "py"]:  # these two on pytest's behalf, when a test asks for it
            importlib.import_module(name)
        options = ["-s", "-c", os.devnull, "--rootdir", os.path.dirname(trial), "-p", "no:faulthandler"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ready = {pytest.main([*options, "-p", "no:cacheprovider", *more, trial]) for more in 3 * OPTIONS} == {1}
        make_ahead(config)
    except Exception:  # without it, commands are run by new interpreters
        ready = False
    sys.path[:], sys.meta_path[:], tempfile.tempdir = path, finders, None
    sys.path_importer_cache.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pygments", TRIAL)]:
        del sys.modules[name]  # stand-ins of pytest's, which could be taken for a task's own
    gc.collect()
    gc.freeze()
    return ready


def make_ahead(module: typing.Any) -> None:
    """Make the configuration of the first session that each copy starts. Plugins that its options leave out leave it later."""
    ahead, make = [module.get_config()], module.get_config

    def get_config(args: typing.Any = (), plugins: typing.Any = None, **more: typing.Any) -> typing.Any:
        config = ahead.pop() if ahead else make(args, plugins, **more)
        config.invocation_params = config.InvocationParams(args=args or (), plugins=plugins, dir=pathlib.Path.cwd())
        return config

    module.get_config = get_config


def suits(command: Words, variables: typing.Mapping[str, str], usual: typing.Mapping[str, str]) -> bool:
    """Return whether a copy runs a command as a new interpreter would. `variables`: its own. `usual`: those of all commands."""
    environment = {**usual, **variables}
    changed = {name for name, value in environment.items() if value != usual.get(name)} - HARMLESS
    if "-c" in command:
        return environment.get(SEED) == "0" and not any(name.startswith(STARTING) for name in changed - {SEED})
    if "pytest" not in sys.modules or "PATH" in changed or any(name.startswith(STARTING) for name in changed):
        return False
    names = {name.partition(".")[0] for name in sys.modules} | {".local"}
    folders = [".", "src", *environment.get("PYTHONPATH", "").split(":")]
    there = {name.partition(".")[0] or name for at in folders if os.path.isdir(at) for name in os.listdir(at)}
    return names.isdisjoint(there)


def run(command: Words, environment: typing.Mapping[str, str], streams: typing.Sequence[int]) -> typing.NoReturn:
    """Become a command with these variables and streams, and end as it ends."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, 4096)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    hide_memory(False)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    code: object = 0
    try:
        if "-c" in command:
            index = command.index("-c") + 1
            sys.argv = ["-c", *command[index + 1 :]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(command[index], "<string>", "exec"), main.__dict__)
        else:
            index = command.index("pytest")
            sys.argv = ["pytest", *command[index + 1 :]]
            sys.path[:0] = [os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(":"))]
            importlib.import_module("site").main()
            runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    if not isinstance(code, (int, type(None))):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(int(code or 0) & 255)
