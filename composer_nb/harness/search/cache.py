"""An index on disk: the chunks of every file, by path and content, so that only files that changed are cut again.

A cache is one file, put in place by a rename: the BLAKE2b digest of all that follows it, then safetensors. It speaks of the code
that cut the files and of the grammars that were there; from another version it is as good as none. It belongs where nothing that
runs in a sandbox can write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from composer_nb.harness.search.chunks import FileChunks, How
from composer_nb.harness.search.embedding import Embedding
from composer_nb.harness.search.index import CodeIndex
from composer_nb.harness.search.languages import SYNTAX, parser

_SEAL = 32
"""Bytes of the digest."""
State = Literal["new", "used", "rebuilt"]


@cache
def version() -> str:
    """Of everything that decides what the chunks of a file are."""
    here = Path(__file__).parent
    code = b"".join((here / name).read_bytes() for name in ("chunks.py", "languages.py", "terms.py"))
    grammars = [language for language in SYNTAX if parser(language)]
    return blake2b(code + repr(grammars).encode(), digest_size=16).hexdigest()


def save_chunks(path: Path, chunks: Mapping[str, FileChunks]) -> None:
    """Writes a cache. Whoever reads meanwhile finds the old one or the new one."""
    found = list(chunks.values())
    arrays = {
        "spans": np.concatenate([np.zeros((0, 2), np.int32), *(each.spans for each in found)]),
        "counts": np.concatenate([np.zeros(0, np.int32), *(each.counts for each in found)]),
        "terms": np.concatenate([np.zeros(0, np.uint64), *(each.terms for each in found)]),
        "weights": np.concatenate([np.zeros(0, np.float32), *(each.weights for each in found)]),
    }
    files = [[name, each.digest.hex(), each.how, len(each.spans)] for name, each in chunks.items()]
    payload = save(arrays, metadata={"version": version(), "files": json.dumps(files)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as part:
        try:
            part.write(blake2b(payload, digest_size=_SEAL).digest() + payload)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def load_chunks(path: Path) -> dict[str, FileChunks]:
    """Reads a cache. Raises ValueError for one that is damaged or of another version, FileNotFoundError for none."""
    data = path.read_bytes()
    seal, payload = data[:_SEAL], data[_SEAL:]
    if blake2b(payload, digest_size=_SEAL).digest() != seal:
        raise ValueError(f"{path}: damaged")
    try:
        arrays = load(payload)
        length = int.from_bytes(payload[:8], "little")
        metadata = json.loads(payload[8 : 8 + length])["__metadata__"]
        if metadata["version"] != version():
            raise ValueError(f"{path}: of another version")
        chunks: dict[str, FileChunks] = {}
        chunk = term = 0
        for name, digest, how, size in json.loads(metadata["files"]):
            if how not in get_args(How):
                raise ValueError(f"{path}: {how!r} is no way to cut a file")
            counts = arrays["counts"][chunk : chunk + size]
            more = int(counts.sum())
            chunks[name] = FileChunks(
                digest=bytes.fromhex(digest),
                spans=arrays["spans"][chunk : chunk + size],
                counts=counts,
                terms=arrays["terms"][term : term + more],
                weights=arrays["weights"][term : term + more],
                how=how,
            )
            chunk, term = chunk + size, term + more
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a cache of chunks ({error})") from None
    return chunks


def open_index(
    path: Path, files: Mapping[str, bytes], embedding: Embedding | None = None
) -> tuple[CodeIndex, State, str]:
    """The index of `files` with the help of a cache, which is brought up to date.

    Also says whether the cache was `new`, `used`, or had to be `rebuilt`, and then why.
    """
    state: State = "used"
    why = ""
    try:
        known = load_chunks(path)
    except FileNotFoundError:
        known, state = {}, "new"
    except ValueError as error:
        known, state, why = {}, "rebuilt", str(error)
    index = CodeIndex.build(files, embedding, known)
    if state != "used" or index.report.chunked or index.chunks.keys() != known.keys():
        save_chunks(path, index.chunks)
    return index, state, why
