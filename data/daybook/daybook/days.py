"""Days of the Gregorian calendar, as (year, month, day)."""

MONTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
    """Whether a year has a 29th of February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in(year, month):
    """How many days a month has. A month that there is not is a ValueError."""
    if not 1 <= month <= 12:
        raise ValueError(f"no month {month}")
    return MONTHS[month - 1] + (1 if month == 2 and is_leap(year) else 0)


def parse_day(text):
    """`2026-11-22` as (2026, 11, 22).

    White space around it does not count. What is no day is a ValueError.
    """
    parts = text.strip().split("-")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise ValueError(f"not a day: {text}")
    year, month, day = (int(part) for part in parts)
    if not 1 <= day <= days_in(year, month):
        raise ValueError(f"no such day: {text}")
    return year, month, day


def day_number(day):
    """How many days after the first of January of the year 1 a day is."""
    year, month, number = day
    before = year - 1
    total = before * 365 + before // 4 - before // 100 + before // 400
    for earlier in range(1, month):
        total += days_in(year, earlier)
    return total + number - 1


def days_between(first, last):
    """Days from one day to another; negative if the other one is earlier."""
    return day_number(last) - day_number(first)


def weekday(day):
    """0 for a Monday, 6 for a Sunday."""
    return day_number(day) % 7


def next_day(day):
    """The day after a day."""
    year, month, number = day
    if number < days_in(year, month):
        return year, month, number + 1
    if month < 12:
        return year, month + 1, 1
    return year + 1, 1, 1
