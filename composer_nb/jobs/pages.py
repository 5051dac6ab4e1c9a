"""An executed notebook as one HTML page that needs nothing but itself, in light and in dark.

nbconvert makes the body. Here formulas become MathML, which browsers draw by themselves, and controls are drawn as they stood
when the notebook ended; nothing is fetched and no script runs.
"""

from __future__ import annotations

import copy
import html
from collections.abc import Mapping
from typing import Any

from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

VIEW, STATE = "application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json"


class _Renderer(IPythonRenderer):
    """Formulas as MathML."""

    def block_math(self, body: str) -> str:
        return convert(body.strip(), display="block")

    def inline_math(self, body: str) -> str:
        return convert(body.strip(), display="inline")

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")


def markdown(source: str) -> str:
    """Markdown as HTML."""
    return MarkdownWithMath(_Renderer(escape=False, exclude_anchor_links=True)).render(source)


class _Exporter(HTMLExporter):
    """The body alone: a page's head would fetch scripts from elsewhere."""

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return markdown(source)


def notebook_page(book: NotebookNode, title: str, header: str) -> str:
    """The page of an executed notebook; `header` is HTML that stands above it."""
    shown = copy.deepcopy(book)
    shown.metadata.pop("widgets", None)  # nbconvert would put it into the page for a script to read
    for cell in shown.cells:
        if cell.cell_type == "code":
            state = cell.metadata.get("papermill", {}).get("status", "pending")
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), f"state-{state}"]
            cell.outputs = [_without_scripts(output, _models(book)) for output in cell.outputs]
    body, _ = _Exporter(template_name="basic").from_notebook_node(shown)
    return page(title, f"{header}\n<main>{body}</main>")


