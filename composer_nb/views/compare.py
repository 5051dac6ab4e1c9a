"""Figures of two runs side by side: scores with intervals, their differences, curves on one axis, seconds by stage.

The first run is blue in every figure, the second orange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_nb.trainer.rundir import RunDir
from composer_nb.views import style
from composer_nb.views.curves import WINDOW, line
from composer_nb.views.style import Picture, as_share, from_zero, key, title, whole_steps

COLORS = (style.BLUE, style.ORANGE)
_CURVES = {
    "solved": ("rollouts that solve their task", "share"),
    "reward": ("reward", "mean of a batch"),
    "entropy": ("entropy", "nats a token"),
    "turns": ("tool calls a rollout", "calls"),
    "staleness": ("staleness of what was trained", "batches"),
    "live_groups": ("groups with a signal", "share"),
}


def figures(found: Mapping[str, Any], first: RunDir, second: RunDir) -> dict[str, tuple[str, bytes]]:
    """Name -> (caption, PNG) of everything that both runs have got to. `found` is what `compare` found."""
    drawn: dict[str, tuple[Picture, str]] = {}
    if any("difference" in part for part in found["eval"].values()):
        drawn["scores"] = (
            scores(found),
            "Left: pass@1 with 95 % intervals over tasks. Right: second − first. An interval over 0 shows no difference; "
            "paired by task it is narrower than the bars suggest.",
        )
    if first.steps("rl") and second.steps("rl"):
        drawn["curves"] = (curves(found, first, second), f"RL. Bold: mean of the last {WINDOW} steps.")
    if found["wall_s"]:
        drawn["time"] = (times(found), "Where the time went.")
    return {name: (caption, picture.png()) for name, (picture, caption) in drawn.items()}


def scores(found: Mapping[str, Any]) -> Picture:
    """pass@1 of every policy that both runs scored, and the differences."""
    both = {name: part for name, part in found["eval"].items() if "difference" in part}
    if not both:
        return style.empty("there is no policy yet that both runs have scored")
    picture = Picture(9.5, 3.2)
    bars, gaps = picture.panels(1, 2, width_ratios=(3, 2))
    for place, (color, label) in enumerate(zip(COLORS, labels(found), strict=True)):
        at = np.arange(len(both)) + (place - 0.5) * 0.4
        values = [part["scores"][place] for part in both.values()]
        bars.bar(at, [score["pass_at_1"] for score in values], 0.37, color=color, label=label)
        for x, score in zip(at, values, strict=True):
            bars.plot([x, x], score["ci95"], color=style.INK, linewidth=1.2)
    bars.set_xticks(range(len(both)), list(both))
    as_share(bars, min(1.3, 1.3 * max(0.1, *(s["ci95"][1] for part in both.values() for s in part["scores"]))))
    title(bars, "solved, held-out tasks, pass@1")
    key(bars, loc="upper left", ncols=2)
    for place, part in enumerate(both.values()):
        gap = part["difference"]
        gaps.plot(gap["ci95"], [place, place], color=style.INK, linewidth=1.4)
        gaps.plot(gap["pass_at_1"], place, "o" if gap["paired"] else "s", color=style.INK, markersize=6)
    gaps.axvline(0, color=style.GREY, linestyle=":")
    gaps.set_yticks(range(len(both)), list(both))
    gaps.set_ylim(len(both) - 0.5, -0.5)
    gaps.grid(axis="y", visible=False)
    gaps.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    paired = all(part["difference"]["paired"] for part in both.values())
    title(gaps, f"second − first, {'paired by task' if paired else 'not paired'}", "pass@1")
    return picture


def curves(found: Mapping[str, Any], first: RunDir, second: RunDir) -> Picture:
    """What RL did in both, over its steps."""
    steps = first.steps("rl"), second.steps("rl")
    if not any(steps):
        return style.empty("RL has not reached its first checkpoint yet in either run")
    picture = Picture(9.5, 5.4)
    for ax, (name, (text, unit)) in zip(picture.panels(2, 3), _CURVES.items(), strict=True):
        for points, color, label in zip(steps, COLORS, labels(found), strict=True):
            line(ax, points, name, color, label)
        as_share(ax, 1.02) if unit == "share" else from_zero(ax) if name != "reward" else ax
        title(whole_steps(ax), text, "RL step", unit)
    key(picture.axes[0], loc="best")
    return picture


def times(found: Mapping[str, Any]) -> Picture:
    """Seconds by part of the recipe."""
    names = [name for name in found["wall_s"] if name != "total"] + ["total"]
    picture = Picture(9.5, 0.9 + 0.42 * len(names))
    [ax] = picture.panels(1, 1)
    for place, (color, label) in enumerate(zip(COLORS, labels(found), strict=True)):
        at = np.arange(len(names)) + (place - 0.5) * 0.4
        spent = [found["wall_s"].get(name, (0, 0))[place] or 0.0 for name in names]
        ax.barh(at, spent, 0.37, color=color, label=label)
        for y, seconds in zip(at, spent, strict=True):
            ax.text(seconds, y, f" {seconds:.0f}", va="center", fontsize=8.5, color=style.INK)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    title(ax, "seconds by part of the recipe", "seconds")
    key(ax, loc="best")
    return picture


def labels(found: Mapping[str, Any]) -> Sequence[str]:
    """The runs' names; a run compared with itself still has two."""
    names = [run["run"] for run in found["runs"]]
    return names if names[0] != names[1] else [f"{names[0]}, first", f"{names[1]}, second"]
