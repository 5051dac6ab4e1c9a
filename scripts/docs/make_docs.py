#!/usr/bin/env python3
"""Builds the documentation site from README.md, docs/ and the notebooks, without the network: `make docs`.

    scripts/docs/make_docs.py              run the notebooks whose code has changed, then build build/docs/html
    scripts/docs/make_docs.py --stale      name those notebooks, and fail if there are any
    scripts/docs/make_docs.py --bare       build without running notebooks: those whose code has changed have no outputs
    scripts/docs/make_docs.py --llms       write llms.txt
    scripts/docs/make_docs.py --text       write docs/pages anew from the outputs that they hold; run nothing

A notebook runs at CPU size on the example in data/. Its executed copy is kept in build/docs/executed with the record of its
run. The site takes its outputs from there, or else from docs/pages, and its text from the notebook, so a new sentence needs no
new run. The site is not in git; docs/pages is, for those who read on GitHub. A page there gets new outputs if it is missing or
its notebook's code changed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from composer_nb.jobs.check import notebook_digest
from scripts.docs import notebook_pages

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "data" / "example")
SHORT: dict[str, dict[str, Any]] = {
    "01_tour": {"run_dir": EXAMPLE},
    "05_rl_run": {"runs": str(ROOT / "build" / "docs" / "runs")},
    "08_product": {"tasks_wanted": 5},
    "09_bench": {"tasks_wanted": 8},
    "09b_real_use": {"requests": 8},
}
"""Parameters with which a notebook shows the same in less time."""
FIRST = ("two_days", "glossary", "architecture", "comparison")
"""Pages of docs/ that a newcomer reads first."""
CONFIG: dict[str, Any] = {
    "project": "composer_nb",
    "extensions": ["myst_nb", __name__],
    "html_theme": "furo",
    "html_title": "composer_nb",
    "html_show_sphinx": False,
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_math_renderer": "mathml",
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},  # would be fetched from elsewhere
    "nb_mime_priority_overrides": [
        ("html", "application/vnd.jupyter.widget-view+json", None)
    ],  # the static twin is shown
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 3,
    "suppress_warnings": ["myst.header", "misc.highlighting_failure", "mystnb.unknown_mime_type"],
    "exclude_patterns": [],
}
FLAGS = {
    "stale": "name the notebooks whose code has changed since their page, and fail if there are any",
    "bare": "build without running notebooks; those whose code has changed have no outputs",
    "llms": "write llms.txt",
    "text": "write docs/pages anew from the notebooks' text and the outputs that they hold",
}
LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^)\s]+)\)")


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def executed(source: Path, build: Path) -> Path:
    return build / "executed" / source.stem / source.name


def has_run(source: Path, build: Path) -> bool:
    """Whether there is an executed copy that ran to its end, with the notebook's present code and the right parameters."""
    copy = executed(source, build)
    if not copy.is_file():
        return False
    record = json.loads(copy.with_name("run.json").read_text(encoding="utf-8"))
    ran = record["state"], record["parameters"], record["notebook_sha256"]
    return ran == ("completed", SHORT.get(source.stem, {}), notebook_digest(source))


def is_stale(source: Path, build: Path) -> bool:
    """Whether neither the executed copy nor the page in docs/pages has outputs of the notebook's present code."""
    return not has_run(source, build) and not notebook_pages.stored_outputs(source)


