"""Environments of others: those of `verifiers`, named `verifiers:NAME`, and of OpenEnv, named `openenv:MODULE:ENV:ACTION`.

A verifiers environment keeps its own loop, tools and rubric, and asks an endpoint for turns. An OpenEnv environment gets one
action a turn: the JSON object that the policy writes. Both run in this process, unlike the tasks of this package, so load only
what you trust. References: PrimeIntellect's verifiers (0.3), Meta's openenv-core (0.3).

Training on them needs no access to their loop: `composer-nb serve --record` keeps the tokens, `grade` sends the rewards when all
attempts have ended, and `composer-nb improve` learns from them, the rollouts of an example as a group.
"""

import asyncio
import json
import math
import os
import time
import uuid
from asyncio import Semaphore
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from random import Random
from typing import Annotated, Any

import httpx
import numpy as np
from pydantic import Field

from composer_nb.harness.agent.chat import User
from composer_nb.harness.agent.turns import TurnPolicy
from composer_nb.harness.bench import bootstrap
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.production.policies import equipment, open_endpoint, open_policy, parse_policy

KINDS = ("verifiers:", "openenv:")
# Most actions of an episode.
TURNS = 32
# Rollouts of verifiers side by side.
AT_ONCE = 16
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


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = {"verifiers": "'verifiers<0.4'", "openenv.core": "openenv-core"}.get(name)
        what = f"needs a package: pip install {package}" if package else "cannot be imported"
        raise ValueError(f"{name}: {what} ({error})") from None


def load_verifiers(name: str) -> Any:
    """Return the environment that the installed package `name` has. Raises ValueError."""
    library = _library("verifiers")
    if not hasattr(library, "load_environment"):
        raise ValueError("verifiers: this version has no load_environment; pip install 'verifiers<0.4'")
    try:
        return library.load_environment(name)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"verifiers:{name}: {error}") from None


def load_openenv(name: str) -> tuple[Any, Any]:
    """Return an environment and the class of its actions. Raises ValueError."""
    parts = name.split(":")
    if len(parts) != 3:
        raise ValueError(f"openenv:{name}: write openenv:MODULE:ENVIRONMENT:ACTION")
    _library("openenv.core")
    try:
        environment, action = (getattr(_library(parts[0]), part) for part in parts[1:])
    except AttributeError as error:
        raise ValueError(f"openenv:{name}: {error}") from None
    return environment(), action


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """One attempt at an example.

    Attributes:
        rollout: Its name, if it is recorded.
        reward: None: it was lost.
        tokens: None: they were not counted.
    """

    example: Any
    rollout: str
    reward: float | None
    tokens: float | None


