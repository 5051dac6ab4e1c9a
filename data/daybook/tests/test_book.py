import pytest

from daybook.book import Entry, balance, by_kind, longest_gap, parse_book, parse_line, report, running

TEXT = """\
# November
2026-11-03  -12.50  food  bread and cheese
2026-11-01  2,000   Pay

2026-11-20  -700    rent
2026-11-04  -7.50   food
"""


@pytest.fixture
def book():
    return parse_book(TEXT)


def test_a_line():
    assert parse_line("2026-11-03 -12.50 Food bread and cheese") == Entry(
        (2026, 11, 3), -1250, "food", "bread and cheese"
    )
    assert parse_line("2026-11-03 1 x").note == ""


def test_a_short_line():
    with pytest.raises(ValueError):
        parse_line("2026-11-03 5")


def test_a_book(book):
    assert [entry.day[2] for entry in book] == [1, 3, 4, 20]
    assert book[0].kind == "pay"


def test_sums(book):
    assert balance(book) == 128000
    assert by_kind(book) == [("pay", 200000), ("food", -2000), ("rent", -70000)]
    assert by_kind([Entry((1, 1, 1), 5, "b"), Entry((1, 1, 1), 5, "a")]) == [("a", 5), ("b", 5)]


def test_running(book):
    assert running(book) == [200000, 198750, 198000, 128000]
    assert running([]) == []


def test_gaps(book):
    assert longest_gap(book) == 16
    assert longest_gap(book[:1]) == 0


def test_a_report(book):
    assert report(book) == "pay: 2,000.00\nfood: -20.00\nrent: -700.00\nbalance: 1,280.00"
