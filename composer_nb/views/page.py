"""HTML for notebooks and for pages that need no other file, and tables for terminals.

Notebook HTML follows JupyterLab's theme; pages, and notebooks elsewhere, follow the reader's light or dark setting.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from composer_nb.harness.untrusted import visible_lines


@dataclass(frozen=True, slots=True)
class Html:
    """Text that a notebook shows as HTML."""

    text: str

    def __repr__(self) -> str:
        return f"<Html of {len(self.text):,} characters>"

    def _repr_html_(self) -> str:
        return self.text


STYLE = """<style>
.cnb { color-scheme: light dark; --cnb-back: var(--jp-layout-color0, light-dark(#fff, #181818));
  --cnb-ink: var(--jp-content-font-color1, light-dark(#222, #e6e6e6));
  --cnb-line: var(--jp-border-color2, light-dark(#ddd, #444));
  --cnb-quiet: var(--jp-content-font-color2, light-dark(#666, #a8a8a8));
  background: var(--cnb-back); color: var(--cnb-ink); padding: .6em; border: 1px solid var(--cnb-line);
  border-radius: 4px; overflow-x: auto; font: 13px/1.5 system-ui, sans-serif }
.cnb .head { font-weight: 600 }
.cnb .quiet, .cnb summary { font-size: 12px; color: var(--cnb-quiet) }
.cnb summary { cursor: pointer }
.cnb details { border-top: 1px solid var(--cnb-line); padding: .1em 0 }
.cnb pre { white-space: pre-wrap; font: 12.5px/1.55 ui-monospace, monospace; background: none; color: var(--cnb-ink);
  margin: .1em 0 .3em 1.1em; padding: 0 }
.cnb table { border: 0; color: inherit; font-size: 12.5px }
.cnb tr { background: none !important }
.cnb td { text-align: left; vertical-align: top; padding: .1em 1.2em .1em 0; white-space: pre-wrap; overflow-wrap: anywhere }
.cnb .mono { font-family: ui-monospace, monospace }
.cnb .read { color: var(--cnb-quiet) }
.cnb .mark { font-size: 75%; color: var(--cnb-quiet) }
.cnb .chip { padding: 0 .4em; border-radius: 2px }
</style>"""


def box(*parts: str) -> Html:
    """Return parts in one frame that suits light and dark themes."""
    return Html(f'{STYLE}<div class="cnb">{"".join(parts)}</div>')


def document(title: str, body: Sequence[str], style: str = "") -> str:
    """Return an HTML page of HTML parts, with further CSS rules in `style`."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_RULES}{style}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def figure(name: str, caption: str, png: bytes) -> str:
    """Return a PNG with its caption as HTML that needs no other file."""
    return f"<figure>{image(name, png)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def image(name: str, png: bytes) -> str:
    """Return a PNG as HTML that needs no other file."""
    data = base64.b64encode(png).decode()
    return f"<img alt='{html.escape(name)}' style='max-width:100%' src='data:image/png;base64,{data}'>"


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table as HTML; cells may hold any text."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(head, "th")] if head else []
    return "<table>" + "\n".join([*lines, *(row(cells, "td") for cells in rows)]) + "</table>"


def text_table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), title: str = "", numbers: bool = False
) -> Table:
    """Return a plain table for a terminal; cells may hold any text. With `numbers` all columns but the first align right."""
    made = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=bool(head)
    )
    for place, name in enumerate(head):
        made.add_column(name, justify="right" if numbers and place else "left", no_wrap=numbers)
    for row in rows:
        made.add_row(*(escape(visible_lines(cell)) for cell in row))
    return made


def shown(value: float | None, form: str = "") -> str:
    """Return a number as text; "–" where there is none."""
    return "–" if value is None or (isinstance(value, float) and math.isnan(value)) else format(value, form)


_RULES = """
:root { color-scheme: light dark; --quiet: light-dark(#666, #a8a8a8); --line: light-dark(#ddd, #444);
  --code: light-dark(#f6f7f8, #232323); --good: light-dark(#00734f, #3fbf92); --bad: light-dark(#b34700, #f0894a) }
body { background: light-dark(#fff, #181818); color: light-dark(#222, #e6e6e6); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
a { color: light-dark(#0b62a8, #7cc0f2) }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line) }
td { font-variant-numeric: tabular-nums } th { font-weight: 600 }
figure { margin: 2rem 0 } img { max-width: 100% } figcaption { color: var(--quiet); max-width: 45rem }
.note { border-left: 3px solid var(--bad); padding: .5rem 1rem } summary { cursor: pointer; margin-top: .6rem }
pre { background: var(--code); padding: .8rem; overflow-x: auto; font-size: 12.5px }
"""