def page(title: str, body: str) -> str:
    """A page around HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_style()}</style></head><body>\n{body}\n</body></html>\n"
    )


# Controls


def _models(book: NotebookNode) -> Mapping[str, Any]:
    models: Mapping[str, Any] = book.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    return models


def _without_scripts(output: NotebookNode, models: Mapping[str, Any]) -> NotebookNode:
    """An output that a page can show by itself: controls as HTML, and nothing that would run."""
    data = output.get("data")
    if data is None:
        return output
    data.pop("application/javascript", None)
    view = data.pop(VIEW, None)
    if view is not None:
        if drawn := still(models, view["model_id"]):
            note = '<div class="quiet">Controls, as they stood at the end. They move in JupyterLab.</div>'
            output["data"] = {"text/html": f'<div class="controls">{drawn}{note}</div>'}
        elif "text/html" not in data:
            output["data"] = {"text/plain": "(a control, of which the notebook keeps no state)"}
    return output


def still(models: Mapping[str, Any], model: str) -> str:
    """A widget, and all within it, as HTML without a script; empty where its state was not kept or it is hidden. `models` is
    the state that a notebook keeps of its widgets."""
    if model not in models:
        return ""
    kind, state = models[model]["model_name"].removesuffix("Model"), models[model]["state"]
    layout = models.get(_reference(state.get("layout", "")), {}).get("state", {})
    if layout.get("display") == "none":
        return ""
    if "children" in state:
        inner = "".join(still(models, _reference(child)) for child in state["children"])
        return f'<div class="{"across" if kind in ("HBox", "GridBox") else "down"}">{inner}</div>'
    if kind == "Output":
        return "".join(_shown(NotebookNode(output)) for output in state["outputs"])
    if kind == "Image":
        data = [each["data"] for each in models[model].get("buffers", []) if each["path"] == ["value"]]
        return "".join(f'<img alt="" src="data:image/{state["format"]};base64,{image}">' for image in data)
    value = state.get("value", "")
    if kind in ("HTML", "HTMLMath"):
        return f"<div>{value}</div>"
    return _control(kind, state, value)


def _control(kind: str, state: Mapping[str, Any], value: Any) -> str:
    name = html.escape(str(state.get("description", "")))
    if kind in ("Button", "ToggleButton"):
        return f"<button disabled>{name}</button>"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if "_options_labels" in state:
        text = str(state["_options_labels"][state["index"]]) if state.get("index") is not None else ""
    bar = ""
    if {"min", "max", "step"} <= set(state) and isinstance(value, int | float):
        span = " ".join(f'{key}="{state[key]}"' for key in ("min", "max", "step"))
        bar = f'<input type="range" disabled {span} value="{value}">'
    return f"<label><span>{name}</span>{bar}<output>{html.escape(text)}</output></label>"


def _shown(output: NotebookNode) -> str:
    """What a cell, or a widget that captures output, has shown."""
    if output.output_type == "error":
        return f"<pre>{html.escape(output.ename)}: {html.escape(output.evalue)}</pre>"
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" in data:
        return str(data["text/html"])
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"]}">'
    return f"<pre>{html.escape(str(data.get('text/plain', '')))}</pre>"


def _reference(text: str) -> str:
    return text.removeprefix("IPY_MODEL_")


# Style


def _style() -> str:
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("vs", "github-dark"))
    return f"{_RULES}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n.highlight {{ background: none }}"


_RULES = """
:root { color-scheme: light dark; --back: #fff; --ink: #222; --quiet: #666; --line: #ddd; --code: #f6f7f8;
  --link: #0b62a8; --good: #00734f; --bad: #b34700 }
@media (prefers-color-scheme: dark) { :root { --back: #181818; --ink: #e6e6e6; --quiet: #a8a8a8; --line: #444;
  --code: #232323; --link: #7cc0f2; --good: #3fbf92; --bad: #f0894a } }
body { background: var(--back); color: var(--ink); font: 15px/1.55 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.25rem; margin-top: 2.2rem } h3 { font-size: 1.05rem }
a { color: var(--link) }
.quiet { color: var(--quiet); font-size: 13px }
.failed, .timed_out, .lost, .interrupted { color: var(--bad) } .completed { color: var(--good) }
header, article { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1.1rem; margin: 1rem 0 }
article h2 { margin: 0 0 .3rem } article ul { margin: .4rem 0; padding-left: 1.3rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0 0; font-size: 13px }
dt { color: var(--quiet) } dd { margin: 0; overflow-wrap: anywhere }
.prompt { display: none }
.highlight pre, details pre, .output_text pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; margin: 0 }
.input_area, .text_cell .highlight, details > pre { background: var(--code); border-radius: 4px; padding: .6rem .8rem;
  overflow-x: auto; margin: .6rem 0 }
code { font: .9em ui-monospace, "DejaVu Sans Mono", monospace; background: var(--code); padding: .05em .25em;
  border-radius: 3px }
pre code { background: none; padding: 0; font-size: 1em }
.output_area { overflow-x: auto; margin: .4rem 0 }
.output_text pre { white-space: pre-wrap; overflow-wrap: anywhere }
.output_stdout pre, .output_stderr pre { color: var(--quiet) }
.output_error { border-left: 3px solid var(--bad); padding-left: .8rem }
.celltag_state-pending .input_area { opacity: .55 }
.celltag_state-pending .input_area::after { content: "did not run"; font-size: 12px }
.celltag_state-failed .input_area { outline: 1px solid var(--bad) }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
.output_html table.dataframe { border: 0 } .dataframe td, .dataframe th { border: 0; text-align: right }
.dataframe thead th, .text_cell th { border-bottom: 1px solid var(--line) }
.controls { border: 1px solid var(--line); border-radius: 4px; padding: .6rem .8rem }
.across { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem }
.controls label { display: inline-flex; gap: .6rem; align-items: center; width: 23rem; font-size: 13px }
.controls label span { width: 11rem; text-align: right } .controls input { width: 7rem }
summary { cursor: pointer }
.ansi-red-fg, .ansi-red-intense-fg { color: var(--bad) } .ansi-green-fg, .ansi-green-intense-fg { color: var(--good) }
.ansi-blue-fg, .ansi-cyan-fg, .ansi-blue-intense-fg, .ansi-cyan-intense-fg { color: var(--link) } .ansi-bold { font-weight: 600 }
"""
