"""Reading repositories: what is part of a task, and what never is."""

from pathlib import Path

import pytest

from composer_nb.harness.tasks.making import repository as reading
from composer_nb.harness.tasks.making.repository import of_files, read_repository
from tests.folders import write


def test_a_checkout_without_what_gives_answers_away(checkout: Path, files: dict[str, str]) -> None:
    repository = read_repository(checkout)
    assert repository.files == files and repository.name == "shapes"
    assert repository.sources == ("shapes/__init__.py", "shapes/core.py")
    assert set(repository.tests) == {"tests/test_core.py", "tests/test_odd.py"} and repository.scope == ("shapes/**",)


def test_what_is_no_repository_is_refused(tmp_path: Path) -> None:
    for name, lacks in (("a.py", "no test module"), ("test_a.py", "no Python source"), ("a.txt", "no test module")):
        with pytest.raises(ValueError, match=lacks):
            read_repository(write(tmp_path / name, {name: b""}))
    with pytest.raises(FileNotFoundError, match="no repository here"):
        read_repository(tmp_path / "none")
    (tmp_path / "a.tar.gz").write_text("x")
    with pytest.raises(ValueError, match="not a folder; unpack an archive first"):
        read_repository(tmp_path / "a.tar.gz")


def test_what_is_too_large_is_refused(tmp_path: Path, files: dict[str, str], monkeypatch):
    path = write(tmp_path, files)
    monkeypatch.setattr(reading, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match="name the package's folder"):
        read_repository(path)


def test_whatever_is_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    files = {
        "money/shares.py": "\ufeffx = 1\n".encode(),
        "money/latin.py": "# -*- coding: latin-1 -*-\nNAME = 'Café'\n".encode("latin-1"),
        "money/broken.py": b"NAME = '\xff'\n",
        "money/logo.png": b"\0\1",
        "money/shares.pyc": b"x",
        "data.csv": b"1" * (1 << 20) + b"1",
        ".git/config": b"",
        "test_shares.py": b"",
    }
    write(tmp_path, files)
    (tmp_path / "link.py").symlink_to("test_shares.py")
    (tmp_path / "folder").symlink_to("money")
    repository = read_repository(tmp_path)
    assert set(repository.files) == {"money/shares.py", "test_shares.py"}
    assert repository.files["money/shares.py"] == "\ufeffx = 1\n", "the mark stays in the file"
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
