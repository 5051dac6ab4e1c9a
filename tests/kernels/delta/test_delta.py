"""The distribution that encoder and decoder share."""

from __future__ import annotations

import numpy as np

from composer_nb.kernels.delta import block as delta

U = np.uint64


def test_the_distribution_begins_and_ends_as_the_format_says() -> None:
    assert [int(x) for x in delta.KNOTS[:2]] == [0, 2**30 * 260218914 >> 32]
    assert delta.cumulative(U(1 << 16), U(1 << 16)) == delta.KNOTS[1]
    assert delta.cumulative(U(2**40), U(1 << 16)) == delta.GIVEN_UP
