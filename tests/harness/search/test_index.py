"""The index: an edit leaves it as if it had been built anew, forks are apart, searches find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.search import cache, index
from composer_nb.harness.search.chunks import chunk_file
from composer_nb.harness.search.embedding import SHIPPED, Embedding, load_embedding, save_embedding, shipped
from composer_nb.harness.search.index import CodeIndex, fused, ranking
from composer_nb.harness.search.segment import K1, B, make_segment
from composer_nb.harness.search.terms import stem, term_id, weigh

WORDS = ["open", "reader", "matrix", "rotate", "cache", "evict", "parser"]


def embedding(seed: int = 0) -> Embedding:
    """Random vectors, but for `evict` and `rotate`, which mean the same."""
    ids = np.array(sorted(term_id(stem(word)) for word in WORDS), np.uint64)
    vectors = np.random.default_rng(seed).standard_normal((len(ids), 8)).astype(np.float32)
    place = {int(each): number for number, each in enumerate(ids)}
    vectors[place[term_id("evict")]] = vectors[place[term_id("rotat")]]
    return Embedding(terms=ids, vectors=vectors)


FILES = {
    "src/geometry.py": b"def rotate(matrix):\n    return matrix[::-1]\n\n\ndef open_reader(path):\n    return path\n",
    "src/cache.py": b"class Cache:\n    def evict(self):\n        self.items.pop()\n",
    "docs/guide.md": b"How to open a reader of a cache.\n",
    "build/out.py": b"def rotate(matrix): pass\n",
    ".gitignore": b"build/\n",
}


def test_finds_by_words_and_by_meaning() -> None:
    found = CodeIndex.build(FILES, embedding()).search("rotate it", limit=2)
    assert [(hit.path, hit.first_line, hit.last_line) for hit in found] == [
        ("src/geometry.py", 1, 2),
        ("src/cache.py", 2, 3),
    ]
    assert found[0].text == "def rotate(matrix):\n    return matrix[::-1]"
    assert found[0].score > found[1].score > 0


def test_only_in_directories() -> None:
    built = CodeIndex.build(FILES, embedding())
    assert {hit.path for hit in built.search("open reader cache", ["docs"])} == {"docs/guide.md"}
    assert {hit.path for hit in built.search("open reader cache", ["./src/cache.py", "docs/"])} == {
        "docs/guide.md",
        "src/cache.py",
    }
    assert built.search("open", ["nowhere"]) == [] and built.search("the of and") == []
    with pytest.raises(ValueError, match="limit=0"):
        built.search("open", limit=0)


def test_the_report_counts_what_became_of_the_files() -> None:
    files = FILES | {"image.png": b"\0\1", "empty.py": b"", "big.txt": b"word\n" * (1 << 18)}
    report = CodeIndex.build(files, embedding()).report
    assert report.files == 4 and report.chunked == 4  # .gitignore is text as well
    assert dict(report.left_out) == {"binary": 1, "empty": 1, "too_large": 1, "ignored": 1}
    assert dict(report.how) == {"parsed": 2, "plain": 2} and report.no_grammar == ()


def test_a_repository_beyond_the_bound_is_indexed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_BYTES", 120)
    report = CodeIndex.build(FILES, embedding()).report
    assert 0 < report.files < 4 and report.left_out["over_budget"] == 4 - report.files


def test_bm25_is_the_formula() -> None:
    texts = {"a.txt": "open open reader", "b.txt": "reader", "c.txt": "cache matrix open"}
    segment = make_segment({path: chunk_file(path, text.encode()) for path, text in texts.items()}, embedding())
    bags = [weigh([(text, 1.0), (path, 1.0)]) for path, text in texts.items()]
    mean = sum(sum(bag.values()) for bag in bags) / 3
    idf = {term_id("open"): 0.7, term_id("read"): 1.3, term_id("absent"): 9.0}
    wanted = [
        sum(
            rare * bag[term] * (K1 + 1) / (bag[term] + K1 * (1 - B + B * sum(bag.values()) / mean))
            for term, rare in idf.items()
            if term in bag
        )
        for bag in bags
    ]
    np.testing.assert_allclose(segment.bm25(idf), wanted, rtol=1e-5)


paths = st.sampled_from(["a.py", "src/b.py", "src/c.md", "d.txt"])
contents = st.lists(st.sampled_from([f"def {a}_{b}():\n    return {b}\n" for a in WORDS for b in WORDS]), max_size=3)
edits = st.lists(st.tuples(paths, st.none() | contents.map(lambda parts: "".join(parts).encode())), max_size=12)


@settings(deadline=None, max_examples=30)
@given(edits, edits, st.sampled_from(WORDS), st.sampled_from(WORDS), st.integers(0, 6))
def test_edits_leave_what_a_new_index_would_hold(first: list, second: list, one: str, two: str, most: int) -> None:  # type: ignore[type-arg]
    files = {path: data for path, data in first if data is not None}
    edited = CodeIndex.build(files, embedding())
    before = edited.fork()
    held = index._OVERLAY
    index._OVERLAY = most  # so that the base is made again now and then
    try:
        now = dict(files)
        for path, data in second:
            edited.edit(path, data)
            now.pop(path, None)
            now |= {path: data} if data is not None else {}
    finally:
        index._OVERLAY = held
    fresh = CodeIndex.build(now, embedding())
    query = f"{one} {two}"

    def found(some: CodeIndex) -> set[tuple[str, int, int, str]]:
        return {(hit.path, hit.first_line, hit.last_line, hit.text) for hit in some.search(query, limit=200)}

    assert found(edited) == found(fresh)
    assert edited.digest == fresh.digest
    assert before.digest == CodeIndex.build(files, embedding()).digest
    assert found(before) == found(CodeIndex.build(files, embedding()))
    assert edited.sync(now) == 0 and before.sync(now) >= (before.digest != fresh.digest)
    assert before.digest == fresh.digest and found(before) == found(fresh)


def test_sync_heeds_a_changed_ignore_file() -> None:
    built = CodeIndex.build(FILES, embedding())
    assert built.sync(FILES | {".gitignore": b"src/\n"}) == 4  # itself, two files less, one more
    assert {hit.path for hit in built.search("rotate evict")} == {"build/out.py", "docs/guide.md"}
    built.edit("src/new.py", b"def rotate(): pass\n")
    assert {hit.path for hit in built.search("rotate evict")} == {"build/out.py", "docs/guide.md"}


def test_ranking_and_fusion() -> None:
    scores = np.array([0, 3, 1, 3, -1, 2], np.float32)
    assert ranking(scores, 3).tolist() == [1, 3, 5] and ranking(scores, 1).tolist() == [1]
    assert ranking(scores, 99).tolist() == [1, 3, 5, 2]
    order, totals = fused(np.array([0, 2, 1], np.float32), np.array([0.5, 0.1, 0], np.float32))
    assert order == [1, 2, 0]
    np.testing.assert_allclose(totals, [1 + index._DENSE * 0.1, 0.5, index._DENSE * 0.5], rtol=1e-6)


def test_an_embedding_survives_storing(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    save_embedding(tmp_path / "e.safetensors", ["open", "read", "cach"], vectors, {"source": "here"})
    save_embedding(tmp_path / "again.safetensors", ["open", "read", "cach"], vectors, {"source": "here"})
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "e.safetensors").read_bytes()
    read = load_embedding(tmp_path / "e.safetensors")
    place = np.searchsorted(read.terms, np.uint64(term_id("read")))
    assert np.abs(read.vectors[place] - vectors[1]).max() <= np.abs(vectors[1]).max() / 100
    assert dict(read.provenance) == {"source": "here"}
    [one] = read.encode(np.array([term_id("read"), 5], np.uint64), np.ones(2, np.float32), [2])
    np.testing.assert_allclose(one, read.vectors[place] / np.linalg.norm(read.vectors[place]), atol=1e-6)
    (tmp_path / "e.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="make_retrieval"):
        load_embedding(tmp_path / "e.safetensors")


def test_many_texts_are_encoded_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known = embedding()
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 6, 40)
    terms = rng.choice(np.append(known.terms, np.uint64(7)), counts.sum())
    weights = rng.random(counts.sum()).astype(np.float32)
    ends = np.concatenate([[0], np.cumsum(counts)])
    single = [known.encode(terms[a:b], weights[a:b], [b - a])[0] for a, b in zip(ends, ends[1:], strict=False)]
    monkeypatch.setattr("composer_nb.harness.search.embedding._BLOCK", 5)
    np.testing.assert_allclose(known.encode(terms, weights, counts), single, atol=1e-6)


def test_a_cache_spares_what_did_not_change(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "index"
    first, state, _ = cache.open_index(place, FILES, embedding())
    assert state == "new" and first.report.chunked == 4
    again, state, _ = cache.open_index(place, FILES, embedding())
    assert state == "used" and again.report.chunked == 0 and again.digest == first.digest
    assert again.search("open reader") == first.search("open reader")
    changed = FILES | {"docs/guide.md": b"Nothing.\n"}
    assert cache.open_index(place, changed, embedding())[0].report.chunked == 1
    assert cache.open_index(place, changed, embedding())[0].report.chunked == 0
    assert [each.name for each in place.parent.iterdir()] == ["index"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:50] + b"!" + data[51:], lambda data: b""]
)
def test_a_damaged_cache_is_rebuilt_and_says_so(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    place = tmp_path / "index"
    cache.open_index(place, FILES, embedding())
    place.write_bytes(damage(place.read_bytes()))
    built, state, why = cache.open_index(place, FILES, embedding())
    assert state == "rebuilt" and "damaged" in why and built.report.chunked == 4
    assert cache.open_index(place, FILES, embedding())[1] == "used"


def test_a_cache_of_another_version_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "index"
    with monkeypatch.context() as then:
        then.setattr(cache, "version", lambda: "before")
        cache.open_index(place, FILES, embedding())
    assert cache.open_index(place, FILES, embedding())[1:] == ("rebuilt", f"{place}: of another version")


def test_the_shipped_embedding_knows_what_words_mean() -> None:
    assert SHIPPED.stat().st_size < 2 << 20
    known = shipped()
    assert "standard library" in known.provenance["source"] and len(known.provenance["inputs_sha256"]) == 64
    words = ["remove", "delete", "directory", "folder path", "thread", "lock acquire"]
    bags = [weigh([(word, 1.0)]) for word in words]
    terms = np.array([term for bag in bags for term in bag], np.uint64)
    vectors = known.encode(terms, np.ones(len(terms), np.float32), [len(bag) for bag in bags])
    alike = vectors @ vectors.T
    for one in (0, 2, 4):  # each is nearer to its neighbour than to any other
        assert alike[one, one + 1] == max(np.delete(alike[one], one))
