"""docs/failures.md names tests; each of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "failures.md").read_text())))


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_the_tests_that_keep_failures_out_exist(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for named, name in NAMED if named == file} <= defined


def test_each_row_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs" / "failures.md").read_text().split("\n") if line.startswith("| ")]
    failures = [row for row in rows if not row.startswith("| reported failure")]
    assert len(failures) > 20 and all("`tests/" in row for row in failures)
