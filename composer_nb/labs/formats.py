"""Number formats: bits, rounding errors, and tokens that affect each other through a shared scale.

NVFP4 as NVIDIA has it shares one float32 scale among all tokens of a tensor. So a token's numbers depend on tokens beside it, and
on later ones (Composer 2 technical report, §6.1). Nothing here needs a GPU.

Dimensions: T tokens, K columns.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from composer_nb.kernels.formats import microscaling
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

Quantize = Callable[[Tensor], microscaling.MXTensor | microscaling.NVFP4Tensor]

# Quantisers by the names that figures have.
FORMATS: dict[str, Quantize] = {
    "MXFP8": microscaling.mx_quantize_reference,
    "MXFP8, floor": lambda x: microscaling.mx_quantize_reference(x, rule="floor"),
    "MXFP8, blocks of 128": lambda x: microscaling.mx_quantize_reference(x, block=128),
    "NVFP4, a scale per token": microscaling.nvfp4_quantize_reference,
    "NVFP4, a scale per tensor": lambda x: microscaling.nvfp4_quantize_reference(x, share="tensor"),
}


def changed_past(quantize: Quantize, x_TK: Tensor, factor: float = 3.0) -> Tensor:
    """[T − 1]: by how much the quantised numbers of each earlier token change, relative to their length, when the last token is
    multiplied by `factor`. Any but 0 lets the future into the past. (A power of two moves a shared scale and no rounding.)"""
    later_TK = x_TK.clone()
    later_TK[-1] *= factor
    before_TK, after_TK = quantize(x_TK).dequantize()[:-1], quantize(later_TK).dequantize()[:-1]
    return (after_TK - before_TK).norm(dim=1) / before_TK.norm(dim=1)


def changed_alone(quantize: Quantize, x_TK: Tensor) -> Tensor:
    """[T]: by how much each token's quantised numbers change, relative to their length, when it is alone in its batch."""
    together_TK = quantize(x_TK).dequantize()
    alone_TK = torch.cat([quantize(token_TK).dequantize() for token_TK in x_TK.split(1)])
    return (alone_TK - together_TK).norm(dim=1) / together_TK.norm(dim=1)


LINES = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION, style.PURPLE, style.SKY)
FIELDS = {"sign": style.VERMILION, "exponent": style.SKY, "mantissa": style.YELLOW}
# Bits of sign, exponent, mantissa.
LAYOUT = {
    "bf16": (1, 8, 7),
    "e4m3": (1, 4, 3),
    "E8M0": (0, 8, 0),
    "e2m1": (1, 2, 1),
    "e4m3 scale": (1, 4, 3),
    "float32 scale": (1, 8, 23),
}


def bits_of(x_K: Tensor, mx: microscaling.MXTensor, four: microscaling.NVFP4Tensor) -> dict[str, list[int]]:
    """Return the first four numbers of a token as they are stored, by the name of their format, scales after codes."""
    return {
        "bf16": x_K.bfloat16().view(torch.int16)[:4].int().bitwise_and(0xFFFF).tolist(),
        "e4m3": mx.qdata.view(torch.uint8).flatten()[:4].tolist(),
        "E8M0": mx.scale.flatten()[:1].tolist(),
        "e2m1": microscaling.unpack_e2m1(four.qdata).flatten()[:4].tolist(),
        "e4m3 scale": four.scale.view(torch.uint8).flatten()[:1].tolist(),
        "float32 scale": four.global_scale.view(torch.int32).flatten()[:1].tolist(),
    }


def decimal(name: str, number: int) -> float:
    """Return the value of stored bits."""
    if name == "bf16":
        return float(torch.tensor(number, dtype=torch.int32).to(torch.int16).view(torch.bfloat16))
    if name == "float32 scale":
        return float(torch.tensor(number, dtype=torch.int32).view(torch.float32))
    byte = torch.tensor(number, dtype=torch.uint8)
    if name.startswith("e4m3"):
        return float(byte.view(torch.float8_e4m3fn))
    return float(microscaling.e8m0_to_float(byte) if name == "E8M0" else microscaling.e2m1_to_float(byte))


