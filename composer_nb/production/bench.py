"""The bench behind `composer-nb eval`: a policy's attempts at tasks, with several choices of tools, and their figures.

Attempts are kept as they end. An arm is the same tasks with other tools, to measure the worth of a tool, or its description, to a
policy.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.loop import LIMITS, system_text
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.agent.summary import NO_SUMMARIES, SummarySettings
from composer_nb.harness.agent.turns import Limits, TokenTurnPolicy, TurnPolicy
from composer_nb.harness.agent.user import open_user
from composer_nb.harness.attempt import Environment, attempt
from composer_nb.harness.bench import bootstrap, detectable, pass_at_k, pass_hat_k, scores, summarise
from composer_nb.harness.files import read_json, write_atomic, write_json
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.grading.plan import PLAN
from composer_nb.harness.monitors import flags_of
from composer_nb.harness.quality import change_quality, quality_columns, quality_figures
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.contract import WORKSPACE
from composer_nb.harness.store import pack_attempt, save_attempts, unpack_attempt
from composer_nb.harness.tasks.runtime import spec_of
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.search import Indexes
from composer_nb.harness.tools.toolset import NAMES, SEARCH, ToolSet
from composer_nb.harness.tools.web import read_pages
from composer_nb.harness.untrusted import parquet, visible
from composer_nb.production.planner import TaskPlan, make_plans, with_plans
from composer_nb.production.policies import Cast, equipment, identity, known_training, open_policy, parse_policy
from composer_nb.tour.expert import GREPPING, TINY_SCRIPTS, Script, ScriptedPolicy
from composer_nb.trainer.records.provenance import harness_digest, package_digest, require_harness

LOG = logging.getLogger(__name__)
# Rollouts at a time: of tasks of the grader `functions`, and of tasks with sandboxes of their own.
WORKERS = {True: 16, False: 2}
# Limits at tasks of the grader `functions` for a policy whose tokens are not those of a tiny model.
UNCOUNTED = Limits(turn_tokens=1 << 12, tokens=1 << 20)
# Maximum share of attempts that may be lost to infrastructure faults.
LOST = 0.01


class TooManyLost(ValueError):
    """Too many attempts were lost for the figures to count."""

    exit_status = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A choice of tools, with or without their descriptions."""

    offer: tuple[str, ...] = NAMES
    described: bool = True

    def tools(self) -> ToolSet:
        search = Indexes() if SEARCH in self.offer else None
        return ToolSet.cursor(search=search, offer=self.offer, described=self.described)

    def tiny(self) -> ToolSet:
        """Return the tools of tiny models, whose search is `grep`."""
        tools = ToolSet.tiny()
        return tools.only([name for name in tools.tools if name != "grep" or SEARCH in self.offer])


ARMS: Mapping[str, Arm] = {
    "all": Arm(),
    "bash": Arm(offer=("run_terminal_cmd",)),
    "no-search": Arm(offer=tuple(name for name in NAMES if name != SEARCH)),
    "no-descriptions": Arm(described=False),
}
# Arms at tasks of the grader `functions`: the compact format describes no tool, and there is no terminal.
TINY_ARMS = ("all", "no-search")
# Figures of `summarise` that only the tools of tiny models report.
TINY_FIGURES = ("runs_tests", "retries_after_failed_test")


