"""What `composer-nb eval` does with tasks for the product's tools, and what `composer-nb agent` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from composer_nb.harness.agent.loop import LIMITS, Told, converse
from composer_nb.harness.agent.prompt import system_text
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.files import write_atomic, write_json
from composer_nb.harness.product import checkout
from composer_nb.harness.product.arms import ARMS, arms_of, difference, figures
from composer_nb.harness.product.attempts import Environment, attempt_all, check_fit
from composer_nb.harness.product.diff import Blob, require_git
from composer_nb.harness.product.work import Work, keep
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.contract import WORKSPACE, SandboxDied, SandboxFailure
from composer_nb.harness.sandbox.fleet import Fleet
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.runtime import spec_of
from composer_nb.harness.tasks.task import Task
from composer_nb.policies import identity, open_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What a bench depends on besides its policy, tasks and tools."""

    limits: Limits = LIMITS
    temperature: float = 1.0
    strict: bool = True
    """Whether tools take what their schemas say and nothing else."""
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
    """Attempts every task `samples` times with each arm, `workers` at a time; keeps every rollout in `out`.

    The same call with the same `out` goes on where it was. Returns figures by arm, and for each but the first its gain over
    the first. Raises ValueError for tasks, arms or policies that there are not, and for an `out` of another policy;
    SandboxUnavailable, ProviderFailure.
    """
    settings = settings or BenchSettings()
    check_fit(tasks)
    _claim(out, {"policy": policy, "is": identity(policy), "backend": backend, "settings": asdict(settings)})
    chosen = arms_of(arms)
    found: dict[str, list[Attempt]] = {}
    with open_backend(backend) as made, Fleet(made) as fleet:
        for task in tasks:
            spec_of(task, made)
        for name, arm in chosen.items():
            found[name] = []
            tools = arm.tools(settings.strict)
            schemas, place = arm.schemas(tools), Environment(backend=fleet, tools=tools, limits=settings.limits)
            with open_policy(
                policy,
                system_text(WORKSPACE),
                schemas,
                limits=settings.limits,
                temperature=settings.temperature,
                seed=settings.seed,
                slots=workers,
            ) as cast:
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
    """Notes in `out` whose rollouts it holds. Raises ValueError where that is somebody else's."""
    path, text = out / "bench.json", json.dumps(what, indent=2, sort_keys=True)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"--out {out}: holds rollouts of another policy, backend or settings ({path}); give another")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def new_folder(under: Path, name: str) -> Path:
    """A path below `under` for something of now, which does not exist yet."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (f"{name}-{stamp}", *(f"{name}-{stamp}-{number}" for number in range(2, 1000)))
    return next(under / each for each in names if not (under / each).exists())


def run_agent(
    root: Path,
    instruction: str,
    policy: str,
    out: Path,
    *,
    backend: str = "bwrap",
    image: str = "",
    limits: Limits = LIMITS,
    strict: bool = True,
    told: Told = lambda event: None,
    temperature: float = 1.0,
) -> Work:
    """Lets an agent work on a copy of a user's repository, in a sandbox, and keeps what it did in the new folder `out`: `rollout`
    (Parquet and safetensors), `changes.diff` and `verdict.json`, which is `open` until the user decides.

    `image`: of the backend `docker`, with what the repository needs in it. The repository itself is not touched. Raises
    ValueError for an instruction that is empty or no Unicode, a repository that is empty or too large, a policy that there
    is not; SandboxUnavailable; ProviderFailure for an endpoint that does not answer at all.
    """
    if not instruction.strip():
        raise ValueError("agent: the instruction is empty; say what shall be done")
    if any("\ud800" <= letter <= "\udfff" for letter in instruction):
        raise ValueError("agent: the instruction is not UTF-8")
    if image and backend != "docker":
        raise ValueError(f"--image {image}: the backend {backend} has no images; use --backend docker")
    require_git()
    source = checkout.read_checkout(root)
    if out.exists():
        raise FileExistsError(f"{out}: is there already; give --out a new folder")
    arm = ARMS["all"]
    tools = arm.tools(strict)
    with open_backend(backend) as made, source.start(made, image) as box:
        session = tools.open(box)
        with open_policy(
            policy, system_text(session.root), arm.schemas(tools), limits=limits, temperature=temperature, slots=1
        ) as cast:
            speaker = cast(None, 0)
            try:
                done = converse(instruction, speaker, tools, session, limits, told)
            finally:
                segment = speaker.close()
        changes, others, lost = dict[str, Blob | None](), frozenset[str](), ""
        try:
            changes, others = checkout.changed(source, *checkout.carry_back(box))
        except (SandboxDied, SandboxFailure, OSError) as error:  # what was said is kept all the same
            lost = str(error)
    work = Work(path=out, source=source, conversation=done, changes=changes, others=others, lost=lost)
    keep(work, instruction, segment, policy)
    return work
