"""Curves over steps: losses of supervised training, metrics of RL of one run or of many, and times."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from composer_nb.harness.bench import half_width
from composer_nb.trainer.recipe.reader import Status
from composer_nb.trainer.services.journal import REFUSED
from composer_nb.views import style
from composer_nb.views.charts import WINDOW, Chart, Figure, bars, lines, stack

Steps = Sequence[Mapping[str, Any]]

_LOSSES = {
    "loss": ("training, weighted", style.GREY),
    "agent_loss": ("training, what the agent writes", style.ORANGE),
    "heldout_agent_loss": ("held out, what the agent writes", style.BLUE),
    "heldout_code_loss": ("held-out code", style.GREEN),
    "heldout_own_loss": ("text of the checkpoint's own", style.PURPLE),
    "heldout_long_loss": ("held-out code, all positions", style.VERMILION),
}
_SUPERVISED = {"midtrain": "mid-training", "extend": "on longer rows", "sft": "fine-tuning (SFT)"}

# Panels over RL steps: title, unit, and lines (metric, color, label), the one that stands for the panel last.
METRICS: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...]]] = {
    "reward": ("reward", "mean of a batch", (("reward", style.ORANGE, "reward"),)),
    "solved": (
        "solved",
        "share",
        (("best_of_group", style.GREEN, "any of the group"), ("solved", style.BLUE, "rollouts")),
    ),
    "entropy": ("entropy", "nats a token", (("entropy", style.PURPLE, "entropy"),)),
    "staleness": (
        "staleness of what was trained",
        "batches",
        (("staleness_max", style.SKY, "oldest"), ("staleness", style.BLUE, "mean")),
    ),
    "mismatch": (
        "engine and trainer apart",
        "nats",
        (("logprob_gap_p99", style.VERMILION, "p99 of |Δ log p|"), ("k3", style.BLUE, "k3")),
    ),
    "turns": ("tool calls a rollout", "calls", (("turns", style.ORANGE, "calls"),)),
    "faults": (
        "what teaches nothing, or goes wrong",
        "share",
        (
            ("unfinished", style.GREY, "never finished"),
            ("invalid_call_rate", style.VERMILION, "invalid calls"),
            ("dead", style.SKY, "groups: no signal"),
        ),
    ),
}


def known(steps: Steps, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of every step that has the figure."""
    return [(p["step"], p[name]) for p in steps if p.get(name) is not None and math.isfinite(p[name])]


def points(steps: Steps, name: str, line: str) -> Iterator[dict[str, Any]]:
    """Yield a metric as rows of a chart."""
    derived = {"unfinished": "finished", "dead": "live_groups"}.get(name)
    for step, value in known(steps, derived or name):
        yield {"step": step, "line": line, "value": 1 - value if derived else value}


def events(status: Status) -> Iterator[dict[str, Any]]:
    """Yield what happened at RL steps: settings that were changed live, attempts lost to the infrastructure, tampering, and
    versions whose number jumps, as after a restart."""
    for change in status.changes:
        if change.step not in (None, REFUSED):
            yield {"step": (change.step or 0) + 1, "event": f"{change.name} = {change.value}"}
    for name, text in (("infra_errors", "lost to the infrastructure"), ("tampered", "tampered")):
        yield from ({"step": step, "event": f"{value:g} {text}"} for step, value in known(status.steps, name) if value)
    for (_, before), (step, version) in pairwise(known(status.steps, "version")):
        if version - before > 1:
            yield {"step": step, "event": f"version {version} follows {before}"}


def panels(status: Status) -> list[Chart]:
    """Return the panels of METRICS that a run has data for, with its events on the axis."""
    happened = list(events(status))
    charts = []
    for name, (title, unit, parts) in METRICS.items():
        rows = [row for figure, _, label in parts for row in points(status.steps, figure, label)]
        colors = {label: hue for _, hue, label in parts}
        extra: list[dict[str, Any]] = [{"bound": status.bound}] if name == "staleness" and status.bound else []
        if rows:
            extra += _scored(status) if name == "solved" else []
            scored = (row["line"] for row in extra if "line" in row)
            colors |= {line: style.BLUE if line.endswith("pass@1") else style.GREEN for line in scored}
            charts.append(lines(title, [*rows, *happened, *extra], unit, colors, zero=name != "reward"))
    return charts


def _scored(status: Status) -> list[dict[str, Any]]:
    """Return pass@1 and best of k on held-out tasks before and after RL, and on tuning tasks, as points."""
    rows = []
    for name, label in (("pass_at_1", "pass@1"), ("best_of_k", "best of k")):
        tuning = known(status.steps, f"tune_{name}")
        rows += [{"line": f"tuning tasks, {label}", "step": step, "point": value} for step, value in tuning]
        for step, stage in ((0, "eval_start"), (len(status.steps), "eval_final")):
            if (score := status.infos.get(stage, {}).get(name)) is not None:
                rows.append({"line": f"held-out tasks, {label}", "step": step, "point": score})
    return rows


