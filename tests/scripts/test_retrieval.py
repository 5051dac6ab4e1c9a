"""Training of search's embedding: it learns what words mean each other, leaks nothing, and is the same twice."""

import numpy as np

from composer_nb.harness.search.chunks import chunk_file
from scripts.data.retrieval.questions import Question
from scripts.data.retrieval.training import RetrievalSettings, make_vocabulary, prepare, recall, to_embedding, train

ASKED = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "julia", "kilo", "lima"]
SAID = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SETTINGS = RetrievalSettings(width=16, steps=60, batch=24, further=8, names=0.3, drop=0.0, learning_rate=0.05)


def repository(first: int) -> tuple[dict[str, bytes], list[Question]]:
    """Return files in which each word stands for another one, always the same, and questions about them."""
    files = {f"m{first + n}.py": f"def f{first + n}():\n    return {name}\n".encode() for n, name in enumerate(SAID)}
    questions = [
        Question(text=f"what does {word} mean", path=f"m{first + n}.py", first=1, last=2, kind="docstring")
        for n, word in enumerate(ASKED)
    ]
    files |= {"words.md": " ".join(ASKED).encode(), "again.md": " ".join(ASKED).encode()}
    return files, questions


def trained() -> tuple[dict[str, float], np.ndarray, list[float]]:
    parts = [repository(first) for first in (0, 20)]
    vocabulary = make_vocabulary([files for files, _ in parts], 200)
    repositories = [prepare(str(n), files, questions, vocabulary) for n, (files, questions) in enumerate(parts)]
    vectors, losses = train(repositories, vocabulary, SETTINGS)
    return vocabulary, vectors, losses


def test_learns_what_words_alone_do_not_say_and_twice_the_same() -> None:
    (vocabulary, vectors, losses), (_, vectors_again, losses_again) = trained(), trained()
    assert losses == losses_again and vectors.tobytes() == vectors_again.tobytes()
    files, questions = repository(40)  # never seen
    unseen = prepare("unseen", files, questions, vocabulary)
    start = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    assert recall(unseen, vectors, depth=1) == 1.0 and recall(unseen, start, depth=1) < 0.5
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    # Searching encodes as training did.
    files, questions = repository(0)
    embedding = to_embedding(vectors, vocabulary)
    places, weights = prepare("0", files, questions, vocabulary).chunks.row(0)
    expected = (vectors[places] * weights[:, None]).sum(axis=0)
    assert (np.diff(embedding.terms.astype(object)) > 0).all()
    path = min(files)
    chunk = chunk_file(path, files[path])
    encoded = embedding.encode(chunk.terms, chunk.weights, chunk.counts)
    np.testing.assert_allclose(encoded[0], expected / np.linalg.norm(expected), atol=1e-5)
