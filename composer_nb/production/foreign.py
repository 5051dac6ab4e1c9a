"""Environments of others, wherever `MODULE:CLASS` names one: `openenv:MODULE:ENV:ACTION[:COUNT]` and `verifiers:NAME[:COUNT]`.

An episode of OpenEnv is a task whose tool `act` takes an action and answers with the observation. An example of verifiers is a
task with the tools of its toolsets and a tool `answer`, whose text its rewards score. This package's loop plays both, so RL on
them has exact tokens, groups and replay. Their code runs in this process, unlike the tasks of this package, so load only what
you trust. References: Meta's openenv (0.10; `core/env_server/interfaces.py`), PrimeIntellect's verifiers (0.4; `v1/task.py`).
"""

import asyncio
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from random import Random
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.plain import import_for_user
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.harbor import first_problem
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.arguments import Arguments, Content, printable
from composer_nb.harness.tools.session import Observation, Session
from composer_nb.harness.tools.tool_call import Tool, ToolError, invalid
from composer_nb.harness.tools.toolset import ToolSet

# Tasks of an environment whose name says no number.
COUNT = 128
# Reward from which a task counts as solved.
SOLVED = 1.0
# Module in a task's workspace that holds its reward so far.
EPISODE = "episode.py"
INTRO = "Call act until the episode ends. The first observation:"
# Most actions of an audited episode.
TURNS = 32
# Of an observation, what no policy reads.
HIDDEN = {"metadata", "done", "reward"}
# Answers that solve nothing; each is made from the last message of a prompt.
LAZY: Mapping[str, Callable[[str], str]] = {
    "an empty answer": lambda prompt: "",
    "the request, repeated": lambda prompt: prompt,
    "a refusal": lambda prompt: "I do not know.",
    "many numbers": lambda prompt: " ".join(map(str, range(200))),
    "many choices": lambda prompt: "A B C D yes no true false <answer></answer> \\boxed{}",
}
ONE, RANDOM = "one action, repeated", "random actions"
# Plays of such a kind.
SOME = 6
# Share of tasks at which a play that earns the best reward is a fault; fewest tasks at which one action can be too good.
RULE, LEAST = 0.9, 8


class ForeignEnvironment:
    """Tasks, tools and reward of an environment of others. The reward is the one that tools have put into EPISODE, so that
    stored rollouts can be scored again; the hidden test asks whether it reaches SOLVED."""

    tools: ToolSet

    def instructions(self) -> Sequence[str]:
        raise NotImplementedError

    def tasks(self) -> Iterator[Task]:
        test = render_tests(EPISODE.removesuffix(".py"), "earns", [((SOLVED,), True)])
        for number, instruction in enumerate(self.instructions()):
            fields: dict[str, Any] = {"files": {EPISODE: _module(number, 0.0)}, "tests": {"test_episode.py": test}}
            yield Task(id=f"episode-{number}", instruction=instruction, source_scope=(EPISODE,), **fields)

    def reward(self, rollout: Rollout, grade: Grade) -> float:
        return float(_constant(rollout.files[EPISODE], "REWARD"))


def _module(number: int, reward: float) -> str:
    """Return the text of EPISODE."""
    return f"NUMBER = {number}\nREWARD = {reward!r}\n\n\ndef earns(least):\n    return REWARD >= least\n"


def _constant(text: str, name: str) -> str:
    """Return the text of a constant in EPISODE."""
    return text.partition(f"{name} = ")[2].partition("\n")[0]


def _number(session: Session) -> int:
    return int(_constant(session.text(EPISODE), "NUMBER"))


def _pay(session: Session, name: str, number: int, reward: float) -> None:
    """Store the reward so far. Raises SandboxFailure if it is not finite: nothing is known of the policy then."""
    if not math.isfinite(reward):
        raise SandboxFailure(f"{name}, task {number}: its reward is {reward}")
    session.store(EPISODE, _module(number, reward))


