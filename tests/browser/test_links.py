"""Links of notebooks lead to the heading that they name, on a rendered page; tables of calls keep their indents."""

import re
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook
from screen import Lab, Notebook

pytestmark = pytest.mark.browser
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
SHOWN = """([path, heading]) => {
  const page = window.jupyterapp.shell.currentWidget;
  return page.context?.path === path && [...page.node.querySelectorAll('h1, h2, h3')].some(one => {
    const { top, bottom } = one.getBoundingClientRect();
    return one.textContent.replace('¶', '') === heading && top >= 0 && bottom <= innerHeight })
}"""


def headings(lab: Lab) -> dict[str, str]:
    """Return the heading that each link from a notebook to a page must show."""
    books = [nbformat.read(path, 4) for path in sorted(lab.folder.glob("[0-9]*.ipynb"))]
    text = "\n".join(cell.source for book in books for cell in book.cells if cell.cell_type == "markdown")
    expected = {}
    for target in sorted(set(re.findall(r"\]\((\.\./docs/[^)]+\.md[^)]*)\)", text))):
        file, _, anchor = target.partition("#")
        names = re.findall(r"^#+ (.+)$", (lab.folder / file).read_text(), re.M)
        [expected[target]] = [
            name for name in names if re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") == anchor
        ] or names[:1]
    return expected


def test_every_link_to_a_page_shows_its_heading(lab: Lab, notebook: Callable[[str], Notebook], page: Any):
    expected = headings(lab)
    assert len(expected) > 50
    cells = [new_markdown_cell("\n\n".join(f"[at {target}]({target})" for target in expected))]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), lab.folder / "links.ipynb")
    book = notebook("links.ipynb")
    for target, heading in expected.items():
        book.command("docmanager:open", path="notebooks/links.ipynb")
        page.locator(".jp-NotebookPanel").get_by_role("link", name=f"at {target}", exact=True).click()
        path = target.partition("#")[0].removeprefix("../")
        page.wait_for_function(SHOWN, arg=[path, heading], timeout=20_000)
