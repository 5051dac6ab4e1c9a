"""The reward lab: sliders over the terms of a reward, and a stored batch under it.

`sliders` and `look` show the same figure. `sliders` redraws it when a slider is released; `look` is its static twin.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from composer_nb.harness.rewards import Effort, RewardSettings, effort_curve
from composer_nb.harness.terms import conduct  # noqa: F401  they register terms for sliders
from composer_nb.harness.terms.registry import TERMS
from composer_nb.labs.rewards.judges import Agreement
from composer_nb.labs.rewards.rescore import Lab, RescoredBatch, StoredBatch, judge, rescore
from composer_nb.trainer.settings import changed, override
from composer_nb.views import style
from composer_nb.views.page import shown
from composer_nb.views.style import Picture, from_zero, key, title

if TYPE_CHECKING:
    import ipywidgets

# Label, colour and marker of a rollout.
SOLVED = {True: ("solved", style.BLUE, "o"), False: ("not solved", style.ORANGE, "D")}
_EFFORT = {
    "effort.weight": (0.0, 1.0, 0.01),
    "effort.k": (0.1, 10.0, 0.1),
    "effort.q": (0.0, 3.0, 0.1),
    "effort.turns": (0.0, 1.0, 0.05),
    "effort.tool_call_tokens": (0.0, 0.1, 0.005),
    "effort.tool_output_tokens": (0.0, 0.1, 0.005),
}


def ranges(batch: StoredBatch) -> dict[str, tuple[float, float, float]]:
    """Return (from, to, step) of each slider by setting, ten at most: the effort penalty, and the terms that differ within most
    groups of the batch."""
    live = {name: float(rescore(batch, RewardSettings(weights={name: 1.0})).live_P.mean()) for name in TERMS}
    terms = sorted(filter(live.__getitem__, live), key=lambda name: -live[name])[: 10 - len(_EFFORT)]
    return {**{f"weights.{name}": (-2.0, 2.0, 0.1) for name in terms}, **_EFFORT}


def with_values(rewards: RewardSettings, values: Mapping[str, float]) -> RewardSettings:
    """Return `rewards` with settings replaced by dotted name; `weights.TERM` sets the weight of one term. Raises
    ValueError for an unknown name or a value that does not fit."""
    weights = {name[8:]: value for name, value in values.items() if name.startswith("weights.")}
    rest = {name: value for name, value in values.items() if not name.startswith("weights.")}
    if unknown := set(weights) - set(TERMS):
        raise ValueError(f"no reward term {sorted(unknown)[0]!r}; registered terms: {', '.join(sorted(TERMS))}")
    return override(rewards, {"weights": {**rewards.weights, **weights}, **rest})


def value_of(rewards: RewardSettings, name: str) -> float:
    """Return the value of a dotted name; a term without a weight counts 0."""
    group, _, leaf = name.partition(".")
    return float(rewards.weights.get(leaf, 0.0) if group == "weights" else getattr(rewards.effort, leaf))


def look(lab: Lab, rescored: RescoredBatch) -> Picture:
    """Draw the stored batch under another reward: each rollout's advantage as trained and as it would be, the groups, and the
    angle between the two gradients."""
    picture = Picture(9.5, 3.6)
    rollouts, groups, turn = picture.panels(1, 3, width_ratios=(1.1, 1.2, 0.9))
    _advantages(rollouts, lab, rescored)
    _groups(groups, lab, rescored)
    _turn(turn, rescored)
    return picture


def _advantages(ax: Axes, lab: Lab, rescored: RescoredBatch) -> None:
    old_R, new_R = lab.stored.advantage_R, rescored.scores.advantage_R
    edge = 1.1 * max(1e-3, np.abs(old_R).max(), np.abs(new_R).max())
    ax.plot([-edge, edge], [-edge, edge], color=style.PALE, linewidth=1, zorder=0)
    ax.axhline(0, color=style.GREY, linewidth=0.7)
    ax.axvline(0, color=style.GREY, linewidth=0.7)
    for solved, (label, color, marker) in SOLVED.items():
        chosen_R = lab.stored.solved_R == solved
        ax.plot(old_R[chosen_R], new_R[chosen_R], marker, color=color, markersize=4.5, alpha=0.6, label=label)
    ax.set(xlim=(-edge, edge), ylim=(-edge, edge))
    title(ax, "advantage of each rollout", "as trained", "under this reward")
    key(ax)


def _groups(ax: Axes, lab: Lab, rescored: RescoredBatch) -> None:
    """Draw one row per group: its rollouts' new advantages, and how it changed."""
    scores = rescored.scores
    for solved, (_, color, marker) in SOLVED.items():
        chosen_R = scores.solved_R == solved
        at_R = scores.group_R[chosen_R] + (0.12 if solved else -0.12)
        ax.plot(scores.advantage_R[chosen_R], at_R, marker, color=color, markersize=4, alpha=0.6)
    live_P = scores.live_P
    notes = {group: "dead" for group in np.flatnonzero(~live_P).tolist()}
    notes |= {group: "revived" for group in rescored.revived} | {group: "silenced" for group in rescored.silenced}
    notes |= {group: "flips" for group in rescored.flipped}
    ax.set_yticks(range(len(live_P)), [f"{notes.get(group, '')} {group + 1}" for group in range(len(live_P))])
    ax.set_ylim(len(live_P) - 0.5, -0.5)
    ax.axvline(0, color=style.GREY, linewidth=0.7)
    was, now = int(lab.stored.live_P.sum()), int(live_P.sum())
    title(ax, f"groups: {now} of {len(live_P)} teach (were {was})", "advantage under this reward")


