import pytest

from daybook.amounts import interest, parse_amount, show_amount, split_evenly


def test_parsing():
    assert parse_amount("1,250.40") == 125040
    assert parse_amount("-3") == -300
    assert parse_amount("0.5") == 50
    assert parse_amount(" 12.05 ") == 1205


@pytest.mark.parametrize("text", ["", "x", "1.234", "1.x", "--", "."])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError):
        parse_amount(text)


def test_showing():
    assert show_amount(125040) == "1,250.40"
    assert show_amount(-5) == "-0.05"
    assert show_amount(0) == "0.00"


def test_splitting():
    assert split_evenly(100, 3) == [34, 33, 33]
    assert split_evenly(99, 3) == [33, 33, 33]
    assert sum(split_evenly(1001, 7)) == 1001


def test_no_parts():
    with pytest.raises(ValueError):
        split_evenly(1, 0)


def test_interest():
    assert interest(100000, 5, 360) == 5000
    assert interest(100000, 5, 30) == 417
    assert interest(100, 0, 30) == 0
