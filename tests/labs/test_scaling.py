"""Loss against tokens: lines through points that lie on one, and bytes counted by decoding."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_nb.cli import main
from composer_nb.labs.scaling import bytes_per_token, fit_loss, predictions
from composer_nb.trainer.learning.data import TokenRow, code_rows
from composer_nb.trainer.recipe.reader import EXAMPLES

TOKENS = [1e3, 3e3, 1e4, 5e4, 2e5]


@given(intercept=st.floats(-5, 5), slope=st.floats(-2, 2))
def test_points_on_a_line_give_that_line(intercept: float, slope: float):
    x = np.log(TOKENS)
    straight = fit_loss(TOKENS, intercept + slope * x)
    assert straight.shape == "log-linear"
    assert (straight.intercept, straight.slope) == pytest.approx((intercept, slope), abs=1e-6)
    assert straight.predict(math.e * 1e5) - straight.predict(1e5) == pytest.approx(slope, abs=1e-6)
    power = fit_loss(TOKENS, np.exp(intercept + slope * x), "power")
    assert power.slope == pytest.approx(slope, abs=1e-6)
    assert power.predict(2e6) / power.predict(1e6) == pytest.approx(2**slope, rel=1e-6), "a share a doubling"


def test_bytes_are_those_of_the_text(tokenizer: Tokenizer):
    texts = ["def f(xs):\n    return 'äß✓' * 3  # ∑\n" * 20]
    rows = code_rows(texts, tokenizer, 1.0)
    text = b"".join(tokenizer.decode(row.token_ids[1:].tolist()).encode() for row in rows if row is rows[0])
    first = bytes_per_token(rows[:1], tokenizer)
    # A cut inside a character decodes to signs that stand for it; everything else is exact.
    assert first * (len(rows[0].token_ids) - 1) == pytest.approx(len(text), abs=4)
    ids = tokenizer.encode("abc", add_special_tokens=False).ids
    special = tokenizer.token_to_id("<|end|>")
    row = TokenRow(np.array([special, *ids, special], np.int32), np.ones(len(ids) + 2, np.float32))
    assert bytes_per_token([row], tokenizer) == pytest.approx(3 / (len(ids) + 1)), "special tokens are no text"
    with pytest.raises(ValueError, match="nothing to predict"):
        bytes_per_token([], tokenizer)


def test_a_prediction_is_judged_at_the_last_point():
    loss = (4 - 0.3 * np.log(TOKENS)).tolist()
    exact = predictions(TOKENS, loss)
    assert exact["log-linear"][1] == pytest.approx(0, abs=1e-9) and exact["power"][1] > 0.01, "it bends"
    higher = predictions(TOKENS, [*loss[:-1], loss[-1] + 1])
    assert higher["log-linear"][1] == pytest.approx(-1) and higher["log-linear"][0] == exact["log-linear"][0]


def test_the_command_fits_a_run_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["scaling", str(EXAMPLES[0]), "--json", "--png", str(tmp_path / "fit.png")]) == 0
    fit = json.loads(capsys.readouterr().out)
    assert fit["laws"]["log-linear"]["slope"] < 0 and fit["tokens"] == sorted(fit["tokens"])
    assert len(fit["loss"]) == len(fit["tokens"]) > 5 and (tmp_path / "fit.png").read_bytes()[1:4] == b"PNG"
    assert main(["scaling", str(EXAMPLES[0])]) == 0 and "log-linear" in capsys.readouterr().out
    assert main(["scaling", str(EXAMPLES[0]), "--loss", "no_loss"]) != 0
    assert "fewer than three measurements of 'no_loss'" in capsys.readouterr().err
