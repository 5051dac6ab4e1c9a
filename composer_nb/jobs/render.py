"""Executed notebooks as pages: an executed copy and an HTML page of each, from one clean run, and an index.

    render(notebooks, Path("build/render"))

The notebooks run as a job, one after another. A notebook that failed has its page, with the traceback. `render.json` is the
index for programs. nbconvert makes the body of a page; formulas become MathML, and no page fetches a file or runs a script.
Widgets are left to JupyterLab: a page shows their static twin.

A notebook that trains for long is rendered on a finished run, or listed with the reason.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import yaml
from jinja2 import Environment, pass_context
from latex2mathml.converter import convert
from markupsafe import Markup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

from composer_nb import __version__
from composer_nb.harness.files import write_atomic, write_json
from composer_nb.jobs.check import parameters_of
from composer_nb.jobs.file import load_job
from composer_nb.jobs.records import now, read_json
from composer_nb.jobs.runner import run_job
from composer_nb.views.page import document

LIMIT_S = 1800.0
"""Time limit of a notebook. At its smoke size it takes minutes on an idle machine."""
ON_A_RUN = {"00_tour": "run_dir"}
"""Notebooks that train for long unless this parameter names a finished run."""
WIDGET = "application/vnd.jupyter.widget-view+json"


class Opening(NamedTuple):
    """Contents of a notebook's first cell, as Markdown."""

    title: str
    goals: tuple[str, ...]
    """The reader's tasks."""
    needs: str
    """Minutes, memory, programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A notebook in the index."""

    name: str
    opening: Opening
    state: str
    """State of the job's node, or `not rendered`."""
    error: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The attempt's run.json."""
    files: tuple[str, ...] = ()
    """Page and executed notebook."""


def render(
    notebooks: Sequence[Path],
    out: Path,
    settings: Mapping[str, str] | None = None,
    *,
    runs: Path = Path("runs/jobs"),
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Entry], dict[str, Any]]:
    """Run the notebooks and write their pages into `out`; return the index and the job's run.json.

    `settings` are those of a job: `name=value` for every notebook that takes it, `notebook:name=value` for one. Removes what an
    earlier call wrote into `out`, and nothing else. Raises ValueError for parameters that do not fit and where no notebook can
    be rendered, FileNotFoundError for a missing notebook. For the main thread.
    """
    sources = {re.sub(r"[^A-Za-z0-9_.=+-]+", "-", path.stem).strip("-.") or "notebook": path for path in notebooks}
    if len(sources) < len(notebooks):
        raise ValueError("two notebooks have the same name; render them into folders of their own")
    given = dict(settings or {})
    reasons = {
        name: f"{name} trains for long; to render it, name a finished run: --set {name}:{parameter}=runs/tour"
        for name, parameter in ON_A_RUN.items()
        if name in sources and not (given.get(f"{name}:{parameter}") or given.get(parameter))
    }
    if len(reasons) == len(sources):
        raise ValueError("; ".join(reasons.values()) or "no notebook to render")
    job = _write_job({name: path for name, path in sources.items() if name not in reasons}, out)
    load_job(job, given)  # reports what is wrong before the old pages go
    for name in [*(read_json(out / "render.json") or {}).get("files", []), "render.json"]:
        (out / Path(name).name).unlink(missing_ok=True)
    openings = {name: opening(path) for name, path in sources.items()}
    job_run = run_job(job, given, runs=runs, say=say)
    entries = [
        Entry(name=name, opening=openings[name], state="not rendered", error=reasons[name])
        if name in reasons
        else _written(name, openings[name], job_run["nodes"][name], out)
        for name in sources
    ]
    seconds = sum(entry.record.get("seconds", 0.0) for entry in entries)
    index = _page("The notebooks, executed", entries=entries, seconds=seconds, now=now())
    write_atomic(out / "index.html", index)
    files = ["index.html", *(name for entry in entries for name in entry.files)]
    write_json(out / "render.json", {"files": files, "run": job_run["dir"], "notebooks": [asdict(e) for e in entries]})
    return entries, job_run


