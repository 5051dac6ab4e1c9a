"""A byte-level BPE tokenizer, trained here on the corpus of the run, stored as a Hugging Face `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from composer_nb.harness.agent.compact import SPECIALS
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer

FORMATS = {"compact": SPECIALS, "qwen": QwenRenderer.tokens, "kimi": KimiRenderer.tokens}
"""The tokens that each chat format (`env.renderer`) needs."""

TO_ADD = "composer-nb convert {} DIR --format {} writes a checkpoint with them"

# A newline with its indentation, spaces, a word, one digit, an operator, one sign; all but digits with the space before them.
_WORDS = r"\n *| {2,}| ?[A-Za-z_]+|[0-9]| ?(?:[-+*/%<>=!]=|\*\*|//)| ?[^\sA-Za-z_0-9]|\s"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    vocab_size: Annotated[int, Field(ge=264)] = 1024


def cut_by(words: str) -> pre_tokenizers.PreTokenizer:
    """Return what cuts text into matches of a pattern, as bytes, before byte pairs are merged."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), behavior="isolated"), plain])


def train_tokenizer(texts: Iterable[str], vocab_size: int, more: Sequence[str] = ()) -> Tokenizer:
    """Trains on `texts`. Every byte is in the alphabet, so any text round-trips; digits are tokens of their own. The special
    tokens are those of the compact format, and `more`.

    Raises ValueError when `vocab_size` cannot hold the special tokens and the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*SPECIALS, *more]
    if vocab_size < len(special) + len(alphabet):
        raise ValueError(f"tokenizer.vocab_size={vocab_size}: at least {len(special) + len(alphabet)} are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut_by(_WORDS)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path, needed: Sequence[str] = SPECIALS) -> Tokenizer:
    """Reads `tokenizer.json` in the folder `path`. Raises ValueError when it is damaged or lacks a token that is needed: those of
    the compact format, if nothing else is said."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: a checkpoint needs its tokenizer beside it")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing else
        raise ValueError(f"{file}: damaged ({error}); fetch or write it again") from None
    if missing := [token for token in needed if tokenizer.token_to_id(token) is None]:
        name = next((name for name, tokens in FORMATS.items() if {*missing} <= {*tokens}), "qwen")
        raise ValueError(f"{file}: lacks the tokens {missing}; {TO_ADD.format(path, name)}")
    return tokenizer


def format_of(path: Path) -> str:
    """Return the chat format (`env.renderer`) whose tokens the tokenizer in the folder `path` has. Raises ValueError if there
    is none."""
    tokenizer = load_tokenizer(path, ())
    for name, needed in FORMATS.items():
        if all(tokenizer.token_to_id(token) is not None for token in needed):
            return name
    raise ValueError(
        f"{path}: its tokenizer has the tokens of no chat format ({', '.join(FORMATS)}); {TO_ADD.format(path, 'qwen')}"
    )
