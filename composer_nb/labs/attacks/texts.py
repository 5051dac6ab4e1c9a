"""Cases that are written as text: a line `=== title`, a head, and sections that begin with a line `%% field argument`."""

import re
from collections import defaultdict
from pathlib import Path

Sections = dict[str, dict[str, str]]  # field -> argument -> text


def read_cases(text: str) -> dict[str, tuple[str, Sections]]:
    """Return the head and the sections of each case by its title."""
    cases = {}
    for case in re.split(r"^=== ", text, flags=re.M)[1:]:
        head, *parts = re.split(r"^%% ", case.rstrip() + "\n", flags=re.M)
        title, _, head = head.partition("\n")
        sections: Sections = defaultdict(dict)
        for part in parts:
            first, _, body = part.partition("\n")
            field, _, argument = first.partition(" ")
            sections[field][argument] = body
        cases[title] = head.strip(), sections
    return cases


# The hostile patches, the task that they are tried on, and programs that fit rules or look answers up.
ATTACKS = read_cases(Path(__file__).with_name("attacks.txt").read_text(encoding="utf-8"))