def shipped() -> list[Path]:
    """Return the notebooks of the checkout. Raises FileNotFoundError for an installed package, which has none."""
    folder = Path(__file__).parents[2] / "notebooks"
    if not (found := sorted(folder.glob("*.ipynb"))):
        raise FileNotFoundError(f"{folder}: the notebooks come with a checkout; name the ones to render")
    return found


def opening(path: Path) -> Opening:
    """Return title, goals and needs from a notebook's first cell; what is missing is empty, the title then the file's name."""
    first = next(iter(nbformat.read(path, 4).cells), None)
    text = first.source if first is not None and first.cell_type == "markdown" else ""
    title = re.search(r"^# (.+)$", text, re.M)
    goals = re.search(r"^\*You will\*\n+((?:.+\n?)+)", text, re.M)
    needs = re.search(r"^\*Needs\*\s+(.+?)(?:\n\n|\Z)", text, re.M | re.S)
    return Opening(
        title=title[1] if title else path.stem,
        goals=tuple(re.findall(r"^[-*] (.+?)[;.]?$", goals[1], re.M)) if goals else (),
        needs=needs[1] if needs else "",
    )


def _write_job(sources: Mapping[str, Path], out: Path) -> Path:
    """Write the job file, one node per notebook. Runs that a notebook makes go into its node's own directory."""
    nodes = {}
    for name, path in sources.items():
        parameters = {"runs": f"${{{name}.dir}}"} if "runs" in parameters_of(path) else {}
        nodes[name] = {"notebook": os.path.relpath(path, out), "parameters": parameters, "timeout_s": LIMIT_S}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "render.yml"
    write_atomic(file, yaml.safe_dump({"name": "render", "nodes": nodes}, sort_keys=False))
    return file


def _written(name: str, opening: Opening, node: Mapping[str, Any], out: Path) -> Entry:
    """Write page and copy of a notebook that ran, whatever its state."""
    executed = Path(node.get("output", ""))
    record = (read_json(executed.with_name("run.json")) if executed.name else None) or {}
    files = (f"{name}.html", f"{name}.ipynb") if "output" in record else ()
    entry = Entry(
        name=name, opening=opening, state=node["state"], error=node.get("error", ""), record=record, files=files
    )
    if files:
        write_atomic(out / files[0], notebook_page(nbformat.read(executed, 4), entry))
        write_atomic(out / files[1], executed.read_text(encoding="utf-8"))
    return entry


# HTML


class _Renderer(IPythonRenderer):
    """Writes formulas as MathML."""

    def block_math(self, body: str) -> str:
        return convert(body.strip(), display="block")

    def inline_math(self, body: str) -> str:
        return convert(body.strip(), display="inline")

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")


class _Exporter(HTMLExporter):
    """Exports the body alone: nbconvert's head would fetch scripts."""

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return _markdown(source)


def _markdown(source: str) -> str:
    return MarkdownWithMath(_Renderer(escape=False, exclude_anchor_links=True)).render(source)


def notebook_page(book: nbformat.NotebookNode, entry: Entry) -> str:
    """Return the page of an executed notebook."""
    shown = copy.deepcopy(book)
    shown.metadata.pop("widgets", None)  # nbconvert would put it into the page for a script to read
    for cell in shown.cells:
        if cell.cell_type == "code":
            state = cell.metadata.get("papermill", {}).get("status", "pending")
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), f"state-{state}"]
            for output in cell.outputs:
                data = output.get("data", {})
                data.pop("application/javascript", None)
                if data.pop(WIDGET, None) and "text/html" not in data:
                    output["data"] = {"text/plain": "(controls; they work in JupyterLab)"}
    body, _ = _Exporter(template_name="basic").from_notebook_node(shown)
    return _page(entry.opening.title, entry=entry, body=Markup(body))


def _page(title: str, **values: Any) -> str:
    """Return a notebook's page, or without `body` the index."""
    template, css = (Path(__file__).with_name(f"render.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    environment = Environment(autoescape=True)
    environment.filters["inline"] = lambda text: Markup(
        _markdown(text).strip().removeprefix("<p>").removesuffix("</p>")
    )
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("vs", "github-dark"))
    rules = f"{css}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n.highlight {{ background: none }}"
    body = environment.from_string(template).render(version=__version__, **values)
    return document(title, [body], rules)
