"""The three evaluations of a base, on models whose answers are known, and against slower references."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_nb.cli import main
from composer_nb.harness.tasks.patch import apply_patch
from composer_nb.labs.bases import BaseCandidate, chosen, distance, make_histories, make_questions, rolling_loss
from composer_nb.trainer.models.checkpoint import save_pretrained

TEXT = "".join(
    f"def f_{n}({', '.join('abcdefg'[k] + str(n) for k in range(2 + n % 3))}):\n    return {n} * a{n}\n\n\n"
    for n in range(9)
)
SIZES = {"vocab_size": 420, "max_position_embeddings": 512}


@pytest.fixture
def base(make_model: Callable, tokenizer: Tokenizer) -> BaseCandidate:
    return BaseCandidate(name="tiny", model=make_model(0, **SIZES), tokenizer=tokenizer)


@pytest.fixture
def even(make_model: Callable, tokenizer: Tokenizer) -> BaseCandidate:
    """Every token is as probable as every other, always."""
    model = make_model(0, **SIZES)
    with torch.no_grad():
        model.final_norm.zero_()
    return BaseCandidate(name="even", model=model, tokenizer=tokenizer)


@pytest.mark.parametrize(("window", "stride"), [(9, 1), (12, 5), (40, 39)])
@torch.no_grad()
def test_each_token_is_predicted_once_from_the_window_before_it(base: BaseCandidate, window: int, stride: int):
    text = TEXT[:160]
    stream = np.array([base.first, *base.ids(text)], np.int32)
    total = 0.0
    for position in range(1, len(stream)):
        end = min(len(stream), 1 + -(-position // stride) * stride)  # of the window that predicts it
        logits, _ = base.model(torch.from_numpy(stream[None, max(0, end - window) : position]).long())
        total -= float(torch.log_softmax(logits[0, -1], -1)[stream[position]])
    assert rolling_loss(base, text, window, stride) == pytest.approx(total, rel=1e-4)


def test_questions_have_one_right_choice_and_an_even_model_takes_the_one_with_the_longest_tokens(even: BaseCandidate):
    questions = make_questions([TEXT], 100, 4, 0)
    assert len(questions) == 9 and questions == make_questions([TEXT], 100, 4, 0) != make_questions([TEXT], 100, 4, 1)
    for question in questions:
        assert len(set(question.choices)) == 4 and question.prompt + question.choices[question.answer] in TEXT
        wrong = set(question.choices) - {question.choices[question.answer]}
        assert not any(question.prompt + choice in TEXT for choice in wrong)
        cost = [len(even.ids(choice)) / len(choice) for choice in question.choices]
        assert cost[chosen(even, question)] == pytest.approx(min(cost))
    with pytest.raises(ValueError, match=r"questions: 0 functions differ .* 4 are needed"):
        make_questions(["x = 1", "def f("], 5, 4, 0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), lines=st.integers(1, 8), edits=st.integers(0, 6))
def test_the_diffs_of_a_history_lead_to_its_end(seed: int, lines: int, edits: int):
    for history in make_histories([TEXT, "x"], 3, lines, edits, seed):
        files = {"f.py": history.start}
        for diff in history.diffs:
            if diff:
                files |= apply_patch(files, f"--- a/f.py\n+++ b/f.py\n{diff}")
        assert files["f.py"] == history.end and len(history.diffs) == edits and history.start in TEXT


def test_distance_is_levenshteins():
    pairs = ("kitten", "sitting"), ("saturday", "sunday"), ("", "ab"), ("é\n", "e\n"), ("abc", "abc")
    assert [distance(*pair) for pair in pairs] == [3, 3, 2, 1, 0]


def test_the_command_compares_checkpoints(base: BaseCandidate, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base.tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_pretrained(base.model, tmp_path / "m", tokenizer=tmp_path / "tokenizer.json")
    for number in range(20):
        (tmp_path / f"m{number}.py").write_text(TEXT)
    sizes = ["bytes=2000", "questions=4", "histories=2", "lines=3", "edits=1"]
    line = ["bases", str(tmp_path / "m"), f"random:{tmp_path / 'm'}", *(word for s in sizes for word in ("--set", s))]
    line += ["--code", str(tmp_path)]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "random m" in out and "no model" in out and "bits/byte" in out