def _turn(ax: Axes, rescored: RescoredBatch) -> None:
    """Draw the two gradients as directions, the trained one to the right."""
    ax.set_aspect("equal", anchor="N")
    ax.set(xlim=(-1.25, 1.25), ylim=(-0.75, 1.25))
    ax.axis("off")
    around = np.linspace(0, np.pi, 90)
    ax.plot(np.cos(around), np.sin(around), color=style.PALE, linewidth=1)
    _arrow(ax, 1.0, style.GREY)
    ax.text(1.0, -0.14, "as trained", ha="right", fontsize=8.5, color=style.GREY)
    text_of_cosine = "no gradient" if math.isnan(rescored.cosine) else f"cosine {rescored.cosine:+.3f}"
    if not math.isnan(rescored.cosine):
        _arrow(ax, rescored.cosine, style.BLUE)
    ax.text(0.0, -0.42, text_of_cosine, ha="center", fontsize=12, color=style.INK)
    agrees = rescored.scores.agreement
    text = "" if math.isnan(agrees) else f"agreement with the tests {agrees:.2f}"
    ax.text(0.0, -0.66, text, ha="center", fontsize=8.5, color=style.INK)
    title(ax, "policy gradient")


def _arrow(ax: Axes, cosine: float, color: str) -> None:
    tip = (cosine, math.sqrt(max(0.0, 1.0 - cosine * cosine)))
    ax.annotate("", xy=tip, xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2})


def sliders(lab: Lab) -> ipywidgets.VBox:
    """Return sliders over `ranges`, beginning at the rewards of the run, above the figure of `look`.

    The figure follows when a slider is released; until it is drawn, the line below says so. It belongs to the widget, so nothing
    else in a notebook depends on the sliders.
    Below it stand the `overrides` with which a run trains on the chosen reward.
    Settings that have no slider keep their value.
    """
    import ipywidgets as w

    settings = lab.batch.settings.reward
    wide = w.Layout(width="auto")
    spans = ranges(lab.batch)
    start_values = {name: value_of(settings, name) for name in spans}
    slider_by_name = {
        name: w.FloatSlider(
            value=start_values[name],
            min=min(low, start_values[name]),  # a slider would bend a value outside to its end
            max=max(high, start_values[name]),
            step=step,
            continuous_update=False,  # drawing takes longer than a pixel takes to pass
            description=name,
            layout=wide,
            style={"description_width": "14em"},
            readout_format=".3f" if step < 0.01 else ".2f",
        )
        for name, (low, high, step) in spans.items()
    }
    image = w.Image(format="png", layout=w.Layout(max_width="100%"))
    caption, reset_button = w.HTML(), w.Button(description="reset")

    def draw(_: object = None) -> None:
        caption.value = "computing …"
        values = {name: slider.value for name, slider in slider_by_name.items() if slider.value != start_values[name]}
        chosen_settings = with_values(settings, values)
        rescored = judge(lab, chosen_settings)
        image.value = look(lab, rescored).png()
        overrides = {f"reward.{name}": value for name, value in changed(RewardSettings(), chosen_settings).items()}
        text = html.escape(json.dumps(overrides))
        caption.value = f"<code>{summary(rescored)}</code><br><code>overrides = {text}</code>"

    def reset(_: object = None) -> None:
        for name, slider in slider_by_name.items():
            slider.unobserve_all("value")
            slider.value = start_values[name]
            slider.observe(draw, "value")
        draw()

    reset()
    reset_button.on_click(reset)
    columns = w.Layout(width="100%", grid_template_columns="repeat(auto-fit, minmax(24em, 1fr))")
    grid = w.GridBox([*slider_by_name.values(), reset_button], layout=columns)
    return w.VBox([grid, image, caption], layout=w.Layout(width="100%"))