def arms_of(names: str) -> dict[str, Arm]:
    """Return the arms of a list such as `all,bash`, or all for `every`. Raises ValueError for an unknown one."""
    chosen = list(ARMS) if names == "every" else names.split(",")
    if unknown := [name for name in chosen if name not in ARMS]:
        raise ValueError(f"--arms {unknown[0]}: there are {', '.join(ARMS)}, several with commas, or `every`")
    return {name: ARMS[name] for name in chosen}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a bench besides its policy, tasks and tools."""

    limits: Limits = LIMITS
    summary: SummarySettings = NO_SUMMARIES
    temperature: float = 1.0
    seed: int = 0
    user: str = ""
    """Who answers an agent that asks, as `env.user`."""
    web: str = ""
    """Recorded pages of the tool `web_search`, as `env.web`."""
    harness: str = ""
    """Digest, or its beginning, of the only harness that may evaluate (`harness` of a report); empty: any."""
    egress: str = ""
    """Hosts that sandboxes of tasks which need a network may reach, as `env.egress`."""


def bench_settings(policy: str, tasks: Sequence[Task], changes: Mapping[str, Any]) -> BenchSettings:
    """Return the settings of a bench: the limits that a checkpoint was trained with, or usual ones, and `changes` by their dotted
    names. Raises ValueError, FileNotFoundError."""
    from composer_nb.trainer.settings import override

    tiny, training = check_fit(tasks), known_training(policy)
    usual = (training and training.limits) or (LIMITS if training or not tiny else UNCOUNTED)
    return override(BenchSettings(limits=usual), changes)


def check_fit(tasks: Sequence[Task]) -> bool:
    """Return whether the tasks are of the grader `functions`, at which agents have the tiny tools. Raises ValueError where only
    some are, and for tasks that lack a plan of their tests."""
    tiny = tasks[0].grader == "functions"
    for task in tasks:
        at = f"task {task.id}"
        if (task.grader == "functions") != tiny:
            raise ValueError(f"{at}: the grader `functions` needs other tools; do not mix such tasks with others")
        if task.grader == "pytest" and PLAN not in task.metadata:
            raise ValueError(f"{at}: has no plan of its tests; composer-nb tasks make, or grading.validate, makes one")
    return tiny


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
    """Attempt every task `samples` times with each arm, `workers` at a time (0: WORKERS), and once at temperature 0 if `greedy`;
    keep every rollout in `out`. Agents have tiny models' tools at tasks of the grader `functions`, and in the arm `all` with a
    checkpoint trained with them, or `tools`. `planner`, another policy, adds the arm `planned`, with the tools of the first.

    The same call with the same `out` resumes. Returns the figures of the first arm and of each, with the gain of each other over
    the first. Raises ValueError for unknown tasks, arms, policies, or an `out` of others; SandboxUnavailable, ProviderFailure.
    """
    tiny, training = check_fit(tasks), known_training(policy)
    policy_tools, workers = tools or equipment(policy)[0], workers or WORKERS[tiny]
    settings = settings or bench_settings(policy, tasks, {})
    chosen = _tiny_arms(policy, arms, bool(tools) or policy_tools.terse or not training) if tiny else arms_of(arms)
    limits, user = settings.limits, open_user(settings.user)
    digest = _claim_evaluation(out, policy, backend, settings)
    LOG.info("a difference below %.3f may not show", smallest := detectable(len(tasks), samples))
    report, first, empty = dict[str, dict[str, Any]](), list[Attempt](), 0
    with ExitStack() as stack:
        functions = CachedExecutor(stack.enter_context(SandboxExecutor())) if tiny else None
        sandboxes = None if tiny else stack.enter_context(open_backend(backend, egress=settings.egress))
        if sandboxes is not None:
            for task in tasks:
                spec_of(task, sandboxes)
        runs = [(name, name, arm, tasks) for name, arm in chosen.items()]
        if planner:
            plans = _plans(planner, tasks, out, workers, settings)
            planned = [plan.given(task) for plan, task in zip(plans, tasks, strict=True)]
            runs.append(("planned", *runs[0][1:3], planned))
        for name, arm_name, arm, arm_tasks in runs:
            own_tools = arm_name == "all" and (tools or (policy_tools.terse and not tiny))
            arm_tools = arm.tiny() if tiny else arm.tools().with_web(read_pages(settings.web))
            offered = policy_tools if own_tools else arm_tools
            environment = Environment(backend=sandboxes, functions=functions, tools=offered, limits=limits, user=user)
            run = partial(_attempts, policy, arm_tasks, environment, workers, partial(on_attempt, name))
            sampled = run(settings, samples, out / name / "attempts")
            quality = _save_with_quality(out / name / "rollouts.parquet", sampled)
            certain = run(replace(settings, temperature=0.0), 1, out / name / "greedy") if greedy else []
            if greedy:
                save_attempts(out / name / "greedy.parquet", certain)
            empty += sum(sample.rollout.stop == "tokens" and not sample.rollout.turns for sample in sampled)
            report[name] = figures(sampled, certain, settings.seed, price) | {"quality": quality}
            if name == "planned":
                report[name] = with_plans(report[name], plans, planner, planner_price)
            first = first or sampled
            if first is not sampled and (gain := difference(sampled, first, settings.seed)):
                report[name]["gain"] = gain
    if empty:
        LOG.warning("%d attempts ended before a turn: raise limits.tokens, or shorten their prompts", empty)
    about = {"policy": policy, "samples": samples, "backend": backend, "detectable": smallest, "seed": settings.seed}
    whole = {**next(iter(report.values())), **about, "package": package_digest(), "harness": digest, "arms": report}
    write_json(out / "report.json", whole)
    return whole


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
    claim(out / "planned", {"planner": planner, "is": identity(planner), "seed": settings.seed})
    limits = equipment(planner)[1]
    options = {name: getattr(settings, name) for name in ("temperature", "seed")}
    with open_policy(planner, "", [], limits=limits, slots=workers, **options) as cast:
        plans = make_plans(tasks, cast, out / "planned" / "plans", workers, limits.seconds)
    if empty := sum(not plan.text for plan in plans):
        LOG.warning("--planner %s: %d of %d plans are empty; their tasks stay as they are", planner, empty, len(plans))
    return plans


def _attempts(
    policy: str,
    tasks: Sequence[Task],
    environment: Environment,
    workers: int,
    on_attempt: Callable[[Attempt], None],
    settings: BenchSettings,
    samples: int,
    folder: Path,
) -> list[Attempt]:
    """Return `samples` attempts at each task, in their order."""
    attempts = dict[int, Attempt]()
    with _turn_policies(policy, tasks, samples, environment, settings, workers) as cast:
        for number, attempt in attempt_all(tasks, samples, environment, cast, folder, workers):
            attempts[number] = attempt
            on_attempt(attempt)
    return [attempts[number] for number in sorted(attempts)]


def _save_with_quality(path: Path, attempts: Sequence[Attempt]) -> dict[str, Any] | None:
    """Store attempts with the quality of their changes beside the human's, and return its figures."""
    qualities = [change_quality(attempt.task, attempt.rollout.files) for attempt in attempts]
    save_attempts(path, attempts, quality_columns(qualities))
    return quality_figures(qualities, attempts)


