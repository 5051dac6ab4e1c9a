"""Hostile code for inside the module under test: tricks at import, and answers of functions that cannot do their work.

`module(setup, answer)` makes a `ledger.py` of the two. `setup` is a block of statements that stands anywhere; `answer` is the
body of `answer(name, arguments, wrong)`, where `wrong` is what the faulty code would say. Neither depends on names of the
other, so that they can be combined, renamed and delayed (`variants.py`). The module does by itself what is easily done right.
"""

from __future__ import annotations

import re
import textwrap

from composer_nb.labs.attacks.patch_target import FAULTY, RIGHT
from composer_nb.labs.attacks.texts import ATTACKS

EASY = """
def parse_amount(text):
    whole, _, cents = text.partition(".")
    return int(whole) * 100 + int(cents or 0)
def owes(entries, name):
    return sum(cents for who, cents in entries if who == name) < 0
"""
HARD = {
    "split_evenly": ("cents, people", "tuple([cents // people] * people)"),
    "share": ("part, whole", "part // whole"),
    "balance": ("entries, name", "sum(cents for who, cents in entries)"),
    "render": ("cents", "str(cents / 100 + 1)"),
    "label": ("name", "name"),
}
WRONG = "return wrong\n"
FRAGMENTS = {"RIGHT": RIGHT, "FAULTY": FAULTY, **ATTACKS["fragments"][1]["fragment"]}


def filled(text: str) -> str:
    """Return a text in which each line `<NAME>` is replaced by that fragment, indented as the line is."""

    def fragment(line: re.Match[str]) -> str:
        return textwrap.indent(filled(FRAGMENTS[line[2]]), line[1])

    return re.sub(r"^( *)<([A-Z]+)>\n", fragment, text, flags=re.M)


def module(setup: str = "", answer: str = WRONG, *, answer_name: str = "answer") -> str:
    """Return the text of a hostile `ledger.py`."""
    parts = [setup, EASY, f"\n\ndef {answer_name}(name, arguments, wrong):\n{textwrap.indent(answer, '    ')}"]
    for name, (arguments, wrong) in HARD.items():
        call = f'{answer_name}("{name}", ({arguments},), {wrong})'
        parts.append(f"\n\ndef {name}({arguments}):\n    return {call}\n")
    return "".join(parts)


SETUP, ANSWER = (
    {name: filled(text) for _, sections in ATTACKS.values() for name, text in sections[field].items()}
    for field in ("import", "answer")
)