def open_environment(name: str) -> ForeignEnvironment:
    """Return the environment of a name, which a number of tasks may end. Raises ValueError."""
    kind, _, rest = name.partition(":")
    start, _, end = rest.rpartition(":")
    rest, count = (start, int(end)) if end.isdecimal() and int(end) else (rest, COUNT)
    return OpenEnvEpisodes(rest, count) if kind == "openenv" else VerifiersExamples(rest, count)


def load_openenv(name: str) -> tuple[Any, type[BaseModel]]:
    """Return an environment, or a client of one, and the class of its actions. Raises ValueError."""
    parts = name.split(":")
    if len(parts) != 3:
        raise ValueError(f"openenv:{name}: write openenv:MODULE:ENVIRONMENT:ACTION, and :COUNT for the number of tasks")
    try:
        module = import_for_user(parts[0])
        environment, action = (getattr(module, part) for part in parts[1:])
    except (ImportError, AttributeError) as error:
        raise ValueError(f"openenv:{name}: {error} (pip install openenv brings the library)") from None
    return environment(), action


def _text(result: Any) -> str:
    """Return what a policy reads of an observation, or of the result of a client's step."""
    observation = result if isinstance(result, BaseModel) else result.observation
    if isinstance(observation, BaseModel):
        return observation.model_dump_json(exclude=HIDDEN)
    return json.dumps(observation, default=str)


