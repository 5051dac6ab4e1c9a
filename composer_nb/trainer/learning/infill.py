"""Fill in the middle (arXiv 2207.14255): rows of code in which a gap comes after the text on both of its sides.

PSM    <prefix> before <suffix> after <middle> gap
SPM    <prefix> <suffix> after <middle> before gap          the paper's second variant, for training both at once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer

from composer_nb.trainer.learning.data import TokenRow

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
    marks, random = gap_tokens(tokenizer), Random(f"infill {seed}")
    return [
        _with_gap(row, tokenizer, marks, random, random.random() < settings.suffix_first)
        if random.random() < settings.share
        else row
        for row in rows
    ]


def _with_gap(
    row: TokenRow, tokenizer: Tokenizer, marks: tuple[int, int, int], random: Random, suffix_first: bool
) -> TokenRow:
    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    whole = row.token_ids.tolist()
    head = whole[:1] if whole[0] == tokenizer.token_to_id("<|bos|>") else []
    ids = whole[len(head) : len(whole) - len(marks)]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if encoded(text) != ids or len(text) < 2:
        return row
    first, last = sorted(random.sample(range(len(text) + 1), 2))
    before, gap, after = encoded(text[:first]), encoded(text[first:last]), encoded(text[last:])
    left = len(ids) - len(before) - len(gap)
    if not 0 <= left <= len(after):
        return row
    prefix, suffix, middle = marks
    special = [prefix, *before, suffix, *after[:left], middle]
    if suffix_first:
        special = [prefix, suffix, *after[:left], middle, *before]
    return replace(row, token_ids=np.array([*head, *special, *gap], np.int32))
