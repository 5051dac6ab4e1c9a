"""Figures of routes: where the trainer would have chosen other experts than the engine, and the effect on log-probabilities.

Each figure is drawn from `mismatch.Comparison`s by name, one per pair of numerics.
"""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.policy import Trace, route_dtype
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.recipe.mismatch import Comparison, Gap, gap_figures
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

_HUES = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE)
_MARKS = "oDs^v"
# Bins of a logarithmic axis of margins, and how many (token, layer) pairs make one worth drawing.
BINS, ENOUGH = 14, 20
# An axis of gaps. float32 resolves no less of a log-probability around 1.
LEAST, MOST = 1e-7, 30.0


def flips(pairs: Mapping[str, Comparison]) -> Picture:
    """Draw the share of tokens that flip an expert, by layer and by the margin of the trainer's router."""
    picture = Picture(9.5, 3.3)
    layers, margins = picture.panels(1, 2)
    hues = dict(zip(pairs, itertools.cycle(_HUES), strict=False))
    sides = [style.BarSeries(name, hues[name], pair.flips_NL.mean(0).tolist()) for name, pair in pairs.items()]
    style.grouped(layers, [str(layer) for layer in range(len(sides[0].values))], sides)
    for (name, pair), mark in zip(pairs.items(), itertools.cycle(_MARKS), strict=False):
        margins.plot(*by_margin(pair), color=hues[name], marker=mark, markersize=4, label=name)
    layers.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    title(layers, "tokens that flip an expert", "layer", "share of tokens")
    margins.set_xscale("log")
    style.as_share(margins, 1.02)
    heading = "by the margin between the last expert in and the first out"
    title(margins, heading, "margin (probability)", "share that flips")
    key(layers)
    return picture


def by_margin(pair: Comparison) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the middle of each bin with at least ENOUGH margins, and the share of its (token, layer) pairs that flip."""
    margin, flipped = pair.margins_NL.ravel(), pair.flips_NL.ravel()
    edges = np.geomspace(max(1e-6, margin.min()), 1.0, BINS + 1)
    bin_of = np.clip(np.searchsorted(edges, margin, "right") - 1, 0, BINS - 1)
    count = np.bincount(bin_of, minlength=BINS)
    there = count >= ENOUGH
    share = np.bincount(bin_of, flipped, BINS)[there] / count[there]
    return np.sqrt(edges[:-1] * edges[1:])[there], share


def shared_experts(engine: Sequence[Trace], trainer: Sequence[Trace]) -> NDArray[np.int64]:
    """Return [K + 1] the number of (token, layer) pairs for which both chose 0, 1, … K of the same experts."""
    pairs = [(e.routes[e.route_valid], t.routes[e.route_valid]) for e, t in zip(engine, trainer, strict=True)]
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    same = (first[..., :, None] == second[..., None, :]).sum((-2, -1))
    return np.bincount(same.ravel(), minlength=first.shape[-1] + 1)


def load_drift(use_before: NDArray[np.float64], use_after: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [L] the share of the load that moved to other experts between two versions: the total variation of their shares
    [L, E], which sum to K (`views.rollout.expert_use`)."""
    wide = max(use_before.shape[1], use_after.shape[1])
    padded = [np.pad(use, ((0, 0), (0, wide - use.shape[1]))) for use in (use_before, use_after)]
    return np.abs(padded[0] - padded[1]).sum(1) / 2 / use_before.sum(1)


def route_bytes(layers: int, chosen: int, experts: int) -> dict[str, float]:
    """Return the bytes of a token's routes: of the experts alone, in base64 as a service sends them, with their gates, and with
    margins and check, all that a rollout keeps."""
    ids = layers * chosen * np.dtype(route_dtype(experts)).itemsize
    gates = 4 * layers * chosen
    sent: dict[str, float] = {"experts": ids, "base64": 4 * math.ceil(ids / 3)}
    return sent | {"with gates": ids + gates, "all": ids + gates + 4 * layers + 8}


def gaps(pairs: Mapping[str, Comparison]) -> Picture:
    """Draw the share of tokens beyond each size of |Δ log p|, one panel per pair: own routes, the engine's replayed, and the
    floor, tokens whose routes agreed anyway."""
    picture = Picture(min(11.0, 3.3 * max(2, len(pairs))), 3.2)
    panels = picture.panels(1, len(pairs), sharey=True)
    for column, (ax, (name, pair)) in enumerate(zip(panels, pairs.items(), strict=True)):
        lines: tuple[tuple[str, Gap, str, str], ...] = (
            ("own routes", pair.off_S, style.VERMILION, "-"),
            ("engine's routes replayed", pair.on_S, style.BLUE, "-"),
            ("routes agree anyway", pair.on_S[~pair.flipped_S], style.GREY, "--"),
        )
        for label, gap_S, hue, dash in lines:
            if len(gap_S):
                size = np.sort(np.maximum(np.abs(gap_S), LEAST))
                ax.plot(size, 1 - np.arange(len(size)) / len(size), dash, color=hue, linewidth=1.7, label=label)
        ax.set(xscale="log", yscale="log", xlim=(LEAST, MOST))
        title(ax, name, "|Δ log p|, nats", "share of tokens beyond it" if column == 0 else "")
    key(panels[0])
    return picture