class OpenEnvEpisodes(ForeignEnvironment):
    """Episodes of an environment of OpenEnv, one for each seed, or for each row of a data set that it lists (`TaskProvider`)."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count, (environment, self._action) = name, count, load_openenv(name)
        _close(environment)
        if getattr(environment, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
            raise ValueError(f"openenv:{name}: keeps to one thread; run it behind its server, and name a client")
        fields: dict[str, Any] = {key: (info.annotation, info) for key, info in self._action.model_fields.items()}
        fields.pop("metadata", None)
        arguments = create_model("act", __base__=Arguments, **fields)
        description = "Act in the environment, which answers with an observation."
        act = Tool(name="act", description=description, arguments=arguments, run=self._act, mutates=True)
        self.tools = ToolSet(tools={act.name: act}, terse=True)

    @cached_property
    def _episodes(self) -> list[tuple[dict[str, Any], str]]:
        """The arguments of `reset`, and the first observation, of each task. Raises ValueError if an episode does not begin twice
        in the same way."""
        environment = load_openenv(self._name)[0]
        try:
            resets: list[dict[str, Any]] = [{"seed": seed} for seed in range(self._count)]
            if hasattr(environment, "num_tasks"):
                count = min(self._count, environment.num_tasks("train"))
                resets = [{"split": "train", "index": index} for index in range(count)]
            first, *texts = [_text(environment.reset(**reset)) for reset in (*resets[:1], *resets)]
        finally:
            _close(environment)
        if first != texts[0]:
            raise ValueError(f"openenv:{self._name}: two calls of reset with {resets[0]} differ; it must use its seed")
        return list(zip(resets, texts, strict=True))

    def instructions(self) -> list[str]:
        return [f"{INTRO}\n{observation}" for _, observation in self._episodes]

    def _act(self, session: Session, **arguments: Any) -> Observation:
        """Take an action in the session's own environment. Raises ToolError for what is no action, and SandboxFailure if the
        environment fails: nothing is known of the policy then."""
        try:
            action = self._action.model_validate(arguments)
        except ValidationError as error:
            raise invalid(printable(first_problem(error))) from None
        number = _number(session)
        try:
            if "environment" not in session.custom:
                session.custom["environment"] = load_openenv(self._name)[0]
                session.custom["environment"].reset(**self._episodes[number][0])
            result = session.custom["environment"].step(action)
        except Exception as error:  # the code of others
            raise SandboxFailure(f"openenv:{self._name}, episode {number}: {error!r:.300}") from error
        total = float(_constant(session.text(EPISODE), "REWARD")) + float(result.reward or 0)
        _pay(session, f"openenv:{self._name}", number, total)
        return Observation(text=_text(result), ends=bool(result.done))


def _close(environment: Any) -> None:
    getattr(environment, "close", lambda: None)()


async def _awaited(function: Callable[..., Any], *values: Any, **arguments: Any) -> Any:
    """Return the result of a function, awaited if it has to be."""
    result = function(*values, **arguments)
    return await result if inspect.isawaitable(result) else result


class VerifiersExamples(ForeignEnvironment):
    """Examples of a taskset of verifiers. Raises ValueError for one that only verifiers' own loop can play."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        try:
            self._library = vf = import_module("verifiers.v1")
            self._decorated = import_module("verifiers.v1.utils.decorators").discover_decorated
            self._taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name))
            self.examples = [*self._taskset.take(count)]
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"verifiers:{name}: {error} (pip install 'verifiers>=0.4' brings the library)") from None
        for example in self.examples:
            if obstacle := self._obstacle(example):
                raise ValueError(f"verifiers:{name}: example {example.data.idx} needs {obstacle}: verifiers plays it")
        answer = Tool(
            name="answer",
            description="Give your final answer, in the form that the task asks for. It ends the task.",
            arguments=create_model("answer", __base__=Arguments, text=(Content, ...)),
            run=self._answer,
            ends=True,
        )
        toolsets = self._toolsets(self.examples[0]) if self.examples else []
        tools = [tool for index, toolset in enumerate(toolsets) for tool in self._tools(index, toolset)]
        self.tools = ToolSet(tools={tool.name: tool for tool in (*tools, answer)}, terse=True)

    def _toolsets(self, example: Any) -> list[Any]:
        taskset = self._taskset
        return [*type(example).toolsets(example.config), *type(taskset).toolsets(taskset.config)]

    def _obstacle(self, example: Any) -> str:
        """Return why this package's loop cannot play an example; nothing if it can."""
        vf, data, kind = self._library, example.data, type(example)
        state_of = import_module("verifiers.v1.state").state_cls
        changed = [hook for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(vf.Task, hook)]
        scores = [*example.hooks("reward"), *example.hooks("metric")]
        runtimes = [inspect.signature(score).parameters.get("runtime") for score in scores]
        needs_runtime = any(p and p.default is p.empty for p in runtimes)
        request = self._request(example) if data.prompt else []
        texts = [m.content for m in request if m.role != "assistant" and isinstance(m.content, str)]
        obstacles = {
            "a loop of its own": vf.environment_class(self._name) is not vf.SingleAgentEnv,
            "a runtime": kind.NEEDS_CONTAINER or data.image or changed or needs_runtime,
            "hooks in its conversation": example.hooks("stop") or self._decorated(example, "intercept"),
            "a state of its own": {state_of(kind), *map(state_of, map(type, self._toolsets(example)))} != {vf.State},
            "a user who begins, or a prompt that is more than text": not texts or len(texts) < len(request),
        }
        return next((obstacle for obstacle, holds in obstacles.items() if holds), "")

    def _tools(self, index: int, toolset: Any) -> Iterator[Tool]:
        """Yield the tools of a toolset."""
        for method in self._decorated(toolset, "tool"):
            name = "_".join(filter(None, (toolset.server_name, getattr(method, "tool_name", None) or method.__name__)))
            fields: dict[str, Any] = {
                name: (p.annotation, ... if p.default is p.empty else p.default)
                for name, p in inspect.signature(method, eval_str=True).parameters.items()
            }
            arguments = create_model(name, __base__=Arguments, **fields)
            run, description = partial(self._call, index, method.__name__, name), inspect.getdoc(method) or ""
            yield Tool(name=name, description=description, arguments=arguments, run=run, mutates=True)

    def _opened(self, session: Session) -> dict[str, Any]:
        """Return the example of a session with its toolsets, set up on first use, their event loop, and the messages so far."""
        if "example" not in session.custom:
            example, loop = self.examples[_number(session)], asyncio.Runner()
            toolsets = self._toolsets(example)
            session.custom |= {"example": example, "toolsets": toolsets, "loop": loop, "messages": []}
            try:
                for index, toolset in enumerate(toolsets):
                    loop.run(_awaited(toolset.setup))
                    if index < len(type(example).toolsets(example.config)):  # not those of the whole taskset
                        loop.run(_awaited(toolset.setup_task, example.data))
            except Exception as error:  # the code of others
                raise SandboxFailure(f"verifiers:{self._name}: its tools: {error!r:.300}") from error
        return session.custom

    def _call(self, index: int, method: str, name: str, session: Session, /, **arguments: Any) -> Observation:
        """Call a tool of verifiers. The agent reads its exceptions, as those of verifiers' servers of tools."""
        vf, opened, error = self._library, self._opened(session), ""
        try:
            result = opened["loop"].run(_awaited(getattr(opened["toolsets"][index], method), **arguments))
        except Exception as failure:  # the code of others
            result = error = printable(f"{failure!r:.300}")
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        call_id, written = f"call_{len(opened['messages'])}", json.dumps(arguments, default=str)
        called = vf.ToolCall(id=call_id, name=name, arguments=written)
        answered = vf.ToolMessage(tool_call_id=call_id, content=text, name=name)
        opened["messages"] += [vf.AssistantMessage(tool_calls=[called]), answered]
        if error:
            raise ToolError("UnexpectedEnvironment", error)
        return Observation(text=text)

    def _answer(self, session: Session, text: str) -> Observation:
        """Score the answer. Raises SandboxFailure if that fails: nothing is known of the policy then."""
        number = _number(session)
        try:
            reward = self.score(self.examples[number], text, self._opened(session)["messages"])
        except Exception as error:  # the code of others
            raise SandboxFailure(f"verifiers:{self._name}, example {number}: {error!r:.300}") from error
        _pay(session, f"verifiers:{self._name}", number, reward)
        return Observation(text="")

    def _request(self, example: Any) -> list[Any]:
        """Return the messages that begin the conversation of an example."""
        vf, data = self._library, example.data
        system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        return [*system, *([vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt)]

    def instructions(self) -> list[str]:
        return ["\n\n".join(message.content for message in self._request(example)) for example in self.examples]

    def score(self, example: Any, answer: str, calls: Sequence[Any] = ()) -> float:
        """Return the sum of an example's weighted rewards for a conversation that ends in an answer. Raises what they raise."""
        vf, nodes = self._library, list[Any]()
        for message in (*self._request(example), *calls, vf.AssistantMessage(content=answer)):
            parent = len(nodes) - 1 if nodes else None
            nodes.append(vf.MessageNode(parent=parent, message=message, sampled=message.role == "assistant"))
        task = vf.TraceTask(type=type(example).__name__, data=example.data, key=example.key, hash=example.hash)
        trace = vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, ok=True)
        trace.stop("agent_completed")
        asyncio.run(example.score(trace))
        return float(trace.reward)


