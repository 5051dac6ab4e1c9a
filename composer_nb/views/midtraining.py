"""Mid-training: loss against tokens with fits, the effect of data mixtures, and which tokens see which in a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from composer_nb.harness.bench import wilson
from composer_nb.labs.scaling import LossFit
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.models.transformer import Model, PackedRows
from composer_nb.views import style
from composer_nb.views.page import shown, text_table
from composer_nb.views.style import Picture, key, title

Floats = Sequence[float]
# Smaller changes of a logit are rounding.
MOVED = 1e-4
_SEEN = LinearSegmentedColormap.from_list("seen", ["#ffffff", style.SKY, style.BLUE])


def yields(report: Mapping[str, Any]) -> Table:
    """Return what each filter of a corpus (`corpus.build`) dropped and left, as a table for a terminal."""
    head = ("filter", "dropped: files", "MB", "left: files", "MB", "repositories", "of bytes")
    form = "{dropped_files:,}|{dropped_mb:.2f}|{files:,}|{mb:.2f}|{repositories:,}|{share:.1%}"
    total = report["yields"][0]["bytes"] or 1
    rows = []
    for row in [*report["yields"], report["heldout"]]:
        sizes = {"dropped_mb": row["dropped_bytes"] / 1e6, "mb": row["bytes"] / 1e6, "share": row["bytes"] / total}
        rows.append((row["filter"], *form.format(**row, **sizes).split("|")))
    return text_table(rows, head, numbers=True)


def yields_picture(report: Mapping[str, Any]) -> Picture:
    """Draw what is left after each filter of a corpus, in files and in bytes, as shares of what was found."""
    picture, ax = style.one_panel(8, 3.4)
    rows = report["yields"]
    for name, hue, mark in (("files", style.BLUE, "o"), ("bytes", style.VERMILION, "s")):
        left = [row[name] / max(1, rows[0][name]) for row in rows]
        ax.plot(left, range(len(rows)), color=hue, marker=mark, drawstyle="steps-pre", linewidth=1.7, label=name)
    ax.set_yticks(range(len(rows)), [row["filter"] for row in rows])
    ax.invert_yaxis()
    title(ax, "what is left after each filter", "share of what was found")
    key(ax)
    return picture


def bases_picture(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """Draw the rows of `labs.bases.compare_bases`, a panel for each evaluation, and 95 % intervals over questions."""
    picture = Picture(9.5, 1.0 + 0.35 * len(rows))
    kinds = {"fresh_knowledge": "fresh knowledge, share right\n(more is better)"}
    kinds["state_distance"] = "state tracking, characters off\n(less is better)"
    kinds["bits_per_byte"] = "codebase, bits per byte\n(less is better)"
    for ax, (kind, text) in zip(picture.panels(1, 3, sharey=True), kinds.items(), strict=True):
        title(style.bars(ax, {row["base"]: row[kind] for row in rows}, style.BLUE), text)
    for number, row in enumerate(rows):
        if row["weights"] and row["questions"]:  # guessing has no interval
            style.interval(picture.axes[0], wilson(row["fresh_knowledge"], row["questions"]), [number, number])
    return picture


def base_table(rows_of_bases: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of `labs.bases.compare_bases` as a table for a terminal; arrows point to the better side."""
    head = ("base", "M weights", "knowledge ↑", "state, edits ↓", "code, nats ↓", "bits/byte ↓")
    forms = {"state_distance": ".1f", "codebase_nats": ",.0f", "bits_per_byte": ".3f"}
    rows = []
    for row in rows_of_bases:
        first_cells = f"{row['weights'] / 1e6:.1f}", shown(row["fresh_knowledge"], ".1%")
        rows.append((row["base"], *first_cells, *(format(row[name], form) for name, form in forms.items())))
    return text_table(rows, head, numbers=True)


def tokens_seen(points: Sequence[Mapping[str, Any]], begin: int = 0) -> NDArray[np.float64]:
    """Return the tokens trained on from step `begin` up to each point of a supervised stage (`tokens` is per step since the point
    before). Raises ValueError when no point is at `begin`."""
    steps = np.array([0, *(point["step"] for point in points)])
    counted = np.cumsum([0.0, *(np.diff(steps) * [point["tokens"] for point in points])])
    if begin not in steps:
        raise ValueError(f"no look was taken at step {begin}; there are {steps[1:].tolist()}")
    return counted[1:] - counted[int(np.flatnonzero(steps == begin)[0])]


