"""The functions behind `composer-nb eval` and `composer-nb agent`, for programs that call rather than parse."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.endpoint import EndpointSpeaker
from composer_nb.harness.agent.expert import Script, ScriptedPolicy, blind, expert, searcher
from composer_nb.harness.agent.loop import LIMITS, Told, converse
from composer_nb.harness.agent.prompt import system_text
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent, Attempt, Environment, attempt
from composer_nb.harness.bench import run_eval, summarise
from composer_nb.harness.carry import Blob, carry_back
from composer_nb.harness.environment import RENDERERS, Carried
from composer_nb.harness.files import write_atomic, write_json
from composer_nb.harness.policy import Policy
from composer_nb.harness.product import checkout
from composer_nb.harness.product.arms import arms_of, difference, figures
from composer_nb.harness.product.attempts import attempt_all, check_fit
from composer_nb.harness.product.diff import require_git
from composer_nb.harness.product.work import Work, keep, open_session
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, Executor, SandboxExecutor
from composer_nb.harness.sandbox.contract import WORKSPACE, SandboxDied, SandboxFailure
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.runtime import spec_of
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.policies import equipment, identity, open_endpoint, open_policy, parse_policy, trained_with

ENDPOINT_ROLLOUTS = 8
"""Rollouts at a time of tiny tasks against an endpoint."""
UNCOUNTED = Limits(turn_tokens=1 << 12, tokens=1 << 20)
"""Limits of tiny tasks for a policy whose tokens are not those of a tiny model."""
TINY_SCRIPTS: Mapping[str, Callable[[Task, Random], Script]] = {
    "expert": lambda task, random: expert(task, random, 0.0),
    "searcher": searcher,
    "blind": blind,
}
"""Policies without a model at tiny tasks. `blind` alone does not know the answer."""
Attempts = Callable[[int, float], list[Attempt]]


def evaluate_policy(policy: str, tasks: Path, samples: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Score a policy on tasks of the grader `functions`: the figures of `summarise`, with its name and the seed. See
    `policy_attempts`."""
    seed, sampled, greedy = policy_attempts(policy, tasks, samples, settings)
    return {"policy": policy, "seed": seed, **summarise(sampled, greedy, seed)}


def policy_attempts(
    policy: str, tasks: Path, samples: int, settings: Mapping[str, Any]
) -> tuple[int, list[Attempt], list[Attempt]]:
    """Return the seed, `samples` attempts a task at temperature 1, and a greedy one, at tasks of the grader `functions`. Policies
    are a checkpoint directory, `openai:URL[#MODEL]`, and `scripted:` with a name of TINY_SCRIPTS.

    `settings` are dotted names: `limits.*` (otherwise those that a checkpoint was trained with, or UNCOUNTED), `engine.slots` and
    `seed` matter here. Raises ValueError for other kinds of policy, FileNotFoundError for a missing checkpoint or file.
    """
    from composer_nb.settings import Settings, override
    from composer_nb.trainer.learning.ranks import set_up_process

    kind, name = parse_policy(policy)
    known = trained_with(Path(name)) if kind == "checkpoint" else None
    of_limits = {key: value for key, value in settings.items() if key.startswith("limits.")}
    chosen = override(Settings(), {key: value for key, value in settings.items() if key not in of_limits})
    usual = (known.limits or chosen.limits) if known else UNCOUNTED
    limits = override(BenchSettings(limits=usual), of_limits).limits  # the positions of a default model do not matter
    set_up_process(chosen.seed)
    loaded = load_tasks(tasks)
    with SandboxExecutor() as sandboxes:
        executor = CachedExecutor(sandboxes)
        if kind == "openai":
            attempts = _endpoint_attempts(name, loaded, limits, executor)
        elif kind == "scripted":
            attempts = _scripted_attempts(name, loaded, chosen.seed, limits, executor)
        elif known:
            attempts = _checkpoint_attempts(Path(name), replace(known, limits=limits), loaded, chosen, executor)
        return chosen.seed, attempts(samples, 1.0), attempts(1, 0.0)


