"""Planted bugs, features that are gone, and several at once: the texts, without running anything."""

import ast
import difflib
import inspect
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise

import pytest

from composer_nb.harness.grading import plan, twins
from composer_nb.harness.tasks.making.changes import MAX_CHANGED, Change, bugs, combined, features, units
from composer_nb.harness.tasks.making.mutations import KINDS

SOURCES = {f"{module.__name__}.py": inspect.getsource(module) for module in (plan, twins, textwrap, shlex)}
UNITS = [unit for path, text in SOURCES.items() for unit in units(path, text)]


@pytest.fixture(scope="module")
def changes() -> list[Change]:
    return list(islice(bugs(SOURCES, UNITS, "0"), 200))


def test_there_are_enough_kinds_and_each_is_drawn(changes: list[Change]) -> None:
    assert changes[:10] == list(islice(bugs(SOURCES, UNITS, "0"), 10)) != list(islice(bugs(SOURCES, UNITS, "1"), 10))
    kinds = Counter(change.kind for change in changes)
    assert len(KINDS) >= 13 and set(kinds) >= set(KINDS) - {"wrapper"}
    first = Counter(change.kind for change in changes[:60])
    assert len(first) >= 20 and max(first.values()) <= 12


def test_bugs_are_small_python_that_means_something_else_and_never_come_twice(changes: list[Change]) -> None:
    assert len({change.key for change in changes}) == len(changes) == 200
    for change in changes[:40]:
        [(path, text)] = change.apply(SOURCES).items()
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCES[path]))
        lines = list(difflib.unified_diff(SOURCES[path].split("\n"), text.split("\n"), lineterm="", n=0))[2:]
        assert 0 < sum(line.startswith(("+", "-")) for line in lines) <= MAX_CHANGED
        [edit] = change.edits  # nothing changes outside of the function
        before, after = SOURCES[path].split("\n"), text.split("\n")
        assert before[: edit.start - 1] == after[: edit.start - 1]
        assert before[edit.end :] == after[len(after) - (len(before) - edit.end) :]


def test_a_feature_takes_the_private_functions_along_that_only_it_uses(files: dict[str, str]) -> None:
    core_units = units("shapes/core.py", files["shapes/core.py"])
    by_name = {change.edits[0].name: change for change in features(files, core_units, "0")}
    assert {"chunks", "most_common"} <= set(by_name) and "Stack.push" not in by_name
    text = by_name["most_common"].apply(files)["shapes/core.py"]
    assert "_largest" not in text and "occurs most often" not in text
    scope: dict[str, object] = {}
    exec(text, scope)  # our own text
    with pytest.raises(NotImplementedError):
        scope["most_common"]([])  # type: ignore[operator]
    assert scope["clamp"](12) == 10  # type: ignore[operator]


def test_combined_bugs_touch_nothing_twice(changes: list[Change]) -> None:
    singles = changes[:60]
    combinations = list(combined(singles, "0"))
    keys = [key for change in combinations for key in change.parts]
    assert combinations == list(combined(singles, "0")) and len(keys) == len(set(keys)) and len(combinations) >= 20
    assert {len(change.parts) for change in combinations} == {2, 3}
    for change in combinations:
        spans = sorted((edit.path, edit.start, edit.end) for edit in change.edits)
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(spans))
        by_key = {single.key: single for single in singles}
        texts = change.apply(SOURCES)
        for key in change.parts:
            [edit] = by_key[key].edits
            assert edit.text in texts[edit.path]


MARK = "\ufeff"
LAYOUTS: dict[str, Callable[[str], str]] = {
    "mark": lambda text: MARK + text,
    "returns": lambda text: text.replace("\n", "\r\n"),
    "both": lambda text: MARK + text.replace("\n", "\r\n"),
    "form feeds": lambda text: text.replace("\n\n\ndef", "\n\f\n\fdef"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bugs_keep_the_layout_of_their_file(name: str, files: dict[str, str]) -> None:
    def changes_of(text: str) -> list[Change]:
        found_units = units("m.py", text)
        return [*bugs({"m.py": text}, found_units, "0"), *features({"m.py": text}, found_units, "0")]

    plain, text = files["shapes/core.py"], LAYOUTS[name](files["shapes/core.py"])
    changes = changes_of(text)
    assert {change.kind for change in changes} == {change.kind for change in changes_of(plain)}
    for change in changes:
        changed = change.apply({"m.py": text})["m.py"]
        assert changed.startswith(MARK) == text.startswith(MARK) and changed.count(MARK) == text.count(MARK)
        assert ("\r" in changed) == ("\r" in text) and changed.count("\r") in (0, changed.count("\n"))
        extra_edits = len(change.edits) - 1 if name == "form feeds" else 0  # private functions that only a feature uses
        assert changed.count("\f") == text.count("\f") - extra_edits
        ast.parse(changed.removeprefix(MARK))


def test_sources_without_bugs_are_named_with_their_reason(files: dict[str, str]) -> None:
    for text, reason in (
        (files["shapes/core.py"].replace("\n", "\r\n", 3), "its lines end in several ways"),
        ("{{ name }}: template\n", "not Python"),
        ("a\n" * 200_000, "not parsed: 400000 characters"),
    ):
        with pytest.raises(ValueError, match=reason):
            units("m.py", text)
