"""Evaluation stages: the scores of published weights on held-out tasks, and the numerics of the final weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from composer_nb.harness.bench import run_eval, summarise
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Trace
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.task import Task
from composer_nb.production.fidelity import differences
from composer_nb.trainer.headroom import headroom
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import PAIRS, TOUR, variant
from composer_nb.trainer.recipe.mismatch import measure_mismatch
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.weights import delta_sizes

FEW = 100
"""Number of tasks of each kind that score a policy from an early stage."""


def evaluate(s: Stages, name: str) -> None:
    """Score published weights on the held-out tasks and, separately (`structures`), on those of new structures. An untrained base
    is scored on FEW of each, with one sample, and the mid-trained policy on FEW if fine-tuning follows. Weights that were scored
    before under another name take over its figures and rollouts (`same_as`)."""
    with s.stage(f"eval_{name}") as info:
        if info is None:
            return
        if same := _scored(s, name):
            if s.ranks.first:
                for file in (s.run.path / "rollouts").glob(f"eval_{same}*"):
                    shutil.copyfile(file, file.with_name(file.name.replace(f"eval_{same}", f"eval_{name}")))
                info |= {**(s.run.finished(f"eval_{same}") or {}), "same_as": same}
                del info["seconds"]
            return
        attempts_by_kind = {kind: _score(s, name, kind) for kind in ("heldout", "structures") if s.tasks(kind)}
        if s.ranks.first:
            sampled, greedy = attempts_by_kind["heldout"]
            custom = s.settings.env.reward_function(s.settings.limits.seconds)
            info |= summarise(sampled, greedy)
            info["headroom"] = headroom(sampled, greedy, s.settings.reward, custom)
            if "structures" in attempts_by_kind:
                info["structures"] = summarise(*attempts_by_kind["structures"])
            s.say(
                f"eval {name}: pass@1 {info['pass_at_1']:.3f}, greedy {info['pass_greedy']:.3f}, "
                f"best of {info['k']} {info['best_of_k']:.3f} on {info['n_tasks']} tasks"
            )


def _score(s: Stages, name: str, kind: str) -> tuple[list[Attempt], list[Attempt]]:
    """Return attempts of published weights at tasks of a kind, sampled and greedy, and store them in the run."""
    tasks, samples = s.tasks(kind), s.settings.eval.samples
    if name == "base" and s.settings.midtrain.steps and not s.settings.model.start:
        tasks, samples = tasks[:FEW], 1
    if name == "midtrained" and s.settings.sft.steps:
        tasks = tasks[:FEW]
    model = s.policy(name)
    sampled, greedy = evaluate_model(s, model, tasks, samples, 1.0), evaluate_model(s, model, tasks, 1, 0.0)
    if s.ranks.first:
        suffix = "" if kind == "heldout" else f"_{kind}"
        save_attempts(s.run.path / "rollouts" / f"eval_{name}{suffix}.parquet", [*sampled, *greedy])
    return sampled, greedy


def _scored(s: Stages, name: str) -> str | None:
    """Return the name under which the same weights were scored before, or None."""
    folder, others = s.run.path / "weights", {"base", "midtrained"} - {name}
    same = [other for other in sorted(others) if (folder / other).resolve() == (folder / name).resolve()]
    return next((other for other in same if s.run.finished(f"eval_{other}") is not None), None)


def evaluate_model(s: Stages, model: Model, tasks: Sequence[Task], samples: int, temperature: float) -> list[Attempt]:
    """Return a model's attempts at tasks, in order of task. The ranks share the work, and all return the same list."""
    engine = s.engine(model, seed=s.settings.seed + 17, temperature=temperature)
    slots = range(len(tasks))[s.ranks.rank :: s.ranks.world]
    mine = run_eval(engine, s.agent(), [tasks[slot] for slot in slots], s.sandboxes, samples, slots)
    parts = s.ranks.gather([_light(done) for done in mine])
    order = {task.id: place for place, task in enumerate(tasks)}
    return sorted((done for part in parts for done in part), key=lambda done: order[done.task.id])


def _light(done: Attempt) -> Attempt:
    segments = tuple(replace(segment, trace=Trace()) for segment in done.rollout.segments)
    return replace(done, rollout=replace(done.rollout, segments=segments))


def compare_numerics(s: Stages) -> None:
    """Measure on the final weights how engines with other numerics than the trainer's change log-probabilities, and how much of
    this the replay of their routes removes. The pairs of `variants` are dealt over the ranks; the tour's own comes first in the
    report. Also measure the size of a lossless delta between versions, and compare the sandboxes of training and product."""
    with s.stage("numerics") as info:
        if info is None:
            return
        sparse = s.load("final").config.moe_layers > 0
        pairs = list(PAIRS) if sparse else ["bf16"]  # the others differ in experts and routers
        mine = {name: compare_pair(s, name) for name in pairs[s.ranks.rank :: s.ranks.world]}
        results = {name: result for part in s.ranks.gather(mine) for name, result in part.items()}
        if s.ranks.first:
            main_pair = TOUR if sparse else "bf16"
            info["replay"] = {**results.pop(main_pair), "pair": main_pair, "others": results}
            info["weights"] = delta_sizes(s.weights("before_final"), s.weights("final"))
            info["fidelity"] = compare_places(s)


def compare_places(s: Stages) -> dict[str, Any] | None:
    """Compare an agent's prompts and tool results in training with those in the product, byte by byte, on the first held-out task
    with its own sandbox; None if no task has one."""
    agent, tasks = s.agent(), s.tasks("heldout")
    task = next((task for task in tasks if task.grader != "functions" and not task.image), None)
    if agent.backend is None or task is None:
        return None
    try:
        calls, differing = differences(task, agent)
    except (SandboxFailure, SandboxDied, OSError, ValueError) as error:
        return {"task": task.id, "error": str(error)}
    names = dict.fromkeys(difference.what for difference in differing)
    s.say(f"training and product: differences in {calls} calls: {', '.join(names) or 'none'}")
    return {"task": task.id, "calls": calls, "differences": [difference.excerpt() for difference in differing]}


def compare_pair(s: Stages, name: str, weights: str = "final", tasks: int = 48, samples: int = 2) -> dict[str, Any]:
    """Return the mismatch of one pair on published weights, over `samples` rollouts of each of the first `tasks` tuning tasks."""
    pair, model = PAIRS[name], s.load(weights)
    engine = s.engine(variant(model, pair.engine), seed=s.settings.seed + 29)
    attempts = list(run_eval(engine, s.agent(), s.tasks("tune")[:tasks], s.sandboxes, samples))
    return measure_mismatch(variant(model, pair.trainer), attempts)
