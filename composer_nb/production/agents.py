"""The functions behind `composer-nb eval` and `composer-nb agent`, for programs that call rather than parse."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.loop import LIMITS, Told, converse, silent, system_text
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.agent.summary import NO_SUMMARIES, SummarySettings
from composer_nb.harness.agent.turns import Limits, TokenTurnPolicy
from composer_nb.harness.attempt import Environment
from composer_nb.harness.carry import Blob, carry_back
from composer_nb.harness.files import write_atomic, write_json
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.contract import WORKSPACE
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.making.options import given_packages
from composer_nb.harness.tasks.runtime import spec_of
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.production import checkout
from composer_nb.production.arms import TINY_ARMS, Arm, arms_of, detectable, difference, figures
from composer_nb.production.attempts import attempt_all, check_fit
from composer_nb.production.diff import require_git
from composer_nb.production.planner import TaskPlan, make_plans, with_plans
from composer_nb.production.policies import Cast, equipment, identity, known_training, open_policy, parse_policy
from composer_nb.production.work import Work, keep, open_session
from composer_nb.tour.expert import GREPPING, TINY_SCRIPTS, Script, ScriptedPolicy
from composer_nb.trainer.records.provenance import package_digest

WORKERS = {True: 16, False: 2}
"""Rollouts at a time: of tasks of the grader `functions`, and of tasks with sandboxes of their own."""
UNCOUNTED = Limits(turn_tokens=1 << 12, tokens=1 << 20)
"""Limits at tasks of the grader `functions` for a policy whose tokens are not those of a tiny model."""


LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a bench besides its policy, tasks and tools."""

    limits: Limits = LIMITS
    summary: SummarySettings = NO_SUMMARIES
    temperature: float = 1.0
    seed: int = 0


def bench_settings(policy: str, tasks: Sequence[Task], changes: Mapping[str, Any]) -> BenchSettings:
    """Return the settings of a bench: the limits that a checkpoint was trained with, or usual ones, and `changes` by their dotted
    names. Raises ValueError, FileNotFoundError."""
    from composer_nb.trainer.settings import override

    tiny, training = check_fit(tasks), known_training(policy)
    usual = (training and training.limits) or (LIMITS if training or not tiny else UNCOUNTED)
    return override(BenchSettings(limits=usual), changes)


def evaluate(
    policy: str,
    tasks: Sequence[Task],
    out: Path,
    *,
    samples: int = 4,
    greedy: bool = False,
    arms: str = "all",
    backend: str = "bwrap",
    workers: int = 0,
    settings: BenchSettings | None = None,
    price: tuple[float, float] | None = None,
    planner: str = "",
    planner_price: tuple[float, float] | None = None,
    tools: ToolSet | None = None,
    on_attempt: Callable[[str, Attempt], None] = lambda arm, attempt: None,
) -> dict[str, Any]:
    """Attempt every task `samples` times with each arm, `workers` at a time (0: as many as WORKERS says), and once at temperature
    0 if `greedy`; keep every rollout in `out`. Agents have the tools of tiny models at tasks of the grader `functions`, and in
    the arm `all` with a checkpoint that was trained with them. `planner`, another policy, adds the arm `planned` (`planner.py`),
    with the tools of the first. `tools`: those of the arm `all`, of an environment of your own.

    The same call with the same `out` resumes. Returns the figures of the first arm and figures by arm, and for each but the first
    its gain over the first. Raises ValueError for unknown tasks, arms or policies and for an `out` of another policy;
    SandboxUnavailable, ProviderFailure.
    """
    tiny, training = check_fit(tasks), known_training(policy)
    policy_tools = tools or equipment(policy)[0]
    settings = settings or bench_settings(policy, tasks, {})
    chosen = _tiny_arms(policy, arms, bool(tools) or policy_tools.terse or not training) if tiny else arms_of(arms)
    _claim(out, {"policy": policy, "is": identity(policy), "backend": backend, "settings": asdict(settings)})
    smallest = detectable(len(tasks), samples)
    LOG.info("%d tasks, %d rollouts each: a difference below %.3f may not show", len(tasks), samples, smallest)
    attempts_by_arm: dict[str, tuple[list[Attempt], list[Attempt]]] = {}
    with ExitStack() as stack:
        functions = CachedExecutor(stack.enter_context(SandboxExecutor())) if tiny else None
        sandboxes = None if tiny else stack.enter_context(open_backend(backend))
        if sandboxes is not None:
            for task in tasks:
                spec_of(task, sandboxes)
        plans = _plans(planner, tasks, out, workers or WORKERS[tiny], settings) if planner else []
        planned_tasks = [plan.given(task) for plan, task in zip(plans, tasks, strict=True)] if planner else []
        runs = [(name, arm, tasks) for name, arm in chosen.items()]
        for name, arm, arm_tasks in [*runs, *([("planned", runs[0][1], planned_tasks)] if planner else [])]:
            first = name if name != "planned" else runs[0][0]
            arm_tools = arm.tiny() if tiny else arm.tools()
            agent_tools = policy_tools if first == "all" and (tools or (policy_tools.terse and not tiny)) else arm_tools
            environment = Environment(backend=sandboxes, functions=functions, tools=agent_tools, limits=settings.limits)
            run = partial(
                _attempts, policy, arm_tasks, environment, workers or WORKERS[tiny], partial(on_attempt, name)
            )
            attempts_by_arm[name] = run(settings, samples, out / name / "attempts"), []
            save_attempts(out / name / "rollouts.parquet", attempts_by_arm[name][0])
            if greedy:
                attempts_by_arm[name][1][:] = run(replace(settings, temperature=0.0), 1, out / name / "greedy")
                save_attempts(out / name / "greedy.parquet", attempts_by_arm[name][1])
    about = {"policy": policy, "samples": samples, "backend": backend, "detectable": smallest}
    planned = partial(with_plans, plans=plans, policy=planner, price=planner_price)
    return _reported(attempts_by_arm, settings.seed, out, about, price, planned)


