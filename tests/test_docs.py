"""The pages of docs/ hold together: words are explained, links lead somewhere, the index is current, the site builds offline."""

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import nbformat
import numpy as np
import pytest
from PIL import Image

from composer_nb import cli
from composer_nb.trainer.recipe.reader import EXAMPLES, ReadOnly
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.settings import Settings, to_flat
from scripts.docs import drawings, make_docs, notebook_pages

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "history").glob("*.md"))]
FOR_CONTRIBUTORS = [ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "skills").glob("*/SKILL.md"))]
WITH_OUTPUTS = sorted(notebook_pages.PAGES.glob("*.md"))
CHECKED = [*PAGES, *FOR_CONTRIBUTORS, *WITH_OUTPUTS, *make_docs.notebooks()]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
TERMS = re.findall(r"^### (.+)$", GLOSSARY, re.M)
OTHER_SENSE = {
    ("03_environments", "control"),
    ("03b_isolation", "fork"),
    ("04_reward_design", "flip"),
    ("04_reward_design", "rank"),
    ("12_weight_sync", "flip"),
    ("13_kernels", "floor"),
}
"""Notebooks in which a term is an ordinary word."""
HISTORY = {"log.md", "decisions.md"}
"""Pages that name what was there when they were written."""
NOW = [path for path in (*PAGES, *FOR_CONTRIBUTORS) if path.name not in HISTORY and path.parent.name != "history"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
SETTINGS = {key[: dot.start()] for key in to_flat(Settings()) for dot in re.finditer(r"\.|$", key)}
REPORTED = {"sft.sharpness_ci95"}
"""Dotted names in a report that look like settings."""
MADE_BY_READERS = {"mine.py", "random.py"}
FOLDERS = ("composer_nb", "scripts", "tests", "notebooks", "docs", "data", "papermill_jobs", "recipes")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
LARGEST = 3_000_000
"""Bytes that docs/pages may take, figures included."""
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|^#[^\n]*|\$[^$]*\$|<[^>]*>", re.S | re.M)


def slug(heading: str) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"`|\*\*", "", heading).strip().lower()).replace(" ", "-")


