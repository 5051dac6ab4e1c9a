"""A byte-level BPE tokenizer, trained here on the corpus of the run, stored as a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from composer_nb.harness.agent.compact import SPECIALS
from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.untrusted import json_of

if TYPE_CHECKING:
    from composer_nb.trainer.models.transformer import Model

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
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": special, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options, show_progress=False))
    return tokenizer


def load_tokenizer(path: Path, needed: Sequence[str] = SPECIALS) -> Tokenizer:
    """Reads `tokenizer.json` in the folder `path`. Raises ValueError when it is damaged or lacks a token that is needed: those of
    the compact format, if nothing else is said."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: a checkpoint needs its tokenizer beside it")
    return read_tokenizer(file.read_bytes(), file, needed)


def tokenizer_of(model: Model, path: Path) -> Tokenizer:
    """Return the tokenizer of a model that was loaded from `path`. Raises like `load_tokenizer`."""
    if (data := model.companions.get("tokenizer.json")) is None:
        raise FileNotFoundError(f"{path}: a checkpoint needs its tokenizer beside it, a file tokenizer.json")
    return read_tokenizer(data, path)


def read_tokenizer(data: bytes, file: Path, needed: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer in the contents of `file`. Raises ValueError if it is damaged, makes texts grow without bound, or
    lacks a needed token. Padding and truncation are ignored, as by `transformers`."""
    try:
        _check_growth(json_of(data))
        tokenizer = Tokenizer.from_str(data.decode())
        tokenizer.no_padding()  # which could make any number of tokens of a text
        tokenizer.no_truncation()
    except Exception as error:  # the library raises nothing else
        raise ValueError(f"{file}: damaged ({error}); fetch or write it again") from None
    if missing := [token for token in needed if tokenizer.token_to_id(token) is None]:
        name = next((name for name, chat in FORMATS.items() if {*missing} <= {*chat.tokens}), "qwen")
        raise ValueError(f"{file}: lacks the tokens {missing}; {TO_ADD.format(file.parent, name)}")
    return tokenizer


# Largest factor by which the parts of a tokenizer that rewrite texts may lengthen one together. (NFKC can make 18 of one.)
MOST_GROWTH = 64
# Largest number of characters of a token.
LONGEST_TOKEN = 4096
# Largest number of characters that a part makes of one, where it is more than one.
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "BertNormalizer": 4, "Lowercase": 2, "ByteLevel": 4}


def _check_growth(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer.json whose parts, one after another, can make a short text fill the memory."""
    tokens = [
        *(tokenizer["model"].get("vocab") or ()),
        *(added["content"] for added in tokenizer["added_tokens"] or ()),
    ]
    if max((len(token if isinstance(token, str) else token[0]) for token in tokens), default=0) > LONGEST_TOKEN:
        raise ValueError(f"it has a token of more than {LONGEST_TOKEN:,} characters")
    if (count := _added(tokenizer.get("post_processor") or {})) > LONGEST_TOKEN:
        raise ValueError(f"its post_processor adds {count:,.0f} tokens to a text, and at most {LONGEST_TOKEN:,} may be")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (part := tokenizer.get(name)) and (factor := _growth(part)) > MOST_GROWTH:
            raise ValueError(f"its {name} may make a text {factor:.0f} times as long; at most {MOST_GROWTH} is allowed")


def _added(part: dict[str, Any]) -> float:
    """Return how many tokens a part of a tokenizer adds to one or two texts; infinity if it repeats a text."""
    pieces = [part.get("single") or [], part.get("pair") or []]
    texts = [piece["Sequence"]["id"] for side in pieces for piece in side if "Sequence" in piece]
    if len(texts) > 3:  # one, and two
        return math.inf
    tokens = part.get("special_tokens") or {}
    named = [piece["SpecialToken"]["id"] for side in pieces for piece in side if "SpecialToken" in piece]
    return sum(len(tokens[name]["ids"]) for name in named) + sum(map(_added, part.get("processors") or ()))


def _growth(part: dict[str, Any]) -> float:
    """Return by what factor a part of a tokenizer may lengthen a text, at most. Raises ValueError for one without a type, which
    the library knows by its other keys."""
    if "type" not in part:
        raise ValueError("a part of it has no type")
    factor: float = _GROWTH.get(part["type"], 1)
    if part["type"] == "Prepend":
        factor = 1 + len(part["prepend"])
    elif part["type"] == "Precompiled":  # a trie with its size before it, and the texts that it leads to
        table = base64.b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace")
        factor = max(1, *map(len, texts.split("\0")))
    elif part["type"] == "Replace":
        [(kind, pattern)] = part["pattern"].items()
        # A regular expression may match the empty text between all characters.
        least = len(pattern) if kind == "String" else 0
        factor = max(1.0, len(part["content"]) / least if least else len(part["content"]) + 1)
    parts = (inner for key in ("normalizers", "pretokenizers", "decoders") for inner in part.get(key) or ())
    return factor * math.prod(map(_growth, parts))


def format_of(path: Path) -> str:
    """Return the chat format (`env.renderer`) whose tokens the tokenizer in the folder `path` has. Raises ValueError if there
    is none."""
    tokenizer = load_tokenizer(path, ())
    for name, chat in FORMATS.items():
        if all(tokenizer.token_to_id(token) is not None for token in chat.tokens):
            return name
    raise ValueError(f"{path}: has the tokens of no chat format ({', '.join(FORMATS)}); {TO_ADD.format(path, 'qwen')}")