def page(source: Path, build: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of its last run, or else with those of its page in docs/pages."""
    book, runs = nbformat.read(source, 4), has_run(source, build)
    ran = {cell.id: cell for cell in nbformat.read(executed(source, build), 4).cells} if runs else {}
    cell_outputs = {} if runs else notebook_pages.stored_outputs(source)
    for cell in book.cells:
        if cell.cell_type == "code" and cell.id in ran:
            cell.outputs, cell.execution_count = ran[cell.id].outputs, ran[cell.id].execution_count
        if cell.cell_type == "code" and cell.id in cell_outputs:
            cell.outputs = [nbformat.v4.new_output("display_data", {"text/markdown": cell_outputs[cell.id]})]
    for cell in book.cells:
        if cell.cell_type == "markdown":
            cell.source = inside(cell.source, source)
    return book


def on_site(target: Path) -> bool:
    """Whether a file of the checkout is a page or a picture of the site."""
    if target == ROOT / "README.md":
        return True
    return target.is_file() and target.parent in (ROOT / "docs", ROOT / "docs" / "images", ROOT / "notebooks")


def inside(text: str, path: Path) -> str:
    """Return Markdown in which links to files that are not on the site are their text alone."""

    def changed(match: re.Match[str]) -> str:
        _, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        file = path.parent / target.partition("#")[0]
        return match[0] if on_site(file.resolve()) else label

    return LINK.sub(changed, text).replace("](../README.md", "](../index.md")


def toctree(caption: str, names: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def write_sources(build: Path) -> Path:
    """Write what Sphinx reads: README.md as the first page, docs/, and the notebooks with their outputs."""
    folder = build / "source"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "images", folder / "docs" / "images")
    (folder / "notebooks").mkdir()
    for source in notebooks():
        nbformat.write(page(source, build), folder / "notebooks" / source.name)
    pages = sorted((ROOT / "docs").glob("*.md"), key=lambda path: (path.stem not in FIRST, path.stem))
    for path in pages:
        (folder / "docs" / path.name).write_text(inside(path.read_text(encoding="utf-8"), path), encoding="utf-8")
    trees = [
        toctree("Notebooks", [f"notebooks/{path.stem}" for path in notebooks()]),
        toctree("Pages", [f"docs/{path.stem}" for path in pages]),
    ]
    readme = ROOT / "README.md"
    text = re.sub(r"\(docs/pages/(\w+)\.md", r"(notebooks/\1.ipynb", readme.read_text(encoding="utf-8"))
    text = inside(text, readme)
    (folder / "index.md").write_text(text + "".join(trees), encoding="utf-8")
    return folder


def setup(app: Any) -> None:
    """Register formulas as MathML, which browsers draw without a script. Sphinx calls this of its extensions."""
    from docutils import nodes
    from docutils.utils.math.latex2mathml import tex2mathml

    def draw(translator: Any, node: Any) -> None:
        translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (draw, None), (draw, None))


def build_site(build: Path, *, strict: bool = True) -> Path:
    """Build the pages and return their folder. Raises RuntimeError for what Sphinx warns of."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    source, out = write_sources(build), build / "html"
    with docutils_namespace():
        app = Sphinx(
            str(source), None, str(out), str(build / "doctrees"), "html", CONFIG, status=None, warning=sys.stderr
        )
        app.build()
        if strict and app._warncount:
            raise RuntimeError(f"{app._warncount} warnings; they are above")
    return out


def first_sentence(text: str) -> str:
    """Return the first sentence of Markdown below its title, without markup."""
    body = next(
        paragraph
        for paragraph in text.split("\n\n")[1:]
        if paragraph and not paragraph.startswith(("#", "```", "|", "!"))
    )
    plain = LINK.sub(r"\2", " ".join(body.split()))
    return re.split(r"(?<=[.?])\s", plain.replace("**", ""))[0].rstrip(":")


def llms_txt() -> str:
    """Return an index of the project for language models, in the form of llmstxt.org."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = ["# composer_nb", "", f"> {first_sentence(readme)}", "", "## Notebooks", ""]
    for path in notebooks():
        opening = nbformat.read(path, 4).cells[0].source
        [learnt] = re.findall(r"^\*You will have learnt\* (.*)$", opening, re.M)
        plain = LINK.sub(r"\2", learnt)
        lines.append(f"- [{opening.splitlines()[0][2:]}](notebooks/{path.name}): {plain}")
    lines += ["", "## Pages", ""]
    lines += [f"- [{title}](docs/{name}): {description}" for title, name, description in titles()]
    lines += ["", "## Work on it", ""]
    for path in (ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "skills").glob("*/SKILL.md"))):
        text = re.sub(r"\A---.*?\n---\n\n", "", path.read_text(encoding="utf-8"), flags=re.S)
        lines.append(f"- [{text.splitlines()[0][2:]}]({path.relative_to(ROOT)}): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def titles() -> Iterator[tuple[str, str, str]]:
    for path in sorted((ROOT / "docs").glob("*.md"), key=lambda path: (path.stem not in FIRST, path.stem)):
        text = path.read_text(encoding="utf-8")
        yield text.splitlines()[0].removeprefix("# "), path.name, first_sentence(text)


def write_pages(pages: Path, build: Path | None = None) -> list[str]:
    """Write the pages that are out of date, and return what is wrong with those that need a run which is not in `build`."""
    faults = []
    for path in notebooks():
        fault = notebook_pages.fault(path, pages)
        if fault.endswith(notebook_pages.TEXT):
            notebook_pages.write_page(path, pages)
        elif fault and build and has_run(path, build):
            notebook_pages.write_page(path, pages, nbformat.read(executed(path, build), 4))
        elif fault:
            faults.append(fault)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    for name, description in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=description)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "docs")
    args = parser.parse_args()
    if args.llms:
        (ROOT / "llms.txt").write_text(llms_txt(), encoding="utf-8")
        return 0
    if args.text:
        faults = write_pages(notebook_pages.PAGES)
        print("\n".join(faults) or "docs/pages is up to date")
        return 1 if faults else 0
    old = [path for path in notebooks() if is_stale(path, args.build)]
    if args.stale:
        print(*(f"{path.name}: its page does not show its present code; run make docs" for path in old), sep="\n")
        return 1 if old else 0
    from composer_nb.jobs.notebook import run_notebook

    for number, path in enumerate([] if args.bare else old, 1):
        print(f"{path.name}, {number} of {len(old)}: running; a notebook takes up to some minutes", flush=True)
        try:
            record = run_notebook(path, executed(path, args.build), SHORT.get(path.stem, {}))
        except KeyboardInterrupt:
            print(f"{path.name}: interrupted; the same command goes on with it")
            return 130
        print(f"{path.name}: {record['state']} after {record['seconds']:.0f} s", flush=True)
    if not args.bare:
        write_pages(notebook_pages.PAGES, args.build)
    print(build_site(args.build) / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
