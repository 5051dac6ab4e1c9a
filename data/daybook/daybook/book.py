"""Lines of a daybook: `2026-11-22  -12.50  food  bread and cheese`."""

from daybook.amounts import parse_amount, show_amount
from daybook.days import days_between, parse_day


class Entry:
    """One line."""

    def __init__(self, day, cents, kind, note=""):
        self.day = day
        self.cents = cents
        self.kind = kind
        self.note = note

    def __eq__(self, other):
        return vars(self) == vars(other)


def parse_line(line):
    """A line as an Entry. Fewer than three words are a ValueError."""
    words = line.split()
    if len(words) < 3:
        raise ValueError(f"day, amount and kind are needed: {line}")
    day, amount, kind = words[:3]
    return Entry(parse_day(day), parse_amount(amount), kind.lower(), " ".join(words[3:]))


def parse_book(text):
    """All lines but empty ones and those that begin with `#`, in the order of their days."""
    entries = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            entries.append(parse_line(line))
    return sorted(entries, key=lambda entry: entry.day)


def balance(entries):
    """What all lines add up to."""
    return sum(entry.cents for entry in entries)


def by_kind(entries):
    """What the lines of each kind add up to, the largest sum first, equal ones by name."""
    sums = {}
    for entry in entries:
        sums[entry.kind] = sums.get(entry.kind, 0) + entry.cents
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))


def running(entries):
    """The balance after each line."""
    totals = []
    total = 0
    for entry in entries:
        total += entry.cents
        totals.append(total)
    return totals


def longest_gap(entries):
    """The most days between two lines that follow one another; 0 for fewer than two lines."""
    longest = 0
    for first, second in zip(entries, entries[1:]):
        gap = days_between(first.day, second.day)
        if gap > longest:
            longest = gap
    return longest


def report(entries):
    """A line a kind, and the sum."""
    lines = [f"{kind}: {show_amount(cents)}" for kind, cents in by_kind(entries)]
    return "\n".join([*lines, f"balance: {show_amount(balance(entries))}"])