def overlaid(runs: Mapping[str, Sequence[Steps]]) -> list[Chart]:
    """Return the panels of METRICS with a line per name: a run, or the mean of three and more, which are the seeds of one
    setting, with a 95 % t-interval."""
    charts = []
    for name, (title, unit, parts) in METRICS.items():
        figure, _, label = parts[-1]
        rows = [row for line, seeds in runs.items() for row in _over_seeds(seeds, figure, line)]
        if rows:
            heading = title if len(parts) == 1 else f"{title}: {label}"
            charts.append(lines(heading, rows, unit, zero=name != "reward"))
    return charts


def _over_seeds(seeds: Sequence[Steps], figure: str, line: str) -> Iterator[dict[str, Any]]:
    """Yield the mean over runs at each step that all have, and the interval of their means over the last WINDOW steps."""
    if len(seeds) == 1:
        yield from points(seeds[0], figure, line)
        return
    values = pd.DataFrame([{row["step"]: row["value"] for row in points(steps, figure, line)} for steps in seeds])
    values = values.dropna(axis=1).sort_index(axis=1).T
    smooth = values.rolling(WINDOW, min_periods=1).mean()
    half = smooth.apply(half_width, axis=1)
    ends = {"low": smooth.mean(axis=1) - half, "high": smooth.mean(axis=1) + half}
    for row in pd.DataFrame({"value": values.mean(axis=1), **ends}).itertuples():
        yield {"step": row.Index, "line": line, "value": row.value, "low": row.low, "high": row.high}


def supervised(status: Status) -> Figure:
    """Draw the losses of mid-training, the long-context phase if there is one, and fine-tuning, in nats per token."""
    charts = []
    for stage, title in _SUPERVISED.items():
        steps = status.supervised.get(stage, ())
        rows = [row for loss, (label, _) in _LOSSES.items() for row in points(steps, loss, label)]
        if rows:
            charts.append(lines(title, rows, "nats a token", dict(_LOSSES.values()), x="optimizer step", window=1))
    return Figure(charts, note="mid-training has not reached its first checkpoint yet")


def reinforcement(status: Status) -> Figure:
    """Draw RL: solved rollouts, held-out and tuning tasks (the mean and the best of k of each), entropy, calls per rollout, and
    failures."""
    return Figure(
        [chart for chart in panels(status) if not chart.title.startswith("staleness")],
        note="RL has not reached its first checkpoint yet",
    )


def time_split(status: Status) -> Figure:
    """Draw seconds by stage, and how an average rank spent each RL step."""
    return Figure(times(status), note="no stage is complete yet")


def times(status: Status) -> list[Chart]:
    """Return the panels of `time_split` that a run has data for."""
    charts = []
    if status.stages:
        rows = [{"name": name, "value": spent} for name, spent in status.stages.items()]
        charts.append(bars("seconds of complete stages", rows, dict.fromkeys(status.stages, style.SKY), form=",.0f"))
    return [*charts, *([step_times(status.steps)] if status.steps else [])]


def step_times(steps: Steps) -> Chart:
    """Return the parts of each step: sampling, waiting and training in the synchronous loop; waiting and training with
    services."""
    parts = {"train": "train_s", "sample and grade": "sample_s", "wait for the other rank": "wait_s"}
    colors = dict(zip(parts, (style.BLUE, style.SKY, style.GREY), strict=True))
    times_of = [step["time"] for step in steps]
    if "sample_s" not in times_of[0]:
        parts = {"train": "train_s", "the trainer waits": "idle_s"}
        colors = dict(zip(parts, (style.BLUE, style.SKY), strict=True))
        times_of = [time | {"idle_s": max(0.0, time["wall_s"] - time["train_s"])} for time in times_of]
    rows = [
        {"at": step["step"], "part": part, "value": time[name], "order": order}
        for step, time in zip(steps, times_of, strict=True)
        for order, (part, name) in enumerate(parts.items())
    ]
    totals = [sum(time[name] for name in parts.values()) for time in times_of]
    # A first step may take ten times as long.
    top = min(max(totals), 1.5 * float(np.quantile(totals, 0.98)))
    return stack("seconds of a step", rows, colors, x="RL step", unit="seconds", top=top)


def staleness(status: Status, train: Mapping[str, Any]) -> Figure:
    """Draw the staleness of trained rollouts step by step with the bound, and where it arose (`report.training`)."""
    ages = [chart for chart in panels(status) if chart.title.startswith("staleness")]
    names = {"while sampled": "in_flight", "while waiting": "in_queue"}
    parts = [{"name": text, "value": train[name]} for text, name in names.items() if train.get(name) is not None]
    arose = [bars("where it arose: batches, mean over rollouts", parts, form=".2f")] if parts else []
    return Figure([*ages, *arose], note="nothing was trained")
