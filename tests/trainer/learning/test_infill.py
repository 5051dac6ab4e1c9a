"""Fill in the middle: the pieces of a row put together again are its text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_nb.trainer.learning.data import GAP_TOKENS, InfillSettings, TokenRow, code_rows, gap_tokens, with_gaps
from composer_nb.trainer.models.tokenizer import train_tokenizer

TEXT = "".join(f"def f_{n}(xs):\n    return {n} * sum(x for x in xs if x > {n})\n" for n in range(60))
TOKENIZER = train_tokenizer([TEXT], 330, GAP_TOKENS[0])
ROWS = code_rows([TEXT], TOKENIZER, 0.5, length=64)


def pieces(ids: list[int], marks: tuple[int, int, int]) -> tuple[list[int], list[int], list[int]]:
    """Before, gap and after."""
    prefix, suffix, middle = marks
    assert [ids.count(mark) for mark in marks] == [1, 1, 1] and ids[1] == prefix
    at, end = ids.index(suffix), ids.index(middle)
    if at > 2 or end < at:  # PSM
        return ids[2:at], ids[end + 1 :], ids[at + 1 : end]
    return [], ids[end + 1 :], ids[at + 1 : end]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.sampled_from([0.0, 1.0]))
def test_the_pieces_are_the_text_of_the_row_but_for_its_end(seed: int, order: float):
    marks = gap_tokens(TOKENIZER)
    made = with_gaps(ROWS, TOKENIZER, InfillSettings(share=1.0, suffix_first=order), seed)
    changed = [(row, new) for row, new in zip(ROWS, made, strict=True) if new is not row]
    assert len(changed) > len(ROWS) // 3
    for row, new in changed:
        assert (
            new.token_ids.shape == row.token_ids.shape and new.token_ids.dtype == np.int32 and new.weight is row.weight
        )
        assert new.token_ids[0] == row.token_ids[0], "it begins as every row"
        before, gap, after = (TOKENIZER.decode(part) for part in pieces(new.token_ids.tolist(), marks))
        whole = TOKENIZER.decode(row.token_ids.tolist())
        assert whole.startswith(before + gap) and (not after or after in whole)
        if order == 1.0:
            assert new.token_ids[2] == marks[1] and before == "", "the suffix comes first, the prefix runs into the gap"
    assert [r.token_ids.tolist() for r in made] == [
        r.token_ids.tolist() for r in with_gaps(ROWS, TOKENIZER, InfillSettings(share=1.0, suffix_first=order), seed)
    ]


def test_a_tokenizer_without_them_is_refused_and_a_cut_character_is_left_alone(tokenizer: Tokenizer):
    with pytest.raises(
        ValueError, match=r"midtrain.infill.share: the tokenizer has no tokens for infilling; set it to 0"
    ):
        with_gaps(ROWS, tokenizer, InfillSettings(share=0.1), 0)
    half = TOKENIZER.encode("é", add_special_tokens=False).ids[1:]
    row = TokenRow(np.array([0, *half, *ROWS[0].token_ids[1:]], np.int32), np.ones(64 + len(half), np.float32))
    assert with_gaps([row], TOKENIZER, InfillSettings(share=1.0), 0) == [row]