def _tiny_arms(policy: str, arms: str, fits: bool) -> dict[str, Arm]:
    """Return the arms at tasks of the grader `functions`; `every` stands for those that the policy can have. `fits`: it has tiny
    tools. Raises ValueError for arms, or a policy, that cannot attempt such tasks."""
    kind, script = parse_policy(policy)
    usable = TINY_ARMS[:1] if script in GREPPING else TINY_ARMS
    chosen = {name: arm for name, arm in arms_of(arms).items() if name in usable or arms != "every"}
    if {*chosen} - {*usable} or not fits:
        raise ValueError(
            f"--policy {policy} --arms {arms}: at tasks of the grader `functions` agents have the tiny tools, with the arms "
            f"{', '.join(TINY_ARMS)}; scripts that call grep have {TINY_ARMS[0]!r} alone"
        )
    if kind == "scripted" and not script.endswith(".json") and script not in TINY_SCRIPTS:
        raise ValueError(f"--policy {policy}: there is scripted:{', scripted:'.join(TINY_SCRIPTS)}")
    return chosen


def _plans(planner: str, tasks: Sequence[Task], out: Path, workers: int, settings: BenchSettings) -> list[TaskPlan]:
    """Return the plans of a policy, kept in `out`. Raises ValueError for plans of another there."""
    _claim(out / "planned", {"planner": planner, "is": identity(planner), "seed": settings.seed})
    limits = equipment(planner)[1]
    options = {name: getattr(settings, name) for name in ("temperature", "seed")}
    with open_policy(planner, "", [], limits=limits, slots=workers, **options) as cast:
        plans = make_plans(tasks, cast, out / "planned" / "plans", workers, limits.seconds)
    if empty := sum(not plan.text for plan in plans):
        LOG.warning("--planner %s: %d of %d plans are empty; their tasks stay as they are", planner, empty, len(plans))
    return plans