def _endpoint_attempts(name: str, tasks: Sequence[Task], limits: Limits, executor: Executor) -> Attempts:
    place = Environment(tools=ToolSet.tiny(), limits=limits, functions=executor)

    def attempts(each: int, temperature: float) -> list[Attempt]:
        endpoint = open_endpoint(name, temperature)

        def one(task: Task) -> Attempt:
            speaker = EndpointSpeaker(endpoint, "", place.tools.schemas, limits, parallel=False)
            return attempt(task, place, speaker)

        with ThreadPoolExecutor(ENDPOINT_ROLLOUTS, thread_name_prefix="endpoint") as pool:
            return list(pool.map(one, [task for task in tasks for _ in range(each)]))

    return attempts


def _scripted_attempts(name: str, tasks: Sequence[Task], seed: int, limits: Limits, executor: Executor) -> Attempts:
    """Return attempts of a script. It has no tokenizer, so one is trained on the tasks, to count its tokens."""
    from composer_nb.trainer.models.tokenizer import train_tokenizer

    if name not in TINY_SCRIPTS:
        raise ValueError(f"--policy scripted:{name}: there is scripted:{', scripted:'.join(TINY_SCRIPTS)}")
    texts = [f"{task.instruction}\n{text}" for task in tasks for text in task.files.values()]
    agent = Agent(CompactRenderer(train_tokenizer(texts, 1024)), limits=limits)

    def made(each: int, temperature: float) -> Policy:
        def random(rollout: int) -> Random:
            return Random(f"{name} {seed} {tasks[rollout // each].id} {rollout % each}")

        script = TINY_SCRIPTS[name]
        return ScriptedPolicy(agent.renderer, lambda rollout: script(tasks[rollout // each], random(rollout)))

    return lambda each, temperature: list(run_eval(made(each, temperature), agent, tasks, executor, each))


def _checkpoint_attempts(
    path: Path, known: Carried, tasks: Sequence[Task], chosen: Any, executor: Executor
) -> Attempts:
    from composer_nb.trainer.engine import Engine
    from composer_nb.trainer.models.checkpoint import load_pretrained
    from composer_nb.trainer.models.tokenizer import load_tokenizer

    if known.tools != "tiny":
        raise ValueError(
            f"--policy {path}: trained with the tools {known.tools}; at these tasks agents have the tiny ones"
        )
    tools, tokenizer = ToolSet.tiny(), load_tokenizer(path, needed=())
    model, renderer = load_pretrained(path), RENDERERS[known.renderer](tokenizer, tools.schemas)
    limits = known.limits or Limits()
    agent = Agent(renderer, tools, limits)

    def made(temperature: float) -> Policy:
        slots, most = chosen.engine.slots, limits.tokens
        return Engine(
            model, stop=renderer.stop, slots=slots, max_length=most, temperature=temperature, seed=chosen.seed
        )

    return lambda each, temperature: list(run_eval(made(temperature), agent, tasks, executor, each))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a bench besides its policy, tasks and tools."""

    limits: Limits = LIMITS
    temperature: float = 1.0
    seed: int = 0


def evaluate_arms(
    policy: str,
    tasks: Sequence[Task],
    out: Path,
    *,
    samples: int = 4,
    arms: str = "all",
    backend: str = "bwrap",
    workers: int = 2,
    settings: BenchSettings | None = None,
    told: Callable[[str, Attempt], None] = lambda arm, done: None,
) -> dict[str, Any]:
    """Attempt every task `samples` times with each arm, `workers` at a time; keep every rollout in `out`. A checkpoint that was
    trained with the tools of tiny models has those in the arm `all`.

    The same call with the same `out` resumes. Returns figures by arm, and for each but the first its gain over the first.
    Raises ValueError for unknown tasks, arms or policies and for an `out` of another policy; SandboxUnavailable,
    ProviderFailure.
    """
    settings = settings or BenchSettings()
    check_fit(tasks)
    own, _ = equipment(policy)
    _claim(out, {"policy": policy, "is": identity(policy), "backend": backend, "settings": asdict(settings)})
    chosen = arms_of(arms)
    drawn = {name: getattr(settings, name) for name in ("limits", "temperature", "seed")}
    found: dict[str, list[Attempt]] = {}
    with open_backend(backend) as made:
        for task in tasks:
            spec_of(task, made)
        for name, arm in chosen.items():
            found[name] = []
            tools = own if own.terse and name == "all" else arm.tools()
            schemas, place = tools.schemas, Environment(backend=made, tools=tools, limits=settings.limits)
            with open_policy(policy, system_text(WORKSPACE), schemas, slots=workers, **drawn) as cast:
                for done in attempt_all(tasks, samples, place, cast, out / name / "attempts", workers):
                    found[name].append(done)
                    told(name, done)
            found[name].sort(key=lambda done: done.task.id)
            save_attempts(out / name / "rollouts.parquet", found[name])
    first = next(iter(found.values()))
    report = {name: figures(attempts, settings.seed) for name, attempts in found.items()}
    for name, attempts in found.items():
        if attempts is not first and (gain := difference(attempts, first, settings.seed)):
            report[name]["gain"] = gain
    whole = {"policy": policy, "seed": settings.seed, "samples": samples, "backend": backend, "arms": report}
    write_json(out / "report.json", whole)
    return whole


def _claim(out: Path, what: Mapping[str, Any]) -> None:
    """Note in `out` what its rollouts depend on. Raises ValueError if it holds rollouts of something else."""
    path, text = out / "bench.json", json.dumps(what, indent=2, sort_keys=True)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"--out {out}: holds rollouts of another policy, backend or settings ({path}); give another")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def new_folder(under: Path, name: str) -> Path:
    """Return a path below `under`, with the time in its name, that does not exist yet."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (f"{name}-{stamp}{end}" for end in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(under / each for each in names if not (under / each).exists())


def run_agent(
    root: Path,
    instruction: str,
    policy: str,
    out: Path,
    *,
    backend: str = "bwrap",
    image: str = "",
    limits: Limits | None = None,
    told: Told = lambda event: None,
    temperature: float = 1.0,
) -> Work:
    """Let an agent work on a copy of a user's repository, in a sandbox, and keep the result in the new folder `out`: `rollout`
    (Parquet and safetensors), `changes.diff` and `verdict.json`, which is `open` until the user decides.

    A checkpoint gets the tools and limits that it was trained with (`environment.carried`), other policies those of the product.

    `image`: Docker image with the dependencies of the repository, for the backend `docker`. The repository itself is not
    touched. Raises ValueError for an instruction that is empty or not Unicode, a repository that is empty or too large, an
    unknown policy; SandboxUnavailable; ProviderFailure for an endpoint that does not answer at all.
    """
    if not instruction.strip():
        raise ValueError("agent: the instruction is empty; say what to do")
    if any("\ud800" <= letter <= "\udfff" for letter in instruction):
        raise ValueError("agent: the instruction is not UTF-8")
    if image and backend != "docker":
        raise ValueError(f"--image {image}: the backend {backend} has no images; use --backend docker")
    require_git()
    source = checkout.read_checkout(root)
    if out.exists():
        raise FileExistsError(f"{out}: exists already; give --out a new folder")
    tools, usual = equipment(policy)
    limits = limits or usual
    with open_backend(backend) as made, open_session(source, tools, made, image) as (session, system):
        with open_policy(policy, system, tools.schemas, limits=limits, temperature=temperature, slots=1) as cast:
            speaker = cast(None, 0)
            try:
                done = converse(instruction, speaker, tools, session, limits, told)
            finally:
                segment = speaker.close()
        changes, others, lost = dict[str, Blob | None](), frozenset[str](), ""
        try:
            changes, others = checkout.changed(source, *carry_back(session.sandbox))
        except (SandboxDied, SandboxFailure, OSError) as error:  # the conversation is kept all the same
            lost = str(error)
    work = Work(path=out, source=source, conversation=done, changes=changes, others=others, lost=lost)
    keep(work, instruction, segment, policy)
    return work
