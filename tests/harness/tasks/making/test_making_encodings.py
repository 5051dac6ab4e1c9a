"""Sources with a mark, other line ends, form feeds or other encodings: tasks are made of them, or a line says why not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from composer_nb.harness.tasks.making.changes import bugs, features, units
from composer_nb.harness.tasks.making.options import read_options
from composer_nb.harness.tasks.making.repository import of_files, read_repository

MARK = "\ufeff"
SHARES = '''def split(amount, people):
    """Split an amount of cents among people, as evenly as possible.

    The larger shares come first.
    """
    if people < 1:
        raise ValueError("nobody")
    share, rest = divmod(amount, people)
    return [share + 1] * rest + [share] * (people - rest)


def largest(shares):
    best = shares[0]
    for share in shares:
        if share > best:
            best = share
    return best
'''
TESTS = """import pytest

from money.shares import largest, split


@pytest.mark.parametrize(("amount", "people", "shares"), [(10, 3, [4, 3, 3]), (9, 3, [3, 3, 3]), (1, 2, [1, 0])])
def test_split(amount, people, shares):
    assert split(amount, people) == shares


def test_largest():
    assert largest([3, 9, 4]) == 9
    assert largest([2, 1]) == 2


def test_split_nobody():
    with pytest.raises(ValueError):
        split(1, 0)
"""
LAYOUTS = {
    "plain": SHARES,
    "mark": MARK + SHARES,
    "returns": SHARES.replace("\n", "\r\n"),
    "both": MARK + SHARES.replace("\n", "\r\n"),
    "form feeds": SHARES.replace("\n\n\ndef", "\n\f\n\fdef"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bugs_keep_the_layout_of_their_file(name: str) -> None:
    files = {"m.py": LAYOUTS[name]}
    where = units("m.py", files["m.py"])
    assert [unit.name for unit in where] == ["split", "largest"]
    changes = [*bugs(files, where, "0"), *features(files, where, "0")]
    plain, there = {"m.py": SHARES}, units("m.py", SHARES)
    usual = {change.kind for change in (*bugs(plain, there, "0"), *features(plain, there, "0"))}
    assert {change.kind for change in changes} == usual
    for change in changes:
        text = change.apply(files)["m.py"]
        assert text.startswith(MARK) == files["m.py"].startswith(MARK) and text.count(MARK) == files["m.py"].count(MARK)
        assert ("\r" in text) == ("\r" in files["m.py"]) and text.count("\r") in (0, text.count("\n"))
        assert text.count("\f") == files["m.py"].count("\f")
        ast.parse(text.removeprefix(MARK))


def test_sources_without_bugs_are_named_with_their_reason() -> None:
    for text, reason in (
        (SHARES.replace("\n", "\r\n", 3), "its lines end in several ways"),
        ("{{ name }}: template\n", "not Python"),
        ("a\n" * 200_000, "not parsed: 400000 characters"),
    ):
        with pytest.raises(ValueError, match=reason):
            units("m.py", text)


def test_whatever_is_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    for path, data in {
        "money/shares.py": (MARK + SHARES).encode(),
        "money/latin.py": "# -*- coding: latin-1 -*-\nNAME = 'Café'\n".encode("latin-1"),
        "money/broken.py": b"NAME = '\xff'\n",
        "money/logo.png": b"\0\1",
        "money/shares.pyc": b"x",
        "data.csv": b"1" * (1 << 20) + b"1",
        ".git/config": b"",
        "test_shares.py": TESTS.encode(),
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    (tmp_path / "link.py").symlink_to("test_shares.py")
    (tmp_path / "folder").symlink_to("money")
    repository = read_repository(tmp_path)
    assert set(repository.files) == {"money/shares.py", "test_shares.py"}
    assert repository.files["money/shares.py"] == MARK + SHARES, "the mark stays in the file"
    assert repository.left_out == {
        ".git": "history",
        "data.csv": "more than 1 MiB",
        "folder": "a link",
        "link.py": "a link or device",
        "money/broken.py": "in another encoding, not in UTF-8",
        "money/latin.py": "in iso-8859-1, not in UTF-8",
        "money/logo.png": "no text",
        "money/shares.pyc": "a cache",
    }
    with pytest.raises(ValueError, match=r"no Python source besides tests; left out: money/latin.py: in iso-8859-1"):
        entries = [("money/latin.py", b"# coding: latin-1\n\xe9"), ("test_a.py", b"")]
        of_files("r", entries, tmp_path)


PYTEST = '[pytest]\naddopts = ["-m", "not network"]\ntestpaths = ["tests"]\npython_functions = ["check_*"]\nxfail_strict = true\n'


def test_the_newest_forms_of_pytests_configuration_are_read_first() -> None:
    others = {"pytest.ini": "[pytest]\naddopts = -k none\n", "tests/test_a.py": ""}
    for name in ("pytest.toml", ".pytest.toml"):
        found = read_options(others | {name: MARK + PYTEST})
        assert found.select == ("-m", "not network") and found.paths == ("tests",)
        assert found.ini == "python_functions =\n    check_*\nxfail_strict =\n    True\n"
    assert read_options(others | {"pytest.toml": ""}).select == (), "an empty one counts too, as pytest has it"
    assert read_options(others | {"pytest.toml": PYTEST, ".pytest.toml": "["}).paths == ("tests",)
    with pytest.raises(ValueError, match=r"pytest.toml cannot be read for pytest's options: .*table \[pytest\]"):
        read_options({"pytest.toml": "addopts = '-x'\n"})