def _row(played: Sequence[_Played], seed: int) -> dict[str, Any]:
    """Return the figures of attempts, with a 95 % interval over examples. Raises ValueError if none has a reward."""
    rewarded = [attempt for attempt in played if attempt.reward is not None]
    lost = len(played) - len(rewarded)
    if not rewarded:
        raise ValueError(f"no attempt has a reward, {lost} were lost; is the endpoint reachable?")
    rewards: dict[Any, list[float]] = {}
    for attempt in rewarded:
        rewards.setdefault(attempt.example, []).append(attempt.reward or 0.0)
    means = np.array([np.mean(values) for values in rewards.values()])
    tokens = [attempt.tokens for attempt in rewarded if attempt.tokens is not None]
    return {
        "reward": float(means.mean()),
        "ci95": bootstrap(means, seed),
        "best_of_k": float(np.mean([max(values) for values in rewards.values()])),
        "k": max(map(len, rewards.values())),
        "n_tasks": len(rewards),
        "tokens_per_task": float(np.mean(tokens)) if tokens else None,
        "lost": lost,
        "attempts": len(played),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSettings:
    """Settings of such an evaluation.

    Attributes:
        count: Examples of verifiers (0: all), or episodes of OpenEnv (0: 16).
        grade: Send each reward to the policy's server, which records (`composer-nb serve --record`).
    """

    count: Annotated[int, Field(ge=0)] = 0
    temperature: float = 1.0
    seed: int = 0
    grade: bool = False


def evaluate_foreign(policy: str, tasks: str, samples: int, settings: ForeignSettings | None = None) -> dict[str, Any]:
    """Return the rewards of a policy, `samples` times at each example: the mean with its 95 % interval over examples, and the
    best of k. Raises ValueError, ProviderFailure."""
    s = settings or ForeignSettings()
    kind, _, name = tasks.partition(":")
    if s.grade:
        _require_record(policy)
    played = (_play_openenv if kind == "openenv" else _play_verifiers)(policy, name, samples, s)
    if s.grade:
        _grade(policy, tasks, played)
    return _row(played, s.seed)


def _play_openenv(policy: str, name: str, samples: int, s: ForeignSettings) -> list[_Played]:
    played, batch, limits = list[_Played](), uuid.uuid4().hex[:8], equipment(policy)[1]
    opened = partial(open_policy, system="", schemas=[], limits=limits, temperature=s.temperature, seed=s.seed)
    with ExitStack() as stack:
        shared = None if s.grade else stack.enter_context(opened(policy))
        for n in range((s.count or 16) * samples):
            rollout = f"{batch}-{n}"
            with nullcontext(shared) if shared else opened(f"openai:{_address(policy, rollout)}") as cast:
                environment = load_openenv(name)
                reward, tokens = _episode(*environment, cast(None, n), s.seed + n // samples, limits.seconds)
            played.append(_Played(example=n // samples, rollout=rollout, reward=reward, tokens=tokens))
    return played


def _play_verifiers(policy: str, name: str, samples: int, s: ForeignSettings) -> list[_Played]:
    if parse_policy(policy)[0] != "openai":
        raise ValueError(f"--policy {policy}: verifiers asks an endpoint, which `composer-nb serve` makes of a folder")
    env, endpoint = load_verifiers(name), open_endpoint(parse_policy(policy)[1])
    key = "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else "COMPOSER_NB_NO_KEY"
    os.environ.setdefault("COMPOSER_NB_NO_KEY", "none")  # the library refuses an empty one
    connect = partial(_library("verifiers.types").ClientConfig, api_key_var=key, max_retries=2)
    batch, rows = uuid.uuid4().hex[:8], env.get_eval_dataset(n=s.count or -1).to_list()

    async def play(number: int, at: Semaphore) -> _Played:
        rollout, row = f"{batch}-{number}", rows[number // samples]
        url = _address(policy, rollout).partition("#")[0] if s.grade else endpoint.url
        sampling = {**(env.sampling_args or {}), "temperature": s.temperature}
        async with at:
            result = await env.run_rollout(row, connect(api_base_url=url), endpoint.model, sampling)
        reward = None if result.get("error") else float(result["reward"])
        tokens = sum(result["token_usage"].values()) if result.get("token_usage") else None
        return _Played(example=row["example_id"], rollout=rollout, reward=reward, tokens=tokens)

    async def all_of_them() -> list[_Played]:
        at = Semaphore(AT_ONCE)
        return await asyncio.gather(*(play(number, at) for number in range(len(rows) * samples)))

    return asyncio.run(all_of_them())


def _address(policy: str, rollout: str) -> str:
    """Return the address, and model if one is named, at which a server records what is asked as one rollout."""
    url, mark, model = parse_policy(policy)[1].partition("#")
    return f"{url.rstrip('/').removesuffix('/v1')}/rollouts/{rollout}/v1{mark}{model}"


def _verdict(policy: str, rollout: str, **verdict: Any) -> httpx.Response:
    url = _address(policy, rollout).partition("#")[0].removesuffix("/v1") + "/grade"
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.post(url, json=verdict, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60)


def _require_record(policy: str) -> None:
    """Raise ValueError for a policy whose server keeps no rollouts: it would refuse the name of one."""
    reply = parse_policy(policy)[0] == "openai" and _verdict(policy, "none", reward=0.0)
    if not reply or "was recorded here" not in reply.text:
        raise ValueError(f"--set grade=true: {policy} records nothing; serve it with `composer-nb serve --record RUN`")


def _grade(policy: str, tasks: str, played: Sequence[_Played]) -> None:
    for attempt in played:
        if attempt.reward is not None:
            reply = _verdict(policy, attempt.rollout, reward=attempt.reward, task=f"{tasks}#{attempt.example}")
            if reply.is_error:
                raise ProviderFailure(f"{policy}: did not take the reward of {attempt.rollout}: {reply.text}")


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


def _episode(env: Any, action: Any, turn_policy: TurnPolicy, seed: int, seconds: float) -> tuple[float, float]:
    """Play one episode. Return the sum of its rewards, and the tokens where they are counted. What is no action ends it."""
    schema, tokens = json.dumps(action.model_json_schema()), 0.0
    prompt = f"Act in an environment. Answer each observation with one JSON object, of this schema:\n{schema}\n\n"

    def play(turn: int, observation: str) -> Any:
        nonlocal tokens
        with suppress(ValueError, TimeIsUp):  # a ValueError also for what lies outside of the schema
            news = User(text=observation if turn else prompt + observation)
            spoken = turn_policy.say([news], time.monotonic() + seconds)
            if spoken is not None:
                tokens += spoken.read + spoken.written
                text = spoken.message.text
                return action.model_validate_json(text[text.find("{") : text.rfind("}") + 1])
        return None

    try:
        return _played(env, play, seed).total, tokens
    finally:
        turn_policy.close()
        with suppress(AttributeError):
            env.close()


def audit_verifiers(name: str) -> dict[str, Any]:
    """Score answers whose worth is known with an environment's own rubric.

    Return for each kind of answer at how many examples it was tried, and judged wrongly: a lazy one that earns as much as the
    example's answer (or more than 0, where it has none), and an answer, word for word, that earns no more than an empty one."""
    env, types = load_verifiers(name), _library("verifiers.types")
    rows = [dict(row) for row in env.get_eval_dataset(n=32)]

    async def score(row: Mapping[str, Any], text: str) -> float:
        example = {"answer": "", "info": {}, **row}
        state = await env.init_state(example, client=types.ClientConfig(), model="none")
        state["completion"] = [types.AssistantMessage(content=text)]
        await env.rubric.score_rollout(state)
        return float(state["reward"])

    async def tried() -> dict[str, list[bool]]:
        wrongs: dict[str, list[bool]] = {kind: [] for kind in ("the answer", *LAZY)}
        for row in rows:
            lazy = {kind: await score(row, make(row["prompt"][-1]["content"])) for kind, make in LAZY.items()}
            gold = await score(row, str(row["answer"])) if row.get("answer") else None
            for kind, reward in lazy.items():
                wrongs[kind].append(reward > 0 and (gold is None or reward >= gold))
            wrongs["the answer"] += [] if gold is None else [gold <= lazy["an empty answer"]]
        return wrongs

    results = asyncio.run(tried())
    return {"examples": len(rows)} | _probed(results, [kind for kind, wrong in results.items() if any(wrong)])


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
    wrongs["no reward"] = [
        is_unpaid or not math.isfinite(outcome.total) for is_unpaid, outcome in zip(unpaid, all_episodes, strict=True)
    ]
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
