"""The environment of a run: settings for its tasks, tools, chat format and sandboxes."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, update_wrapper
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, cast

from pydantic import Field, TypeAdapter, ValidationError
from tokenizers import Tokenizer

from composer_nb.harness.agent.formats import FORMATS, FormatName
from composer_nb.harness.agent.loop import system_text
from composer_nb.harness.agent.summary import NO_SUMMARIES, SummarySettings
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.agent.user import open_user
from composer_nb.harness.attempt import Agent
from composer_nb.harness.blocking import within
from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.plain import import_for_user
from composer_nb.harness.rewards import OWN, fault
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.contract import WORKSPACE, Backend
from composer_nb.harness.sandbox.egress import destinations
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.fleet import SandboxFleet
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.harness.terms.registry import Term
from composer_nb.harness.tools.search import Indexes
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.harness.tools.web import read_pages


class CustomEnvironment(Protocol):
    """A custom environment: a class without parameters. It may also have `tools`, a ToolSet, and `reward(rollout, grade)`, which
    returns a number and replaces the weighted terms."""

    def tasks(self) -> Iterable[Task]: ...


# The environment of `env.tasks=generated`. It also generates tasks from a seed, and its expert demonstrates any task.
GENERATOR = "composer_nb.tour.environment:Tour"


# Beginnings of the names of environments of others, and the module that makes custom ones of them.
FOREIGN, OPENED_BY = ("openenv:", "verifiers:"), "composer_nb.production.foreign"


@lru_cache(maxsize=8)
def _foreign(name: str) -> CustomEnvironment:
    return cast(CustomEnvironment, import_module(OPENED_BY).open_environment(name))


def _own(name: str) -> CustomEnvironment:
    """Return the single instance of the class that `name` refers to now, since a notebook may redefine it."""
    if name.startswith(FOREIGN):
        return _foreign(name)
    module, _, kind = name.partition(":")
    try:
        return _only(getattr(import_for_user(module), kind))
    except (Exception, SystemExit) as error:
        problem = f"env.tasks={name!r}: neither a path nor MODULE:CLASS that can be imported"
        raise ValueError(f"{problem} ({error!r})") from None


def tasks_of(name: str, environment: CustomEnvironment) -> list[Task]:
    """Return the tasks of a custom environment. Raises ValueError if its class violates the protocol."""
    problem = f"env.tasks={name!r}:"
    if not isinstance(tools := getattr(environment, "tools", ToolSet.tiny()), ToolSet):
        raise ValueError(f"{problem} tools must be a ToolSet, and is {type(tools).__name__}")
    try:
        signature(getattr(environment, "reward", lambda rollout, grade: 0.0)).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{problem} reward must be called as reward(rollout, grade): {error}") from None
    try:
        tasks = list(environment.tasks())
    except (Exception, SystemExit) as error:
        raise fault(f"{problem} tasks()", error) from error
    if not tasks:
        raise ValueError(f"{problem} tasks() has no task")
    if wrong := [task for task in tasks if not isinstance(task, Task)]:
        raise ValueError(f"{problem} tasks() must give Tasks, and gave {type(wrong[0]).__name__}")
    if twice := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise ValueError(f"{problem} tasks() gives the id {twice[0]!r} more than once")
    return tasks


def load_environment(name: str) -> tuple[list[Task], CustomEnvironment | None]:
    """Return the tasks of a path, or of a custom environment (`MODULE:CLASS`) with it. Raises like `load_tasks`, `tasks_of`."""
    environment = EnvSettings(tasks=name).own
    return (tasks_of(name, environment) if environment else load_tasks(Path(name))), environment


@lru_cache(maxsize=8)
def _only(kind: type[CustomEnvironment]) -> CustomEnvironment:
    return kind()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """The source of tasks, and the tools, chat format and sandboxes of agents."""

    tasks: str = "generated"
    """`generated`; or a path: a JSON Lines file, a folder of Harbor task directories, or output of `composer-nb tasks make`; or
    `MODULE:CLASS`, a custom environment (`CustomEnvironment`); or one of others, `openenv:MODULE:ENV:ACTION` or
    `verifiers:NAME` (`production/foreign.py`)."""
    tools: str = "tiny"
    """tiny: search, read, edit a line, undo, run the tests, finish. cursor: the product's tools, which need a sandbox per
    rollout. A comma-separated list of names from one set (tiny ones must include `finish`): these alone, those of the product
    without descriptions, for a short prompt."""
    renderer: FormatName = "compact"
    """The chat format: compact, qwen or kimi. The tokenizer must contain its special tokens."""
    backend: Literal["bwrap", "docker"] = "bwrap"
    """Sandboxes of tasks with the grader `pytest`."""
    web: str = ""
    """JSON Lines file of recorded web pages, which the tool `web_search` searches; empty: no such tool."""
    egress: str = ""
    """Hosts that sandboxes of tasks which need a network may reach, as `example.org:443,example.com:80`. A private host has its
    address in the list, as `mirror=10.0.0.5:8080`. Empty: no network, and such tasks are refused."""
    sandboxes: Annotated[int, Field(ge=1)] = 16
    """Maximum sandboxes per engine that rollouts have of their own, in their conversations and for their grades together."""
    summary: SummarySettings = NO_SUMMARIES
    """Summaries, for conversations that exceed the context."""
    user: Annotated[str, Field(pattern="^(scripted|openai:.+)?$")] = ""
    """Who answers an agent that asks: nobody (empty), scripted (the facts of a task), or openai:URL[#MODEL], a model that knows
    them."""

    def __post_init__(self) -> None:
        """Raise ValueError for unknown tools and a wrong list of hosts."""
        destinations(self.egress)
        try:
            tools = ToolSet.named(self.tools)
        except ValueError as error:
            raise ValueError(f"env.tools={self.tools!r}: {error}, or give tiny or cursor") from None
        if self.web and not tools.needs_sandbox:
            raise ValueError(
                "env.web: web_search is beside the product's tools alone: set env.tools=cursor, or a list of them"
            )

    @property
    def path(self) -> Path | None:
        """The path of the tasks; None if they are generated."""
        return None if self.tasks == "generated" else Path(self.tasks).expanduser()

    @property
    def own(self) -> CustomEnvironment | None:
        """The environment if `tasks` names a class. Raises ValueError if it cannot be imported."""
        return _own(self.tasks) if ":" in self.tasks and not Path(self.tasks).exists() else None

    @property
    def generator(self) -> Any:
        """The tour (`tour.environment.Tour`)."""
        return _own(GENERATOR)

    @property
    def toolset(self) -> ToolSet:
        if tools := getattr(self.own, "tools", None):
            return cast(ToolSet, tools)
        return ToolSet.named(self.tools, Indexes()).with_web(read_pages(self.web))

    def reward_function(self, seconds: float) -> Term | None:
        """Return the reward of a custom environment that has one. A reward that is in the grade already is taken as it is. A call
        that does not return within `seconds` raises CallTimeout, and one too many TooManyBlocked."""
        term: Term | None = getattr(self.own, "reward", None)
        if term is None:
            return None

        def reward(rollout: Rollout, grade: Grade) -> float:
            if OWN in grade.rewards:
                return grade.rewards[OWN]
            until, name = time.monotonic() + seconds, f"the reward of {self.tasks} at {rollout.task_id}"
            return within(lambda: until - time.monotonic(), name, lambda: term(rollout, grade))

        return update_wrapper(reward, term)

    @property
    def boxed(self) -> bool:
        """Whether rollouts may have their own sandbox."""
        return self.path is not None or self.toolset.needs_sandbox


# File in a checkpoint that describes its training environment.
CARRIED = "environment.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The environment that a checkpoint was trained in.

    Attributes:
        tools: The value of `env.tools`, or the `MODULE:CLASS` that defined the tools.
    """

    renderer: FormatName
    tools: str
    limits: Limits | None = None
    summary: SummarySettings = NO_SUMMARIES


def trained_in(env: EnvSettings, limits: Limits) -> Carried:
    """Return the environment in which a run with these settings trains."""
    tools = env.tasks if hasattr(env.own, "tools") else env.tools
    return Carried(renderer=env.renderer, tools=tools, limits=limits, summary=env.summary)


def carry(path: Path, env: EnvSettings, limits: Limits) -> None:
    """Write the training environment beside the weights in `path`."""
    write_json(path / CARRIED, asdict(trained_in(env, limits)))


TO_CONVERT = "no checkpoint folder, but a file; composer-nb convert FILE DIR makes a checkpoint of a GGUF file"


def carried(path: Path, renderer: str) -> Carried:
    """Return the environment that the checkpoint in `path` was trained in. Without such a file, the chat format is `renderer`,
    that of its tokenizer, and the tools are the tiny ones for the compact format, else the product's. Raises ValueError if the
    file is damaged."""
    file = path / CARRIED
    if not file.is_file():
        return Carried(renderer=renderer, tools="tiny" if renderer == "compact" else "cursor")
    try:
        return read_carried(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: damaged ({error}); write it again, or remove it") from None


def read_carried(text: bytes | str) -> Carried:
    """Return a `Carried` from its JSON. Raises ValueError if it is invalid."""
    try:
        return TypeAdapter(Carried).validate_json(text)
    except ValidationError as error:
        [first, *_] = error.errors()
        raise ValueError(f"{'.'.join(map(str, first['loc']))} {first['msg']}") from None


class Sandboxes:
    """The sandboxes of a process: an executor that calls functions, and a backend of sandboxes with a workspace. Each is opened
    on first use. This is a context manager."""

    def __init__(self, env: EnvSettings | None = None, run_id: str | None = None, journal: Path | None = None) -> None:
        """`journal`: folder of the run's journal (`reap.py`)."""
        self._env, self._run_id, self._journal = env or EnvSettings(), run_id, journal
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Call functions. Raises SandboxFailure if a sandbox fails."""
        return self.functions.run(requests)

    @cached_property
    def functions(self) -> CachedExecutor:
        """The executor. Raises SandboxUnavailable if no function can be called in a sandbox here."""
        opened = SandboxExecutor(run_id=self._run_id, journal=self._journal)
        return CachedExecutor(self._stack.enter_context(opened))

    @cached_property
    def backend(self) -> Backend:
        """The backend, with a fleet before it. Raises SandboxUnavailable if it cannot work here."""
        backend = open_backend(self._env.backend, self._run_id, self._journal, self._env.egress)
        return self._stack.enter_context(SandboxFleet([backend]))


def require_sandboxes(env: EnvSettings) -> None:
    """Raise SandboxUnavailable, which names the setting, if the sandboxes of an environment cannot be created here."""
    try:
        with Sandboxes(env) as sandboxes:
            _ = env.boxed and sandboxes.backend
            _ = env.path or sandboxes.functions
    except SandboxUnavailable as error:
        # Generated tasks call functions, which bubblewrap alone can.
        named = f"env.backend={env.backend}" if env.boxed else "env.tasks=generated"
        raise SandboxUnavailable(f"{named}: {error}") from None


def make_agent(env: EnvSettings, tokenizer: Tokenizer, limits: Limits, sandboxes: Sandboxes | None = None) -> Agent:
    """Return the agent of an environment. Raises ValueError for a tokenizer that lacks the tokens of the chat format."""
    tools = env.toolset
    backend = sandboxes.backend if sandboxes and env.boxed else None
    renderer = FORMATS[env.renderer](tokenizer, tools.schemas)
    user = open_user(env.user)
    system = system_text(WORKSPACE, answered=user is not None, egress=env.egress)
    return Agent(renderer, tools, limits, backend=backend, system=system, summary=env.summary, user=user)
