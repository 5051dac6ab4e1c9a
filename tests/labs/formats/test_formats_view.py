"""Figures of number formats draw what was computed."""

from __future__ import annotations

import pytest
import torch

from composer_nb.kernels.formats.microscaling import mx_quantize_reference, nvfp4_quantize_reference
from composer_nb.labs.formats import view as formats
from composer_nb.labs.formats.findings import FORMATS, changed_past
from composer_nb.labs.formats.trial import Curve


def test_bits_spell_the_numbers():
    x = torch.tensor([-2.0, 1.0, *[0.0] * 30])
    stored = formats.bits_of(x, mx_quantize_reference(x), nvfp4_quantize_reference(x), shown=2)
    assert stored["bf16"] == [0xC000, 0x3F80] and stored["E8M0"] == [127 - 7]
    assert stored["e2m1"] == [0b1111, 0b0101], "-6 and 3 sixths of 2"
    [ax] = formats.bits(stored).axes
    spelled = "".join(text.get_text() for text in ax.texts)
    assert spelled.startswith(f"{0xC000:016b}{0x3F80:016b}") and len(spelled) == 2 * (16 + 8 + 4) + 8 + 8
    assert len(ax.patches) == len(spelled)


def test_errors_are_at_most_half_a_step_of_the_mantissa():
    [ax] = formats.errors(["MXFP8", "NVFP4, a scale per token"]).axes
    eight, four = (line.get_ydata() for line in ax.get_lines())
    assert max(eight[2000:]) <= 1 / 16 + 1e-3 and max(four[-400:]) > 0.1
    assert max(four[:1000]) == 1, "far below the largest nothing is left"


def test_a_bar_for_each_token():
    x = torch.randn(5, 32)
    x[-1] = x.abs().max()
    found = {name: changed_past(FORMATS[name], x) for name in FORMATS if "NVFP4" in name}
    own, shared = formats.by_token(found, "leak", "change").axes
    assert [bar.get_height() for bar in own.patches] == [0] * 4
    assert [bar.get_height() for bar in shared.patches] == pytest.approx(found["NVFP4, a scale per tensor"].tolist())


def test_divisions_show_their_shares():
    one = {"float32 scales": 0.5, "e4m3 scales": 0.01, "codes": 0.0, "tokens with any": 1.0}
    [ax] = formats.divisions({"inverse": one}).axes
    assert [text.get_text() for text in ax.texts] == ["0.5", "0.01", "0", "1"]


def test_curves():
    curves = [
        Curve(recipe="bf16", division="ieee", losses=[2.0] * 9, held_out=2.0, gap=[], weights=torch.ones(1)),
        Curve(
            recipe="nvfp4",
            division="inverse",
            losses=[2.2] * 9,
            held_out=2.2,
            gap=[(1, 0.1, 0.2)],
            weights=torch.ones(1),
        ),
    ]
    left, right = formats.losses(curves, smooth=3).axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["bf16", "nvfp4, inverse"]
    assert right.get_lines()[1].get_ydata() == pytest.approx([10.0] * 7)
    [ax] = formats.gaps(curves[1:]).axes
    assert [line.get_ydata().tolist() for line in ax.get_lines()] == [[0.1], [0.2]]
    assert formats.values().png().startswith(b"\x89PNG")
