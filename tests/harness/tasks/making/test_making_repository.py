"""Reading repositories: what is part of a task, and what never is."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from composer_nb.harness.tasks.making import repository as reading
from composer_nb.harness.tasks.making.repository import read_repository


def archive(path: Path, files: dict[str, bytes], top: str = "shapes-1.0/") -> Path:
    with tarfile.open(path, "w:gz") as out:
        for name, data in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def test_a_checkout_without_what_gives_answers_away(
    checkout: Path, files: dict[str, str], leaks: dict[str, str]
) -> None:
    found = read_repository(checkout)
    assert found.files == files and found.name == "shapes"
    assert found.sources == ("shapes/__init__.py", "shapes/core.py")
    assert set(found.tests) == {"tests/test_core.py", "tests/test_odd.py"} and found.scope == ("shapes/**",)
    left_out = {path.split("/")[0] for path in leaks} - {"shapes"}
    assert left_out <= {path.split("/")[0] for path in found.left_out}
    assert found.left_out["shapes/link.py"] == "a link or device" and found.left_out["logo.png"] == "no UTF-8 text"
    assert found.left_out[".git"] == "history" and "shapes/core.py.orig" in found.left_out


def test_an_archive_is_the_same_as_its_folder(
    checkout: Path, tmp_path: Path, files: dict[str, str], leaks: dict[str, str]
) -> None:
    everything = {path: text.encode() for path, text in (files | leaks).items()} | {"PKG-INFO": b"Name: shapes\n"}
    packed = read_repository(archive(tmp_path / "shapes-1.0.tar.gz", everything))
    assert packed.files == read_repository(checkout).files and packed.name == "shapes-1.0"


def test_paths_that_lead_out_of_an_archive_are_dropped(tmp_path: Path, files: dict[str, str]) -> None:
    held = {path: text.encode() for path, text in files.items()}
    path = archive(tmp_path / "evil.tar.gz", held | {"../outside.py": b"", "/abs.py": b"", "a/../../b.py": b""}, top="")
    assert read_repository(path).files == files


def test_of_a_name_that_comes_twice_the_last_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 20)
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        for name, data in (("a.py", b"x" * 30), ("test_a.py", b""), ("a.py", b"y = 2\n"), ("a.py", b"x = 1\n")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    assert read_repository(tmp_path / "a.tar").files == {"a.py": "x = 1\n", "test_a.py": ""}


def test_support_of_tests_in_the_package_comes_with_the_grade(tmp_path: Path) -> None:
    files = {"pkg/a.py": b"x = 1\n", "pkg/tests/test_a.py": b"", "pkg/tests/helper.py": b"", "pkg/tests/data.txt": b"1"}
    found = read_repository(archive(tmp_path / "pkg.tar.gz", files))
    assert found.sources == ("pkg/a.py",) and set(found.hidden) == {path for path in files if "tests" in path}


@pytest.mark.parametrize(
    ("files", "told"),
    [({"a.py": b""}, "no test module"), ({"test_a.py": b""}, "no Python source"), ({}, "no test module")],
)
def test_what_is_no_repository_is_refused(tmp_path: Path, files: dict[str, bytes], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_repository(archive(tmp_path / "a.tar.gz", files))


def test_bad_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no repository here"):
        read_repository(tmp_path / "none")
    (tmp_path / "a.rpm").write_text("x")
    with pytest.raises(ValueError, match="not a folder and not a source distribution"):
        read_repository(tmp_path / "a.rpm")
    (tmp_path / "a.tar.gz").write_text("x")
    with pytest.raises(ValueError, match="not a readable archive"):
        read_repository(tmp_path / "a.tar.gz")


def test_what_is_too_large_is_left_out_or_refused(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {path: text.encode() for path, text in files.items()}
    path = archive(tmp_path / "a.tar.gz", held | {"data.sql": b"x" * 5000})
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 4000)
    assert read_repository(path).left_out["data.sql"] == "too large"
    monkeypatch.setattr(reading, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match="name the package's own folder"):
        read_repository(path)


def test_what_is_too_large_is_not_read_to_its_end(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {path: text.encode() for path, text in files.items()}
    monkeypatch.setattr(reading, "MAX_BYTES", 2000)
    monkeypatch.setattr(reading, "LOOKED_AT", 4)
    packed = archive(tmp_path / "a.tar.gz", held | {f"more{n}.py": b"x = 1\n" * 200 for n in range(40)})
    whole, path = gzip.decompress(packed.read_bytes()), tmp_path / "a.tar"
    path.write_bytes(whole[: len(whole) // 2])  # whoever reads on sees that it is cut
    with pytest.raises(ValueError, match="name the package's own folder"):
        read_repository(path)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    held = {"b.py": b"", "test_a.py": b"", "a.py": os.urandom(20_000).hex().encode()}
    damaged = {}
    plain = gzip.decompress(archive(tmp_path / "a.tar.gz", held).read_bytes())
    packed = {"gz": gzip.compress(plain), "xz": lzma.compress(plain), "bz2": bz2.compress(plain)}
    for ending, whole in packed.items():
        data = bytearray(whole)
        data[len(data) // 2] ^= 255
        damaged[f"a.tar.{ending}"] = bytes(data)
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: not a readable archive"):
            read_repository(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_stop_the_reading(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("")
    (tmp_path / "a.py").write_text("")
    os.mkfifo(tmp_path / "pipe.py")
    assert read_repository(tmp_path).left_out == {"pipe.py": "a link or device"}
