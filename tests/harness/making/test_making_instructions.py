"""Instructions: what is seen, never what is wrong; and what is taken out of the visible tests."""

from __future__ import annotations

import ast

import pytest

from composer_nb.harness.grading.box import Failure, Result
from composer_nb.harness.making.instructions import Symptom, symptom, without_tests, write, write_feature

KNOWN = ["chunks", "clamp", "Stack", "pop"]


def seen(files: dict[str, str], name: str, why: str, needle: str, message: str = "") -> Symptom:
    text = files["tests/test_core.py"]
    line = next(number for number, each in enumerate(text.split("\n"), 1) if needle in each)
    failed = Failure(line=line, message=message)
    return symptom(f"tests/test_core.py::{name}#0", text, Result(outcome="failed", why=why), failed, KNOWN)


def test_what_is_seen_of_a_failure(files: dict[str, str]) -> None:
    found = seen(files, "test_chunks", "AssertionError", "assert chunks(")
    assert found.subject == "chunks" and found.example == "chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]"
    table = seen(files, "test_clamp", "AssertionError", "clamp(value)")
    assert table.subject == "clamp" and table.example == "" and table.topic == "clamp"  # says nothing by itself
    crash = seen(
        files, "TestStack::test_order", "TypeError", "Stack().push", "/box/run0/a.py: no\x1b[1m such thing" + "x" * 300
    )
    assert (
        crash.exception == "TypeError"
        and len(crash.message) == 160
        and "\x1b" not in crash.message
        and "/box" not in crash.message
    )
    silent = seen(
        files, "test_chunks_refuses", "Failed", "pytest.raises(ValueError)", "DID NOT RAISE <class 'ValueError'>"
    )
    assert silent.missing == "ValueError" and silent.example == ""
    elsewhere = symptom(
        "tests/test_core.py::gone#0", files["tests/test_core.py"], Result(outcome="failed", why="KeyError"), None, KNOWN
    )
    assert elsewhere.subject == "core" and elsewhere.exception == "KeyError"


@pytest.mark.parametrize("count", [1, 3])
def test_texts_are_many_and_hold_by_their_seed(files: dict[str, str], count: int) -> None:
    found = seen(files, "test_chunks", "AssertionError", "assert chunks(")
    texts = [write([found] * count, 4, str(seed)) for seed in range(60)]
    assert texts == [write([found] * count, 4, str(seed)) for seed in range(60)] and len(set(texts)) >= 8
    assert all("chunks" in text and len(text) < 600 and "{" not in text for text in texts)


def test_a_feature_is_asked_for_by_its_signature_or_its_documentation(files: dict[str, str]) -> None:
    text = files["shapes/core.py"].split("\n\n\n")[1]
    texts = {write_feature("shapes/core.py", "chunks", text, str(seed)) for seed in range(30)}
    assert len(texts) == 4 and all("chunks" in each and "range(0" not in each for each in texts)


def test_failing_tests_are_taken_out_of_a_module(files: dict[str, str]) -> None:
    text = files["tests/test_core.py"]
    left = without_tests(text, ["t.py::test_clamp#1", "t.py::TestStack::test_size#0", "t.py::nowhere#0"])
    assert "def test_clamp(" not in left and "parametrize" not in left and "def test_size" not in left
    assert "def test_clamp_range(" in left and "def test_order" in left
    empty = without_tests(text, [f"t.py::TestStack::{name}#0" for name in ("test_order", "test_size", "test_empty")])
    [stack] = [node for node in ast.parse(empty).body if isinstance(node, ast.ClassDef)]
    assert all(isinstance(each, ast.Pass) for each in stack.body)
