"""Curves over steps: losses of supervised training, metrics of RL, and times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from composer_nb.trainer.recipe.reader import Status
from composer_nb.views import style
from composer_nb.views.style import Picture, as_share, from_zero, key, title, whole_steps

# Steps that a smoothed line averages.
WINDOW = 8

_LOSSES = {
    "loss": ("training, weighted", style.GREY),
    "agent_loss": ("training, what the agent writes", style.ORANGE),
    "heldout_agent_loss": ("held out, what the agent writes", style.BLUE),
    "heldout_code_loss": ("held-out code", style.GREEN),
    "heldout_own_loss": ("text of the checkpoint's own", style.PURPLE),
    "heldout_long_loss": ("held-out code, all positions", style.VERMILION),
}


def supervised(status: Status) -> Picture:
    """Draw the losses of mid-training, the long-context phase if there is one, and fine-tuning, in nats per token."""
    stages = {"midtrain": "mid-training", "extend": "on longer rows", "sft": "fine-tuning (SFT)"}
    if "midtrain" not in status.supervised:
        return style.empty("mid-training has not reached its first checkpoint yet")
    if "extend" not in status.supervised:
        del stages["extend"]
    picture = Picture(9.5, 3.4)
    widths = (2, *[1] * (len(stages) - 1))
    for ax, (name, text) in zip(picture.panels(1, len(stages), width_ratios=widths), stages.items(), strict=True):
        for loss, (label, color) in _LOSSES.items():
            if points := known(status.supervised.get(name, ()), loss):
                ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1.6, label=label)
        from_zero(whole_steps(ax))
        title(ax, text, "optimiser step", "nats a token" if name == "midtrain" else "")
        if name == "midtrain" or "extend" in stages:
            key(ax)
    return picture


# Panels over RL steps: title, unit, and lines (metric, color, label).
METRICS: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...]]] = {
    "reward": ("reward", "mean of a batch", (("reward", style.ORANGE, "reward"),)),
    "solved": (
        "solved",
        "share",
        (("best_of_group", style.GREEN, "group: any rollout solves it"), ("solved", style.BLUE, "rollout: solved")),
    ),
    "entropy": ("entropy", "nats a token", (("entropy", style.PURPLE, "entropy"),)),
    "staleness": ("staleness of what was trained", "batches", (("staleness", style.BLUE, "mean"),)),
    "mismatch": (
        "engine and trainer apart",
        "nats",
        (("logprob_gap_p99", style.VERMILION, "p99 of |Δ log p|"), ("k3", style.BLUE, "k3")),
    ),
    "turns": ("tool calls a rollout", "calls", (("turns", style.ORANGE, "calls"),)),
    "live_groups": ("groups with a signal", "share", (("live_groups", style.SKY, "groups"),)),
    "faults": (
        "what teaches nothing, or goes wrong",
        "share",
        (
            ("invalid_call_rate", style.VERMILION, "invalid calls"),
            ("unfinished", style.GREY, "never finished"),
            ("dead", style.SKY, "groups without a signal"),
        ),
    ),
}


def metric(ax: Axes, steps: Sequence[Mapping[str, Any]], name: str, bound: int | None = None) -> Axes:
    """Draw a panel of METRICS; `bound` is a horizontal line."""
    for figure, color, label in METRICS[name][2]:
        line(ax, steps, figure, color, label)
    if name == "staleness" and any(point.get("staleness_max") is not None for point in steps):
        oldest = [p["staleness_max"] if p.get("staleness_max") is not None else math.nan for p in steps]
        ax.plot([p["step"] for p in steps], oldest, color=style.SKY, linewidth=1, label="oldest")
    if not steps:
        style.absent(ax, "RL has no step yet")
    elif not ax.lines:
        style.absent(ax, "nothing was trained")
    if bound:
        ax.axhline(bound, color=style.INK, linestyle=":", label="bound")
    return scaled(ax, name)


def scaled(ax: Axes, name: str) -> Axes:
    """Title a panel of METRICS and set its axes."""
    heading, unit, _ = METRICS[name]
    if unit == "share":
        as_share(ax, 1.02)
    elif name == "mismatch" and ax.lines:
        ax.set_yscale("symlog", linthresh=1e-9)
    elif name != "reward":
        from_zero(ax)
    title(whole_steps(ax), heading, "RL step", unit)
    key(ax, near=True)
    return ax


def reinforcement(status: Status) -> Picture:
    """Draw RL: solved rollouts, held-out and tuning tasks (the mean and the best of k of each), entropy, calls per rollout, and
    failures."""
    if not (steps := status.steps):
        return style.empty("RL has not reached its first checkpoint yet")
    derived = [{**p, "unfinished": 1 - p["finished"], "dead": 1 - p["live_groups"]} for p in steps]
    picture = Picture(9.5, 6.0)
    panels = picture.panels(2, 2)
    for ax, name in zip(panels, ("solved", "entropy", "turns", "faults"), strict=True):
        metric(ax, derived, name).set_xlim(0, steps[-1]["step"] + 1)
    ends = {0: status.infos.get("eval_start", {}), steps[-1]["step"]: status.infos.get("eval_final", {})}
    for name, label, marker in (("best_of_k", "best of k", "D"), ("pass_at_1", "pass@1", "o")):
        look: dict[str, Any] = {"color": style.INK, "markersize": 5, "zorder": 3}
        heldout = [(step, scores[name]) for step, scores in ends.items() if name in scores]
        for points, kind, fill in ((heldout, "held-out", style.INK), (known(steps, f"tune_{name}"), "tuning", "none")):
            if points:
                key_text = f"{kind} tasks, {label}"
                panels[0].plot(*zip(*points, strict=True), f"{marker}:", label=key_text, markerfacecolor=fill, **look)
    key(panels[0], near=True)
    return picture


def line(ax: Axes, steps: Sequence[Mapping[str, Any]], name: str, color: str, label: str) -> None:
    """Draw every step that has the figure faintly, and the mean over WINDOW of them."""
    if not (points := known(steps, name)):
        return
    at, values = (np.array(x, float) for x in zip(*points, strict=True))
    ax.plot(at, values, color=color, linewidth=0.9, alpha=0.3)
    marker = "o" if len(at) < 6 else ""
    means = style.smooth(values.tolist(), WINDOW)
    ax.plot(at, means, color=color, linewidth=2, marker=marker, markersize=4, label=label)


def known(steps: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of every step that has the figure."""
    return [(p["step"], p[name]) for p in steps if p.get(name) is not None]


