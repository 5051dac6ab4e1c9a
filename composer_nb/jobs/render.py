"""Notebooks to read without running anything: an executed copy and a page of each, from one clean run, and an index.

    render(notebooks, Path("build/render"))

The notebooks run as a job, one after another, so what became of them is what the runner says. One that failed has a page as
well, with its traceback, and says so in the index. Beside the pages stand `render.json`, the index for programs, and
`render.yml`, the job that ran.

Leaves out: notebooks that would train for longer than reading is worth. They are rendered on a finished run, or listed with the
reason.
"""

from __future__ import annotations

import ast
import html
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import yaml

from composer_nb import __version__
from composer_nb.jobs import pages
from composer_nb.jobs.check import parameters_of
from composer_nb.jobs.file import load_job
from composer_nb.jobs.records import now, read_json, write_json, write_text
from composer_nb.jobs.runner import run_job

NAME = "render"
LIMIT_S = 1800.0
"""For a notebook. At their smoke size they promise three minutes, on a machine that has nothing else to do."""
ON_A_RUN = {"00_tour": "run_dir"}
"""Notebooks that train for long unless this parameter names a finished run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the first cell of a notebook promises, as Markdown."""

    title: str
    goals: tuple[str, ...]
    """What the reader will do."""
    needs: str
    """Minutes, memory, programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A notebook in the index."""

    name: str
    opening: Opening
    state: str
    """One of the states of a job's node, or `not rendered`."""
    error: str = ""
    """Why it has not completed, in a line."""
    seconds: float | None = None
    parameters: Mapping[str, Any]
    """As the notebook had them, whether given or by default."""
    commit: str | None = None
    version: str = __version__
    """Of the package."""
    ended: str = ""
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
    """Runs the notebooks and writes what they became into `out`; returns the index and what the job's run.json says.

    `settings` are those of a job: `name=value` for every notebook that takes it, `notebook:name=value` for one. What an
    earlier call wrote into `out` is removed, and nothing else. Raises ValueError for parameters that do not fit and
    where no notebook can be rendered, FileNotFoundError for a notebook that is not there. For the main thread.
    """
    sources = {re.sub(r"[^A-Za-z0-9_.=+-]+", "-", path.stem).strip("-.") or "notebook": path for path in notebooks}
    if len(sources) < len(notebooks):
        raise ValueError("two notebooks have the same name; render them into folders of their own")
    given = dict(settings or {})
    reasons = {name: reason for name in sources if (reason := _left_out(name, given))}
    if len(reasons) == len(sources):
        raise ValueError("; ".join(reasons.values()) or "no notebook to render")
    job = _write_job({name: path for name, path in sources.items() if name not in reasons}, out)
    load_job(job, given)  # what is wrong is said before the old pages go
    _clear(out)
    openings = {name: opening(path) for name, path in sources.items()}
    told = run_job(job, given, runs=runs, say=say)
    entries = [
        Entry(name=name, opening=openings[name], state="not rendered", error=reasons[name], parameters={})
        if name in reasons
        else _written(name, path, openings[name], told["nodes"][name], out)
        for name, path in sources.items()
    ]
    write_text(out / "index.html", index(entries))
    files = ["index.html", *(name for entry in entries for name in entry.files)]
    write_json(out / "render.json", {"files": files, "run": told["dir"], "notebooks": [asdict(e) for e in entries]})
    return entries, told


def shipped() -> list[Path]:
    """The notebooks of the checkout. Raises FileNotFoundError where the package stands alone."""
    folder = Path(__file__).parents[2] / "notebooks"
    if not (found := sorted(folder.glob("*.ipynb"))):
        raise FileNotFoundError(f"{folder}: the notebooks come with a checkout; name the ones to render")
    return found


def opening(path: Path) -> Opening:
    """Title, aims and needs from a notebook's first cell; what is not there is empty, the title then the file's name."""
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


def parameter_values(book: nbformat.NotebookNode) -> dict[str, Any]:
    """What an executed notebook's parameters were: the cell of defaults, then the cell that a run has put after it."""
    found: dict[str, Any] = {}
    for cell in book.cells:
        if {"parameters", "injected-parameters"} & set(cell.metadata.get("tags", [])):
            for node in ast.parse(cell.source).body:
                match node:
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                        found[name] = _plain(value)
                    case ast.Assign(targets=[ast.Name(id=name)], value=value):
                        found[name] = _plain(value)
    return found