def facts(rescored: RescoredBatch) -> dict[str, float]:
    """Return the numbers of a verdict."""
    return {
        "cosine": rescored.cosine,
        "groups that teach": int(rescored.scores.live_P.sum()),
        **{name: len(getattr(rescored, name)) for name in _CHANGES},
        "agreement": rescored.scores.agreement,
    }


_CHANGES = ("revived", "silenced", "flipped")


def summary(rescored: RescoredBatch) -> str:
    """Summarise a verdict in one line; groups are numbered from 1, as in the figure."""
    live_P = rescored.scores.live_P
    parts = [f"cosine {rescored.cosine:+.4f}", f"{int(live_P.sum())} of {len(live_P)} groups teach"]
    for name in _CHANGES:
        if groups := getattr(rescored, name):
            parts.append(f"{name}: {', '.join(str(group + 1) for group in groups)}")
    return "; ".join(parts)


def effort_curves(batch: StoredBatch, effort: Effort) -> Picture:
    """Draw the effort penalty C_{k,q}(x) for several q, and the price of one more unit of effort. Ticks below: the efforts of the
    stored rollouts, by outcome."""
    efforts_R = np.array([effort.of(attempt.rollout) for attempt in batch.attempts])
    solved_R = np.array([attempt.grade.passed for attempt in batch.attempts])
    x = np.linspace(0, max(1.0, 1.15 * float(efforts_R.max())), 200)
    picture = Picture(9.5, 3.3)
    curve, price = picture.panels(1, 2)
    for q, color in zip((0.0, 0.5, 1.0, 2.0), (style.GREY, style.BLUE, style.GREEN, style.PURPLE), strict=False):
        cost = [effort_curve(float(value), effort.k, q) for value in x]
        curve.plot(x, cost, color=color, linewidth=2, label=f"q = {q:g}")
        price.plot(x, (1 + effort.k * x) ** -q, color=color, linewidth=2)
    for solved, (_, color, _) in SOLVED.items():
        chosen = efforts_R[solved_R == solved]
        at = np.full(len(chosen), 0.03 if solved else 0.07)
        for ax in (curve, price):
            ax.plot(chosen, at, "|", color=color, markersize=7, alpha=0.7, transform=ax.get_xaxis_transform())
    from_zero(title(curve, f"cost C(x), k = {effort.k:g}", "effort x of a rollout", "C"))
    from_zero(title(price, "price of a little more effort, dC/dx", "effort x of a rollout", "slope"))
    key(curve)
    return picture


def cosines(real: Mapping[str, float], control_N: NDArray[np.float64]) -> Picture:
    """Draw the cosines of `real` rewards (by name) over a histogram of the control's."""
    picture, ax = style.one_panel(9.5, 2.8)
    ax.hist(control_N, bins=np.linspace(-1, 1, 61).tolist(), color=style.SKY, label=f"{len(control_N)} × shuffled")
    top = ax.get_ylim()[1]
    for row, (name, value) in enumerate(real.items()):
        if not math.isnan(value):
            ax.axvline(value, color=style.VERMILION, linewidth=1.6)
            side = "right" if value > 0 else "left"
            box, at = {"facecolor": "white", "edgecolor": "none", "pad": 1}, (value, top * (0.92 - 0.13 * row))
            ax.annotate(f" {name} ", at, ha=side, fontsize=8.5, color=style.INK, bbox=box)
    ax.set_xlim(-1.05, 1.05)
    title(ax, "cosine to the gradient as trained", "cosine", "shuffles")
    key(ax)
    return picture