def time_split(status: Status) -> Picture:
    """Draw seconds by stage, and how an average rank spent each RL step."""
    if not (stages := status.stages):
        return style.empty("no stage is complete yet")
    picture = Picture(9.5, 3.4)
    bars, split = picture.panels(1, 2)
    style.bars(bars, stages, style.SKY, ".0f").set_xlim(0, max(stages.values()) * 1.12)
    title(bars, "seconds by stage", "seconds")
    if status.steps:
        step_times(split, status.steps)
    else:
        split.axis("off")
    return picture


def step_times(ax: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Draw the parts of each step: sampling, waiting and training in the synchronous loop; waiting and training with services."""
    at = [p["step"] for p in steps]
    parts = {"sample and grade": "sample_s", "wait for the other rank": "wait_s", "train": "train_s"}
    colors = [style.SKY, style.PALE, style.BLUE]
    if "sample_s" not in steps[0]["time"]:
        parts, colors = {"train": "train_s", "the trainer waits": "idle_s"}, [style.BLUE, style.PALE]
        steps = [{"time": p["time"] | {"idle_s": p["time"]["wall_s"] - p["time"]["train_s"]}} for p in steps]
    times = np.array([[max(0.0, p["time"][name]) for p in steps] for name in parts.values()])
    total = times.sum(0)
    top = min(float(total.max()), 1.5 * float(np.quantile(total, 0.98)))  # a first step may take ten times as long
    ax.stackplot(at, times * np.minimum(1.0, top / total), labels=list(parts), colors=colors, step="mid")
    from_zero(whole_steps(ax)).set_xlim(at[0], max(at[-1], at[0] + 1))
    ax.set_ylim(0, 1.05 * top)
    title(ax, "seconds of one RL step", "RL step", "seconds")
    key(ax, near=True)


def staleness(status: Status, train: Mapping[str, Any]) -> Picture:
    """Draw the staleness of trained rollouts step by step with the bound, and where it arose (`report.training`)."""
    picture = Picture(9.5, 3.0)
    ages, parts = picture.panels(1, 2)
    metric(ages, status.steps, "staleness", train["staleness_bound"])
    names = {"while sampled": "in_flight", "while waiting": "in_queue"}
    parts_of_age = {text: train[name] for text, name in names.items() if train.get(name) is not None}
    style.bars(parts, parts_of_age, [style.BLUE, style.SKY][: len(parts_of_age)])
    if not parts_of_age:
        style.absent(parts, "nothing was trained")
    title(parts, "where it arose", "batches, mean over rollouts")
    return picture