# Returns the action in a turn from its number and the observation; None ends the episode.
Play = Callable[[int, str], Any]


@dataclass(slots=True, kw_only=True)
class _Episode:
    observations: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    ended: bool = False
    error: str = ""

    @property
    def total(self) -> float:
        return sum(float(reward or 0) for reward in self.rewards)


def _played(env: Any, play: Play, seed: int) -> _Episode:
    episode, observation = _Episode(), env.reset(seed=seed)
    episode.observations.append(observation.model_dump_json(exclude=HIDDEN))
    while (
        not observation.done
        and len(episode.rewards) < TURNS
        and (act := play(len(episode.rewards), episode.observations[-1])) is not None
    ):
        observation = env.step(act)
        episode.observations.append(observation.model_dump_json(exclude=HIDDEN))
        episode.rewards.append(observation.reward)
    episode.ended = bool(observation.done)
    return episode


def audit_verifiers(name: str) -> dict[str, Any]:
    """Score answers whose worth is known with the rewards of a taskset.

    Return for each kind of answer at how many examples it was tried, and judged wrongly: a lazy one that earns as much as the
    example's `answer` (or more than 0, where it has none), and that answer itself, if it earns no more than an empty one."""
    environment, wrongs = VerifiersExamples(name, 32), {kind: list[bool]() for kind in ("the answer", *LAZY)}
    for example in environment.examples:
        prompt, answer = example.data.prompt_text, getattr(example.data, "answer", None)
        lazy = {kind: environment.score(example, make(prompt)) for kind, make in LAZY.items()}
        gold = environment.score(example, str(answer)) if answer else None
        for kind, reward in lazy.items():
            wrongs[kind].append(reward > 0 and (gold is None or reward >= gold))
        wrongs["the answer"] += [] if gold is None else [gold <= lazy["an empty answer"]]
    faults = [kind for kind, flags in wrongs.items() if any(flags)]
    return {"examples": len(environment.examples)} | _probed(wrongs, faults)


