"""Questions with known answers: from docstrings, tests, bugs and rollouts, and how answers to them are scored."""

from __future__ import annotations

import json

import numpy as np
import pytest

from composer_nb.harness.rollout import Turn
from scripts.data.retrieval.measure import figures, score, table
from scripts.data.retrieval.questions import mine
from scripts.data.retrieval.traces import Lines, labels, steps_of, trace_questions

SOURCE = '''"""A module."""


class Shelf:
    """Holds books."""

    def lend(self, book, days=14):
        """Gives a book to a reader. The date of its return is days later, counted from the day of lending.

        More text.
        """
        self.due[book] = self.today + days
        return self.due[book]

    def same(self):
        """Twice the same sentence here."""
        return 1

    def other(self):
        """Twice the same sentence here."""
        return 2

    def nothing(self):
        """Does nothing at all, ever."""
        raise NotImplementedError

    def inline(self): """On the line of its def."""; return 3
'''
TEST = """from shelf import Shelf


def test_lend_twice():
    shelf = Shelf()
    assert shelf.lend("novel") > 3
"""
FILES = {"shelf.py": SOURCE.encode(), "tests/test_shelf.py": TEST.encode(), "bad.py": b"def (", "note.md": b"Shelf"}


def test_a_docstring_asks_for_its_function_and_no_answer_is_given_away() -> None:
    mined = mine(FILES)
    questions = {question.kind: question for question in mined.questions}
    assert (
        sum(question.kind == "docstring" for question in mined.questions) == 1
    )  # the others are short, double or idle
    asked = questions["docstring"]
    assert (asked.text, asked.path, asked.first, asked.last) == ("Gives a book to a reader", "shelf.py", 7, 13)
    assert questions["bug"].text.startswith("shelf.py: ") and "The date of its return" in questions["bug"].text
    test = questions["test"]
    assert test.first == 7 and "novel" in test.text and "shelf.lend" not in test.text
    text = mined.files["shelf.py"].decode()
    assert text.count("\n") == SOURCE.count("\n") and text.split("\n")[11] == SOURCE.split("\n")[11]
    assert "Gives a book" not in text and "Twice the same" not in text and "A module" in text
    compile(text, "shelf.py", "exec")


def test_figures_and_their_intervals() -> None:
    rank = np.array([1, 6, 11, np.inf])
    assert {name: each.tolist() for name, each in figures(rank).items()} == {
        "recall@5": [1, 0, 0, 0], "recall@10": [1, 1, 0, 0], "mrr": [1, 1 / 6, 1 / 11, 0],
    }  # fmt: skip
    sure, wide = score(np.ones(50)), score(np.tile([0.0, 1.0], 200))
    assert (sure.mean, sure.low, sure.high) == (1, 1, 1)
    assert (
        wide.mean == 0.5 and wide.low == pytest.approx(0.451, abs=0.01) and wide.high == pytest.approx(0.549, abs=0.01)
    )
    both = table({"fused": np.ones(9), "bm25": np.full(9, 2.0)})["fused - bm25"]
    assert both["mrr"].mean == 0.5 and both["recall@5"].mean == 0


def turn(name: str, error: str | None = None, **arguments: object) -> Turn:
    return Turn(call=json.dumps({"name": name, "arguments": arguments}), observation="", error=error)


CODE = {"f.py": "a\nb\nc\nd\ne\n", "g.py": "x\ny\n"}


def test_a_rollout_asks_for_what_it_came_to_edit() -> None:
    turns = [
        turn("codebase_search", query="where is d", target_directories=[]),
        turn("read_file", path="g.py"),
        turn("read_file", target_file="f.py", offset=1, limit=2),
        Turn(call="no JSON", observation="", error="InvalidArguments"),
        turn("search_replace", file_path="f.py", old_string="d\n", new_string="D\n"),
        turn("edit_line", error="InvalidArguments", path="g.py", line=1, text="z"),
        turn("codebase_search", query="and after that"),
    ]
    wanted = (Lines(path="f.py", first=4, last=4), Lines(path="f.py", first=1, last=2))
    assert list(labels(steps_of("mend f", turns, CODE))) == [("mend f", wanted), ("where is d", wanted)]
    assert [(q.text, q.path, q.first, q.last, q.kind) for q in trace_questions("mend f", turns[-3:], CODE)] == [
        ("mend f", "f.py", 4, 4, "trace")
    ]
