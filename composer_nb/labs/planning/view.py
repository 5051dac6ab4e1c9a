"""A planned mesh: the places of its ranks in its two grids, and the memory of a rank.

grids(mesh, experts)     coordinates of every rank, and the experts that it holds
needs(estimates, limit)  memory of a rank at the peak of a training step, by part, beside the limit
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap

from composer_nb.trainer.parallel.memory import Need
from composer_nb.trainer.parallel.mesh import Axis, Mesh
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

GIB = 2**30
_GRIDS: dict[str, tuple[Axis, ...]] = {
    "everything else": ("replicate", "shard", "cp"),
    "experts": ("expert_replicate", "expert_shard", "ep"),
}
_SHADES = ListedColormap(["#ffffff", "#e8f3fa", "#cfe6f4", "#b3d8ee", "#95c8e6", "#78b8dd", "#5ca7d2", "#4396c6"])


def grids(mesh: Mesh, experts: int) -> Picture:
    """Draw both grids, one column per rank; a darker field is a higher coordinate."""
    picture = Picture(max(6.0, 0.55 * mesh.world + 2.5), 3.6)
    for ax, (name, axes) in zip(picture.panels(2, 1), _GRIDS.items(), strict=True):
        places = np.array([[mesh.place(rank)[axis] for rank in range(mesh.world)] for axis in axes])
        ax.imshow(places, cmap=_SHADES, aspect="auto", vmin=0, vmax=max(7, int(places.max())))
        for (row, rank), at in np.ndenumerate(places):
            style.note(ax, rank, row, str(at), ha="center", color=style.DARK)
        held = [mesh.experts(rank, experts) for rank in range(mesh.world)]
        labels = [f"{rank}\n{e.start}–{e.stop - 1}" if name == "experts" else str(rank) for rank, e in enumerate(held)]
        ax.set_xticks(range(mesh.world), labels)
        ax.set_yticks(range(len(axes)), axes)
        ax.grid(False)
        title(ax, name, "rank" if name != "experts" else "rank, and its experts")
    return picture


def needs(estimates: Mapping[str, Need], limit: int) -> Picture:
    """Draw GiB of one rank, one bar per estimate; the line is `limit` bytes."""
    picture, ax = style.one_panel(9.0, 1.3 + 0.45 * len(estimates))
    start = np.zeros(len(estimates))
    for part, color in (("weights", style.BLUE), ("gradients", style.SKY), ("optimizer", style.ORANGE)):
        sizes = np.array([getattr(need, part) / GIB for need in estimates.values()])
        ax.barh(list(estimates), sizes, left=start, color=color, label=part)
        start += sizes
    peaks = np.array([need.peak / GIB for need in estimates.values()])
    ax.barh(list(estimates), peaks - start, left=start, color=style.GREY, label="for a moment, at the peak")
    ax.axvline(limit / GIB, color=style.VERMILION, linewidth=1.4, label="what a rank has")
    ax.invert_yaxis()
    ax.grid(axis="x", color=style.PALE)
    title(ax, "memory of a rank", "GiB")
    key(ax, loc="best")
    return picture
