"""Curves over steps: losses of supervised training, what RL did, where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from composer_nb.trainer.rundir import RunDir
from composer_nb.views import style
from composer_nb.views.style import Picture, as_share, from_zero, key, title, whole_steps

WINDOW = 8
"""Steps that a smoothed line averages."""

_LOSSES = {
    "loss": ("training, weighted", style.GREY),
    "agent_loss": ("training, what the agent writes", style.ORANGE),
    "heldout_agent_loss": ("held out, what the agent writes", style.BLUE),
    "heldout_code_loss": ("held-out code", style.GREEN),
    "heldout_long_loss": ("held-out code, all positions", style.VERMILION),
}


def supervised(run: RunDir) -> Picture:
    """Losses of mid-training, of the long-context phase if there is one, and of fine-tuning, in nats a token."""
    stages = {"midtrain": "mid-training", "extend": "on longer rows", "sft": "fine-tuning on mistakes"}
    steps = {name: run.steps(name) for name in stages}
    if not steps["midtrain"]:
        return style.empty("mid-training has not reached its first checkpoint yet")
    if not steps["extend"]:
        del stages["extend"]
    picture = Picture(9.5, 3.4)
    widths = (2, *[1] * (len(stages) - 1))
    for ax, (name, text) in zip(picture.panels(1, len(stages), width_ratios=widths), stages.items(), strict=True):
        for loss, (label, color) in _LOSSES.items():
            points = [(p["step"], p[loss]) for p in steps[name] if p.get(loss) is not None]
            if points:
                ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1.6, label=label)
        from_zero(whole_steps(ax))
        title(ax, text, "optimiser step", "nats a token" if name == "midtrain" else "")
        if name == "midtrain" or "extend" in stages:
            key(ax)
    return picture


def reinforcement(run: RunDir) -> Picture:
    """RL: solved rollouts with the tuning tasks, entropy, calls a rollout, what went wrong."""
    steps = run.steps("rl")
    if not steps:
        return style.empty("RL has not reached its first checkpoint yet")
    picture = Picture(9.5, 6.0)
    solved, entropy, calls, faults = picture.panels(2, 2)
    line(solved, steps, "best_of_group", style.GREEN, "group: any rollout solves it")
    line(solved, steps, "solved", style.BLUE, "rollout: solved")
    looks = (("tune_greedy", "greedy", "D", style.VERMILION), ("tune_pass_at_1", "pass@1", "o", style.BLACK))
    for name, label, marker, color in looks:
        if points := [(p["step"], p[name]) for p in steps if name in p]:
            at, values = zip(*points, strict=True)
            solved.plot(at, values, marker, color=color, markersize=5, label=f"tuning tasks, {label}", zorder=3)
    title(as_share(solved, 1.02), "solved", "", "share")
    key(solved, loc="best")
    line(entropy, steps, "entropy", style.PURPLE, "entropy")
    scale = steps[-1].get("logit_scale", 1.0)
    sharper = "" if scale == 1 else f" (logits × {scale:.2f} by now)"
    title(from_zero(entropy), f"entropy of what is sampled{sharper}", "", "nats a token")
    if not entropy.lines:
        style.absent(entropy, "no group had a signal: nothing was trained")
    line(calls, steps, "turns", style.ORANGE, "calls")
    title(from_zero(calls), "tool calls a rollout", "RL step", "calls")
    line(faults, steps, "invalid_call_rate", style.VERMILION, "invalid calls")
    line(faults, [{**p, "unfinished": 1 - p["finished"]} for p in steps], "unfinished", style.GREY, "never finished")
    line(faults, [{**p, "dead": 1 - p["live_groups"]} for p in steps], "dead", style.SKY, "groups without a signal")
    title(as_share(faults, 1.02), "what teaches nothing, or goes wrong", "RL step", "share")
    key(faults)
    for ax in (solved, entropy, calls, faults):
        whole_steps(ax).set_xlim(0, steps[-1]["step"] + 1)
    return picture


def line(ax: Axes, steps: Sequence[Mapping[str, Any]], name: str, color: str, label: str) -> None:
    """Every step faintly, and the mean over WINDOW steps."""
    points = [(p["step"], p[name]) for p in steps if name in p]
    if not points:
        return
    at, values = (np.array(x, float) for x in zip(*points, strict=True))
    ax.plot(at, values, color=color, linewidth=0.9, alpha=0.3)
    marker = "o" if len(at) < 6 else ""
    ax.plot(
        at, style.smooth(values.tolist(), WINDOW), color=color, linewidth=2, marker=marker, markersize=4, label=label
    )


def time_split(run: RunDir, report: Mapping[str, Any]) -> Picture:
    """Seconds by stage, and what an average rank did in each RL step."""
    stages: Mapping[str, float] = report["stages"]
    steps = run.steps("rl")
    if not stages:
        return style.empty("no stage is complete yet")
    picture = Picture(9.5, 3.4)
    bars, split = picture.panels(1, 2)
    names = list(stages)[::-1]
    bars.barh(names, [stages[name] for name in names], color=style.SKY, height=0.65)
    for place, name in enumerate(names):
        bars.text(stages[name], place, f" {stages[name]:.0f}", va="center", fontsize=8.5, color=style.INK)
    bars.grid(axis="y", visible=False)
    bars.set_xlim(0, max(stages.values()) * 1.12)
    title(bars, "seconds by stage", "seconds")
    if not steps:
        split.axis("off")
        return picture
    step_times(split, steps)
    return picture


def step_times(ax: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """In the plain loop a rank samples, waits and trains by turns; beside services the trainer trains or waits for a batch."""
    at = [p["step"] for p in steps]
    parts = {"sample and grade": "sample_s", "wait for the other rank": "wait_s", "train": "train_s"}
    colors = [style.SKY, style.PALE, style.BLUE]
    if "sample_s" not in steps[0]["time"]:
        parts, colors = {"the trainer waits": "idle_s", "train": "train_s"}, colors[1:]
        steps = [{"time": p["time"] | {"idle_s": p["time"]["wall_s"] - p["time"]["train_s"]}} for p in steps]
    times = np.array([[max(0.0, p["time"][name]) for p in steps] for name in parts.values()])
    ax.stackplot(at, times, labels=list(parts), colors=colors, step="mid")
    from_zero(whole_steps(ax)).set_xlim(at[0], max(at[-1], at[0] + 1))
    ax.set_ylim(
        0, min(ax.get_ylim()[1], 1.5 * float(np.quantile(times.sum(0), 0.98)))
    )  # a first step may take ten times as long
    title(ax, "seconds of one RL step", "RL step", "seconds")
    ax.legend(frameon=False, fontsize=8.5, labelcolor=style.INK, reverse=True, loc="best")


def staleness(run: RunDir, report: Mapping[str, Any]) -> Picture:
    """How old the trained rollouts were, step by step, against the bound; and where the versions passed."""
    steps, train = run.steps("rl"), report["train"]
    picture = Picture(9.5, 3.0)
    ages, parts = picture.panels(1, 2)
    at = [p["step"] for p in steps]
    ages.plot(at, [p["staleness"] for p in steps], color=style.BLUE, linewidth=2, label="mean")
    ages.plot(at, [p["staleness_max"] for p in steps], color=style.SKY, linewidth=1, label="oldest")
    ages.axhline(train["staleness_bound"], color=style.INK, linestyle=":", label="bound")
    from_zero(whole_steps(ages))
    title(ages, "staleness of what was trained", "RL step", "batches")
    ages.legend(frameon=False, fontsize=8.5, labelcolor=style.INK)
    names = {"while sampled": "in_flight", "while waiting": "in_queue"}
    parts.barh(
        list(names), [train.get(name, 0.0) for name in names.values()], color=[style.BLUE, style.SKY], height=0.5
    )
    parts.grid(axis="y", visible=False)
    title(parts, "where it arose", "batches, mean over rollouts")
    return picture
