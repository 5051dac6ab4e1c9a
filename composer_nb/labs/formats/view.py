"""Figures of number formats: bits, errors, tokens that affect each other through a shared scale, divisions, losses.

The numbers come from `findings.py` and `trial.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from composer_nb.kernels.formats.microscaling import E2M1_VALUES, MXTensor, NVFP4Tensor, unpack_e2m1
from composer_nb.labs.formats.findings import FORMATS
from composer_nb.labs.formats.trial import Curve
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

LINES = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION, style.PURPLE, style.SKY)
FIELDS = {"sign": style.VERMILION, "exponent": style.SKY, "mantissa": style.YELLOW}
LAYOUT = {"bf16": (1, 8, 7), "e4m3": (1, 4, 3), "e2m1": (1, 2, 1), "E8M0": (0, 8, 0), "e4m3 scale": (1, 4, 3)}
"""Bits of sign, exponent, mantissa."""


def bits_of(x_K: Tensor, mx: MXTensor, four: NVFP4Tensor, shown: int = 4) -> dict[str, list[int]]:
    """Return the first numbers of a token as they are stored, by the name of their format, scales after codes."""
    return {
        "bf16": x_K.bfloat16().view(torch.int16)[:shown].int().bitwise_and(0xFFFF).tolist(),
        "e4m3": mx.qdata.view(torch.uint8).flatten()[:shown].tolist(),
        "E8M0": mx.scale.flatten()[:1].tolist(),
        "e2m1": unpack_e2m1(four.qdata).flatten()[:shown].tolist(),
        "e4m3 scale": four.scale.view(torch.uint8).flatten()[:1].tolist(),
    }


def bits(stored: Mapping[str, Sequence[int]]) -> Picture:
    """Draw one box per bit, coloured by its meaning, one row per format and one group of boxes per number."""
    picture, ax = style.one_panel(9.5, 0.5 * len(stored) + 0.6)
    for row, (name, numbers) in enumerate(stored.items()):
        widths = LAYOUT[name]
        kinds = [kind for kind, width in zip(FIELDS, widths, strict=True) for _ in range(width)]
        for index, number in enumerate(numbers):
            for place, kind in enumerate(kinds):
                at = index * 18 + place
                ax.add_patch(Rectangle((at, -row - 0.4), 0.92, 0.8, color=FIELDS[kind]))
                bit = number >> (len(kinds) - 1 - place) & 1
                ax.text(at + 0.46, -row, str(bit), ha="center", va="center", fontsize=7.5, color=style.DARK)
    ax.set(xlim=(-0.5, 18 * max(map(len, stored.values()))), ylim=(-len(stored) + 0.4, 0.6), xticks=[])
    ax.set_yticks([-row for row in range(len(stored))], list(stored))
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    title(ax, "one token's first numbers: sign, exponent, mantissa")
    return picture


def errors(names: Sequence[str], largest: float = 1.0, decades: int = 5) -> Picture:
    """Draw the relative error of a number by its size, in a block whose largest is `largest`: the saw of a short mantissa, the
    slope below the smallest normal number, and total loss below that."""
    sizes = torch.logspace(-decades, 0, 4000) * largest
    x = torch.zeros(len(sizes), 128)
    x[:, 0], x[:, 1] = largest, sizes
    picture, ax = style.one_panel(9.5, 3.0)
    for name, color in zip(names, LINES, strict=False):
        error = (FORMATS[name](x).dequantize()[:, 1] - sizes).abs() / sizes
        ax.plot(sizes, error, color=color, linewidth=0.9, label=name)
    ax.set(xscale="log", yscale="log", ylim=(1e-4, 1.5))
    key(ax)
    title(
        ax,
        "what rounding does to a number beside a larger one",
        f"size (the largest of the block is {largest:g})",
        "relative error",
    )
    return picture


def values() -> Picture:
    """Draw all positive numbers of four bits."""
    picture, ax = style.one_panel(9.5, 1.1)
    ax.vlines(E2M1_VALUES, 0, 1, color=style.BLUE, linewidth=2)
    ax.set(yticks=[], xticks=E2M1_VALUES, ylim=(0, 1.2))
    ax.grid(False)
    title(ax, "e2m1 has eight magnitudes")
    return picture


def by_token(found: Mapping[str, Tensor], heading: str, y: str) -> Picture:
    """Draw a number for each token, one panel per format."""
    picture = Picture(9.5, 2.4)
    panels = picture.panels(1, len(found), sharey=True)
    for ax, (name, value), color in zip(panels, found.items(), LINES, strict=False):
        ax.bar(range(len(value)), value.tolist(), color=color)
        title(ax, f"{name}: {int((value != 0).sum())} of {len(value)}", "token")
    panels[0].set_ylabel(y, fontsize=8.5)
    picture.suptitle(heading, fontsize=10, x=0.01, ha="left")
    return picture


def divisions(found: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the shares of stored numbers that another division changes, on a logarithmic axis."""
    picture, ax = style.one_panel(9.5, 2.4)
    sides = [
        style.Side(name, color, list(one.values())) for (name, one), color in zip(found.items(), LINES, strict=False)
    ]
    ax.set(yscale="log", ylim=(1e-6, 5))
    style.grouped(ax, list(next(iter(found.values()))), sides, ".2g", 1e-6)
    key(ax)
    title(ax, "NVFP4 divided otherwise than IEEE 754 says: share that differs", "", "share")
    return picture


def losses(curves: Sequence[Curve], smooth: int = 20) -> Picture:
    """Draw training losses, and the distance of each from the first."""
    picture = Picture(9.5, 2.8)
    left, right = picture.panels(1, 2)
    means = [np.convolve(curve.losses, np.ones(smooth) / smooth, "valid") for curve in curves]
    for curve, mean, color in zip(curves, means, LINES, strict=False):
        label = curve.recipe if curve.division == "ieee" else f"{curve.recipe}, {curve.division}"
        steps = np.arange(len(mean)) + smooth
        left.plot(steps, mean, color=color, linewidth=1.1, label=label)
        right.plot(steps, 100 * (mean / means[0] - 1), color=color, linewidth=1.1)
    key(left)
    title(left, f"loss, mean of {smooth} steps", "step", "nats a byte")
    title(right, f"away from {curves[0].recipe}'s", "step", "%")
    return picture


def gaps(curves: Sequence[Curve]) -> Picture:
    """Draw mean |Δ log p| between a trainer that divides as IEEE 754 says and an engine that does not, at the same published
    weights, beside the effect of publishing them in bfloat16."""
    picture, ax = style.one_panel(9.5, 2.4)
    for curve, color in zip(curves, LINES, strict=False):
        steps, gap, cast = zip(*curve.gap, strict=True)
        ax.plot(steps, gap, "o-", color=color, linewidth=1.1, markersize=3, label=f"division: {curve.division}")
        ax.plot(steps, cast, "--", color=style.GREY, linewidth=1.1, label="bfloat16 instead of float32")
    ax.set_yscale("log")
    key(ax)
    title(ax, "what another division adds to the mismatch", "step", "mean |Δ log p|")
    return picture
