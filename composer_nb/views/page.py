"""HTML for notebooks and for pages that need no other file, and tables for terminals.

Notebook HTML follows JupyterLab's theme; pages, and notebooks elsewhere, follow the reader's light or dark setting.
"""

import base64
import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from composer_nb.harness.untrusted import visible_lines

Rows = Iterable[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Html:
    """Text that a notebook shows as HTML."""

    text: str

    def __repr__(self) -> str:
        return f"<Html of {len(self.text):,} characters>"

    def _repr_html_(self) -> str:
        return self.text


STYLE = f"<style>\n{Path(__file__).with_name('notebook.css').read_text(encoding='utf-8')}</style>"
_RULES = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def box(*parts: str) -> Html:
    """Return parts in one frame that suits light and dark themes."""
    return Html(f'{STYLE}<div class="cnb">{"".join(parts)}</div>')


def document(title: str, body: Sequence[str]) -> str:
    """Return an HTML page of HTML parts."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_RULES}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def figure(name: str, caption: str, drawing: Any) -> str:
    """Return a figure (`charts.Figure`, or a `Picture`) with its caption as HTML that needs no other file."""
    body = (
        re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawing.svg()) if hasattr(drawing, "svg") else image(name, drawing.png())
    )
    return f"<figure>{body}<figcaption>{html.escape(caption)}</figcaption></figure>"


def image(name: str, png: bytes) -> str:
    """Return a PNG as HTML that needs no other file."""
    data = base64.b64encode(png).decode()
    return f"<img alt='{html.escape(name)}' style='max-width:100%' src='data:image/png;base64,{data}'>"


def html_table(rows: Rows, head: Sequence[str] = ()) -> str:
    """Return a table as HTML; cells may hold any text."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(head, "th")] if head else []
    return "<table>" + "\n".join([*lines, *(row(cells, "td") for cells in rows)]) + "</table>"


def text_table(rows: Rows, head: Sequence[str] = (), title: str = "", numbers: bool = False) -> Table:
    """Return a plain table for a terminal; cells may hold any text. With `numbers` all columns but the first align right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = bool(head)
    for column, name in enumerate(head):
        table.add_column(name, justify="right" if numbers and column else "left", no_wrap=numbers)
    for row in rows:
        table.add_row(*(escape(visible_lines(cell)) for cell in row))
    return table


def shown(value: float | None, form: str = "") -> str:
    """Return a number as text; "–" where there is none."""
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, form)
