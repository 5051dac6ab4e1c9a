"""Storing of search's static embedding (`harness/search/embedding.py` reads it)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from composer_nb.harness.files import replacing


def save_embedding(
    path: Path, terms: Sequence[str], vectors: NDArray[np.float32], provenance: Mapping[str, str]
) -> None:
    """Write an embedding atomically, rounded to 8 bits per number with one scale per term."""
    scales = (np.abs(vectors).max(axis=1, initial=0.0) / 127).astype(np.float16)
    safe = np.maximum(scales.astype(np.float32), 1e-7)[:, None]
    rounded = np.clip(np.rint(vectors / safe), -127, 127).astype(np.int8)
    metadata = {"embedding": json.dumps({"terms": list(terms), **provenance})}
    with replacing(path) as staging:
        save_file({"vectors": rounded, "scales": scales}, staging, metadata=metadata)
