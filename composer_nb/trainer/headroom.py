"""Headroom: what RL could gain in an environment, estimated from attempts of its initial policy.

RL moves probability towards behaviour that the policy already shows at times. If all attempts at a task earn the same, there is
no gradient. If a second try after a failed test gains nothing, running tests gains nothing, and the policy will drop both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_nb.harness.bench import summarise
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import RewardSettings
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import OwnReward, score_groups

RECOVERY = 0.15
"""Recovery below which testing is not worth learning."""
FIGURES = ("pass_at_1", "pass_greedy", "best_of_k", "k", "n_tasks", "recovery", "recovery_n", "filtered_best_of")


def headroom(
    sampled: Sequence[Attempt], greedy: Sequence[Attempt], rewards: RewardSettings, own: OwnReward | None = None
) -> dict[str, Any]:
    """Return figures of an initial policy: those of `summarise`, `live` (share of tasks whose attempts earn different rewards),
    `gain` (the rise of pass@1 if every attempt were the best of its task), `nothing` (whether RL has nothing to find), and
    `verdict`, a sentence. Solving tasks is not the aim of an environment with a reward of its own (`own`)."""
    scores = summarise(sampled, greedy)
    groups: dict[str, list[Attempt]] = {}
    for done in sampled:
        if done.grade.known:
            groups.setdefault(done.task.id, []).append(done)
    scored = score_groups([*groups.values()], rewards, LossSettings(), own)
    several = [any(abs(s.advantage) > 1e-6 for s in group) for group in scored if len(group) > 1]
    live = float(np.mean(several)) if several else None
    found = {name: scores[name] for name in FIGURES} | {"live": live}
    found["gain"] = found["best_of_k"] - found["pass_at_1"]
    found["nothing"] = live is not None and not (live and (found["best_of_k"] or own))
    found["verdict"] = _verdict(found)
    return found


def _verdict(found: dict[str, Any]) -> str:
    if found["live"] is None:
        return "one attempt at a task cannot tell what RL could find"
    if not found["live"]:
        return f"nothing to find: the {found['k']} attempts at each task earn the same reward, so no gradient is left"
    if found["nothing"]:
        return f"nothing to find but other terms of the reward: none of {found['k']} attempts at each task solves it"
    if not found["best_of_k"]:
        return f"no attempt solves a task; RL can move only the environment's own reward ({found['live']:.0%} of tasks live)"
    best = f"up to +{found['gain']:.2f} of pass@1 (best of {found['k']}), {found['live']:.0%} of tasks live"
    if found["recovery"] is None:
        return f"{best}; no attempt edits again after a failed test, so testing cannot pay"
    if found["recovery"] < RECOVERY:
        return f"{best}; recovery {found['recovery']:.2f} is below {RECOVERY}: RL will probably unlearn testing"
    return f"{best}; recovery {found['recovery']:.2f}: tests and further tries can pay"


def refusal(run: RunDir) -> str:
    """Return why RL has nothing to learn from in a run; empty if it has, has begun, or its start is not evaluated yet."""
    if run.finished("eval_start") is None or run.finished("rl") is not None or run.pointer("rl"):
        return ""
    found = run_headroom(run)
    if not found.get("nothing", found["live"] == 0):  # earlier versions did not store it
        return ""
    return f"RL has {found['verdict']}; change env, data, reward or the start, or resume with rl.gate=false"


def run_headroom(run: RunDir, policy: str = "start") -> dict[str, Any]:
    """Return the headroom of a run's policy on its held-out tasks. Raises ValueError if it was not evaluated."""
    found = run.finished(f"eval_{policy}") or {}
    if "headroom" not in found:
        raise ValueError(f"{run.path.name}: {policy} has not been evaluated, or not by this version")
    headroom: dict[str, Any] = found["headroom"]
    return headroom
