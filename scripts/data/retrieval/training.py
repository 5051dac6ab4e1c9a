"""Training of search's static embedding (`harness/search/embedding.py`) from questions and the spans that answer them.

Legend: V terms of the vocabulary, W dimensions, B questions of a batch, D chunks that compete for them, N terms in a row.

The loss is the softmax cross-entropy of cosines over a temperature, of each question over its own chunk, the chunks of the other
questions and further chunks drawn from the same repository (A. van den Oord et al., "Representation Learning with Contrastive
Predictive Coding", 2018; in-batch negatives as in V. Karpukhin et al., "Dense Passage Retrieval", 2020). What ranks by words
alone is there already, in BM25; so in half of the pairs the terms that question and chunk share are taken out of the chunk.

Questions of mined repositories (`questions.py`) and of rollouts (`traces.py`) are alike. A third source needs no text but code:
the words of a definition's name ask for its body, from which they are taken out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding_bag, normalize

from composer_nb.harness.search.chunks import FileChunks, chunk_file, cut, text_lines, unfit
from composer_nb.harness.search.embedding import Embedding, split, term_id, weigh, words

from .questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings:
    """How the embedding is trained."""

    width: int = 80
    """Dimensions."""
    vocabulary: int = 18_000
    """Terms, the most frequent ones."""
    steps: int = 500
    batch: int = 256
    """Questions a step."""
    further: int = 1024
    """Chunks a step that answer none of them."""
    temperature: float = 0.07
    learning_rate: float = 0.01
    names: float = 0.5
    """Share of the questions that are a definition's name."""
    hide_shared: float = 0.5
    """Share of the pairs in which the chunk loses the terms that it shares with the question."""
    drop: float = 0.3
    """Share of the terms that a question, and a chunk, loses each time: a few thousand questions are soon learnt by heart."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Bags of terms, one after another: positions in the vocabulary and weights [N], and where each bag starts [bags + 1]."""

    columns: NDArray[np.int64]
    weights: NDArray[np.float32]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        span = slice(self.starts[number], self.starts[number + 1])
        return self.columns[span], self.weights[span]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repository:
    """Chunks of one repository, and which of them answer which question."""

    name: str
    chunks: Rows
    questions: Rows
    answers: NDArray[np.int64]
    """[questions], into `chunks`."""
    names: Rows
    """What each chunk's definition is called; empty for chunks without a name."""


def heldout(name: str, share: float = 0.2) -> bool:
    """Return whether a repository of this name is for measuring only: by hash, so always the same ones."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < share * 2**32


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of paths and contents."""
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def make_vocabulary(repositories: Sequence[Mapping[str, bytes]], size: int) -> dict[str, float]:
    """Return the `size` terms that most files have (two at least), with their idf over files."""
    spread: Counter[str] = Counter()
    files = 0
    for repository in repositories:
        for data in repository.values():
            if not unfit(data):
                files += 1
                spread.update({term for word in words(data.decode(errors="replace")) for term in split(word)})
    usual = sorted(((count, term) for term, count in spread.items() if count > 1), key=lambda pair: (-pair[0], pair[1]))
    return {term: math.log(1 + files / count) for count, term in usual[:size]}


def prepare(
    name: str, files: Mapping[str, bytes], questions: Sequence[Question], vocabulary: Mapping[str, float]
) -> Repository:
    """Return a repository as bags of terms. Questions that no chunk answers, or none of whose terms is known, are dropped."""
    column_of = {term_id(term): number for number, term in enumerate(vocabulary)}
    files_in_chunks: dict[str, FileChunks] = {}
    names: list[str] = []
    for path, data in sorted(files.items()):
        if not unfit(data):
            files_in_chunks[path] = chunk_file(path, data)
            names += [span.name for span in cut(path, data, text_lines(data))]
    starts = np.cumsum([0, *(len(chunked.spans) for chunked in files_in_chunks.values())])
    first = dict(zip(files_in_chunks, starts.tolist(), strict=False))
    question_bags: list[dict[int, float]] = []
    answers: list[int] = []
    for question in questions:
        bag = {term: weight for term, weight in weigh([(question.text, 1.0)]).items() if term in column_of}
        if question.path in files_in_chunks and bag:
            spans = files_in_chunks[question.path].spans
            shared = np.minimum(spans[:, 1], question.last) - np.maximum(spans[:, 0], question.first) + 1
            if len(spans) and shared.max() > 0:
                question_bags.append(bag)
                answers.append(first[question.path] + int(shared.argmax()))
    chunks = []
    for chunked in files_in_chunks.values():
        for terms, weights in _rows_of(chunked):
            chunks.append(dict(zip(terms.tolist(), weights.tolist(), strict=True)))
    return Repository(
        name=name,
        chunks=_rows(chunks, column_of),
        questions=_rows(question_bags, column_of),
        answers=np.array(answers, np.int64),
        names=_rows([weigh([(text, 1.0)]) for text in names], column_of),
    )


def _rows_of(file: FileChunks) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    ends = np.cumsum(file.counts)[:-1]
    yield from zip(np.split(file.terms, ends), np.split(file.weights, ends), strict=True) if len(file.counts) else ()


def _rows(bags: Sequence[Mapping[int, float]], column_of: Mapping[int, int]) -> Rows:
    numbered_bags = [[(column_of[term], weight) for term, weight in bag.items() if term in column_of] for bag in bags]
    flat = [pair for bag in numbered_bags for pair in bag]
    return Rows(
        columns=np.array([column for column, _ in flat], np.int64),
        weights=np.log1p(np.array([weight for _, weight in flat], np.float32)),
        starts=np.cumsum([0, *map(len, numbered_bags)]),
    )


