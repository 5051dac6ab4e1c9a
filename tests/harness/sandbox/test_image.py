"""Images: what the one made of this machine's files has in it and what not; Dockerfiles; pytest in one file."""

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.sandbox import image
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.image import ImageFiles, build_image, host_files, host_image, write_archive


@pytest.fixture(scope="module")
def host(docker_client: Any) -> str:
    return host_image(docker_client)


def archive(files: ImageFiles) -> bytes:
    packed = io.BytesIO()
    write_archive(files, packed)
    return packed.getvalue()


def members(files: ImageFiles) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive(files))) as packed:
        return {info.name: info for info in packed}


def test_links_on_the_way_are_kept_as_links(tmp_path: Path) -> None:
    (tmp_path / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "usr" / "lib" / "real.so.1").write_text("x")
    (tmp_path / "usr" / "lib" / "name.so").symlink_to(tmp_path / "lib" / ".." / "lib" / "real.so.1")
    files = ImageFiles()
    files.add(f"{tmp_path}/lib/name.so")
    assert files.links == {
        f"{tmp_path}/lib": "usr/lib",
        f"{tmp_path}/usr/lib/name.so": f"{tmp_path}/lib/../lib/real.so.1",
    }
    assert set(files.regular) == {f"{tmp_path}/usr/lib/real.so.1"}
    with pytest.raises(FileNotFoundError):
        files.add(f"{tmp_path}/lib/none.so")


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    for name in ("b", "a.py", "c"):
        (tmp_path / name).write_text(name)
    (tmp_path / "c").chmod(0o6751)
    os.link(tmp_path / "b", tmp_path / "d")
    os.utime(tmp_path / "a.py", (1e9, 1e9))
    files, same_files = ImageFiles(), ImageFiles()
    files.add_tree(str(tmp_path))
    for name in ("d", "c", "b", "a.py"):
        same_files.add(f"{tmp_path}/{name}")
    assert archive(files) == archive(same_files) and files.digest() == same_files.digest()
    entries = members(files)
    assert list(entries) == sorted(entries)
    prefix = str(tmp_path).lstrip("/")
    assert all(info.uid == info.gid == 0 for name, info in entries.items() if name != "workspace")
    assert {name for name, info in entries.items() if info.mtime} == {f"{prefix}/a.py"}
    assert entries[f"{prefix}/c"].mode == 0o555
    assert entries[f"{prefix}/d"].islnk() and entries[f"{prefix}/d"].linkname == f"{prefix}/b"

    digest = files.digest()
    (tmp_path / "b").write_text("changed")
    assert files.digest() != digest


def test_what_the_host_image_holds() -> None:
    files = host_files()
    files.add_libraries()
    entries = members(files)
    assert {"usr/bin/python3", "workspace", "tmp", "etc/passwd"} <= set(entries)
    assert any(name.rpartition("/")[2].startswith("ld-") for name in entries), "no loader"
    assert any(name.endswith("/os.py") for name in entries)
    assert entries["workspace"].uid == entries["workspace"].gid == image.UID
    assert entries["tmp"].mode == 0o1777
    assert sum(info.size for info in entries.values()) < 150e6

    outside = {name for name in entries if name.startswith(("root", "home", "opt/", "srv", "mnt", "var/lib"))}
    assert not outside - {name.lstrip("/") for name in files.folders}
    settings = {name for name, info in entries.items() if name.startswith("etc/") and info.isreg()}
    assert settings <= {"etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/ld.so.cache"}
    assert not [name for name in entries if "-packages" in name or "customize." in name]
    assert not [name for name, info in entries.items() if info.mode & (stat.S_ISUID | stat.S_ISGID)]


@pytest.mark.docker
def test_an_image_from_a_dockerfile(docker_client: Any, host: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="has no Dockerfile"):
        build_image(docker_client, tmp_path)
    (tmp_path / "greeting").write_text("hello\n")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"FROM {host}\nCOPY greeting /greeting\n")
    built = build_image(docker_client, tmp_path)
    assert docker_client.containers.run(built, ["cat", "/greeting"], network_mode="none", remove=True) == b"hello\n"
    assert build_image(docker_client, tmp_path) == built
    docker_client.images.remove(built, force=True)

    dockerfile.write_text(f"FROM {host}\nRUN exit 3\n")
    with pytest.raises(SandboxUnavailable, match="cannot be built: .*non-zero code: 3") as failed:
        build_image(docker_client, tmp_path)
    assert "docker load" not in str(failed.value) and "\n" not in str(failed.value)

    dockerfile.write_text("FROM composer-nb-none/such:1\n")
    with pytest.raises(SandboxUnavailable, match="no registry can be reached, bring .* with `docker load`"):
        build_image(docker_client, tmp_path)
