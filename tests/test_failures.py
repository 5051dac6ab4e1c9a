"""docs/failures.md and docs/figures.md: each row names a test of what it rests on. `test_docs.py` says if commands exist."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("failures", "figures")}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED = TEST.findall("".join(PAGES.values()))


def rows(page: str) -> list[list[str]]:
    """Return the cells of the rows of a page's tables, without their heads."""
    lines = pairwise([*PAGES[page].splitlines(), ""])
    bodies = [line for line, after in lines if line.startswith("| ") and not after.startswith("|---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in bodies]


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_named_tests_exist(file: str) -> None:
    defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {name for named, name in NAMED if named == file} <= {name for name in defined if name.startswith("test_")}


def test_each_failure_names_a_test() -> None:
    failures = rows("failures")
    assert len(failures) > 25 and all(TEST.search(tests) for _, _, tests in failures)


def test_each_figure_stands_there_once_and_names_a_test_if_it_is_reproduced() -> None:
    figures = rows("figures")
    assert [row[0] for row in figures] == [*(f"A{n}" for n in range(1, 25)), "–", "–"]
    for number, figure, command, tests, measured, verdict in figures:
        kind = re.match(r"(Reproduced|Partly|Not)\b", verdict)
        assert figure and measured and re.match(r"`(composer-nb|make|pytest|scripts/|notebooks/)", command), number
        assert kind and (TEST.search(tests) or (tests == "–" and kind[0] != "Reproduced")), number
    assert "docs/figures.md" in (ROOT / "README.md").read_text(), "the README leads there; llms.txt does by itself"
