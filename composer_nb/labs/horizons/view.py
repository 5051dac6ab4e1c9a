"""Figures of long rollouts: how contexts fill, what segments hold, what compaction costs, whose credit is whose.

None is a widget: each is its own static twin.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_nb.harness.bench import wilson
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Kind
from composer_nb.labs.horizons.fork import Fork, Nudge
from composer_nb.trainer.rl import Scored
from composer_nb.views import style
from composer_nb.views.style import Picture, as_share, from_zero, key, title, whole_steps

_KINDS = {
    "read": (Kind.PROMPT, Kind.OBSERVATION),
    "said": (Kind.THINKING, Kind.TOOL_CALL, Kind.FINAL_MESSAGE),
    "summary": (Kind.SUMMARY,),
}
_COLORS = {"read": style.GREY, "said": style.BLUE, "summary": style.ORANGE}
_SIDES = {"self": style.GREEN, "prompted": style.PURPLE, "truncate": style.SKY}  # none of _COLORS, nor the triggers'


def contexts(attempts: Sequence[Attempt], triggers: Sequence[int]) -> Picture:
    """Draw how many tokens each rollout of one segment holds before each turn, and lines at the triggers."""
    picture, ax = style.one_panel(8.5, 3.0)
    for attempt in attempts:
        lengths = [int(places[0]) for places in attempt.rollout.segments[0].messages]
        ax.plot(range(1, len(lengths) + 1), lengths, color=style.BLUE, alpha=0.35, linewidth=1)
    for trigger in triggers:
        ax.axhline(trigger, color=style.VERMILION, linewidth=1.2)
        style.note(ax, 1, trigger, f"trigger {trigger}", va="bottom")
    whole_steps(from_zero(title(ax, "the context before each turn", "turn", "tokens")))
    return picture


def chain(attempt: Attempt, trigger: int) -> Picture:
    """Draw the tokens of each segment by what they are, and a line at the trigger."""
    segments = attempt.rollout.segments
    picture, ax = style.one_panel(8.5, 0.9 + 0.3 * len(segments))
    parts = {name: [np.isin(s.kind, kinds).sum() for s in segments] for name, kinds in _KINDS.items()}
    style.stacked(ax, [f"segment {number}" for number in range(1, len(segments) + 1)], parts, _COLORS)
    ax.axvline(trigger, color=style.VERMILION, linewidth=1.2, label=f"trigger {trigger}")
    title(ax, f"task {attempt.task.id}: {'solved' if attempt.grade.passed else 'not solved'}", "tokens")
    key(ax)
    return picture


def sides(figures: Mapping[tuple[str, int], Mapping[str, float]], names: Sequence[str]) -> Picture:
    """Draw figures of ways to end a segment, by (way, trigger): a panel for each of `names`, a group of bars for each trigger.
    Shares solved have 95 % intervals."""
    triggers = list(dict.fromkeys(trigger for _, trigger in figures))
    picture = Picture(9.5, 2.8)
    for ax, name in zip(picture.panels(1, len(names)), names, strict=True):
        bars = []
        for way, color in _SIDES.items():
            rows = [figures.get((way, trigger), {}) for trigger in triggers]
            spans = [wilson(row["solved"], int(row["rollouts"])) if row and name == "solved" else None for row in rows]
            bars.append(style.BarSeries(way, color, [row.get(name) for row in rows], spans))
        form = ".2f" if name == "solved" else ".0f"
        style.grouped(ax, [f"trigger {trigger}" for trigger in triggers], bars, form, size=7)
        title(ax, name)
    key(picture.axes[-1])
    return picture


def credit(group: Sequence[Scored], names: Sequence[str]) -> Picture:
    """Draw who gets what of a group: for each segment of each rollout its weight in the gradient, the advantage times the tokens
    that the policy wrote, summaries apart."""
    rows = [
        (name, scored, n, segment)
        for name, scored in zip(names, group, strict=True)
        for n, segment in enumerate(scored.attempt.rollout.segments, 1)
    ]
    picture, ax = style.one_panel(9.0, 0.9 + 0.22 * len(rows))
    parts = {
        name: [s.advantage * np.isin(segment.kind, _KINDS[name]).sum() for _, s, _, segment in rows]
        for name in ("said", "summary")
    }
    style.stacked(ax, [f"{name} {n}" for name, _, n, _ in rows], parts, _COLORS)
    ax.axvline(0, color=style.GREY, linewidth=0.8)
    ax.use_sticky_edges = False
    ax.autoscale(axis="x")  # a margin at both ends
    title(ax, "weight in the gradient of each segment", "advantage × written tokens")
    key(ax)
    return picture


def worth(forks: Mapping[str, Sequence[Fork]]) -> Picture:
    """Draw the share of forks that solve the task with its 95 % interval, by the turn (from 1) from which they go on: a line per
    name."""
    picture, ax = style.one_panel(8.5, 2.8)
    colors = (style.BLUE, style.ORANGE, style.GREEN)
    for shift, (color, (name, series)) in enumerate(zip(colors, forks.items(), strict=False)):
        turns, shares = [fork.turn + 1 + 0.1 * shift for fork in series], np.array([fork.solved for fork in series])
        ends = np.abs(np.array([fork.interval for fork in series]).T - shares)
        ax.errorbar(turns, shares, ends, fmt="o-", linewidth=0.8, elinewidth=2, color=color, label=name)
    whole_steps(as_share(title(ax, "futures that solve the task, 95 % intervals", "forked before turn", ""), 1.05))
    key(ax)
    return picture


def outcomes(forks: Mapping[str, Fork]) -> Picture:
    """Draw the share of each fork's futures that solve the task, with its 95 % interval."""
    picture, ax = style.one_panel(8.5, 0.8 + 0.35 * len(forks))
    style.bars(ax, {name: fork.solved for name, fork in forks.items()}, style.SKY).set_xlim(0, 1)
    for row, fork in enumerate(forks.values()):
        style.interval(ax, fork.interval, [row, row])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    title(ax, "futures that solve the task, 95 % intervals")
    return picture


def nudged(hint: Nudge) -> Picture:
    """Draw, for each token of a turn, the KL between the policy without a hint and with it, and whether the token that was said
    becomes likelier (blue) or less likely. Above a high bar stand the token that the hint raises most, and its probability
    without the hint and with it."""
    picture, ax = style.one_panel(9.0, 2.8)
    colors = [style.BLUE if gain >= 0 else style.VERMILION for gain in hint.gain]
    ax.bar(range(len(hint.kl)), hint.kl, color=colors, width=0.75)
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": style.INK}
    for at, (kl, raised, (without, with_hint)) in enumerate(zip(hint.kl, hint.raised, hint.chance, strict=True)):
        if kl > 0.1 * max(hint.kl):
            ax.annotate(f"{raised.strip()}\n{without:.2f} → {with_hint:.2f}", (at, kl), (0, 2), **above)
    ax.margins(y=0.2)  # room for two lines
    ax.set_xticks(range(len(hint.tokens)), [token.strip() or "␣" for token in hint.tokens], fontsize=7.5, rotation=60)
    title(ax, "what the hint would move", "the turn as it was said", "KL, nats")
    from_zero(ax)
    return picture
