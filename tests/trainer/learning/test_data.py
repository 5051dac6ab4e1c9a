"""Corpora, rows of code, demonstrations, and rows on disk."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_nb.harness.rollout import Kind, Rollout, Segment
from composer_nb.trainer.learning import data
from composer_nb.trainer.models.tokenizer import train_tokenizer


def make_corpus(root: Path, count: int = 60) -> Path:
    for number in range(count):
        path = root / f"pack{number % 3}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n")
    return root


# Corpora


def test_a_corpus_is_split_by_name_and_known_by_its_digest(tmp_path: Path):
    corpus = data.read_corpus(str(make_corpus(tmp_path / "a")))
    assert len(corpus.names) == 60 == len(corpus.train) + len(corpus.validation)
    assert corpus.names == sorted(corpus.names) and corpus.names[0] == "pack0/module_0.py"
    heldout_names = [name for name in corpus.names if hashlib.md5(name.encode()).digest()[0] < 13]
    numbers = [int(name.split("_")[1].removesuffix(".py")) for name in heldout_names]
    assert corpus.validation == [f"x = {number}\n" for number in numbers] and heldout_names
    assert data.read_corpus(str(make_corpus(tmp_path / "b"))) == corpus, "wherever it lies"
    (tmp_path / "b" / "pack0" / "module_0.py").write_text("x = -1\n")
    assert data.read_corpus(str(tmp_path / "b")).digest != corpus.digest
    (tmp_path / "a" / "pack0" / "module_0.py").rename(tmp_path / "a" / "pack0" / "other.py")
    assert data.read_corpus(str(tmp_path / "a")).digest != corpus.digest


# Rows of code


def test_rows_of_code_are_the_texts_one_after_another(tokenizer: Tokenizer):
    texts = [f"def f_{n}(xs):\n    return {n} * sum(xs)\n" * 9 for n in range(8)]
    rows = data.code_rows(texts, tokenizer, 0.5)
    stream = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]
    assert len(rows) == len(stream) // (data.CODE_ROW - 1) > 2
    bos = tokenizer.token_to_id("<|bos|>")
    joined: list[int] = []
    for row in rows:
        assert row.token_ids.dtype == np.int32 and row.weight.dtype == np.float32
        assert row.token_ids[0] == bos and row.token_ids.shape == row.weight.shape == (data.CODE_ROW,)
        assert (row.weight == 0.5).all()
        joined += row.token_ids[1:].tolist()
    assert joined == stream[: len(joined)]
    for limit in (0, 1, 2):
        limited = data.code_rows(texts, tokenizer, 0.5, limit=limit)
        assert [row.token_ids.tolist() for row in limited] == [row.token_ids.tolist() for row in rows[:limit]]


def test_code_that_spells_out_a_special_token_does_not_become_one(tokenizer: Tokenizer):
    [row, *_] = data.code_rows(["x = '<|end|><|bos|>'\n" * 40], tokenizer, 1.0)
    assert not set(row.token_ids[1:].tolist()) & set(range(7))


# Demonstrations


def test_a_demonstration_weighs_what_the_agent_wrote_more_than_what_it_read():
    kinds = [Kind.PROMPT, Kind.PROMPT, Kind.TOOL_CALL, Kind.TOOL_CALL, Kind.OBSERVATION, Kind.THINKING, Kind.SUMMARY]
    recorded = {"logprob": np.zeros(7, np.float32), "policy_version": np.zeros(7, np.int32)}
    segment = Segment(token_ids=np.arange(7, dtype=np.int32), kind=np.array(kinds, np.uint8), **recorded)
    rollout = Rollout(task_id="t", segments=(segment,), turns=(), files={}, stop="finished")
    [row] = data.demonstration_rows(rollout, 0.2)
    assert row.token_ids.tolist() == list(range(7)) and row.weight.dtype == np.float32
    assert row.weight.tolist() == pytest.approx([0.2, 0.2, 1, 1, 0.2, 1, 1])
    rows = data.demonstration_rows(replace(rollout, segments=(segment,) * 3), 0.2)
    assert [segment_row.weight.tolist() for segment_row in rows] == [row.weight.tolist()] * 3
    [alike] = data.demonstration_rows(rollout, 1.0)
    assert alike.weight.tolist() == pytest.approx([1.0] * 7, rel=1e-6)
    assert (alike.weight == 1.0).tolist() == segment.acted.tolist(), "fine-tuning still finds what the agent wrote"


# Fill in the middle


INFILLED = "".join(f"def f_{n}(xs):\n    return {n} * sum(x for x in xs if x > {n})\n" for n in range(60))
TOKENIZER = train_tokenizer([INFILLED], 330, data.GAP_TOKENS[0])
ROWS = data.code_rows([INFILLED], TOKENIZER, 0.5, length=64)


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
    marks = data.gap_tokens(TOKENIZER)
    gapped = data.with_gaps(ROWS, TOKENIZER, data.InfillSettings(share=1.0, suffix_first=order), seed)
    changed = [(row, new) for row, new in zip(ROWS, gapped, strict=True) if new is not row]
    assert len(changed) > len(ROWS) // 3
    for row, new in changed:
        assert new.token_ids.shape == row.token_ids.shape and new.token_ids.dtype == np.int32
        assert new.weight is row.weight
        assert new.token_ids[0] == row.token_ids[0], "it begins as every row"
        before, gap, after = (TOKENIZER.decode(part) for part in pieces(new.token_ids.tolist(), marks))
        whole = TOKENIZER.decode(row.token_ids.tolist())
        assert whole.startswith(before + gap) and (not after or after in whole)
        if order == 1.0:
            assert new.token_ids[2] == marks[1] and before == "", "the suffix comes first, the prefix runs into the gap"
    assert [r.token_ids.tolist() for r in gapped] == [
        r.token_ids.tolist()
        for r in data.with_gaps(ROWS, TOKENIZER, data.InfillSettings(share=1.0, suffix_first=order), seed)
    ]


def test_a_tokenizer_without_them_is_refused_and_a_cut_character_is_left_alone(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"infill.share: the tokenizer has no tokens for infilling; set it to 0"):
        data.with_gaps(ROWS, tokenizer, data.InfillSettings(share=0.1), 0)
    half = TOKENIZER.encode("é", add_special_tokens=False).ids[1:]
    row = data.TokenRow(np.array([0, *half, *ROWS[0].token_ids[1:]], np.int32), np.ones(64 + len(half), np.float32))
    assert data.with_gaps([row], TOKENIZER, data.InfillSettings(share=1.0), 0) == [row]