def bits(stored: Mapping[str, Sequence[int]], restored: Mapping[str, Sequence[float]]) -> Picture:
    """Draw one box per bit, coloured by its meaning, one row per format and one group of boxes per number, with its value. An
    arrow leads to what a code stands for, its product with the scales (`restored`)."""
    picture, ax = style.one_panel(9.5, 0.5 * len(stored) + 0.6)
    for row, (name, numbers) in enumerate(stored.items()):
        widths = LAYOUT[name]
        kinds = [kind for kind, width in zip(FIELDS, widths, strict=True) for _ in range(width)]
        for index, number in enumerate(numbers):
            for position, kind in enumerate(kinds):
                at = index * 24 + position
                ax.add_patch(Rectangle((at, -row - 0.4), 0.92, 0.8, color=FIELDS[kind]))
                bit = number >> (len(kinds) - 1 - position) & 1
                ax.text(at + 0.46, -row, str(bit), ha="center", va="center", fontsize=7.5, color=style.DARK)
            product = f" → {restored[name][index]:.3g}" if name in restored else ""
            style.note(ax, index * 24 + len(kinds), -row, f" = {decimal(name, number):.3g}{product}", fontsize=8)
    ax.set(xlim=(-0.5, 24 * max(map(len, stored.values()))), ylim=(-len(stored) + 0.4, 0.6), xticks=[])
    ax.set_yticks([-row for row in range(len(stored))], list(stored))
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    title(ax, "one token's first numbers: sign, exponent, mantissa")
    return picture


def beside(name: str, sizes: Tensor, largest: float = 1.0) -> Tensor:
    """Return what a format stores of numbers of these sizes, of each in a block whose largest number is `largest`."""
    x = torch.zeros(len(sizes), 128)
    x[:, 0], x[:, 1] = largest, sizes
    return FORMATS[name](x).dequantize()[:, 1]


def errors(names: Sequence[str], largest: float = 1.0, decades: int = 5) -> Picture:
    """Draw the relative error of a number by its size in a block whose largest is `largest`: the saw of a short mantissa, the
    slope below the smallest normal number, and total loss below that. A point is the largest error of 40 neighbouring sizes."""
    shares = torch.logspace(-decades, 0, 4000)
    picture, ax = style.one_panel(9.5, 3.0)
    for name, color in zip(names, LINES, strict=False):
        error = (beside(name, shares * largest, largest) / (shares * largest) - 1).abs()
        ax.plot(shares[20::40], error.view(-1, 40).amax(1), color=color, linewidth=1.8, label=name)
    ax.set(xscale="log", yscale="log", ylim=(0.02, 1.5))
    style.log_axis(ax.yaxis)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    title(ax, "largest error of a number by its size", "size, as a share of the largest number of its block", "error")
    key(ax)
    return picture


def values() -> Picture:
    """Draw all positive numbers of four bits."""
    picture, ax = style.one_panel(9.5, 1.1)
    ax.vlines(microscaling.E2M1_VALUES, 0, 1, color=style.BLUE, linewidth=2)
    ax.set(yticks=[], xticks=microscaling.E2M1_VALUES, ylim=(0, 1.2))
    ax.grid(False)
    title(ax, "e2m1 has eight magnitudes")
    return picture


def by_token(values: Mapping[str, Tensor], heading: str, y: str) -> Picture:
    """Draw a number for each token, one panel per format."""
    picture = Picture(9.5, 2.4)
    panels = picture.panels(1, len(values), sharey=True)
    for ax, (name, value), color in zip(panels, values.items(), LINES, strict=False):
        ax.bar(range(len(value)), value.tolist(), color=color)
        title(ax, f"{name}: {int((value != 0).sum())} of {len(value)}", "token")
    panels[0].set_ylabel(y, fontsize=8.5)
    picture.suptitle(heading, fontsize=10, x=0.01, ha="left")
    return picture
