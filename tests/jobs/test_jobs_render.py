"""Rendered notebooks: what ran is shown, what failed or was left out says so, and no page needs anything but itself."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from composer_nb import __version__, cli
from composer_nb.jobs.render import WIDGET, Entry, Opening, notebook_page, opening, render

ROOT = Path(__file__).resolve().parents[2]
OPENING = """# Halves & wholes

*You will*
- cut a number in **two**;
- put it `together` again.

*Needs* half a minute; 1 GB of memory."""
GOOD = (
    "half = whole / 2\nprint('half', half)",
    "import base64\nfrom IPython.display import Image\n"
    "Image(base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='))",
    "import pandas as pd\nassert half * 2 == whole\npd.DataFrame({'half': [half]})",
)


def notebook(path: Path, *sources: str, parameters: str = "whole: float = 3.0\nname: str = 'a'") -> Path:
    cells = [new_markdown_cell(OPENING), new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [new_markdown_cell("Then $x^2$, and $$\\frac{1}{2}$$"), *map(new_code_cell, sources)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    return path


class Page(HTMLParser):
    """What a page would fetch or run, and its words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.wants: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.styling = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.words += "" if tag in ("code", "strong", "em", "a", "span") else "\n"
        self.styling = tag == "style"
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.wants.append(tag)
        if (source := given.get("src") or "") and not source.startswith("data:"):
            self.wants.append(source)
        self.links += [given["href"]] if tag == "a" and given.get("href") else []

    def handle_endtag(self, tag: str) -> None:
        self.styling = False

    def handle_data(self, data: str) -> None:
        if not self.styling:
            self.words += data