def _plain(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:  # papermill writes an infinite number as a call
        return ast.unparse(value)


def _left_out(name: str, settings: Mapping[str, str]) -> str:
    """Why a notebook is not run, if it is not."""
    parameter = ON_A_RUN.get(name)
    if parameter is None or settings.get(f"{name}:{parameter}") or settings.get(parameter):
        return ""
    return f"{name} trains for long; to render it, name a finished run: --set {name}:{parameter}=runs/tour"


def _clear(out: Path) -> None:
    """Removes what an earlier call has written, so that no old page passes for a new one."""
    for name in (read_json(out / "render.json") or {}).get("files", []):
        (out / Path(name).name).unlink(missing_ok=True)
    (out / "render.json").unlink(missing_ok=True)


def _write_job(sources: Mapping[str, Path], out: Path) -> Path:
    """The job file: a node a notebook. What a notebook keeps goes into its node's own directory."""
    nodes = {}
    for name, path in sources.items():
        parameters = {"runs": f"${{{name}.dir}}"} if "runs" in parameters_of(path) else {}
        nodes[name] = {"notebook": os.path.relpath(path, out), "parameters": parameters, "timeout_s": LIMIT_S}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "render.yml"
    write_text(file, yaml.safe_dump({"name": NAME, "nodes": nodes}, sort_keys=False))
    return file


def _written(name: str, source: Path, promised: Opening, node: Mapping[str, Any], out: Path) -> Entry:
    """Writes page and copy of a notebook that ran, however that ended."""
    executed = Path(node.get("output", source))
    record = read_json(executed.with_name("run.json")) or {}
    entry = Entry(
        name=name,
        opening=promised,
        state=node["state"],
        error=node.get("error", ""),
        seconds=record.get("seconds"),
        parameters=record.get("parameters", {}),
        commit=record.get("commit"),
        version=record.get("versions", {}).get("composer_nb", __version__),
        ended=record.get("ended", ""),
    )
    if "output" not in record:  # it did not begin, or nothing readable is left of it
        return entry
    book = nbformat.read(executed, 4)
    files = (f"{name}.html", f"{name}.ipynb")
    entry = replace(entry, parameters=parameter_values(book), files=files)
    write_text(out / files[0], pages.notebook_page(book, promised.title, header(entry)))
    write_text(out / files[1], executed.read_text(encoding="utf-8"))
    return entry


# HTML


def header(entry: Entry) -> str:
    """What stands above a notebook's page: what ran, when, how that ended."""
    links = f'<a href="index.html">all notebooks</a> · <a href="{entry.name}.ipynb">{entry.name}.ipynb</a>'
    return f"<header><div class=quiet>{links}</div>{_facts(entry)}</header>"


def index(entries: Sequence[Entry]) -> str:
    """The page that lists the notebooks."""
    done = sum(entry.state == "completed" for entry in entries)
    spent = sum(entry.seconds or 0.0 for entry in entries)
    about = f"{done} of {len(entries)} notebooks completed, in {spent:.0f} s, one after another; written {now()}."
    head = f'<h1>The notebooks, executed</h1><p class="quiet">{about}</p>'
    return pages.page("The notebooks, executed", head + "\n".join(map(_card, entries)))


def _card(entry: Entry) -> str:
    title = _inline(entry.opening.title)
    if entry.files:
        title = f'<a href="{entry.files[0]}">{title}</a>'
    goals = "".join(f"<li>{_inline(goal)}</li>" for goal in entry.opening.goals)
    aims = f"<div class=quiet>You will</div><ul>{goals}</ul>" if goals else ""
    return f"<article id='{entry.name}'><h2>{title}</h2>{aims}{_facts(entry)}</article>"


def _facts(entry: Entry) -> str:
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in _rows(entry))
    return f"<dl>{rows}</dl>"


def _rows(entry: Entry) -> Iterator[tuple[str, str]]:
    why = f": {html.escape(entry.error)}" if entry.error else ""
    yield "state", f'<span class="{entry.state.replace(" ", "-")}">{entry.state}</span>{why}'
    if entry.opening.needs:
        yield "needs", _inline(entry.opening.needs)
    if entry.seconds is not None:
        yield "measured", f"{entry.seconds:.1f} s, ended {entry.ended}"
    if entry.parameters:
        given = ", ".join(f"{name} = {value!r}" for name, value in entry.parameters.items())
        yield "parameters", f"<code>{html.escape(given)}</code>"
    if entry.seconds is not None:
        yield "commit", html.escape(entry.commit or "none: the package is not in a checkout")
        yield "package", f"composer_nb {html.escape(entry.version)}"


def _inline(text: str) -> str:
    """Markdown of one paragraph, without the paragraph."""
    return pages.markdown(text).strip().removeprefix("<p>").removesuffix("</p>")
