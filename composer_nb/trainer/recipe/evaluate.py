"""Scores of a run's policies: on the held-out tasks for the report, and on tuning tasks, which set a policy's sharpness."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from composer_nb.harness.bench import bootstrap, detectable, run_eval, summarise
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Trace
from composer_nb.harness.store import save_attempts
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.headroom import headroom
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.stages import Stages, stage
from composer_nb.trainer.records.provenance import harness_digest

# Number of tasks of each kind that score a policy from an early stage.
FEW = 100


@stage("eval_{}")
def evaluate(s: Stages, info: dict[str, Any], name: str) -> None:
    """Score published weights on the held-out tasks and, separately (`structures`), on those of new structures. A base or
    a mid-trained policy that training follows is scored on FEW of each, the base with one sample. Weights that were scored
    before under another name take over its figures and rollouts (`same_as`)."""
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
        info |= summarise(sampled, greedy) | {"harness": harness_digest()}
        info["headroom"] = headroom(sampled, greedy, s.settings.reward, custom)
        if "structures" in attempts_by_kind:
            info["structures"] = summarise(*attempts_by_kind["structures"])
        s.say(
            f"eval {name}: pass@1 {info['pass_at_1']:.3f}, greedy {info['pass_greedy']:.3f}, "
            f"best of {info['k']} {info['best_of_k']:.3f} on {info['n_tasks']} tasks; "
            f"a change of pass@1 below {detectable(info['n_tasks'], info['k']):.3f} may not show"
        )


def _score(s: Stages, name: str, kind: str) -> tuple[list[Attempt], list[Attempt]]:
    """Return attempts of published weights at tasks of a kind, sampled and greedy, and store them in the run."""
    tasks, samples = s.tasks(kind), s.settings.eval.samples
    followed = {"base": s.settings.midtrain.steps + s.settings.sft.steps, "midtrained": s.settings.sft.steps}
    if followed.get(name):
        tasks, samples = tasks[:FEW], 1 if name == "base" else samples
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
    parts = s.ranks.gather([_light(attempt) for attempt in mine])
    order = {task.id: index for index, task in enumerate(tasks)}
    return sorted((attempt for part in parts for attempt in part), key=lambda attempt: order[attempt.task.id])


def _light(attempt: Attempt) -> Attempt:
    segments = tuple(replace(segment, trace=Trace()) for segment in attempt.rollout.segments)
    return replace(attempt, rollout=replace(attempt.rollout, segments=segments))


# Attempts per tuning task when a factor of the logits is judged.
TUNING_TRIES = 2


def calibrate(s: Stages, model: Model, factors: Sequence[float], info: dict[str, Any]) -> None:
    """Multiply the logits of a policy by the factor with which sampling solves the most tuning tasks, or by the only factor.

    A policy that imitates an expert who tries at random is as unsure as the expert. So RL and its control both start at their
    best, as far as the intervals (`sharpness_ci95`, over tasks) distinguish the factors."""
    if not factors:
        return
    if len(factors) == 1:
        info["sharpness"] = factors[0]
        model.final_norm.data.mul_(factors[0])
        return
    tasks, gain = s.tasks("tune"), model.final_norm
    solved: dict[float, float] = {}
    info["sharpness_ci95"] = interval = dict[str, list[float]]()
    before = gain.detach().clone()
    for factor in factors:
        with torch.no_grad():
            gain.copy_(before * factor)
        passed = [attempt.grade.passed for attempt in evaluate_model(s, model, tasks, TUNING_TRIES, 1.0)]
        by_task = np.array(passed, float).reshape(len(tasks), TUNING_TRIES).mean(1)
        solved[factor], interval[str(factor)] = float(by_task.mean()), bootstrap(by_task, 0)
    best = max(solved, key=lambda factor: (solved[factor], -factor))
    with torch.no_grad():
        gain.copy_(before * best)
    info |= {"sharpness": best, "sharpness_solved": {str(factor): share for factor, share in solved.items()}}
    results = ((factor, share, *interval[str(factor)]) for factor, share in solved.items())
    lines = [f"{factor:g} solves {share:.3f} ({low:.2f} to {high:.2f})" for factor, share, low, high in results]
    s.say(f"sharpness {best:g}: " + ", ".join(lines))
