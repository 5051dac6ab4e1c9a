"""A filtered corpus on disk: `files.parquet`, with one row per file, in reading order."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from composer_nb.harness.files import replacing
from composer_nb.harness.untrusted import parquet

FILES = "files.parquet"
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("repository", "path", "licence", "text")]
    + [("heldout", pa.bool_()), ("document", pa.int32())]
)


def write_rows(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write rows of files: repository, path, licence, text, heldout, and the number of the file's document."""
    with replacing(folder / FILES) as part:
        pq.write_table(pa.Table.from_pylist(list(rows), _SCHEMA), part)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read rows written by `write_rows`. Raises ValueError, which names the file, if it is damaged."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(parquet(folder / FILES), schema=_SCHEMA).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{folder / FILES}: damaged ({error}); make it again with composer-nb corpus") from None
    return rows


def digest_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the SHA-256 of names and texts."""
    texts = (f"{row['repository']}/{row['path']}\0{row['text']}\0" for row in rows)
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def documents(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield the text of each document and whether it is held out. The text has its files in order, each under a comment with its
    path."""
    for _, files in groupby(rows, key=lambda row: row["document"]):
        part = list(files)
        yield "\n".join(f"# {row['path']}\n{row['text']}" for row in part), part[0]["heldout"]
