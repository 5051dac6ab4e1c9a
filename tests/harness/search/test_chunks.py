"""Files as chunks: what is one, and that nothing a file holds gets in the way."""

import argparse
import ast
import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.search import chunks
from composer_nb.harness.search.chunks import chunk_file, cut, text_lines, unfit
from composer_nb.harness.search.embedding import split, term_id, weigh, words


def spans(path: str, text: str) -> list[tuple[str, int, int]]:
    data = text.encode()
    return [(span.name, span.first, span.last) for span in cut(path, data, text_lines(data))]


def test_python_is_cut_at_its_definitions() -> None:
    """Against `ast`: a chunk with its name begins with each function at the top of a module, or of a class there. A comment or a
    constant just before is part of it."""
    for module in (argparse, functools, chunks):
        text = Path(module.__file__ or "").read_text(encoding="utf-8")
        pieces, tree = spans("m.py", text), ast.parse(text)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for prefix, body in [("", tree.body), *((f"{node.name}.", node.body) for node in classes)]:
            for node in body:
                if isinstance(node, ast.FunctionDef):
                    begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    named = [first for name, first, _ in pieces if name == prefix + node.name]
                    assert any(begin - 5 <= first <= begin for first in named), node.name


lines = st.lists(
    st.sampled_from(["def f(", "):", "class A:", "    x = 1", "  ", '"""', "import a", "{", "}", "é\x0c\r", "#", "\tif y:"]),
    max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(lines, st.sampled_from(["a.py", "a.pyi", "a.txt"]))
def test_chunks_never_overlap_and_lie_in_the_file(parts: list[str], path: str) -> None:
    text = "\n".join(parts)
    pieces = spans(path, text)
    count = len(text.split("\n"))
    assert all(1 <= first <= last <= count for _, first, last in pieces)
    assert all(earlier[2] < later[1] for earlier, later in zip(pieces, pieces[1:], strict=False))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), st.sampled_from(["a.py", "a.md", "é/x.py"]))
def test_any_bytes_are_chunks_or_unfit(data: bytes, path: str) -> None:
    if not unfit(data):
        file_chunks = chunk_file(path, data)
        assert file_chunks.counts.sum() == len(file_chunks.terms) == len(file_chunks.weights)
        assert len(file_chunks.counts) == len(file_chunks.spans)
        assert (file_chunks.weights > 0).all()


@pytest.mark.parametrize("data", [b"(" * 300_000, b"[(\n" * 100_000, b"def f():\n" * 30_000, b"x=1\n" * 50_000])
def test_hostile_sources_are_cut_all_the_same(data: bytes) -> None:
    data = data[: chunks.LONGEST_FILE]
    pieces = cut("a.py", data, text_lines(data))
    assert pieces and pieces[-1].last <= data.count(b"\n") + 1


def texts(text: str) -> list[str]:
    """Return the terms of a text in order."""
    return [term for word in words(text) for term in split(word)]


def test_identifiers_are_their_parts_and_themselves() -> None:
    assert split("parseHTTPHeader") == ("pars", "http", "head", "parsehttpheader")
    assert split("parse_http_header") == ("pars", "http", "head", "parsehttpheader")
    assert split("the") == () and texts("Splitting lists, and parsers") == ["split", "list", "pars"]


def test_names_and_docstrings_weigh_more_than_text() -> None:
    file_chunks = chunk_file("tools/io.py", b'def rotate(x):\n    """Turns."""\n    return x @ matrix\n')
    weight = dict(zip(file_chunks.terms.tolist(), file_chunks.weights.tolist(), strict=True))
    assert weight[term_id("rotat")] > weight[term_id("turn")] > weight[term_id("matrix")] > 0
    assert weight[term_id("tool")] > 0  # of the path


@given(st.text(max_size=60))
def test_terms_of_any_text_have_weights(text: str) -> None:
    weights = weigh([(text, 1.0), (text, 2.0)])
    assert set(weights) == {term_id(term) for term in texts(text)}
    assert np.isclose(sum(weights.values()), 3 * len(texts(text)))
