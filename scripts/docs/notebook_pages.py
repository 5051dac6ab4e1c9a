"""Writes a notebook with its outputs as Markdown that GitHub shows: docs/pages/NAME.md, and its figures in docs/pages/NAME/.

The first line of a page holds the digest of the notebook's code. The outputs of each code cell stand between two comments with
the cell's id, so a page is written anew from the notebook's text and the outputs that the page holds. `make_docs.py` calls this.
"""

from __future__ import annotations

import base64
import html
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import nbformat
from PIL import Image

from composer_nb.jobs.check import notebook_digest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
LINES, COLOURS, WIDTH, PALE = 30, 128, 1100, 0.1
"""Lines of text that an output keeps; colours of a figure, and its greatest width; the opacity of a ground that shows."""
RUN, TEXT = "make docs", "scripts/docs/make_docs.py --text"
"""Commands that mend a page after a change of code, and of prose."""
WIDGET = "application/vnd.jupyter.widget-view+json"
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
CELL_OUTPUTS = re.compile(r"^<!-- outputs of (\S+) -->\n\n(.*?)\n\n<!-- end of \1 -->$", re.S | re.M)
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:tmp|work|root|home|Users|private|mnt)/(?:[\w.@+-]+/)*([\w.@+-]*)")
KEPT = set("b br code details div i p pre summary table tbody td th thead tr".split())
DROPPED = {"style", "script", "svg", "button"}
ENDS_A_LINE = {"details", "div", "p", "table", "tbody", "thead", "tr"}
Keep = Callable[[bytes], str]
"""Keeps a PNG and returns how the page refers to it."""


def page_of(source: Path, pages: Path) -> Path:
    return pages / f"{source.stem}.md"


def fault(source: Path, pages: Path = PAGES) -> str:
    """Return what is out of date in the page of a notebook, with the command that mends it; empty if nothing is."""
    page = page_of(source, pages)
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    cell_outputs, ids = dict(CELL_OUTPUTS.findall(text)), {cell.id for cell in nbformat.read(source, 4).cells}
    figures = re.findall(rf"{source.stem}/\d+\.png", text)
    if not text.startswith(first_line(source)) or not cell_outputs.keys() <= ids:
        return f"{source.name}: {page.name} does not show its present code; run {RUN}"
    if not all((pages / name).is_file() for name in figures):
        return f"{source.name}: {page.name} lacks figures; delete it and run {RUN}"
    if text != page_text(source, cell_outputs, pages):
        return f"{source.name}: {page.name} does not show its present prose; run {TEXT}"
    return ""


def stored_outputs(source: Path, pages: Path = PAGES) -> dict[str, str]:
    """Return the outputs that a notebook's page holds as Markdown by cell, figures inside; empty if the page is of other code."""
    page = page_of(source, pages)
    text = page.read_text(encoding="utf-8") if page.is_file() else ""

    def inside(match: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((pages / match[1]).read_bytes()).decode()}"'

    cell_outputs = CELL_OUTPUTS.findall(text) if text.startswith(first_line(source)) else []
    return {cell: re.sub(rf'src="({source.stem}/\d+\.png)"', inside, body) for cell, body in cell_outputs}


