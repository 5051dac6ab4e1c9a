import pytest

from daybook.days import day_number, days_between, days_in, is_leap, next_day, parse_day, weekday


@pytest.mark.parametrize("year, leap", [(2024, True), (2023, False), (1900, False), (2000, True)])
def test_leap_years(year, leap):
    assert is_leap(year) is leap


def test_days_of_months():
    assert days_in(2023, 2) == 28
    assert days_in(2024, 2) == 29
    assert days_in(2024, 12) == 31
    assert days_in(2024, 4) == 30


@pytest.mark.parametrize("month", [0, 13])
def test_no_such_month(month):
    with pytest.raises(ValueError):
        days_in(2024, month)


def test_parsing_a_day():
    assert parse_day("2026-11-22") == (2026, 11, 22)
    assert parse_day(" 2024-02-29 ") == (2024, 2, 29)


@pytest.mark.parametrize("text", ["2026-11", "2026-11-22-1", "2026-x-1", "2023-02-29", "2026-11-00", "2026-13-01"])
def test_what_is_no_day(text):
    with pytest.raises(ValueError):
        parse_day(text)


def test_numbers_of_days():
    assert day_number((1, 1, 1)) == 0
    assert day_number((1, 2, 1)) == 31
    assert day_number((2, 1, 1)) == 365
    assert day_number((2024, 3, 1)) - day_number((2024, 2, 1)) == 29


def test_between():
    assert days_between((2024, 2, 28), (2024, 3, 1)) == 2
    assert days_between((2026, 1, 1), (2025, 1, 1)) == -365


def test_weekdays():
    assert weekday((2026, 11, 22)) == 6
    assert weekday((2024, 1, 1)) == 0


def test_the_day_after():
    assert next_day((2024, 2, 28)) == (2024, 2, 29)
    assert next_day((2023, 2, 28)) == (2023, 3, 1)
    assert next_day((2023, 12, 31)) == (2024, 1, 1)