def _probed(wrongs: Mapping[str, Sequence[bool]], faults: Sequence[str]) -> dict[str, Any]:
    probes = {kind: {"tried": len(flags), "wrong": sum(flags)} for kind, flags in wrongs.items()}
    return {"probes": probes, "faults": [*faults]}


def _blind(env: Any, play: Play, seed: int) -> _Episode:
    try:
        return _played(env, play, seed)
    except Exception as error:  # the code of others
        return _Episode(error=f"{error!r:.200}")


def audit_openenv(name: str, seed_count: int = 16, seconds: float = 55.0, seed: int = 0) -> dict[str, Any]:
    """Play episodes with actions that solve nothing, at `seed_count` seeds or until the time is up.

    Return for each probe how often it was tried and wrong, `faults` (probes that were wrong too often), `tasks` (seeds with
    different episodes) and `errors`. A play is wrong at a task if its reward is above 0 and the best of all plays; random actions
    are if all of them earn it. Chance may pay a play, so it is a fault at nine of ten tasks, as RULE says."""
    began, (shared, action) = time.monotonic(), load_openenv(name)
    plays = _plays(action, seed)
    first_play = plays[RANDOM][0]
    wrongs: dict[str, list[bool]] = {kind: [] for kind in ("a new environment", "the same environment")}
    tasks, all_episodes = dict[str, dict[str, list[_Episode]]](), list[_Episode]()
    for play_seed in range(seed, seed + seed_count):
        if tasks and time.monotonic() - began > seconds:
            break
        played = {
            kind: [_blind(load_openenv(name)[0], play, play_seed) for play in kind_plays]
            for kind, kind_plays in plays.items()
        }
        episodes = [episode for kind_plays in played.values() for episode in kind_plays]
        # Further actions, for exceptions.
        extra = [_blind(shared, play, play_seed) for play in _plays(action, play_seed)[RANDOM]]
        repeated, reused = _blind(load_openenv(name)[0], first_play, play_seed), _blind(shared, first_play, play_seed)
        resets = {str(episode.observations[:1]) for episode in episodes}
        differs = len(resets) > 1 or repr(repeated) != repr(played[RANDOM][0])
        wrongs["a new environment"].append(differs)
        wrongs["the same environment"].append(repr(reused) != repr(repeated) and not differs)
        tasks[repr(episodes)], all_episodes = played, [*all_episodes, *episodes, repeated, *extra]
    unpaid = [outcome.ended and all(reward is None for reward in outcome.rewards) for outcome in all_episodes]
    totals = [outcome.total for outcome in all_episodes]
    wrongs["no reward"] = [no or not math.isfinite(total) for no, total in zip(unpaid, totals, strict=True)]
    wrongs["an exception"] = [bool(episode.error) for episode in all_episodes]
    faults = [kind for kind, flags in wrongs.items() if any(flags)]
    wrongs["no end"] = [not (episode.ended or episode.error) for episode in all_episodes]
    faults += ["no end"] if all(wrongs["no end"]) else []
    for kind, kind_plays in plays.items():
        flags = [[_paid(played, kind, index) for played in tasks.values()] for index in range(len(kind_plays))]
        wrongs[kind] = max(flags, key=sum) if kind != ONE or len(tasks) >= LEAST else []
        faults += [kind] if sum(wrongs[kind]) >= max(1, RULE * len(tasks)) else []
    errors = list(dict.fromkeys(episode.error for episode in all_episodes if episode.error))
    return {"episodes": len(all_episodes), "tasks": len(tasks), **_probed(wrongs, faults), "errors": errors[:3]}