def write_page(source: Path, pages: Path = PAGES, ran: nbformat.NotebookNode | None = None) -> None:
    """Write the page of a notebook with the outputs of its run, or else with those that the page holds. Raises ValueError for a
    run whose cells have other ids."""
    page, folder = page_of(source, pages), pages / source.stem
    if ran is None:
        cell_outputs = dict(CELL_OUTPUTS.findall(page.read_text(encoding="utf-8")))
    else:
        if {cell.id for cell in nbformat.read(source, 4).cells} - {cell.id for cell in ran.cells}:
            raise ValueError(
                f"{source.name}: its cells have other ids than when it ran; remove the copy that ran and run {RUN}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        cell_outputs = outputs(ran, folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(page_text(source, cell_outputs, pages), encoding="utf-8")


def first_line(source: Path) -> str:
    return f"<!-- code {notebook_digest(source)} -->\n"


def page_text(source: Path, cell_outputs: Mapping[str, str], pages: Path) -> str:
    """Return the Markdown of a page: prose, code, and outputs by the id of their cell."""
    link = f"[{source.name}]({os.path.relpath(source, pages)})"
    blocks = [
        f"{first_line(source)}<!-- written by {TEXT.split()[0]}, not by hand -->",
        f"*This is {link} with the outputs of one run. The notebook itself also has controls, shades of colour and hover texts.*",
    ]
    for cell in nbformat.read(source, 4).cells:
        if cell.cell_type == "markdown":
            blocks.append(moved(cell.source, source, pages))
        elif cell.source:
            blocks.append(fenced(cell.source, "python"))
        if cell_outputs.get(cell.id):
            blocks.append(f"<!-- outputs of {cell.id} -->\n\n{cell_outputs[cell.id]}\n\n<!-- end of {cell.id} -->")
    return "\n\n".join(blocks) + "\n"


def moved(text: str, source: Path, pages: Path) -> str:
    """Return Markdown whose links lead from the folder of the pages to where they led: notebooks give way to their pages."""

    def changed(match: re.Match[str]) -> str:
        target = source.parent / match[1]
        if not target.exists():
            return match[0]  # an address, or code that looks like a link
        target = page_of(target, pages) if target.suffix == ".ipynb" else target
        return f"]({os.path.relpath(target, pages)}{match[2] or ''})"

    return LINK.sub(changed, text)


# Outputs


def outputs(ran: nbformat.NotebookNode, folder: Path) -> dict[str, str]:
    """Return the outputs of an executed notebook as Markdown by the id of their cell. Figures are written into the folder."""
    figure_numbers: dict[bytes, int] = {}

    def keep(png: bytes) -> str:
        number = figure_numbers.setdefault(png, len(figure_numbers) + 1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(small(png))
        return f'<img alt="figure {number}" src="{folder.name}/{number}.png">'

    texts_by_cell, previous_id = dict[str, list[str]](), ""
    for cell in ran.cells:
        if cell.cell_type != "code":
            continue
        if "injected-parameters" in cell.metadata.get("tags", []):  # papermill puts them below the parameters cell
            texts_by_cell.setdefault(previous_id, []).append("Run with\n\n" + fenced(clean(cell.source), "python"))
        else:
            texts_by_cell[cell.id] = list(rendered(joined(cell.outputs), keep))
        previous_id = cell.id
    return {name: "\n\n".join(texts) for name, texts in texts_by_cell.items() if texts}


def joined(nodes: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return outputs in which what was printed in pieces is one piece."""
    merged: list[nbformat.NotebookNode] = []
    for output in nodes:
        if merged and "text" in output and merged[-1].get("name") == output.name:
            merged[-1] = nbformat.v4.new_output("stream", name=output.name, text=merged[-1].text + output.text)
        else:
            merged.append(output)
    return merged


def rendered(nodes: list[nbformat.NotebookNode], keep: Keep) -> Iterator[str]:
    for output in nodes:
        data = output.get("data", {})
        if "text/html" in data:
            yield as_github_shows(clean(data["text/html"]), keep)
        elif "image/png" in data:
            yield keep(base64.b64decode(data["image/png"]))
        elif WIDGET in data:
            yield "*A widget, which needs JupyterLab.*"
        elif output.output_type == "error":
            yield fenced(clean(f"{output.ename}: {output.evalue}"), "text")
        elif text := data.get("text/plain") or output.get("text", "").rstrip():
            yield fenced(cut(clean(text)), "text")


def clean(text: str) -> str:
    """Return text without colours of a terminal, and without paths of a machine: those of the checkout are relative."""
    text = re.sub(r"^[^\n]*\r(?!\n)", "", ESCAPE.sub("", text), flags=re.M)  # without ^, quadratic in a long line
    return OF_A_MACHINE.sub(r"…/\1", text.replace(f"{ROOT}/", "").replace(str(ROOT), "…"))


def cut(text: str) -> str:
    lines = text.splitlines()
    return text if len(lines) <= LINES else "\n".join([*lines[:LINES], f"… {len(lines) - LINES} more lines"])


def fenced(text: str, language: str) -> str:
    """Return a block of Markdown whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def small(png: bytes) -> bytes:
    """Return a PNG on white, with a palette and no wider than a page."""
    picture = Image.open(BytesIO(png)).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    if flat.width > WIDTH:
        flat = flat.resize((WIDTH, round(flat.height * WIDTH / flat.width)), Image.Resampling.LANCZOS)
    out = BytesIO()
    # MEDIANCUT would give the colour of a thin line to the field behind it.
    flat.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


class Reduced(HTMLParser):
    """Reduces HTML to what GitHub shows: no styles and few attributes; a ground with a colour that is not pale becomes `mark`, a
    figure a file."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep, self.parts = keep, list[str]()
        self.open: list[tuple[str, str, str]] = []  # tag, class, and how it ends on the page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "img":
            kind, _, data = attributes.get("src", "").partition("base64,")
            self._add(self.keep(base64.b64decode(data)) if kind == "data:image/png;" else "")
            return
        begin, end = reduced(tag, attributes)
        self._add(begin)
        if tag != "br":
            self.open.append((tag, attributes.get("class", ""), end))

    def handle_endtag(self, tag: str) -> None:
        while self._within(tag):
            name, _, end = self.open.pop()
            self._add(end)
            if name == tag:
                break

    def handle_data(self, data: str) -> None:
        text = html.escape(data, quote=False)
        if self._within("mono"):
            text = text.strip("\n").replace("\n", "<br>").replace("  ", "&nbsp; ")
        elif not self._within("pre"):
            text = "" if text.isspace() and "\n" in text else re.sub(r"\s*\n\s*", " ", text)
        self._add(text)

    def _within(self, *names: str) -> bool:
        return any(name in (tag, kind) for tag, kind, _ in self.open for name in names)

    def _add(self, text: str) -> None:
        if not self._within(*DROPPED):
            self.parts.append(text)


def reduced(tag: str, attributes: Mapping[str, str]) -> tuple[str, str]:
    """Return how an element begins and ends on the page."""
    if tag == "span":
        ground = re.search(r"background:(?!none)(?:rgba\(.*,([\d.]+)\))?", attributes.get("style", ""))
        return ("<mark>", "</mark>") if ground and float(ground[1] or 1) >= PALE else ("", "")
    if tag not in KEPT:
        return "", ""
    spans = "".join(f' {name}="{attributes[name]}"' for name in ("colspan", "rowspan") if name in attributes)
    begin, end = f"<{tag}{spans}{' open' * ('open' in attributes)}>", f"</{tag}>"
    if attributes.get("class") == "head":
        begin, end = f"{begin}<b>", f"</b>{end}"
    return begin, end + "\n" * (tag in ENDS_A_LINE)


def as_github_shows(text: str, keep: Keep) -> str:
    """Return HTML as one block of Markdown, which ends at the first empty line."""
    parser = Reduced(keep)
    parser.feed(text)
    parser.close()
    block = re.sub(
        "<pre>.*?</pre>", lambda pre: re.sub(r"\n(?=[ \t]*\n)", "&#10;", pre[0]), "".join(parser.parts), flags=re.S
    )
    block = re.sub(r"\n\s*\n", "\n", block.replace("</mark><mark>", "")).strip()
    return block if re.match("<(?:details|div|p|table)[ >]", block) else f"<div>{block}</div>"
