"""Amounts of money as whole cents."""


def parse_amount(text):
    """`1,250.40` as 125040 cents, `-3` as -300. Thousands may be set off by commas.

    More than two digits after the point, and anything that is no amount, is a ValueError.
    """
    plain = text.strip().replace(",", "")
    negative = plain.startswith("-")
    whole, point, cents = plain.lstrip("-").partition(".")
    if not whole.isdigit() or (point and not cents.isdigit()) or len(cents) > 2:
        raise ValueError(f"not an amount: {text}")
    total = int(whole) * 100 + int(cents.ljust(2, "0"))
    return -total if negative else total


def show_amount(cents):
    """The other way round, with commas and always two digits after the point."""
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents), 100)
    return f"{sign}{whole:,}.{rest:02d}"


def split_evenly(cents, parts):
    """An amount in so many parts that differ by a cent at most, the larger ones first. Fewer than one part is a ValueError."""
    if parts < 1:
        raise ValueError("at least one part")
    each, left = divmod(cents, parts)
    return [each + 1] * left + [each] * (parts - left)


def interest(cents, percent, days):
    """Simple interest on an amount for so many days of a year of 360, in cents, rounded half up."""
    product = cents * percent * days
    return (2 * product + 36000) // 72000
