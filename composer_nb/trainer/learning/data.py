"""Training data: Python source, demonstrations, and batches of both.

Every example is a row of token ids with a loss weight per token. Batches depend on the seed alone and are fixed before training
starts, so the step describes the state of training.

With infilling (arXiv 2207.14255), a gap in a row of code comes after the text on both of its sides:

PSM    <prefix> before <suffix> after <middle> gap
SPM    <prefix> <suffix> after <middle> before gap          the paper's second variant, for training both at once
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Protocol, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from composer_nb.harness.files import replacing
from composer_nb.harness.rollout import Rollout
from composer_nb.trainer.corpus.store import FILES, digest_of, documents, read_rows

# Number of tokens in a row of code.
CODE_ROW = 256
_SKIPPED = set("test tests idlelib lib2to3 encodings pydoc_data site-packages __pycache__ turtledemo".split())


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One example: token ids, and the loss weight of each as a target (the first is never a target)."""

    token_ids: NDArray[np.int32]
    weight: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Python files, or documents of several files, split into training and validation.

    Attributes:
        digest: SHA-256 over names and contents, which identifies the training data of a run.
    """

    train: list[str]
    validation: list[str]
    names: list[str]
    digest: str


def read_corpus(code: str) -> Corpus:
    """Read `stdlib` (the running interpreter's standard library) or a folder of Python files, split by a hash of their path; or
    the output of `composer-nb corpus`, which has a split of its own.

    Files that are not UTF-8 are left out. Raises ValueError if a folder of Python files has fewer than 20 usable ones.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if code == "stdlib" else Path(code).expanduser()
    if not root.is_dir():
        raise ValueError(f"data.code={code!r}: neither 'stdlib' nor a folder")
    if (root / FILES).is_file():
        rows = read_rows(root)
        split_documents = list(documents(rows))
        return Corpus(
            train=[text for text, heldout in split_documents if not heldout],
            validation=[text for text, heldout in split_documents if heldout],
            names=[f"{row['repository']}/{row['path']}" for row in rows],
            digest=digest_of(rows),
        )
    texts: dict[str, str] = {}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIPPED & set(name.split("/")[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        digest.update(f"{name}\0{text}\0".encode())
        texts[name] = text
    if len(texts) < 20:
        raise ValueError(f"data.code={code!r}: only {len(texts)} usable Python files; at least 20 are needed")
    hashes = {name: hashlib.md5(name.encode()).digest()[0] for name in texts}
    train_from = max(13, min(hashes.values()) + 1)  # 5 %; in a small folder at least the file with the lowest hash
    return Corpus(
        train=[text for name, text in texts.items() if hashes[name] >= train_from],
        validation=[text for name, text in texts.items() if hashes[name] < train_from],
        names=list(texts),
        digest=digest.hexdigest(),
    )


def code_rows(
    texts: Sequence[str], tokenizer: Tokenizer, weight: float, limit: int | None = None, length: int = CODE_ROW
) -> list[TokenRow]:
    """Concatenate texts and cut them into at most `limit` rows of `length` tokens, which begin with `<|bos|>` if the tokenizer
    has it."""
    bos = tokenizer.token_to_id("<|bos|>")
    prefix = [] if bos is None else [bos]
    content_length = length - len(prefix)
    rows: list[TokenRow] = []
    pending_ids: list[int] = []
    for text in texts:
        if limit is not None and len(rows) >= limit:
            break
        pending_ids += tokenizer.encode(text.replace("<|", "< |"), add_special_tokens=False).ids
        while len(pending_ids) >= content_length:
            ids = np.array([*prefix, *pending_ids[:content_length]], np.int32)
            rows.append(TokenRow(ids, np.full(length, weight, np.float32)))
            del pending_ids[:content_length]
    return rows[:limit]


def unmarked(weight: float) -> float:
    """Return a loss weight of tokens that the agent did not write: the float32 below 1 for 1, which marks those that it wrote."""
    return float(np.nextafter(np.float32(1), np.float32(0))) if np.float32(weight) == 1 else weight


def demonstration_rows(rollout: Rollout, context_weight: float) -> list[TokenRow]:
    """Return the segments of a rollout as examples. Tokens that the agent wrote have weight 1, others `context_weight`."""
    return [
        TokenRow(segment.token_ids, np.where(segment.acted, 1.0, unmarked(context_weight)).astype(np.float32))
        for segment in rollout.segments
    ]


def deal(rows: Sequence[TokenRow], max_tokens: int, rng: Random) -> Iterator[list[int]]:
    """Yield endless batches of row indices, of at most `max_tokens` tokens or one row. Every row comes once before any comes
    again.

    Raises ValueError if there are no rows."""
    if not rows:
        raise ValueError("there are no rows to train on; data.code or data.demonstrations gives too little")
    batch: list[int] = []
    room = max_tokens
    while True:
        indices = list(range(len(rows)))
        rng.shuffle(indices)
        for index in indices:
            row_tokens = len(rows[index].token_ids)
            if batch and row_tokens > room:
                yield batch
                batch, room = [], max_tokens
            batch.append(index)
            room -= row_tokens


def mixture(
    code: Sequence[TokenRow],
    demonstrations: Sequence[TokenRow],
    *,
    steps: int,
    tokens: int,
    code_first: float,
    code_share: float,
    seed: int,
) -> Iterator[list[TokenRow]]:
    """Yield the batches of mid-training, of about `tokens` each. The first share `code_first` of the `steps` has code alone. The
    others have demonstrations with a share `code_share` of code, whose rows are of one length and taken in order, after as many
    rows as the first part took. Rows repeat once all were used. Raises ValueError if there are no rows of a needed kind."""
    code_steps = round(code_first * steps)
    rows_per_batch = max(1, tokens // len(code[0].token_ids)) if code else 0
    code_batches = deal(code[: code_steps * rows_per_batch], tokens, Random(f"rows {seed}"))
    demonstration_batches = deal(demonstrations, round(tokens * (1 - code_share)), Random(f"demonstrations {seed}"))
    used_rows, owed_tokens = 0, 0.0
    for step in range(steps):
        if step < code_steps:
            numbers = next(code_batches)
            used_rows += len(numbers)
            yield [code[number] for number in numbers]
            continue
        rows = [demonstrations[number] for number in next(demonstration_batches)]
        owed_tokens += tokens * code_share
        while owed_tokens >= (length := len(code[0].token_ids)):
            rows.append(code[used_rows % len(code)])
            used_rows, owed_tokens = used_rows + 1, owed_tokens - length
        yield rows


def mixture_code(steps: int, tokens: int, code_first: float, code_share: float, length: int = CODE_ROW) -> int:
    """Return the number of rows of code that `mixture` takes, with a small margin."""
    code_steps = round(code_first * steps)
    return int(tokens * (code_steps + code_share * (steps - code_steps)) / length) + 8


class HasTokens(Protocol):
    """An object with tokens."""

    @property
    def token_ids(self) -> NDArray[np.int32]: ...


T = TypeVar("T", bound=HasTokens)


def within(max_tokens: int, rows: Iterable[T]) -> Iterator[list[T]]:
    """Yield the rows in order, in lists of at most `max_tokens` tokens; a longer row is alone in its list."""
    part: list[T] = []
    for row in rows:
        if part and sum(len(item.token_ids) for item in part) + len(row.token_ids) > max_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def save_rows(rows: Sequence[TokenRow], path: Path) -> None:
    """Write rows as one NumPy archive, atomically."""
    with replacing(path) as part, part.open("wb") as file:
        np.savez(
            file,
            lengths=np.array([len(row.token_ids) for row in rows], np.int32),
            token_ids=np.concatenate([row.token_ids for row in rows]),
            weight=np.concatenate([row.weight for row in rows]),
        )


def load_rows(path: Path) -> list[TokenRow]:
    """Read rows written by `save_rows`. Raises ValueError, which names the file, if it is damaged."""
    try:
        with np.load(path) as archive:
            if any(part.compress_type for part in archive.zip.infolist()):  # a small file might fill the memory
                raise ValueError("it is compressed")
            row_ends = np.cumsum(archive["lengths"])[:-1]
            arrays = (np.split(archive[name], row_ends) for name in ("token_ids", "weight"))
            return [TokenRow(ids, weight) for ids, weight in zip(*arrays, strict=True)]
    except (OSError, ValueError, KeyError, EOFError, MemoryError, BadZipFile) as error:
        raise ValueError(f"{path}: damaged ({error}); delete it and run again") from None


# Fill in the middle


# Tokens for prefix, suffix and middle, by family of models.
GAP_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, and tokenizers trained here
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    tuple(f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end")),  # DeepSeek
    tuple(f"\u2581<{name}>" for name in ("PRE", "SUF", "MID")),  # Code Llama
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillSettings:
    """Settings of rows of code with a gap that comes last."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the rows of code."""
    suffix_first: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of these rows in the order SPM; the others are PSM."""


def gap_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the tokenizer's ids of prefix, suffix and middle. Raises ValueError if it lacks them."""
    for names in GAP_TOKENS:
        prefix, suffix, middle = (tokenizer.token_to_id(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    raise ValueError("midtrain.infill.share: the tokenizer has no tokens for infilling; set it to 0")


def with_gaps(rows: Sequence[TokenRow], tokenizer: Tokenizer, settings: InfillSettings, seed: int) -> list[TokenRow]:
    """Return rows, a share of them with a gap between two positions drawn uniformly from the characters. A row keeps its length:
    the end of its suffix makes room for the three tokens, and for tokens added by cuts inside a token. A row is unchanged if its
    text does not encode to its tokens again, because it begins inside a character or a word."""
    if not settings.share:
        return list(rows)
    gap_ids, random = gap_tokens(tokenizer), Random(f"infill {seed}")
    return [
        _with_gap(row, tokenizer, gap_ids, random, random.random() < settings.suffix_first)
        if random.random() < settings.share
        else row
        for row in rows
    ]


def _with_gap(
    row: TokenRow, tokenizer: Tokenizer, gap_ids: tuple[int, int, int], random: Random, suffix_first: bool
) -> TokenRow:
    """Return a row with a random gap, in the order SPM with `suffix_first`, else PSM; the row itself if its text does not encode
    to its tokens again or its suffix has no room. `gap_ids`: as from `gap_tokens`."""

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    row_ids = row.token_ids.tolist()
    bos = row_ids[:1] if row_ids[0] == tokenizer.token_to_id("<|bos|>") else []
    text_ids = row_ids[len(bos) : len(row_ids) - len(gap_ids)]
    text = tokenizer.decode(text_ids, skip_special_tokens=False)
    if encoded(text) != text_ids or len(text) < 2:
        return row
    start, end = sorted(random.sample(range(len(text) + 1), 2))
    before, gap, after = encoded(text[:start]), encoded(text[start:end]), encoded(text[end:])
    suffix_length = len(text_ids) - len(before) - len(gap)
    if not 0 <= suffix_length <= len(after):
        return row
    prefix, suffix, middle = gap_ids
    context = [prefix, *before, suffix, *after[:suffix_length], middle]
    if suffix_first:
        context = [prefix, suffix, *after[:suffix_length], middle, *before]
    return replace(row, token_ids=np.array([*bos, *context, *gap], np.int32))
