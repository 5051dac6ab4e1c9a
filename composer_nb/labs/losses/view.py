"""The loss bench as a map of angles between gradients, with its numbers written in."""

from __future__ import annotations

import math

import numpy as np

from composer_nb.labs.losses.bench import Bench
from composer_nb.views import style
from composer_nb.views.style import Picture, title


def cosines(found: Bench, heading: str = "cosine between gradients") -> Picture:
    """Draw the cosines between the gradients of all losses and the exact on-policy one; “–” where one of them is 0."""
    names = [row.loss for row in found.rows]
    picture, ax = style.one_panel(1.8 + 0.58 * len(names), 1.0 + 0.44 * len(names))
    low = float(np.nanmin(found.cosines, initial=0.0))
    ax.imshow(np.ma.masked_invalid(found.cosines), cmap="cividis", vmin=low, vmax=1.0, aspect="auto")
    ax.grid(visible=False)
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks(range(len(names)), names, fontsize=8, rotation=45)
    for (row, column), value in np.ndenumerate(found.cosines):
        ink = style.DARK if value > (low + 1) / 2 else "white"  # cividis ends in a light yellow
        text, color = ("–", style.INK) if math.isnan(value) else (f"{value:.2f}", ink)
        style.note(ax, column, row, text, ha="center", fontsize=7.5, color=color)
    title(ax, heading)
    return picture
