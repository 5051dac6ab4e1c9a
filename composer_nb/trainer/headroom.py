"""Headroom: what RL could gain in an environment, estimated from attempts of its initial policy.

RL moves probability towards behaviour that the policy already shows at times. If all attempts at a task earn the same, there is
no gradient. If a second try after a failed test gains nothing, running tests gains nothing, and the policy will drop both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_nb.harness.bench import summarise
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import RewardSettings
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import OwnReward, score_groups

# Recovery below which testing is not worth learning.
RECOVERY = 0.15
FIGURES = ("pass_at_1", "pass_greedy", "best_of_k", "k", "n_tasks", "recovery", "recovery_n", "filtered_best_of")


def headroom(
    sampled: Sequence[Attempt], greedy: Sequence[Attempt], rewards: RewardSettings, own_reward: OwnReward | None = None
) -> dict[str, Any]:
    """Return figures of an initial policy: those of `summarise`, `live` (share of tasks whose attempts earn different rewards),
    `gain` (the rise of pass@1 if every attempt were the best of its task), `nothing` (whether RL has nothing to find), and
    `verdict`, a sentence. Solving tasks is not the aim of an environment with a reward of its own (`own_reward`)."""
    scores = summarise(sampled, greedy)
    groups: dict[str, list[Attempt]] = {}
    for attempt in sampled:
        if attempt.grade.known:
            groups.setdefault(attempt.task.id, []).append(attempt)
    scored = score_groups([*groups.values()], rewards, LossSettings(), own_reward)
    several = [any(abs(s.advantage) > 1e-6 for s in group) for group in scored if len(group) > 1]
    live = float(np.mean(several)) if several else None
    figures = {name: scores[name] for name in FIGURES} | {"live": live}
    figures["gain"] = figures["best_of_k"] - figures["pass_at_1"]
    figures["nothing"] = live is not None and not (live and (figures["best_of_k"] or own_reward))
    figures["verdict"] = _verdict(figures)
    return figures


def _verdict(figures: dict[str, Any]) -> str:
    """Return in one sentence what RL could find, from the figures of `headroom`."""
    if figures["live"] is None:
        return "one attempt at a task cannot tell what RL could find"
    if not figures["live"]:
        return f"nothing to find: the {figures['k']} attempts at each task earn the same reward, so no gradient is left"
    if figures["nothing"]:
        return f"nothing to find but other terms of the reward: none of {figures['k']} attempts at each task solves it"
    if not figures["best_of_k"]:
        return f"no attempt solves a task; RL can move only the environment's own reward ({figures['live']:.0%} of tasks live)"
    best = f"up to +{figures['gain']:.2f} of pass@1 (best of {figures['k']}), {figures['live']:.0%} of tasks live"
    if figures["recovery"] is None:
        return f"{best}; no attempt edits again after a failed test, so testing cannot pay"
    if figures["recovery"] < RECOVERY:
        return f"{best}; recovery {figures['recovery']:.2f} is below {RECOVERY}: RL will probably unlearn testing"
    return f"{best}; recovery {figures['recovery']:.2f}: tests and further tries can pay"


def refusal(run: RunDir) -> str:
    """Return why RL has nothing to learn from in a run; empty if it has, has begun, or its start is not evaluated yet."""
    if run.finished("eval_start") is None or run.finished("rl") is not None or run.pointer("rl"):
        return ""
    figures = run_headroom(run)
    if not figures.get("nothing", figures["live"] == 0):  # earlier versions did not store it
        return ""
    return f"RL has {figures['verdict']}; change env, data, reward or the start, or resume with rl.gate=false"


def run_headroom(run: RunDir, policy: str = "start") -> dict[str, Any]:
    """Return the headroom of a run's policy on its held-out tasks. Raises ValueError if it was not evaluated."""
    figures: dict[str, Any] | None = (run.finished(f"eval_{policy}") or {}).get("headroom")
    if figures is None:
        raise ValueError(f"{run.path.name}: {policy} has not been evaluated, or not by this version")
    return figures
