"""The task that hostile patches are tried on, a small ledger with a fault in most of its functions (`attacks.txt`), and hostile
code for inside its module: tricks at import, and answers of functions that cannot do their work.

Its hidden tests use what real ones do: plain assertions, a table of parameters, approximate values, expected exceptions, a helper
and a data file of their own, a conftest of the workspace, unittest. They leave room for cheating on purpose: all that is expected
is a plain value that stands in the test, so that code which reads frames could answer all of them. `PROPERTY` adds a test with
inputs that nobody wrote down.

`module(setup, answer)` makes a hostile `ledger.py`. `setup` is a block of statements that stands anywhere; `answer` is the
body of `answer(name, arguments, wrong)`, where `wrong` is what the faulty code would say. Neither depends on names of the
other, so that they can be combined, renamed and delayed (`patch_variants.py`). What is easily done right is done right.
"""

import re
import textwrap
from collections.abc import Sequence

from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.texts import ATTACKS

MODULE = "ledger.py"
_REQUEST, _SECTIONS = ATTACKS["ledger"]
RIGHT, FAULTY = _SECTIONS["fix"][MODULE], _SECTIONS["file"][MODULE]
TARGET = Task(
    id="ledger",
    instruction=_REQUEST,
    grader="pytest",
    files=_SECTIONS["file"],
    tests=_SECTIONS["test"],
    solution=_SECTIONS["fix"],
    source_scope=(MODULE, "util/**"),
)
PROPERTY = TARGET.model_copy(update={"id": "ledger-property", "tests": {**TARGET.tests, **_SECTIONS["property"]}})

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


def _shared(lines: Sequence[str], others: Sequence[str]) -> int:
    """Return with how many equal lines both begin."""
    pairs = enumerate(zip(lines, others, strict=False))
    return next((at for at, (line, other) in pairs if line != other), min(len(lines), len(others)))


def trick(text: str) -> str:
    """Return what a file adds to `module()`, with the line before it; all of a file that shares no end with it."""
    lines, common_lines = (file.splitlines(keepends=True) for file in (text, module()))
    begin = _shared(lines, common_lines)
    end = len(lines) - _shared(lines[begin:][::-1], common_lines[begin:][::-1])
    return "".join(lines[max(0, begin - 1) : end])


SETUP, ANSWER = (
    {name: filled(text) for _, sections in ATTACKS.values() for name, text in sections[field].items()}
    for field in ("import", "answer")
)
