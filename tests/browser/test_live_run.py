"""A live run and its notebook: the kernel is killed, the run goes on, the notebook attaches again."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from screen import Lab, Notebook

from composer_nb.harness.sandbox.reap import reap
from composer_nb.trainer.recipe.detached import stop

pytestmark = pytest.mark.browser
BOOK = "05_rl_run.ipynb"
PATIENCE_S = 400.0


@pytest.fixture
def runs(lab: Lab) -> Iterator[Path]:
    """The folder in which the notebook keeps its run. Whatever is live in it afterwards is ended."""
    folder = lab.folder / "runs"
    yield folder
    for path in [path for path in folder.glob("watched-*") if not path.is_symlink()]:
        stop(path)
        reap(path)


@pytest.mark.timeout(1500)
def test_the_run_outlives_the_kernel_of_its_notebook(
    lab: Lab, runs: Path, notebook: Callable[[str], Notebook], page: Any, picture: Callable[[str], None]
):
    from composer_nb.trainer.recipe.reader import read_status, wait_until

    book = notebook(BOOK)
    book.replace("overrides: dict = {}", 'overrides: dict = {"rl.steps": 300, "data.rl_tasks": 1200}')
    book.run_above("early_status = wait_until")
    path = (runs / "watched").resolve()
    assert read_status(path).state == "live"
    board = book.cell("dashboard = Dashboard(path)").locator(".jp-OutputArea")
    board.locator(".desk svg").first.wait_for()

    kernel = lab.kernels()[-1]
    kernel.kill()
    # JupyterLab starts a kernel in its place and says so.
    page.locator(".jp-Dialog", has_text="appears to have died").get_by_role("button").last.click()
    alive = read_status(path)
    assert alive.state == "live", alive.last_line
    page.wait_for_function("document.querySelector('#jp-main-statusbar').innerText.includes('| Idle')")
    assert kernel.pid not in [process.pid for process in lab.kernels()]

    begun = wait_until(path, lambda status: len(status.steps) >= 2, PATIENCE_S)
    book.replace('run_dir: str = ""', f'run_dir: str = "{path}"')
    book.run_above("final_status = wait_until")
    attached = book.cell("second_dashboard = Dashboard(path)").locator(".jp-OutputArea").first
    said_first = attached.inner_text()
    assert "live" in said_first and trained(said_first) >= len(begun.steps)
    page.wait_for_function("([e, old]) => e.innerText !== old", arg=[attached.element_handle(), said_first])
    wait_until(path, lambda status: status.steps_done > trained(said_first) + 2, PATIENCE_S)
    page.wait_for_timeout(4000)
    assert trained(attached.inner_text()) > trained(said_first), "the board does not keep up"
    assert read_status(path).state == "live", "attaching must not end a run"
    for dark in (False, True):
        book.theme(dark)
        book.cell("second_dashboard = Dashboard(path)")
        picture(f"live_run_{'dark' if dark else 'light'}")
    book.theme(False)


def trained(text: str) -> int:
    """Return the number of finished steps that the first line of the board shows."""
    match = re.search(r"(\d+) of \d+ steps", text)
    return int(match[1]) if match else 0
