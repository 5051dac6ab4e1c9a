"""The index: an edit leaves it as if it had been built anew, forks are apart, searches find."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.search import index
from composer_nb.harness.search.embedding import Embedding, load_embedding, stem, term_id, weigh
from composer_nb.harness.search.index import K1, B, CodeIndex
from scripts.data.retrieval.storage import save_embedding

WORDS = ["open", "reader", "matrix", "rotate", "cache", "evict", "parser"]


def embedding(seed: int = 0) -> Embedding:
    """Return random vectors, except that `evict` and `rotate` mean the same."""
    ids = np.array(sorted(term_id(stem(word)) for word in WORDS), np.uint64)
    vectors = np.random.default_rng(seed).standard_normal((len(ids), 8)).astype(np.float32)
    row_of = {int(term): number for number, term in enumerate(ids)}
    vectors[row_of[term_id("evict")]] = vectors[row_of[term_id("rotat")]]
    return Embedding(terms=ids, vectors=vectors)


FILES = {
    "src/geometry.py": b"def rotate(matrix):\n    return matrix[::-1]\n\n\ndef open_reader(path):\n    return path\n",
    "src/cache.py": b"class Cache:\n    def evict(self):\n        self.items.pop()\n",
    "docs/guide.md": b"How to open a reader of a cache.\n",
    "build/out.py": b"def rotate(matrix): pass\n",
    ".gitignore": b"build/\n",
}


def test_finds_by_words_and_by_meaning() -> None:
    hits = (built := CodeIndex.build(FILES, embedding())).search("rotate it", limit=2)
    places = [(hit.path, hit.first_line, hit.last_line) for hit in hits]
    assert places == [("src/geometry.py", 1, 2), ("src/cache.py", 2, 3)]
    assert hits[0].text == "def rotate(matrix):\n    return matrix[::-1]"
    assert hits[0].score > hits[1].score > 0
    assert [hit.path for hit in built.search("items") if hit.score > 0] == ["src/cache.py"], "a word without a vector"


def test_files_that_hold_no_text_are_left_out() -> None:
    files = FILES | {"image.png": b"\0\1", "empty.py": b"", "big.txt": b"word\n" * (1 << 18)}
    built = CodeIndex.build(files, embedding())
    assert len(built.table().paths) == 4 and not set(built.table().paths) & {"image.png", "empty.py", "big.txt"}
    assert len(built.table().file) == 6
    assert built.left_out == {"big.txt": "more than 1 MiB", "image.png": "no text"}, "nobody misses an empty one"
    built.edit("image.png", b"x = 1\n")
    built.edit("data.py", b"x = (" + b"1, " * 20_000 + b")\n")
    assert built.left_out == {"big.txt": "more than 1 MiB", "data.py": "minified"} == built.fork().left_out
    built.sync(FILES | {".gitignore": b"*.bin\n", "a.bin": b"\0"})
    assert built.left_out == {}, "what git ignores is in no search"


def test_rules_and_paths_that_would_take_hours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule with two `**` tries each pair of folders of a deep path."""
    rules = "".join(f"**/*/**/{number}\n" for number in range(500)).encode()
    deep = {".gitignore": rules, "/".join(["folder"] * 60): b"x = 1\n"}
    monkeypatch.setattr(index, "MOST_STEPS", 3e5)
    with pytest.raises(OSError, match="too many rules"):
        CodeIndex.build(deep, embedding())
    usual = CodeIndex.build(FILES | {f"a/{number}.py": b"x = 1\n" for number in range(200)}, embedding())
    for number in range(200):  # each update may take all steps
        usual.edit(f"src/folder/{number}.py", b"x = 1\n" * (1 + number % 2))
    assert len(usual.table().paths) == 404


def test_bm25_is_the_formula() -> None:
    texts = {"a.txt": "open open reader", "b.txt": "reader", "c.txt": "cache matrix open"}
    built = CodeIndex.build({path: text.encode() for path, text in texts.items()}, embedding())
    bags = [weigh([(text, 1.0), (path, 1.0)]) for path, text in texts.items()]
    mean = sum(sum(bag.values()) for bag in bags) / 3
    query = {term_id("open"): 1.0, term_id("read"): 2.0, term_id("absent"): 1.0}
    counts = {term: sum(term in bag for bag in bags) for term in query}
    odds = {term: (3 - count + 0.5) / (count + 0.5) for term, count in counts.items()}
    idf = {term: weight * math.log(1 + odds[term]) for term, weight in query.items()}

    def impact(bag: dict[int, float], term: int) -> float:
        return bag[term] * (K1 + 1) / (bag[term] + K1 * (1 - B + B * sum(bag.values()) / mean))

    expected = [sum(rare * impact(bag, term) for term, rare in idf.items() if term in bag) for bag in bags]
    np.testing.assert_allclose(built.scores("open reader reader absent")[0], expected, rtol=1e-5)


paths = st.sampled_from(["a.py", "src/b.py", "src/c.md", "d.txt"])
contents = st.lists(st.sampled_from([f"def {a}_{b}():\n    return {b}\n" for a in WORDS for b in WORDS]), max_size=3)
edits = st.lists(st.tuples(paths, st.none() | contents.map(lambda parts: "".join(parts).encode())), max_size=12)


@settings(deadline=None, max_examples=30)
@given(edits, edits, st.sampled_from(WORDS), st.sampled_from(WORDS))
def test_edits_leave_what_a_new_index_would_hold(first: list, second: list, first_word: str, second_word: str) -> None:  # type: ignore[type-arg]
    files = {path: data for path, data in first if data is not None}
    edited = CodeIndex.build(files, embedding())
    before = edited.fork()
    current = dict(files)
    for path, data in second:
        edited.edit(path, data)
        current.pop(path, None)
        current |= {path: data} if data is not None else {}
    fresh = CodeIndex.build(current, embedding())
    query = f"{first_word} {second_word}"

    def hits(index: CodeIndex) -> set[tuple[str, int, int, str]]:
        return {(hit.path, hit.first_line, hit.last_line, hit.text) for hit in index.search(query, limit=200)}

    assert hits(edited) == hits(fresh)
    assert hits(before) == hits(CodeIndex.build(files, embedding()))
    edited.sync(current)
    before.sync(current)
    assert hits(edited) == hits(before) == hits(fresh)


def test_an_embedding_survives_storing(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    save_embedding(tmp_path / "e.safetensors", ["open", "read", "cach"], vectors, {"source": "here"})
    save_embedding(tmp_path / "again.safetensors", ["open", "read", "cach"], vectors, {"source": "here"})
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "e.safetensors").read_bytes()
    loaded = load_embedding(tmp_path / "e.safetensors")
    row = np.searchsorted(loaded.terms, np.uint64(term_id("read")))
    assert np.abs(loaded.vectors[row] - vectors[1]).max() <= np.abs(vectors[1]).max() / 100
    assert dict(loaded.provenance) == {"source": "here"}
    [vector] = loaded.encode(np.array([term_id("read"), 5], np.uint64), np.ones(2, np.float32), [2])
    np.testing.assert_allclose(vector, loaded.vectors[row] / np.linalg.norm(loaded.vectors[row]), atol=1e-6)
    (tmp_path / "e.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="make_retrieval"):
        load_embedding(tmp_path / "e.safetensors")
