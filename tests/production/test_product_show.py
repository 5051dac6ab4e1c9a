"""What a user sees of an agent's turns on a terminal."""

import io

import pytest
from rich.console import Console

from composer_nb.harness.rollout import Turn
from composer_nb.harness.terms.registry import called
from composer_nb.production.show import call_line, teller

UNREAD = "(a call that could not be read)"


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ('{"name": "read_file", "arguments": {"path": "a.py"}}', "read_file path='a.py'"),
        ('{"name": "undo"}', "undo"),
        ("", UNREAD),
        ("<|to|>grep def \x1b[2J", UNREAD + " <|to|>grep def \\x1b[2J"),
        ("[1, 2]", UNREAD + " [1, 2]"),
        ('{"name": "x", "arguments": 3}', UNREAD + ' {"name": "x", "arguments": 3}'),
        ("[" * 100_000, UNREAD + " " + "[" * (199 - len(UNREAD))),
    ],
)
def test_a_call_is_one_line_also_where_it_could_not_be_read(call: str, line: str) -> None:
    """A policy may write anything, and an agent does not end because of what it shows."""
    turn = Turn(call=call, observation="error: bad call", error="InvalidArguments")
    assert call_line(turn) == line
    assert called(turn)[0] == ("" if line.startswith(UNREAD) else line.split()[0])
    page = io.StringIO()
    teller(Console(file=page, width=300))(turn)
    assert "error: bad call" in page.getvalue()