def _reported(
    attempts_by_arm: Mapping[str, tuple[list[Attempt], list[Attempt]]],
    seed: int,
    out: Path,
    about: Mapping[str, Any],
    price: tuple[float, float] | None,
    planned: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Return figures by arm, and keep them."""
    [first, *_] = attempts_by_arm.values()
    rollouts = [attempt.rollout for sampled, _ in attempts_by_arm.values() for attempt in sampled]
    if empty := sum(rollout.stop == "tokens" and not rollout.turns for rollout in rollouts):
        LOG.warning("%d attempts ended before a turn: raise limits.tokens, or shorten their prompts", empty)
    report = {name: figures(sampled, greedy, seed, price) for name, (sampled, greedy) in attempts_by_arm.items()}
    report |= {"planned": planned(report["planned"])} if "planned" in report else {}
    for name, (sampled, _) in attempts_by_arm.items():
        if sampled is not first[0] and (gain := difference(sampled, first[0], seed)):
            report[name]["gain"] = gain
    whole = {**next(iter(report.values())), **about, "package": package_digest(), "seed": seed, "arms": report}
    write_json(out / "report.json", whole)
    return whole


def _attempts(
    policy: str,
    tasks: Sequence[Task],
    environment: Environment,
    workers: int,
    on_attempt: Callable[[Attempt], None],
    settings: BenchSettings,
    samples: int,
    keep: Path,
) -> list[Attempt]:
    """Return `samples` attempts at each task, in their order."""
    attempts = dict[int, Attempt]()
    with _turn_policies(policy, tasks, samples, environment, settings, workers) as cast:
        for number, attempt in attempt_all(tasks, samples, environment, cast, keep, workers):
            attempts[number] = attempt
            on_attempt(attempt)
    return [attempts[number] for number in sorted(attempts)]


@contextmanager
def _turn_policies(
    policy: str, tasks: Sequence[Task], samples: int, environment: Environment, settings: BenchSettings, workers: int
) -> Iterator[Cast]:
    """Open a policy for attempts. Scripts for the tools of tiny models count tokens, with a tokenizer trained on the tasks."""
    kind, script = parse_policy(policy)
    if kind != "scripted" or not environment.tools.terse or script.endswith(".json"):
        options = {name: getattr(settings, name) for name in ("limits", "summary", "temperature", "seed")}
        with open_policy(policy, system_text(WORKSPACE), environment.tools.schemas, slots=workers, **options) as cast:
            yield cast
        return
    from composer_nb.trainer.models.tokenizer import train_tokenizer

    def play(rollout: int) -> Script:
        task, sample = tasks[rollout // samples], rollout % samples
        return TINY_SCRIPTS[script](task, Random(f"{script} {settings.seed} {task.id} {sample}"))

    texts = [f"{task.instruction}\n{text}" for task in tasks for text in task.files.values()]
    renderer = CompactRenderer(train_tokenizer(texts, 1024), environment.tools.schemas)
    with Shared(ScriptedPolicy(renderer, play)) as shared:
        yield lambda task, rollout: TokenTurnPolicy(renderer, rollout, settings.limits, shared.ask, shared.release)


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
    return next(under / folder for folder in names if not (under / folder).exists())


def run_agent(
    root: Path,
    instruction: str,
    policy: str,
    out: Path,
    *,
    backend: str = "bwrap",
    image: str = "",
    packages: Path | None = None,
    limits: Limits | None = None,
    told: Told = silent,
    temperature: float = 1.0,
) -> Work:
    """Let an agent work on a copy of a user's repository, in a sandbox, and keep the result in the new folder `out`: `rollout`
    (Parquet and safetensors), `changes.diff` and `verdict.json`, which is `open` until the user decides.

    A checkpoint gets the tools and limits that it was trained with (`environment.carried`), other policies those of the product.

    `image`: Docker image with the dependencies of the repository, for the backend `docker`. `packages`: a folder of such packages
    that pip installed, for any backend. The repository itself is not
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
    source, extras = checkout.read_checkout(root), given_packages(packages)
    if out.exists():
        raise FileExistsError(f"{out}: exists already; give --out a new folder")
    tools, usual = equipment(policy)
    limits = limits or usual
    with open_backend(backend) as opened, open_session(source, tools, opened, image, extras) as (session, system):
        with open_policy(policy, system, tools.schemas, limits=limits, temperature=temperature, slots=1) as cast:
            turn_policy = cast(None, 0)
            try:
                conversation = converse(instruction, turn_policy, tools, session, limits, told)
            finally:
                segments = turn_policy.close()
        changes, others, lost = dict[str, Blob | None](), frozenset[str](), ""
        try:
            changes, others = checkout.changed(source, *carry_back(session.sandbox))
        except (SandboxDied, SandboxFailure, OSError) as error:  # the conversation is kept all the same
            lost = str(error)
    work = Work(path=out, source=source, conversation=conversation, changes=changes, others=others, lost=lost)
    keep(work, instruction, segments, policy)
    return work
