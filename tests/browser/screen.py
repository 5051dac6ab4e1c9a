"""JupyterLab, and a notebook on the screen, as tests handle it.

Cells that are out of sight are not in the page (JupyterLab draws what one can see), so a cell is brought into sight before
anything in it is asked for. What cells have put out is read from the notebook's model, which holds all of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_MODEL = "window.jupyterapp.shell.currentWidget.content"


@dataclass(kw_only=True)
class Lab:
    """A running JupyterLab."""

    url: str
    folder: Path
    """Its notebooks, which are copies that tests may change."""
    pid: int

    def kernels(self) -> list[psutil.Process]:
        """Return the processes of its kernels, oldest first, with earlier notebooks' but not what a kernel has just forked."""
        descendants = psutil.Process(self.pid).children(recursive=True)
        named = {process.pid: process for process in descendants if "ipykernel_launcher" in " ".join(process.cmdline())}
        return sorted(
            (process for process in named.values() if process.ppid() not in named), key=psutil.Process.create_time
        )


class Notebook:
    """The notebook in the current tab of JupyterLab."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        page.wait_for_function("document.querySelector('#jp-main-statusbar')?.innerText.includes('| Idle')")
        question = page.get_by_role("button", name="No", exact=True)
        if question.count():  # a first visit is asked about news from the makers of JupyterLab
            question.first.click()

    def command(self, name: str, **arguments: Any) -> Any:
        """Execute a command of a menu. Return when it has finished; if it runs cells, when they have ended."""
        return self.page.evaluate(
            "([name, given]) => window.jupyterapp.commands.execute(name, given).then(found => found === true)",
            [name, arguments],
        )

    def theme(self, dark: bool) -> None:
        """JupyterLab's own theme, and what the browser tells pages about the reader's setting; a large light window, or a small
        dark one."""
        self.page.set_viewport_size({"width": 1280, "height": 720} if dark else {"width": 1440, "height": 900})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.command("apputils:change-theme", theme=f"JupyterLab {'Dark' if dark else 'Light'}")
        self.page.wait_for_selector(f"body[data-jp-theme-light={'false' if dark else 'true'}]", state="attached")
        self.page.wait_for_timeout(500)  # colours fade

    def index_of(self, text: str) -> int:
        """Return the index of the first code cell whose source contains `text`."""
        index = self.page.evaluate(
            f"text => {_MODEL}.widgets.findIndex(cell => cell.model.type === 'code' && "
            "cell.model.sharedModel.source.includes(text))",
            text,
        )
        assert index >= 0, f"no code cell with {text!r}"
        return int(index)

    def cell(self, text: str) -> Any:
        """Scroll the cell to the top of the window and return it."""
        index = self.index_of(text)
        self.page.evaluate(
            f"async place => {{ const book = {_MODEL}; book.activeCellIndex = place; "
            "await book.scrollToItem(place, 'start') }",
            index,
        )
        cell = self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')
        cell.wait_for()
        return cell

    def replace(self, old: str, new: str) -> None:
        """Edit the first code cell that contains `old`."""
        self.page.evaluate(
            f"([place, old, now]) => {{ const text = {_MODEL}.widgets[place].model.sharedModel; "
            "text.setSource(text.source.replace(old, now)) }",
            [self.index_of(old), old, new],
        )

    def run_above(self, text: str) -> None:
        """Run the cells before the one that contains `text`, and return when they have ended."""
        self.cell(text)
        self.command("notebook:run-all-above")

    def run_all(self) -> None:
        """Run all cells, and return when they have ended."""
        self.command("notebook:run-all-cells")

    def outputs(self) -> list[list[dict[str, Any]]]:
        """Return the outputs of each code cell."""
        outputs: list[list[dict[str, Any]]] = self.page.evaluate(
            f"{_MODEL}.widgets.filter(cell => cell.model.type === 'code').map(cell => cell.model.outputs.toJSON())"
        )
        return outputs

    def ran_cleanly(self) -> None:
        """Fail unless every cell that is not empty has run, and none has raised or warned."""
        counts = self.page.evaluate(
            f"{_MODEL}.widgets.filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source.trim())"
            ".map(cell => cell.model.executionCount)"
        )
        assert all(counts), counts
        for output in [output for outputs in self.outputs() for output in outputs]:
            assert output["output_type"] != "error" and output.get("name") != "stderr", output