def _paid(played: Mapping[str, Sequence[_Episode]], kind: str, play_index: int) -> bool:
    best_total = max(episode.total for episodes in played.values() for episode in episodes)
    episodes = played[kind] if kind == RANDOM else [played[kind][play_index]]
    return best_total > 0 and all(episode.total == best_total for episode in episodes)


def _plays(action: Any, seed: int) -> dict[str, list[Play]]:
    schema = action.model_json_schema()
    schema.get("properties", {}).pop("metadata", None)

    def act(random: Random | None, text: str = "") -> Any:
        for n in range(100):  # a schema does not say all that is checked
            with suppress(ValueError):
                return action.model_validate(drawn(schema, schema, random or (Random(n) if n else None), text))
        raise ValueError(f"{action.__name__}: no action that was drawn from its schema is valid")

    def lazy(make: Callable[[str], str]) -> Play:
        return lambda turn, observation: act(None, make(observation))

    def drawing(number: int, same_each_turn: bool) -> Play:
        return lambda turn, observation: act(Random(f"{seed} {number} {0 if same_each_turn else turn}"))

    plays = {"the smallest action": [lazy(lambda observation: "")]}
    if act(None, "text") != act(None):
        plays |= {kind: [lazy(make)] for kind, make in LAZY.items() if make("text")}
    return plays | {ONE: [drawing(n, True) for n in range(SOME)], RANDOM: [drawing(n, False) for n in range(SOME)]}


def drawn(schema: Mapping[str, Any], root_schema: Mapping[str, Any], random: Random | None, text: str) -> Any:
    """Return a value of a JSON schema: a random one, or the smallest, with `text` for its texts."""

    def value(subschema: Mapping[str, Any]) -> Any:
        return drawn(subschema, root_schema, random, text)

    if "$ref" in schema:
        return value(root_schema["$defs"][schema["$ref"].rpartition("/")[2]])
    if "const" in schema or ("default" in schema and not (random or text)):
        return schema.get("const", schema.get("default"))
    json_type, choices = schema.get("type"), [*schema.get("anyOf", schema.get("oneOf", ()))]
    if "enum" in schema or choices or json_type == "boolean":
        options = schema.get("enum", choices or [False, True])
        option = random.choice(options) if random else options[0]
        return value(option) if choices else option
    if json_type in ("integer", "number"):
        step = int(json_type == "integer")
        low = schema.get("minimum", schema.get("exclusiveMinimum", -100 - step) + step)
        high = schema.get("maximum", schema.get("exclusiveMaximum", max(low, 0) + 100 + step) - step)
        drawn_number = random.uniform(low, high) if random else min(max(0, low), high)
        return round(drawn_number) if step else drawn_number
    extra, min_length = random.randrange(4) if random else 0, schema.get("minItems", schema.get("minLength", 0))
    if json_type == "string":
        drawn_text = text or (random.choice([make("") for make in LAZY.values()]) if random else "")
        return drawn_text.ljust(min_length, "a")[: schema.get("maxLength")]
    if json_type == "array":
        length = min(min_length + extra, schema.get("maxItems", min_length + extra))
        return [value(schema.get("items", {})) for _ in range(length)]
    required, properties = schema.get("required", ()), schema.get("properties", {})
    names = [name for name in properties if name in required or text or (random and random.random() < 0.5)]
    return {name: value(properties[name]) for name in names} if json_type == "object" else None
