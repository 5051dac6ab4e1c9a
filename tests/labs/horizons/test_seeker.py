"""The policy that knows nothing but its context: what it does next, and what it writes down, from the text alone."""

import re

from composer_nb.labs.horizons.seeker import seek, summarise, tried

ASKED = "<|bos|><|user|>fix the tests<|end|><|call|>"
FAILED = "test<|end|><|out|>fail 1/2: pick([3]) = 0 want 3<|end|><|call|>"
FOUND = "grep<|to|>def pick<|end|><|out|>calc.py:1def pick(a):<|end|><|call|>"
SHOWN = "undo<|call|>read calc.py<|end|><|out|>same<|end|><|out|>1def pick(a):\n2    return a + 0<|end|><|call|>"
TRIED = "undo<|call|>sub calc.py<|to|> a + 0<|to|> a - 0<|call|>test<|end|><|out|>same<|end|><|out|>ok<|end|><|out|>"
AGAIN = "fail 1/2: pick([3]) = 0 want 3<|end|><|call|>"


def test_it_repeats_a_change_if_and_only_if_its_context_has_lost_it() -> None:
    whole = ASKED + FAILED + FOUND + SHOWN + TRIED + AGAIN
    first = seek(ASKED + FAILED + FOUND + SHOWN)
    summary = summarise(whole, is_long=False)
    assert tried(whole) == tried(summary) == ["tried a + 0 > a - 0"] and "left: try another change" in summary
    assert seek(whole) != first
    assert seek(f"<|user|>fix the tests\n{summary}<|end|><|call|>{SHOWN}") == seek(whole), "the summary has kept it"
    assert seek(ASKED + FAILED + FOUND + SHOWN) == first, "a cut has not"
    long = summarise(whole, is_long=True)
    assert len(re.findall(r"^\d+\. ", long, re.M)) == 12 and len(long) > 3 * len(summary)
    assert tried(long) == tried(summary)