def prose(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")


def word(term: str) -> str:
    return rf"(?<![\w@-]){re.escape(term)}(?:s|es)?(?![\w-])"


def unlinked_terms(path: Path, text: str) -> Iterator[str]:
    """Yield terms whose first use in a notebook does not lead to the glossary; a line *Words*: below the title counts."""
    for term in TERMS if path.suffix == ".ipynb" else ():
        link = f"../docs/glossary.md#{slug(term)}"
        plain = NOT_PROSE.sub("", text)
        plain = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", lambda m, link=link: f"\0{link}\0" if m[2] == link else "", plain)
        use = re.search(f"{word(term)}|\0", plain, re.I)
        if use and use[0] != "\0" and (path.stem, term) not in OTHER_SENSE:
            yield f"[{term}]({link})"


def test_the_glossary_is_sorted_and_every_term_is_used() -> None:
    assert sorted(TERMS, key=str.lower) == TERMS and len(set(TERMS)) == len(TERMS) > 40
    others = "\n".join(prose(path) for path in (*PAGES, *make_docs.notebooks()) if path.name != "glossary.md")
    assert [term for term in TERMS if not re.search(word(term), others, re.I)] == []


def test_the_readme_shows_the_path_in_its_order() -> None:
    rows = re.findall(r"^\| \[(\d\db?) · [^]]+\]\(notebooks/(\w+)\.ipynb\)", PAGES[0].read_text(encoding="utf-8"), re.M)
    assert [name for _, name in rows] == [path.stem for path in make_docs.notebooks()]
    assert all(name.startswith(number) for number, name in rows)


def anchors_of(text: str) -> set[str]:
    """Return anchors that work on GitHub, on the site and in JupyterLab, which takes a heading as it is written."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    slugs = {slug(heading) for heading in headings if slug(heading) == re.sub(r"`|\*\*", "", heading).replace(" ", "-")}
    return slugs | set(re.findall(r'^<a id="([^"]+)"></a>$', text, re.M))


def scores_of(row: str) -> list[list[float]]:
    """Return the numbers of a row of a table, cell by cell."""
    [cells] = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", BENCHMARKS.read_text(encoding="utf-8"), re.M)
    return [[float(n) for n in re.findall(r"[+−]?\d*\.\d+", cell.replace("−", "-"))] for cell in cells.split(" | ")]


def test_the_results_say_what_their_table_and_the_examples_hold() -> None:
    text, readme = (
        " ".join(page.read_text(encoding="utf-8").replace("−", "-").split()) for page in (BENCHMARKS, PAGES[0])
    )
    start = scores_of("start of RL, sharpness calibrated")
    runs = [scores_of(row) for row in ("**after RL**", "after RL with another seed of RL")]
    gains = [
        [round(100 * (after[n] - before[n]), 1) for run in runs for before, after in zip(start, run, strict=True)]
        for n in range(4)
    ]
    first, new = scores_of("gain in 12 calls over the start"), scores_of("the same on new structures")
    other_seed = scores_of("both gains with another seed of RL")
    within = [row[0] for row in first] + [row[0] for row in other_seed]
    assert max(abs(a - b) for a, b in zip(within, gains[0], strict=True)) <= 0.3, "paired gains, of the same runs"
    structures = [row[0] for row in new] + [row[1] for row in other_seed]
    assert f"add {min(within):.1f} to {max(within):.1f} points in 12 calls" in text
    assert f"they add {min(structures):.1f} to {max(structures):.1f}." in text
    assert f"add {min(within):.1f} to {max(within):.1f} points in 12 calls" in readme
    assert f"best of 4 changes by {min(gains[3]):.1f} to {max(gains[3]):+.1f}" in readme
    today = [scores_of(f"seed {seed}, rehearsal") for seed in range(6)]
    results = [
        [*map(float, row)] for row in re.findall(r"\*\*([+-][\d.]+)\*\* \(([+-][\d.]+) to ([+-][\d.]+)\)", readme)
    ]
    changes = [[100 * (row[1][n] - row[0][n]) for row in today] for n in (1, 3)]
    for points in ([row[2][0] for row in today], [row[3][0] for row in today], *changes):
        expected = pytest.approx([median(points), min(points), max(points)], abs=0.11)  # of shares with three digits
        assert any(row == expected for row in results), points
    assert f"pass@1 gains {min(gains[1]):.1f} to {max(gains[1]):.1f} points" in text
    assert f"greedy decoding {min(gains[2]):.1f} to {max(gains[2]):.1f}." in text
    assert f"Best of 4 changes by {min(gains[3]):.1f} to {max(gains[3]):+.1f}" in text

    reports = [build_report(ReadOnly(path)) for path in EXAMPLES[:2]]
    gain = reports[0]["gain"]["within_12"]["structures"]
    low, high = (100 * end for end in gain["ci95"])
    assert low < 0 < high and f"example gains {100 * gain['gain']:.1f} ({low:.1f} to {high:+.1f})" in text
    kinds = [[report["eval"][name] for name in ("start", "final")] for report in reports]
    fell = [[f"{score['structures']['recovery']:.2f}"[1:] for score in pair] for pair in kinds]
    assert " and ".join(f"from {before} to {after}" for before, after in fell) in text
    before, after = (f"{score['pass_within']['12']:.3f}"[1:] for score in kinds[0])
    assert f"{before} → {after} in 12 calls" in text


def test_an_environment_of_ones_own_runs_in_this_process_as_its_page_says(tmp_path: Path) -> None:
    """The folder holds `mine.py` and the example."""
    page = (ROOT / "docs" / "rl.md").read_text(encoding="utf-8").split("### An environment of your own")[1]
    mine, attempt = re.findall(r"```python\n(.*?)```", page, re.S)[:2]
    (tmp_path / "mine.py").write_text(mine)
    (tmp_path / "attempt.py").write_text(attempt)
    (tmp_path / "data").symlink_to(ROOT / "data")
    process = subprocess.run([sys.executable, "attempt.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0 and -1 < float(process.stdout) <= 1, process.stderr


@cache
def anchors() -> dict[Path, set[str]]:
    return {path: anchors_of(prose(path)) for path in CHECKED}


def lost_links(path: Path, text: str) -> Iterator[str]:
    """Yield broken links. A heading with capitals or signs needs a line <a id="as-github-writes-it"></a> above it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        if "://" not in target and not (page.exists() and (not anchor or anchor in anchors()[page])):
            yield target


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each `composer-nb` command in a text, up to two spaces, a pipe or a comment."""
    for example in re.findall(r"(?:^|`)composer-nb ([a-z][^`]*?)(?:`|$)", text.replace("\\\n", " "), re.M):
        for command in re.split(r"\s{2,}|\s[|#>&]\s", example)[0].split(" · "):
            yield re.sub(r"[\[\]]", "", command.removeprefix("composer-nb ")).split()


def unknown(words: list[str]) -> list[str]:
    """Return the names, actions and options of a command that its parser does not have."""
    parser, unknown_words = cli.parser(), []
    while actions := [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]:
        if not words or words[0].startswith("-"):
            return unknown_words
        name, *words = words
        unknown_words += [choice for choice in name.split("|") if choice not in actions[0].choices]
        parser = actions[0].choices.get(name.split("|")[0], parser)
        if unknown_words:
            return unknown_words
    options = parser._option_string_actions
    return [word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word) and word not in options]


def unknown_commands(path: Path, text: str) -> Iterator[str]:
    yield from (" ".join(words) + f": {name}" for words in commands_in(text) for name in unknown(words))
    yield from (name for name in re.findall(r"(?:^|`)make ([a-z-]{2,})", text, re.M) if name not in TARGETS)


def unknown_settings(path: Path, text: str) -> Iterator[str]:
    heads = "|".join(sorted({key.split(".")[0] for key in SETTINGS}))
    for key in re.findall(rf"(?<![\w./-])((?:{heads})(?:\.[a-z]\w*)+)(?![\w(/]|\.\w)", text):
        if key not in SETTINGS | REPORTED and not re.search(r"\.(json|md|py|txt|safetensors)$", key):
            yield key


def lost_files(path: Path, text: str) -> Iterator[str]:
    for file, name in re.findall(r"`(?:pytest )?((?:[\w.-]+/)*[\w-]+\.(?:py|yml|css|ipynb))(?:::?(\w+))?(?:`| )", text):
        places = [candidate for candidate in FILES if f"/{candidate}".endswith(f"/{file}")]
        sources = "\n".join((ROOT / match).read_text(encoding="utf-8") for match in places)
        if not places and file not in MADE_BY_READERS:
            yield file
        elif name and not re.search(rf"^\s*(?:(?:async )?def |class )?{name}\b", sources, re.M):
            yield f"{file}:{name}"


RULES = (lost_links, unlinked_terms, unknown_commands, unknown_settings, lost_files)


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: path.name)
def test_a_page_keeps_the_rules(path: Path) -> None:
    rules = RULES if path in NOW or path.suffix == ".ipynb" else RULES[:1]
    faults = {rule.__name__: [*rule(path, prose(path))] for rule in rules}
    assert {name: errors for name, errors in faults.items() if errors} == {}


def test_the_client_configuration_that_a_page_shows_starts_the_server() -> None:
    page = (ROOT / "docs" / "agents_and_trackers.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```json\n(.*?)```", page, re.S)
    [server] = json.loads(example)["mcpServers"].values()
    assert Path(server["command"]).name == "composer-nb"
    assert cli.parser().parse_args(server["args"]).command == "mcp"


def test_llms_txt_is_current() -> None:
    assert (ROOT / "llms.txt").read_text(encoding="utf-8") == make_docs.llms_txt(), (
        "run scripts/docs/make_docs.py --llms"
    )


@pytest.mark.parametrize("path", make_docs.notebooks(), ids=lambda path: path.stem)
def test_a_page_for_github_is_current(path: Path) -> None:
    assert notebook_pages.fault(path) == ""


def test_a_page_of_other_code_or_prose_says_what_renews_it(tmp_path: Path) -> None:
    source = make_docs.notebooks()[0]
    for kind, mend in (("code", notebook_pages.RUN), ("markdown", notebook_pages.TEXT)):
        book = nbformat.read(source, 4)
        next(cell for cell in book.cells if cell.cell_type == kind).source += "\n# more"
        nbformat.write(book, tmp_path / source.name)
        assert notebook_pages.fault(tmp_path / source.name).endswith(f"; run {mend}")


def test_a_figure_of_a_page_keeps_the_colour_of_a_thin_line() -> None:
    fields = np.random.default_rng(0).integers((120, 110, 60), (220, 200, 110), (200, 300, 3), np.uint8)
    fields[:, 150] = VERMILION = (213, 94, 0)
    file = io.BytesIO()
    Image.fromarray(fields).save(file, "PNG")
    line = np.asarray(Image.open(io.BytesIO(notebook_pages.small(file.getvalue()))).convert("RGB"))[:, 150].astype(int)
    assert np.abs(line - VERMILION).max() < 24


def test_a_page_marks_grounds_that_are_not_pale() -> None:
    spans = {"pale": "rgba(0,114,178,0.05)", "strong": "rgba(0,114,178,0.40)", "whole": "#d55e00", "bare": "none"}
    text = " ".join(f'<span style="background:{ground}">{name}</span>' for name, ground in spans.items())
    shown = notebook_pages.as_github_shows(f"<div>{text}</div>", lambda png: "")
    assert shown == "<div>pale <mark>strong</mark> <mark>whole</mark> bare</div>"


def test_pages_for_github_are_small_and_name_no_machine() -> None:
    assert [path.stem for path in WITH_OUTPUTS] == [path.stem for path in make_docs.notebooks()], "a page too many"
    readme, files = PAGES[0].read_text(encoding="utf-8"), [p for p in notebook_pages.PAGES.rglob("*") if p.is_file()]
    assert sum(path.stat().st_size for path in files) < LARGEST
    for path in WITH_OUTPUTS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(?:tmp|work|root|home|Users)/", text), path.name
        figures = set(re.findall(rf'src="({path.stem}/\d+\.png)"', text))
        assert figures == {f"{path.stem}/{p.name}" for p in files if p.parent.name == path.stem}, path.name
        assert f"](docs/pages/{path.name})" in readme


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_the_site_builds_and_needs_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="make setup brings it")
    site = make_docs.build_site(tmp_path)
    pages = list(site.rglob("*.html"))
    assert len(pages) > len([path for path in PAGES if path.parent.name != "history"]) + len(make_docs.notebooks())
    for path in pages:
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"(\w+:)?//|<link[^>]*href=\"(\w+:)?//", path.read_text())
        assert not fetched, path.name
    assert not (site / "docs" / "pages").exists()
    assert re.search(r'href="notebooks/01_tour.html"><span[^>]*>01<', (site / "index.html").read_text())
    assert "staleness" in (site / "searchindex.js").read_text()
    assert "data:image/png" in (site / "notebooks" / "06_compare_runs.html").read_text(), (
        "a notebook that never ran here"
    )


def test_drawings_are_those_of_the_script():
    for drawing in drawings.DRAWINGS:
        file = drawings.IMAGES / f"{drawing.__name__}.svg"
        assert file.read_text(encoding="utf-8") == drawing().svg(), "run python -m scripts.docs.drawings"