def stands_alone(path: Path) -> Page:
    page = Page(path)
    assert page.wants == [], path
    assert not re.search(r"@import|url\((?!data:)", path.read_text())
    assert "prefers-color-scheme: dark" in path.read_text()
    for link in page.links:
        assert link.startswith("#") or (path.parent / link).is_file(), link
    return page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three notebooks rendered: one is right, one fails, one is the tour without a run."""
    folder = tmp_path_factory.mktemp("books")
    good = notebook(folder / "good.ipynb", *GOOD)
    bad = notebook(folder / "bad.ipynb", "print('before')", "1 / (whole - whole)", "print('never')")
    tour = notebook(folder / "00_tour.ipynb", "1", parameters="run_dir: str = ''")
    out = folder / "out"
    out.mkdir()
    (out / "mine.txt").write_text("of somebody else")
    (out / "render.json").write_text(json.dumps({"files": ["old.html", "../good.ipynb"]}))
    (out / "old.html").write_text("of a notebook that is gone")
    entries, told = render([tour, good, bad], out, {"good:whole": "8"}, runs=folder / "runs")
    return {"out": out, "folder": folder, "told": told, "entries": {entry.name: entry for entry in entries}}


def test_states_are_those_of_the_job(made: dict[str, Any]):
    assert made["told"]["state"] == "failed"
    assert {name: entry.state for name, entry in made["entries"].items()} == {
        "00_tour": "not rendered",
        "good": "completed",
        "bad": "failed",
    }
    assert made["entries"]["bad"].error == "ZeroDivisionError: float division by zero"
    assert "--set 00_tour:run_dir=" in made["entries"]["00_tour"].error


def test_the_page_shows_what_ran_and_needs_nothing(made: dict[str, Any]):
    page = stands_alone(made["out"] / "good.html")
    assert "half 4.0" in page.words and "whole = 8" in page.words
    assert 'celltag_state-pending"' not in (made["out"] / "good.html").read_text()
    assert page.tags.count("math") == 2 and "mfrac" in page.tags and "img" in page.tags
    assert f"composer_nb {__version__}" in page.words
    executed = nbformat.read(made["out"] / "good.ipynb", 4)
    assert [cell.execution_count for cell in executed.cells if cell.cell_type == "code"] == [1, 2, 3, 4, 5]


def test_a_failure_is_shown_as_one(made: dict[str, Any]):
    page = stands_alone(made["out"] / "bad.html")
    assert "ZeroDivisionError" in page.words and "before" in page.words
    text = (made["out"] / "bad.html").read_text()
    assert text.count('celltag_state-failed"') == text.count('celltag_state-pending"') == 1


def test_the_index_lists_all_with_what_a_reader_asks(made: dict[str, Any]):
    page = stands_alone(made["out"] / "index.html")
    good = made["entries"]["good"].record
    assert f"{good['seconds']:.1f} s" in page.words
    assert good["commit"] in (None, *re.findall(r"\b[0-9a-f]{40}\b", page.words))
    assert "cut a number in two" in page.words and "half a minute; 1 GB" in page.words
    assert page.words.count("Halves & wholes") == 3
    assert set(page.links) == {"good.html", "bad.html"}
    assert "1 of 3 notebooks completed" in " ".join(page.words.split())


def test_only_what_an_earlier_call_wrote_is_removed(made: dict[str, Any]):
    assert not (made["out"] / "old.html").exists()
    assert (made["out"] / "mine.txt").exists() and (made["folder"] / "good.ipynb").exists()
    told = json.loads((made["out"] / "render.json").read_text())
    assert set(told["files"]) == {"index.html", "good.html", "good.ipynb", "bad.html", "bad.ipynb"}
    assert [entry["state"] for entry in told["notebooks"]] == ["not rendered", "completed", "failed"]


def test_the_command_ends_as_the_job_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = notebook(tmp_path / "bad.ipynb", "assert name == 'b'")
    command = ["jobs", "render", str(bad), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 1
    assert "bad: failed" in capsys.readouterr().out
    assert cli.main([*command, "--set", "name=b"]) == 0
    assert "bad: completed" in capsys.readouterr().out
    before = (tmp_path / "out" / "bad.html").read_bytes()
    assert cli.main([*command, "--set", "nome=b"]) == 2
    assert "did you mean 'name'?" in capsys.readouterr().err
    assert (tmp_path / "out" / "bad.html").read_bytes() == before


def test_what_cannot_be_rendered_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tour = notebook(tmp_path / "00_tour.ipynb", "1", parameters="run_dir: str = ''")
    for given, message in (([tour], "name a finished run"), ([tmp_path / "gone.ipynb"], "no such notebook")):
        assert cli.main(["jobs", "render", *map(str, given), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_what_a_notebook_keeps_stays_out_of_its_folder(tmp_path: Path):
    source = notebook(
        tmp_path / "n.ipynb",
        "from pathlib import Path\nkept = Path(runs)\nassert kept.is_absolute()",
        "assert Path(run_dir).samefile(kept.parents[4]), (run_dir, kept)",
        parameters="runs: str = 'runs'\nrun_dir: str = ''",
    )
    [entry], _ = render([source], tmp_path / "out", {"run_dir": str(tmp_path)}, runs=tmp_path / "a" / "b")
    assert entry.state == "completed", entry.error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_says_what_the_index_tells(path: Path):
    found = opening(path)
    assert found.title != path.stem and len(found.goals) >= 3 and "minute" in found.needs
    assert not any(goal.endswith((";", ".")) for goal in found.goals)


def test_a_notebook_without_an_opening_has_its_name(tmp_path: Path):
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), tmp_path / "n.ipynb")
    assert opening(tmp_path / "n.ipynb") == Opening(title="n", goals=(), needs="")


def test_a_widget_needs_no_script_and_leaves_its_static_twin(tmp_path: Path):
    data = {WIDGET: {"model_id": "box"}, "text/plain": "VBox(children=...)", "application/javascript": "alert(1)"}
    twin = {**data, "text/html": "<p>as it stood</p>"}
    outputs = [new_output("display_data", data=each) for each in (data, twin)]
    book = new_notebook(cells=[new_code_cell("box", outputs=outputs, execution_count=1)])
    entry = Entry(name="n", opening=Opening("t", (), ""), state="completed")
    (tmp_path / "index.html").touch()
    (tmp_path / "n.ipynb").touch()
    (tmp_path / "n.html").write_text(notebook_page(book, entry))
    page = stands_alone(tmp_path / "n.html")
    assert "controls; they work in JupyterLab" in page.words and "as it stood" in page.words
    assert "VBox" not in page.words and "alert" not in page.words
    assert WIDGET in book.cells[0].outputs[0].data, "the notebook itself was changed"