def train(
    repositories: Sequence[Repository], vocabulary: Mapping[str, float], settings: RetrievalSettings
) -> tuple[NDArray[np.float32], list[float]]:
    """Return the vectors [V, W] and the loss of each step. The same inputs give the same bits on the same machine.

    Every repository is drawn as often as it has questions. Raises ValueError when there are none.
    """
    usable = [repository for repository in repositories if len(repository.questions)]
    if not usable:
        raise ValueError("no repository has a question to train on")
    rng = np.random.default_rng(settings.seed)
    torch.manual_seed(settings.seed)
    idf_V = torch.tensor(list(vocabulary.values()))
    # Random directions as long as the idf: cosines of tf-idf vectors to begin with, roughly.
    vectors_VW = normalize(torch.randn(len(vocabulary), settings.width), dim=1) * idf_V[:, None]
    vectors_VW.requires_grad_()
    optimiser = torch.optim.Adam([vectors_VW], lr=settings.learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, settings.learning_rate, total_steps=settings.steps)
    share = np.array([len(repository.questions) for repository in usable], float)
    losses: list[float] = []
    for _ in range(settings.steps):
        repository = usable[int(rng.choice(len(usable), p=share / share.sum()))]
        questions, chunks, answer_B, chunk_D = draw(repository, settings, rng)
        cosine_BD = _encode(vectors_VW, questions) @ _encode(vectors_VW, chunks).T
        same_BD = torch.from_numpy(chunk_D[None, :] == chunk_D[answer_B][:, None])
        same_BD[torch.arange(len(answer_B)), torch.from_numpy(answer_B)] = (
            False  # the answer, drawn once more, is no rival
        )
        loss = cross_entropy(
            (cosine_BD / settings.temperature).masked_fill(same_BD, -torch.inf), torch.from_numpy(answer_B)
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return vectors_VW.detach().numpy(), losses


Bag = tuple[NDArray[np.int64], NDArray[np.float32]]
Bags = list[Bag]


def _dropped(bag: Bag, share: float, rng: np.random.Generator) -> Bag:
    keep = rng.random(len(bag[0])) >= share
    return bag[0][keep], bag[1][keep]


def draw(
    repository: Repository, settings: RetrievalSettings, rng: np.random.Generator
) -> tuple[Bags, Bags, NDArray[np.int64], NDArray[np.int64]]:
    """Draw a batch: B questions, D chunks, the answer's place among them [B], and which chunk each is [D]."""
    named = np.flatnonzero(np.diff(repository.names.starts))
    by_name = rng.random(settings.batch) < settings.names if len(named) else np.zeros(settings.batch, bool)
    number_B = rng.integers(0, len(repository.questions), settings.batch)
    chunk_B = repository.answers[number_B]
    if len(named):
        chunk_B = np.where(by_name, rng.choice(named, settings.batch), chunk_B)
    hide = by_name | (rng.random(settings.batch) < settings.hide_shared)
    questions: Bags = []
    chunks: Bags = []
    for name, number, chunk, hidden in zip(by_name, number_B, chunk_B, hide, strict=True):
        question = repository.names.row(chunk) if name else repository.questions.row(number)
        columns, weights = repository.chunks.row(chunk)
        if hidden:
            keep = ~np.isin(columns, question[0])
            columns, weights = columns[keep], weights[keep]
        questions.append(_dropped(question, settings.drop, rng))
        chunks.append(_dropped((columns, weights), settings.drop, rng))
    further_D = rng.integers(0, len(repository.chunks), settings.further)
    chunks += [repository.chunks.row(int(index)) for index in further_D]
    return questions, chunks, np.arange(settings.batch), np.concatenate([chunk_B, further_D])


def _encode(vectors_VW: Tensor, bags: Bags) -> Tensor:
    """Return vectors [bags, W] of length 1."""
    columns = torch.from_numpy(np.concatenate([bag[0] for bag in bags]))
    weights = torch.from_numpy(np.concatenate([bag[1] for bag in bags]))
    starts = torch.from_numpy(np.cumsum([0, *(len(bag[0]) for bag in bags[:-1])]))
    return normalize(embedding_bag(columns, vectors_VW, starts, mode="sum", per_sample_weights=weights), dim=1)


def to_embedding(vectors: NDArray[np.float32], vocabulary: Mapping[str, float]) -> Embedding:
    """What was trained, for searching, before it is rounded."""
    ids = np.array([term_id(term) for term in vocabulary], np.uint64)
    order = np.argsort(ids)
    return Embedding(terms=ids[order], vectors=vectors[order])


def recall(repository: Repository, vectors: NDArray[np.float32], depth: int = 10) -> float:
    """Return the share of the questions whose chunk is among the `depth` most similar ones of its repository."""
    with torch.no_grad():
        table = torch.from_numpy(vectors)
        chunks = _encode(table, [repository.chunks.row(number) for number in range(len(repository.chunks))])
        questions = _encode(table, [repository.questions.row(number) for number in range(len(repository.questions))])
        cosine = questions @ chunks.T
        answer_cosine = cosine[torch.arange(len(questions)), torch.from_numpy(repository.answers)]
        return float(((cosine > answer_cosine[:, None]).sum(dim=1) < depth).float().mean())


def provenance(settings: RetrievalSettings, inputs: Mapping[str, bytes], source: str) -> dict[str, str]:
    """What a stored embedding says of itself."""
    return {"settings": json.dumps(asdict(settings)), "inputs_sha256": digest_of(inputs), "source": source}
