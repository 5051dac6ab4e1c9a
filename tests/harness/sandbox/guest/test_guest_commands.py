"""The resident program's commands and files, where a real sandbox would show it only on a busy machine, or with much data."""

import ast
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.sandbox.backend import resident_program
from composer_nb.harness.sandbox.guest import commands as guest_commands
from composer_nb.harness.sandbox.guest import files as guest_files
from composer_nb.harness.sandbox.guest.commands import Commands


def test_an_image_with_python_3_9_can_begin_the_resident_program() -> None:
    """Its interpreter evaluates annotations unless a module says otherwise, and knows no `X | Y` of types."""
    [sources] = re.findall(r"^.*linux.*$", resident_program("{}")[4:].decode(), re.M)
    modules = ast.literal_eval(sources[sources.index("[") : sources.rindex("]") + 1])
    assert len(modules) == 7
    for name, source in modules:
        assert "\nfrom __future__ import annotations\n" in source, name
        ast.parse(source, feature_version=(3, 9))


def test_what_was_killed_is_waited_for_also_when_it_has_become_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    me, later = os.getpid(), 1 << 40
    children, orphan = [(10, me, 5), (11, 10, 6)], [(11, me, 6)]
    tables = [children, [*children, (12, 11, 7)], orphan, orphan, [(11, me, 9)]]  # at last its number is another's
    killed: list[tuple[int, int]] = []
    commands: Any = Commands.__new__(Commands)
    commands.running = {10}
    monkeypatch.setattr(commands, "reap", lambda: None)
    monkeypatch.setattr(guest_commands, "processes", lambda: iter(tables.pop(0)))
    monkeypatch.setattr(os, "kill", lambda pid, signal_number: killed.append((pid, signal_number)))
    assert commands.end(10, later)
    assert tables == []
    ended = {pid for pid, signal_number in killed if signal_number == signal.SIGKILL}
    assert ended == {10, 11, 12}, "what was forked meanwhile as well"


def test_a_command_that_dies_late_is_ended_although_nothing_is_left_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, signal_number: int) -> None:
        if pid == -1:
            raise ProcessLookupError

    tables = [[(10, 1, 5)]] * 2
    commands: Any = Commands.__new__(Commands)
    commands.running = {10}
    monkeypatch.setattr(commands, "reap", lambda: None)
    monkeypatch.setattr(guest_commands, "processes", lambda: iter(tables.pop() if tables else []))
    monkeypatch.setattr(guest_commands, "KILL_S", -1.0)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "kill", kill)
    assert commands.end(10, 1 << 40)


def test_names_that_are_more_than_the_files_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_files, "HEADERS", 1000)
    for number in range(9):
        (tmp_path / str(number)).write_bytes(b"")
    with pytest.raises(OSError, match="names are more than"):
        guest_files.WorkspaceFiles(str(tmp_path), 1 << 20).pack(0, False)