def ratios(comparisons: Mapping[str, Comparison], loss: LossSettings | None = None) -> Picture:
    """Draw the tokens whose ratio trainer / engine lies outside PPO's clip, and outside ± 1 %, with the trainer's own routes
    and with the engine's."""
    picture = Picture(9.5, 2.9)
    settings = loss or LossSettings()
    windows = (
        (f"outside {1 - settings.clip_low:g} to {1 + settings.clip_high:g}", settings.clip_low, settings.clip_high),
        ("off by more than 1 %", 0.01, 0.01),
    )
    pairs = [pair.off_S for pair in comparisons.values()], [pair.on_S for pair in comparisons.values()]
    for ax, (text, low, high) in zip(picture.panels(1, 2), windows, strict=True):
        own_counts, replayed = ([outside(gap_S, low, high) for gap_S in gaps] for gaps in pairs)
        sides = (
            style.BarSeries("own routes", style.VERMILION, own_counts),
            style.BarSeries("replayed", style.BLUE, replayed),
        )
        style.grouped(ax, _names(comparisons), sides, ",")
        tokens = max((len(pair.off_S) for pair in comparisons.values()), default=0)
        title(style.from_zero(ax), f"ratios {text}", "", f"of {tokens:,} tokens")
    key(picture.axes[0])
    return picture


def _names(pairs: Mapping[str, object]) -> list[str]:
    """Names of pairs in several short lines."""
    return [textwrap.fill(name.replace("-", "- "), 14).replace("- ", "-") for name in pairs]


def outside(gap_S: Gap, low: float, high: float) -> int:
    """Return how many ratios exp(gap) leave 1 − low .. 1 + high."""
    ratio_S = np.exp(gap_S)
    return int(((ratio_S < 1 - low) | (ratio_S > 1 + high)).sum())


def route(routes_TLK: NDArray[np.uint8], texts: Sequence[str], experts: int) -> Picture:
    """Draw the experts of each of T tokens in each layer, as a strip of dots under the token's text."""
    tokens, layers, _ = routes_TLK.shape
    picture = Picture(max(6.0, 0.32 * tokens), 0.8 + 0.13 * layers * experts)
    for layer, ax in enumerate(picture.panels(layers, 1, sharex=True)):
        for k in range(routes_TLK.shape[2]):
            ax.plot(range(tokens), routes_TLK[:, layer, k], "os"[k % 2], color=_HUES[k % 5], markersize=4.5)
        ax.set(ylim=(experts - 0.5, -0.5), yticks=range(0, experts, 2))
        ax.set_ylabel(f"layer {layer}", fontsize=8.5, color=style.INK)
    labels = [text.replace("\n", "⏎").replace("$", r"\$") for text in texts]
    picture.axes[-1].set_xticks(range(tokens), labels, rotation=70, ha="right", fontsize=8)
    title(picture.axes[0], "the route of each token: first expert a circle, second a square", "", "layer 0: expert")
    return picture


def angles(pairs: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the angle between the gradient with a mismatch and the one without, from their cosine, one group of bars per pair; “–”
    where there is no gradient."""
    picture, ax = style.one_panel(7.0, 2.9)
    hues = {"own routes": style.VERMILION, "replayed": style.BLUE}
    turns = {name: np.degrees(np.arccos(np.clip([p[name] for p in pairs.values()], -1, 1))) for name in hues}
    sides = [style.BarSeries(name, hue, turns[name].tolist()) for name, hue in hues.items()]
    style.grouped(ax, _names(pairs), sides, ".2f")
    ax.set_ylim(0, 1.15 * max(np.nanmax(np.array([*turns.values()]), initial=0.0), 1e-3))
    title(ax, "how far the gradient turns", "", "degrees")
    key(ax)
    return picture


def flip_map(engine: Trace, trainer: Trace) -> Picture:
    """Draw the margins of the trainer's router for one rollout, layer by token; a ring where it chooses other experts than the
    engine did. Pale is close, and close is where rings are."""
    valid = engine.route_valid
    margin_TL = np.maximum(trainer.margins[valid], LEAST)
    flipped_TL = (np.sort(engine.routes[valid], -1) != np.sort(trainer.routes[valid], -1)).any(-1)
    picture, ax = style.one_panel(10.5, 0.9 + 0.3 * margin_TL.shape[1])
    image = ax.imshow(np.log10(margin_TL.T), aspect="auto", cmap="cividis_r", vmin=-4, vmax=0, interpolation="nearest")
    for token, layer in np.argwhere(flipped_TL).tolist():
        ax.plot(token, layer, "o", markersize=8, fillstyle="none", color=style.VERMILION, markeredgewidth=1.8)
    ax.set_yticks(range(margin_TL.shape[1]), [str(layer) for layer in range(margin_TL.shape[1])])
    ax.grid(visible=False)
    picture.colorbar(image, ax=ax, fraction=0.03).ax.set_title("log₁₀", fontsize=8.5, color=style.INK)
    title(ax, "margins; rings: the trainer would choose other experts", "token", "layer")
    return picture


def filtered(by_age: Mapping[str, Mapping[float, Comparison]]) -> Picture:
    """Draw p99 and k3 of the gap with routes replayed, by the filter's threshold, one line per staleness; dashed: without
    replay."""
    picture = Picture(9.5, 3.0)
    panels = picture.panels(1, 2)
    for ax, (name, text) in zip(panels, (("logprob_gap_p99", "p99 of |Δ log p|"), ("k3", "k3")), strict=True):
        for series, (age, by_threshold) in enumerate(by_age.items()):
            hue = _HUES[series % len(_HUES)]
            values = [gap_figures(pair.on_S)[name] for pair in by_threshold.values()]
            ax.plot(list(by_threshold), values, color=hue, marker=_MARKS[series], markersize=4, label=age)
            off = gap_figures(next(iter(by_threshold.values())).off_S)[name]
            ax.axhline(off, color=hue, linestyle="--", linewidth=1)
        ax.set_yscale("log")
        title(ax, text, "threshold of the filter", "nats")
    key(panels[0])
    return picture
