"""The query side of search: a static embedding, one vector a term, in NumPy.

A text's vector is the mean of its terms' vectors, each times the term's weight (its idf when training began), scaled to length 1.
The weight lies in the vector's length. How it is trained: `trainer/retrieval.py`.

A file is safetensors: `vectors` int8[V, W], `scales` float16[V], and as metadata (one JSON, so that equal embeddings are equal
files) the V terms and where they are from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from composer_nb.harness.search.terms import term_id

SHIPPED = Path(__file__).with_suffix(".safetensors")
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """V terms in W dimensions, V at least 1."""

    terms: NDArray[np.uint64]
    """[V], ascending."""
    vectors: NDArray[np.float32]
    """[V, W]"""
    provenance: Mapping[str, str] = field(default_factory=dict)

    def encode(
        self, terms: NDArray[np.uint64], weights: NDArray[np.float32], counts: Sequence[int] | NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """[C, W], for C texts one after another: `terms` and `weights` [N], of which `counts` [C] says whose they are.

        A weight w counts as log(1 + w). A text without a known term is the zero vector.
        """
        place = np.minimum(np.searchsorted(self.terms, terms), len(self.terms) - 1)
        factor = np.where(self.terms[place] == terms, np.log1p(weights), 0.0).astype(np.float32)
        ends = np.concatenate([[0], np.cumsum(counts)])
        out = np.zeros((len(counts), self.vectors.shape[1]), np.float32)
        first = 0
        while first < len(counts):  # in blocks, as N · W numbers would not fit
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + _BLOCK, side="right")) - 1)
            some = slice(int(ends[first]), int(ends[last]))
            rows = self.vectors[place[some]] * factor[some, None]
            filled = np.flatnonzero(np.diff(ends[first : last + 1])) + first
            if len(filled):
                out[filled] = np.add.reduceat(rows, ends[filled] - ends[first], axis=0)
            first = last
        norm = np.linalg.norm(out, axis=1, keepdims=True)
        return np.divide(out, norm, out=out, where=norm > 0)


def save_embedding(
    path: Path, terms: Sequence[str], vectors: NDArray[np.float32], provenance: Mapping[str, str]
) -> None:
    """Writes an embedding, rounded to eight bits a number and one scale a term. Atomic."""
    scales = (np.abs(vectors).max(axis=1, initial=0.0) / 127).astype(np.float16)
    safe = np.maximum(scales.astype(np.float32), 1e-7)[:, None]
    rounded = np.clip(np.rint(vectors / safe), -127, 127).astype(np.int8)
    metadata = {"embedding": json.dumps({"terms": list(terms), **provenance})}
    part = path.with_name(path.name + ".part")
    save_file({"vectors": rounded, "scales": scales}, part, metadata=metadata)
    part.replace(path)


def load_embedding(path: Path) -> Embedding:
    """Reads an embedding. Raises ValueError for a file that is damaged or something else, FileNotFoundError for none."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {})["embedding"])
            vectors, scales = file.get_tensor("vectors"), file.get_tensor("scales")
        names = metadata.pop("terms")
        if not len(names) == len(vectors) == len(scales) or not names:
            raise ValueError(f"{len(names)} terms, {len(vectors)} vectors, {len(scales)} scales")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no embedding; data/make_retrieval.py makes it") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{path}: not an embedding, or damaged ({error}); data/make_retrieval.py makes it") from None
    ids = np.array([term_id(name) for name in names], np.uint64)
    order = np.argsort(ids)
    wide = vectors.astype(np.float32) * scales.astype(np.float32)[:, None]
    return Embedding(terms=ids[order], vectors=wide[order], provenance=metadata)


@cache
def shipped() -> Embedding:
    """The embedding that comes with the project."""
    return load_embedding(SHIPPED)