def against_tokens(
    tokens: Floats, loss: Floats, fits: Sequence[LossFit], fitted: int, what: str, unit: str = "nats a token"
) -> Picture:
    """Draw loss over tokens with its fits, and the error of each fit. Fits use the first `fitted` points; open points were held
    back."""
    x, y = np.asarray(tokens), np.asarray(loss)
    picture = Picture(9.5, 3.3)
    ax, errors = picture.panels(1, 2, width_ratios=(3, 2))
    ax.plot(x[:fitted], y[:fitted], "o", color=style.INK, markersize=5, label="fitted")
    ax.plot(x[fitted:], y[fitted:], "o", color=style.INK, markersize=5, fillstyle="none", label="not seen by the fits")
    along = np.geomspace(x.min(), x.max(), 60)
    for fit, hue, dash in zip(fits, (style.BLUE, style.VERMILION), ("-", "--"), strict=False):
        ax.plot(along, fit.predict(along), dash, color=hue, linewidth=1.7, label=fit.shape)
        off = fit.predict(x[fitted:]) - y[fitted:]
        errors.plot(x[fitted:], off, dash, marker="o", markersize=4, color=hue, label=fit.shape)
    ax.set_xscale("log")
    style.log_axis(ax.xaxis)
    for panel in (ax, errors):
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k, 1M
    errors.axhline(0, color=style.INK, linewidth=0.8)
    title(ax, what, "tokens", unit)
    title(errors, "prediction − measured, at the open points", "tokens", unit)
    key(ax)
    return picture


def mixtures(
    runs: Mapping[str, tuple[Floats, Floats, Floats]], unit: str, switch: float, even: tuple[float, float]
) -> Picture:
    """Draw runs by name, each (tokens, held-out loss of code, held-out loss of the agent's text), with one panel per loss, the
    `switch`, the tokens after which demonstrations begin, and `even`, both losses of guessing evenly."""
    picture = Picture(9.5, 3.2)
    panels = picture.panels(1, 2)
    for (name, (tokens, *losses)), hue, mark in zip(runs.items(), (style.BLUE, style.VERMILION), "os", strict=False):
        for ax, loss in zip(panels, losses, strict=True):
            ax.plot(tokens, loss, color=hue, marker=mark, markersize=4, linewidth=1.7, label=name)
    title(panels[0], "held-out code", "tokens", unit)
    title(panels[1], "what the agent writes, held out", "tokens", "nats a token")
    for ax, guess in zip(panels, even, strict=True):
        ax.axhline(guess, color=style.GREY, linestyle="--", label="guessing evenly")
        ax.axvline(switch, color=style.GREY, linestyle=":", label="demonstrations begin")
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k, 1M
    panels[1].set_yscale("log")
    style.log_axis(panels[1].yaxis)
    key(panels[0])
    return picture


@torch.no_grad()
def influence(model: Model, rows: Sequence[TokenRow]) -> NDArray[np.float32]:
    """Return [N, N] how much the final hidden state at place i moves when the token at place j is exchanged, in a batch of N
    input tokens (all but the last of each row)."""
    inputs_N = torch.from_numpy(np.concatenate([row.token_ids[:-1] for row in rows])).long()
    packed = PackedRows.of_lengths([len(row.token_ids) - 1 for row in rows], model.config)

    def hidden(ids_N: Tensor) -> Tensor:
        return model.trunk(ids_N, packed.position_N, packed.attend)[0]

    before_ND = hidden(inputs_N)
    moved = []
    for position in range(len(inputs_N)):
        changed_N = inputs_N.clone()
        changed_N[position] = (changed_N[position] + 1) % model.config.vocab_size
        moved.append((hidden(changed_N) - before_ND).abs().amax(-1))
    return torch.stack(moved, dim=1).numpy()


def who_sees_whom(moved_NN: NDArray[np.float32], lengths: Sequence[int]) -> Picture:
    """Draw `influence`: a place (row) is coloured at the tokens that it reads (columns). Lines separate the rows of the batch."""
    picture = Picture(5.2, 4.6)
    ax = picture.add_subplot()
    image = ax.imshow(np.log10(np.maximum(moved_NN, MOVED)), cmap=_SEEN)
    for edge in np.cumsum(lengths)[:-1] - 0.5:
        ax.axhline(edge, color=style.VERMILION, linewidth=1)
        ax.axvline(edge, color=style.VERMILION, linewidth=1)
    title(ax, f"{len(lengths)} rows in one batch: who reads whom", "place whose token is changed", "place that moves")
    picture.colorbar(image, ax=ax, fraction=0.045, format=lambda value, _: f"1e{value:.0f}", label="change")
    return picture