def alone(batch: StoredBatch) -> Picture:
    """Draw each of the package's terms as if it were the whole reward: the share of groups in which its rollouts differ, and its
    agreement with the tests there (`Scores.agreement`). Of terms that differ nowhere, only the number is shown."""
    names = [name for name, term in TERMS.items() if term.__module__.startswith("composer_nb.")]
    all_scores = {name: rescore(batch, RewardSettings(weights={name: 1.0})) for name in names}
    scores_by_term = {name: scores for name, scores in all_scores.items() if scores.live_P.any()}
    if not scores_by_term:
        return style.empty(f"none of {len(names)} terms differs within a group")
    picture = Picture(9.5, 1.1 + 0.3 * len(scores_by_term))
    live, agrees = picture.panels(1, 2)
    style.bars(live, {name: float(scores.live_P.mean()) for name, scores in scores_by_term.items()}, style.GREY, ".2f")
    style.rows(agrees, list(scores_by_term))
    agrees.axvline(0.5, color=style.GREY, linewidth=0.8)
    points = [scores.agreement for scores in scores_by_term.values()]
    agrees.plot(points, range(len(points)), "o", color=style.BLUE)
    for ax in (live, agrees):
        ax.set_xlim(-0.05, 1.15)
    title(live, f"groups in which it differs; {len(names) - len(points)} other terms: none", "share")
    title(agrees, "agreement with the tests", "0.5: as chance")
    return picture


def agreed(result: Agreement, levels: Sequence[str]) -> Picture:
    """Draw a judge against labels: rollouts by label and level, and the accuracy with its interval beside that of a constant."""
    picture = Picture(9.5, 2.8)
    table, ax = picture.panels(1, 2, width_ratios=(1, 1.3))
    count_KK = np.array([[result.counts.get((k, j), 0) for j in range(len(levels))] for k in range(len(levels))])
    labels = [text.partition(",")[0][:18] for text in levels]
    table.imshow(count_KK, cmap="Blues", vmax=2 * max(1, count_KK.max()))
    for (k, j), count in np.ndenumerate(count_KK):
        style.note(table, j, k, str(count), ha="center", color=style.DARK)
    table.set_xticks(range(len(levels)), labels, fontsize=8)
    table.set_yticks(range(len(levels)), labels, fontsize=8)
    table.grid(visible=False)
    title(table, f"{result.n} rollouts, {result.failed} without an answer", "judge", "label")
    style.bars(ax, {"judge": result.accuracy, "a constant": result.constant}, [style.BLUE, style.GREY])
    style.interval(ax, result.interval, [0, 0])
    ax.set_xlim(0, 1.05)
    title(ax, f"Cohen's κ: {shown(result.kappa, '.2f')}", "accuracy, with its 95 % interval")
    return picture


def against_weight(weights: Sequence[float], *terms: Sequence[RescoredBatch], names: Sequence[str] = ("",)) -> Picture:
    """Draw agreement and cosine against the weight of one term, or of several `names`, on a logarithmic axis. Both vertical axes
    reach from 0 or below to 1, so that what hardly changes looks flat."""
    picture = Picture(9.5, 2.8)
    agreement, cosine = picture.panels(1, 2)
    for name, verdicts, color in zip(names, terms, style.COLORS, strict=False):
        agreement.plot(weights, [r.scores.agreement for r in verdicts], "o-", color=color, markersize=3.5, label=name)
        cosine.plot(weights, [r.cosine for r in verdicts], "o-", color=color, markersize=3.5)
    for ax, name in ((agreement, "agreement with the tests"), (cosine, "cosine to the gradient as trained")):
        # Limits by hand, because a batch without signal has no point to scale an axis by.
        ax.set(xlim=(min(weights) / 1.5, max(weights) * 1.5), xscale="log", ylim=(min(0.0, ax.get_ylim()[0]), 1.05))
        title(ax, name, "weight")
    key(agreement)
    return picture
