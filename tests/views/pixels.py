"""What a figure looks like on a page."""

import io

import matplotlib.image
import numpy as np
from matplotlib.text import Text
from numpy.typing import NDArray

from composer_nb.views.style import DPI, Picture

PAGES = {"light": 0xFF / 255, "dark": 0x11 / 255}
"""JupyterLab's backgrounds, as grey levels."""


def on_page(png: bytes, page: str = "light") -> NDArray[np.float64]:
    """[rows, columns, 3]: a PNG laid over a page."""
    image = matplotlib.image.imread(io.BytesIO(png)).astype(float)
    alpha = image[..., 3:]
    return alpha * image[..., :3] + (1 - alpha) * PAGES[page]


def inked_share(png: bytes) -> float:
    """Return the share of pixels that differ from the page beneath."""
    return float((np.abs(on_page(png) - PAGES["light"]) > 0.1).any(-1).mean())


def luminance(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """WCAG 2.1, relative luminance."""
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrasts(picture: Picture, page: str) -> dict[str, float]:
    """Return the contrast between the lightest and the darkest pixel of each text in a figure."""
    image = luminance(on_page(picture.png(), page))
    picture.set_dpi(DPI)
    picture.canvas.draw()
    beyond = {
        label
        for ax in picture.axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in (*axis.majorTicks, *axis.minorTicks)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    }
    contrast_of = {}
    for text in picture.findobj(Text):
        if text in beyond or not (text.get_visible() and text.get_text().strip()):
            continue
        box = text.get_window_extent()
        rows = slice(max(0, int(len(image) - box.y1)), int(len(image) - box.y0))
        part = image[rows, max(0, int(box.x0)) : int(box.x1)]
        if part.size:
            contrast_of[text.get_text()] = float((part.max() + 0.05) / (part.min() + 0.05))
    return contrast_of