@contextmanager
def _turn_policies(
    policy: str, tasks: Sequence[Task], samples: int, environment: Environment, settings: BenchSettings, workers: int
) -> Iterator[Cast]:
    """Open a policy for attempts. Scripts for the tools of tiny models count tokens, with a tokenizer trained on the tasks."""
    kind, script = parse_policy(policy)
    if kind != "scripted" or not environment.tools.terse or script.endswith(".json"):
        options = {name: getattr(settings, name) for name in ("limits", "summary", "temperature", "seed")}
        system = system_text(WORKSPACE, environment.user is not None, settings.egress)
        with open_policy(policy, system, environment.tools.schemas, slots=workers, **options) as cast:
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


def _claim_evaluation(out: Path, policy: str, backend: str, settings: BenchSettings) -> str:
    """Claim `out` for an evaluation, and return the digest of the harness. Raises ValueError if another one is pinned."""
    require_harness(settings.harness)
    values = {name: value for name, value in asdict(settings).items() if value != "" and name != "harness"}
    about = {"policy": policy, "is": identity(policy), "backend": backend, "harness": (digest := harness_digest())}
    claim(out, about | {"settings": values})
    return digest


def claim(out: Path, content: Mapping[str, Any]) -> None:
    """Note in `out` what its rollouts depend on. Raises ValueError if it holds rollouts of something else."""
    path, text = out / "bench.json", json.dumps(content, indent=2, sort_keys=True)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"--out {out}: holds rollouts of another policy, backend, harness or settings ({path}); give another"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def attempt_all(
    tasks: Sequence[Task],
    samples: int,
    environment: Environment,
    cast: Callable[[Task, int], TurnPolicy],
    folder: Path,
    workers: int = 2,
) -> Iterator[tuple[int, Attempt]]:
    """Attempt every task `samples` times, `workers` at a time, and yield each attempt as it ends, with its number. `cast` makes
    the turn policy of an attempt from its task and the number of the rollout.

    Each attempt is written into `folder` when it ends, and one that is there already is read instead of repeated, so a killed
    bench resumes. Attempts that the infrastructure failed are not kept. When closed early, as by Ctrl-C, it closes the backend.
    Raises ValueError like `check_fit`.
    """
    check_fit(tasks)
    folder.mkdir(parents=True, exist_ok=True)

    def run(task: Task, number: int, sample: int) -> Attempt:
        path = folder / f"{hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:24]}-{sample}.safetensors"
        if path.is_file():
            with suppress(ValueError):  # damaged: it is made again
                return unpack_attempt(path.read_bytes(), task)
        result = attempt(task, environment, cast(task, number * samples + sample))
        if result.grade.known:
            write_atomic(path, pack_attempt(result))
        return result

    with ThreadPoolExecutor(workers, thread_name_prefix="attempt") as pool:
        jobs = [(task, number, sample) for number, task in enumerate(tasks) for sample in range(samples)]
        futures = {pool.submit(run, *job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            if environment.backend:
                environment.backend.close()  # ends what still runs
            raise


def figures(
    attempts: Sequence[Attempt], greedy: Sequence[Attempt] = (), seed: int = 0, price: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Return the figures of `summarise` that these tools report, and of `greedy` attempts if there are any; besides them

    `pass_at_k`, `pass_hat_k`    by k, the chances that one of k attempts, and that all of k, solve a task, each as the unbiased
                                 estimate from all attempts, averaged over tasks; `all_of_k` is the last of `pass_hat_k`
    `flagged`                    share of attempts with a flag of the grader or of a monitor
    `disqualified`               tasks at which an attempt was tampered with, and `disqualified_attempts` their number
    `seconds_p50`, `seconds_p95` of a rollout
    `dollars_per_task`           mean of an attempt's tokens at `price`: dollars per million tokens read, and written

    If no sampled rollout has a grade, return the number of lost rollouts, of all, and the reason of the first."""
    stops, every = Counter(attempt.rollout.stop for attempt in attempts), [*attempts, *greedy]
    lost = [attempt for attempt in every if not attempt.grade.known]
    reasons = [turn.observation for attempt in lost for turn in attempt.rollout.turns if turn.error == "ProviderError"]
    losses = {"stops": dict(sorted(stops.items())), "infra_errors": len(lost), "lost_share": len(lost) / len(every)}
    losses["lost_to"] = reasons[0] if reasons else ""
    graded = [attempt for attempt in attempts if attempt.grade.known]
    if not graded:
        return losses | {"n_tasks": 0}
    solved_by_task = scores(graded, lambda solved_attempt: solved_attempt.task.id).values()
    most = min(map(len, solved_by_task))
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    at_k, hat_k = (
        {str(k): float(np.mean([estimate(len(s), int(sum(s)), k) for s in solved_by_task])) for k in counts}
        for estimate in (pass_at_k, pass_hat_k)
    )
    greedy = [attempt for attempt in greedy if attempt.grade.known]
    median, late = np.quantile([attempt.rollout.seconds for attempt in graded], [0.5, 0.95]).tolist()
    tiny = attempts[0].task.grader == "functions"
    summary = summarise(attempts, greedy or None, seed).items()
    dollars = None
    if price:
        rollouts = [attempt.rollout for attempt in attempts]
        tokens = [(rollout.counted[0] or rollout.tokens - rollout.sampled, rollout.sampled) for rollout in rollouts]
        dollars = float(np.mean(tokens, 0) @ price) / 1e6
    return {
        **{name: value for name, value in summary if tiny or name not in TINY_FIGURES},
        **losses,
        "pass_at_k": at_k,
        "pass_hat_k": hat_k,
        "all_of_k": hat_k[str(most)],
        "flagged": float(np.mean([bool(attempt.grade.flags or flags_of(attempt)) for attempt in graded])),
        "disqualified": sorted({attempt.task.id for attempt in attempts if attempt.grade.status == "tampered"}),
        "disqualified_attempts": sum(attempt.grade.status == "tampered" for attempt in attempts),
        "seconds_p50": median,
        "seconds_p95": late,
        "dollars_per_task": dollars,
    }


def require_attempts(report: Mapping[str, Any], out: Path | None = None) -> None:
    """Raise TooManyLost if an arm of a report lost more than LOST of its attempts: its figures are of the rest alone, and an
    attempt is rarely lost by chance. `out`: folder in which the same command makes the lost ones again."""
    for arm, row in report["arms"].items():
        if row["lost_share"] > LOST:
            lost, reason = row["infra_errors"], visible(row["lost_to"])[:300] or "see composer-nb doctor"
            again = f"; the same command with --out {out} makes these again" if out else ""
            share = f"{lost} of {round(lost / row['lost_share'])} attempts were lost"
            raise TooManyLost(f"arm {arm}: {share}, so its figures do not count{again}: {reason}")


def difference(new: Sequence[Attempt], old: Sequence[Attempt], seed: int = 0) -> list[float]:
    """Return the gain in pass@1 of `new` over `old` on tasks that both have grades of, with its 95 % interval by bootstrap over
    tasks (2,000 resamples); empty if there is no such task."""
    first, second = (
        scores([attempt for attempt in attempts if attempt.grade.known], lambda attempt: attempt.task.id)
        for attempts in (new, old)
    )
    shared = sorted(first.keys() & second.keys())
    gains = np.array([np.mean(first[task]) - np.mean(second[task]) for task in shared])
    return [float(gains.mean()), *bootstrap(gains, seed)] if shared else []


def compare_evals(first: Path, second: Path, seed: int = 0) -> dict[str, Any]:
    """Return pass@1 of two evaluations (folders of `composer-nb eval`) at the tasks that both have grades of, by arm: `scores` of
    each, and `difference` of the second − the first, paired by task, with 95 % intervals by bootstrap over these tasks.
    `left_out`: tasks of the first, and of the second alone. Raises ValueError, FileNotFoundError."""

    def figure(values: Any) -> dict[str, Any]:
        return {"pass_at_1": float(values.mean()), "ci95": bootstrap(values, seed)}

    files = [sorted(out.glob("*/rollouts.parquet")) for out in (first, second)]
    arms = [{file.parent.name: _solved(file) for file in of_one} for of_one in files]
    for out, scores_by_arm in zip((first, second), arms, strict=True):
        if not scores_by_arm:
            raise FileNotFoundError(f"{out}: neither a run nor the folder of an evaluation (composer-nb eval --out)")
    row_by_arm: dict[str, Any] = {}
    for arm in sorted(arms[0].keys() & arms[1].keys()):
        old, new = arms[0][arm], arms[1][arm]
        shared = sorted(old.keys() & new.keys())
        left_out = [sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())]
        row_by_arm[arm] = {"n_tasks": len(shared), "left_out": left_out}
        if shared:
            before, after = (np.array([solved[task] for task in shared]) for solved in (old, new))
            row_by_arm[arm] |= {"scores": [figure(before), figure(after)], "difference": figure(after - before)}
    if not row_by_arm:
        raise ValueError(f"{first} has the arms {', '.join(arms[0])}, {second} {', '.join(arms[1])}: no arm is in both")
    harnesses = [(read_json(out / "bench.json") or {}).get("harness") for out in (first, second)]
    if None not in harnesses and len({*harnesses}) > 1:
        names = [str(harness)[:12] for harness in harnesses]
        LOG.warning("evaluated by different harnesses (%s, %s): --set harness=… pins one", *names)
    return {"evals": [str(first), str(second)], "harness": harnesses, "arms": row_by_arm}


def _solved(file: Path) -> dict[str, float]:
    """Return the share of a task's graded attempts that solved it, by task. Raises ValueError for a damaged file."""
    try:
        table = pq.read_table(parquet(file), columns=["task_id", "status", "passed"]).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file}: damaged ({error!r:.200})") from None
    passed: dict[str, list[float]] = {}
    for row in table:
        if Grade(status=row["status"]).known:
            passed.setdefault(row["task_id"], []).append(float(row["passed"]))
    return {task: float(np.mean(values)) for task, values in passed.items()}
