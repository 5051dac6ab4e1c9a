"""Reading repositories: what is part of a task, and what never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_nb.harness.tasks.making import repository as reading
from composer_nb.harness.tasks.making.repository import read_repository


def laid(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def test_a_checkout_without_what_gives_answers_away(checkout: Path, files: dict[str, str]) -> None:
    found = read_repository(checkout)
    assert found.files == files and found.name == "shapes"
    assert found.sources == ("shapes/__init__.py", "shapes/core.py")
    assert set(found.tests) == {"tests/test_core.py", "tests/test_odd.py"} and found.scope == ("shapes/**",)


@pytest.mark.parametrize(
    ("files", "told"),
    [({"a.py": b""}, "no test module"), ({"test_a.py": b""}, "no Python source"), ({}, "no test module")],
)
def test_what_is_no_repository_is_refused(tmp_path: Path, files: dict[str, bytes], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_repository(laid(tmp_path, files))


def test_bad_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no repository here"):
        read_repository(tmp_path / "none")
    (tmp_path / "a.tar.gz").write_text("x")
    with pytest.raises(ValueError, match="not a folder; unpack an archive first"):
        read_repository(tmp_path / "a.tar.gz")


def test_what_is_too_large_is_left_out_or_refused(tmp_path: Path, files: dict[str, str], monkeypatch):
    held = {path: text.encode() for path, text in files.items()}
    path = laid(tmp_path, held | {"data.sql": b"x" * 5000})
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 4000)
    assert "data.sql" not in read_repository(path).files
    monkeypatch.setattr(reading, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match="name the package's own folder"):
        read_repository(path)
