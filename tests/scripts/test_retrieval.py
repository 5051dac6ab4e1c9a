"""Training of search's embedding: it learns what words mean each other, leaks nothing, and is the same twice."""

from __future__ import annotations

import numpy as np

from composer_nb.harness.search.chunks import chunk_file
from scripts.data.retrieval.questions import Question
from scripts.data.retrieval.training import (
    RetrievalSettings,
    make_vocabulary,
    prepare,
    recall,
    to_embedding,
    train,
)

ASKED = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "julia", "kilo", "lima"]
SAID = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SETTINGS = RetrievalSettings(width=16, steps=60, batch=24, further=8, names=0.3, drop=0.0, learning_rate=0.05)


def repository(first: int) -> tuple[dict[str, bytes], list[Question]]:
    """Functions in which a word stands for another one, always the same; each file has a name of its own."""
    files = {f"m{first + n}.py": f"def f{first + n}():\n    return {said}\n".encode() for n, said in enumerate(SAID)}
    asked = [
        Question(text=f"what does {word} mean", path=f"m{first + n}.py", first=1, last=2, kind="docstring")
        for n, word in enumerate(ASKED)
    ]
    files |= {"words.md": " ".join(ASKED).encode(), "again.md": " ".join(ASKED).encode()}
    return files, asked


def trained(seed: int = 0) -> tuple[dict[str, float], np.ndarray, list[float]]:
    parts = [repository(first) for first in (0, 20)]
    vocabulary = make_vocabulary([files for files, _ in parts], 200)
    repositories = [prepare(str(n), files, asked, vocabulary) for n, (files, asked) in enumerate(parts)]
    settings = RetrievalSettings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__slots__} | {"seed": seed})
    vectors, losses = train(repositories, vocabulary, settings)
    return vocabulary, vectors, losses


def test_learns_what_words_alone_do_not_say() -> None:
    vocabulary, vectors, losses = trained()
    files, asked = repository(40)  # never seen
    unseen = prepare("unseen", files, asked, vocabulary)
    start = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    assert recall(unseen, vectors, depth=1) == 1.0 and recall(unseen, start, depth=1) < 0.5
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def test_twice_the_same() -> None:
    (_, one, losses), (_, two, again), (_, other, _) = trained(), trained(), trained(1)
    assert losses == again and one.tobytes() == two.tobytes() and one.tobytes() != other.tobytes()


def test_searching_encodes_as_training_did() -> None:
    vocabulary, vectors, _ = trained()
    files, asked = repository(0)
    made = prepare("0", files, asked, vocabulary)
    embedding = to_embedding(vectors, vocabulary)
    places, weights = made.chunks.row(0)
    wanted = (vectors[places] * weights[:, None]).sum(axis=0)
    assert (np.diff(embedding.terms.astype(object)) > 0).all()
    paths = sorted(files)
    chunk = chunk_file(paths[0], files[paths[0]])
    found = embedding.encode(chunk.terms, chunk.weights, chunk.counts)
    np.testing.assert_allclose(found[0], wanted / np.linalg.norm(wanted), atol=1e-5)
