"""Images for the backend `docker`: one made of this machine's own files, or one from a Dockerfile.

The *host image* is for where no registry can be reached: this machine's python3 with its standard library, a shell, the usual
small tools and git, and the programs of `toolchain.py`, with the shared libraries that those name. It holds nothing else that was
installed for Python, nothing of anybody's home, and of `/etc` only what is written here, what links in it lead to, and where
libraries are. The same files make the same archive, byte for byte. It is imported once: its tag is a digest of what the files are
called, how long and how old they are. Images of older files stay until
`docker image prune --all --filter label=composer_nb.image`.

Covers Linux with glibc. Does not cover libraries that a program opens by name while it runs, but for the ones in BY_NAME.
"""

import hashlib
import io
import mmap
import os
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from composer_nb.harness.sandbox.contract import PLACES, WORKSPACE
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.toolchain import PLACE, Interpreter, host_programs, install_hint, is_elf, made_programs

HOST_IMAGE = "composer-nb-host"
BUILT_IMAGE = "composer-nb-built"
BUILD_S = 1800
# Most memory of a step of such a build.
BUILD_BYTES = 4 << 30
UID = 47_811  # of who runs in a sandbox, where root makes it: a number that no account uses
WHERE = "/usr/bin:/bin:/usr/sbin:/sbin"
NEEDED = ("sh", "bash")
PROGRAMS = """
    [ awk b2sum base32 base64 basename basenc cat chgrp chmod chown cksum cmp comm cp csplit cut date dd df diff diff3 dir dirname
    du echo egrep env expand expr factor false fgrep find fmt fold free git git-receive-pack git-upload-archive git-upload-pack
    grep groups gunzip gzip head hostid id install join kill link ln logname ls md5sum mkdir mkfifo mktemp more mv nice nl nohup
    nproc numfmt od paste patch pathchk pgrep pkill pr printenv printf ps ptx pwd readlink realpath rm rmdir sdiff sed seq sha1sum
    sha224sum sha256sum sha384sum sha512sum shred shuf sleep sort split stat stdbuf stty sum sync tac tail tar tee test timeout
    touch tr true truncate tsort tty uname unexpand uniq unlink uptime vdir wc which who whoami xargs yes zcat
""".split()
# Libraries beside the C library that it opens itself: for ending threads, for users (before glibc 2.34).
BY_NAME = ("libgcc_s.so.1", "libnss_files.so.2")
# File by which the loader finds libraries that are in no usual place; written anew whenever libraries are installed.
CACHE = "/etc/ld.so.cache"
# Parts of the standard library and of git that nobody installs for a task, or that need a network.
LEFT_OUT = re.compile(
    r"(^|/)(site-packages|dist-packages|_vendor|_bundled|idlelib|turtledemo|test|tests|config-[^/]*|(site|user)customize\.[^/]*)(/|$)"
    r"|\.opt-\d\.pyc$"
    r"|/git-core/(git-)?(daemon|http-|imap-send|instaweb|remote-|scalar|shell|web--browse)[^/]*$"
)
FOLDERS = {"/tmp": 0o1777, "/var/tmp": 0o1777, "/workspace": 0o755, "/proc": 0o755, "/sys": 0o755, "/dev": 0o755}


@dataclass(slots=True)
class ImageFiles:
    """Files of this machine for an image, by their paths there.

    Attributes:
        regular: Path in the image -> file here. They differ for files of folders that a container hides, such as /tmp.
        written: Path in the image -> content and permissions of what is made here.
    """

    folders: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    regular: dict[str, str] = field(default_factory=dict)
    written: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def add(self, path: str) -> None:
        """Add what is at a path, a folder without what is in it, with all links and folders on the way there.

        Raises FileNotFoundError.
        """
        os.stat(path)
        at, todo = "/", path.split("/")
        while todo:
            name = todo.pop(0)
            if name in ("", "."):
                continue
            at = os.path.dirname(at) if name == ".." else os.path.join(at, name)
            if os.path.islink(at):
                target = os.readlink(at)
                self.links[at] = target
                todo = target.split("/") + todo
                at = "/" if target.startswith("/") else os.path.dirname(at)
            elif os.path.isdir(at):
                self.folders.add(at)
            else:
                self.regular[at] = at

    def add_tree(self, folder: str) -> None:
        """Add a folder with what is in it, but for LEFT_OUT, broken links and what this user may not read."""
        if not os.path.isdir(folder):
            return
        self.add(folder)
        for at, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not LEFT_OUT.search(f"{at}/{name}")]
            for path in (os.path.join(at, name) for name in names):
                if not LEFT_OUT.search(path) and os.path.isfile(path) and os.access(path, os.R_OK):
                    self.add(path)

    def digest(self) -> str:
        """Return a digest of names, lengths and times, of what the loader knows, and of this file."""
        digest = hashlib.sha256(Path(__file__).read_bytes())
        digest.update(repr([sorted(self.regular.items()), sorted(self.written.items())]).encode())
        for path in sorted({*self.links, *self.regular.values(), CACHE}):
            status = os.lstat(path) if os.path.lexists(path) else None
            facts = (path, self.links.get(path), status and (status.st_mode, status.st_size, status.st_mtime_ns))
            digest.update(repr(facts).encode())
        return digest.hexdigest()[:32]

    def add_libraries(self) -> None:
        """Add the shared libraries of the programs and libraries so far. Raises SandboxUnavailable."""
        programs = set(filter(is_elf, self.regular.values()))
        libraries, odd = _linked(programs)
        try:
            command = ["ldd", *sorted(odd)]
            result = subprocess.run(command, capture_output=True, text=True, env={"LC_ALL": "C"}, check=False)
        except OSError as error:
            raise SandboxUnavailable(f"ldd, which comes with the C library, cannot be run: {error}") from error
        libraries |= set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", result.stdout, re.M))
        beside = {os.path.dirname(path) for path in libraries if os.path.basename(path) == "libc.so.6"}
        libraries |= {f"{folder}/{name}" for folder in beside for name in BY_NAME}
        for path in filter(os.path.exists, sorted({*libraries, CACHE})):
            self.add(path)


def _linked(programs: set[str]) -> tuple[set[str], set[str]]:
    """Return the libraries that programs need, directly or not, and the files that only `ldd` can resolve."""
    command = [shutil.which("ldconfig", path=f"{WHERE}:/sbin") or "ldconfig", "-p"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return set(), programs
    machine = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(os.uname().machine)
    paths = dict(reversed(re.findall(rf"^\t(\S+) \(libc6,{machine}[^)]*\) => (\S+)$", listing, re.M)))
    libraries, unresolved, pending = set[str](), set[str](), set(programs)
    while pending:
        path = pending.pop()
        needed = _needed(path)
        if needed is None or not all(name in paths or name.startswith("/") for name in needed):
            unresolved.add(path)
            continue
        new = {paths.get(name, name) for name in needed} - libraries
        libraries |= new
        pending |= new
    return libraries, unresolved


def _needed(path: str) -> list[str] | None:
    """Return the names of libraries in an ELF file, and the path of its loader; None if it has its own search path."""
    load, dynamic, loader, needed, strtab, rpath, runpath = 1, 2, 3, 1, 5, 15, 29
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        if elf[4:6] != b"\2\1":
            return None
        table_at, (entry_size, entry_count) = struct.unpack_from("<Q", elf, 32)[0], struct.unpack_from("<HH", elf, 54)
        segments = [struct.unpack_from("<IIQQQQ", elf, table_at + entry_size * index) for index in range(entry_count)]
        names = [elf[seg[2] : seg[2] + seg[5] - 1].decode() for seg in segments if seg[0] == loader]
        tags = [
            struct.unpack_from("<qQ", elf, seg[2] + offset)
            for seg in segments
            if seg[0] == dynamic
            for offset in range(0, seg[5], 16)
        ]
        if any(tag in (rpath, runpath) for tag, _ in tags):
            return None
        for address in [value for tag, value in tags if tag == strtab]:
            [strings_at] = [
                seg[2] + address - seg[3] for seg in segments if seg[0] == load and seg[3] <= address < seg[3] + seg[5]
            ]
            name_offsets = [strings_at + value for tag, value in tags if tag == needed]
            names += [elf[offset : elf.find(b"\0", offset)].decode() for offset in name_offsets]
        return names


def accounts(uid: int) -> dict[str, tuple[bytes, int]]:
    """Return the files by which programs know root and the user of a sandbox: path -> content and permissions."""
    texts = {
        "/etc/passwd": f"root:x:0:0:root:/:/bin/sh\nagent:x:{uid}:{uid}::{WORKSPACE}:/bin/bash\n",
        "/etc/group": f"root:x:0:\nagent:x:{uid}:\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    return {path: (text.encode(), 0o444) for path, text in texts.items()}


def host_files() -> ImageFiles:
    """Return the files of the host image, but for shared libraries. Raises SandboxUnavailable."""
    programs = {f"{PLACE}/{name}": (content, 0o555) for name, content in made_programs().items()}
    files, python = ImageFiles(links=dict(PLACES), written=accounts(UID) | programs), Interpreter.find().path
    files.add(python)
    if os.path.realpath("/usr/bin/python3") == python:
        files.add("/usr/bin/python3")
    else:
        files.links["/usr/bin/python3"] = python
    for path in filter(os.path.isdir, "/bin /sbin /lib /lib64 /usr/bin".split()):  # often links: scripts use them
        files.add(path)
    for name in (*NEEDED, *PROGRAMS):
        program = shutil.which(name, path=WHERE)
        if program is not None:
            files.add(program)
        elif name in NEEDED:
            raise SandboxUnavailable(f"no {name} in {WHERE} to make an image of: {install_hint(name)}")
    for name, program in host_programs().items():
        if os.path.dirname(program) in WHERE.split(":"):
            files.add(program)
        else:
            files.folders.add(PLACE)
            files.regular[f"{PLACE}/{name}"] = program
    code = "import sysconfig; print(*{sysconfig.get_path(n) for n in ('stdlib', 'platstdlib')}, sep='\\n')"
    trees = _output(python, "-I", "-S", "-c", code).splitlines()
    trees += ["/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8"]  # where the C library has it not built in
    if git := shutil.which("git", path=WHERE):
        trees += [_output(git, "--exec-path").strip(), "/usr/share/git-core/templates"]
    for folder in sorted(trees):
        files.add_tree(folder)
    return files


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=True).stdout


def write_archive(files: ImageFiles, target: IO[bytes]) -> None:
    """Write the host image's files as a tar archive, in order, as root's, without times.

    A module's time is kept: by it Python knows whether what it compiled earlier is current.
    """
    folders = files.folders | {*FOLDERS, *map(os.path.dirname, files.written)}
    folders |= {str(parent) for path in folders for parent in Path(path).parents} - {"/"}
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted({*folders, *files.links, *files.regular, *files.written}):
            info, content = tarfile.TarInfo(path.lstrip("/")), b""
            if path in files.written:
                content, info.mode = files.written[path]
                info.size = len(content)
            elif path in files.links:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, files.links[path], 0o777
            elif path in folders:
                info.type, info.mode = tarfile.DIRTYPE, FOLDERS.get(path, 0o755)
                info.uid = info.gid = UID if path == "/workspace" else 0
            else:
                source = files.regular[path]
                info = archive.gettarinfo(source, info.name)  # also knows files with several names
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mode = info.mode & 0o555 | 0o444  # nobody's rights change on the way to another user
                info.mtime = int(info.mtime) if source.endswith(".py") else 0
                content = Path(source).read_bytes() if info.isreg() else b""
            archive.addfile(info, io.BytesIO(content))


def host_image(client: Any) -> str:
    """Return the name of the host image, and make it if the engine of `client` lacks it.

    Raises SandboxUnavailable, SandboxFailure.
    """
    import docker.errors

    files = host_files()
    tag = files.digest()
    name = f"{HOST_IMAGE}:{tag}"
    try:
        client.api.inspect_image(name)
        return name
    except docker.errors.ImageNotFound:
        pass
    try:
        files.add_libraries()
        with tempfile.TemporaryFile() as archive:
            write_archive(files, archive)
            archive.seek(0)
            changes = ["LABEL composer_nb.image=host", "ENV LC_ALL=C.UTF-8", "WORKDIR /workspace"]
            client.api.import_image_from_data(archive, repository=HOST_IMAGE, tag=tag, changes=changes)
        client.api.inspect_image(name)
    except docker.errors.DockerException as error:
        raise SandboxFailure(f"the image {name} could not be imported: {error}") from error
    return name


def build_image(client: Any, folder: Path) -> str:
    """Return the name of an image built from a folder with a Dockerfile; what was built before is reused.

    Covers what the engine's own builder does (no BuildKit); steps have no network, as the sandboxes
    have none: what they need lies in the folder or in the image that it is FROM. Their memory is limited, their processes and the
    disk that they fill are not: build only Dockerfiles that you trust so far. Raises SandboxUnavailable.
    """
    from docker.errors import APIError, BuildError

    if not (folder / "Dockerfile").is_file():
        raise SandboxUnavailable(f"{folder} has no Dockerfile to build an image from")
    labels = {"composer_nb.image": "built"}
    options = {"rm": True, "forcerm": True, "labels": labels, "timeout": BUILD_S, "network_mode": "none"}
    options |= {"container_limits": {"memory": BUILD_BYTES, "memswap": BUILD_BYTES}}
    try:
        image, _ = client.images.build(path=str(folder), **options)
        tag = image.id.removeprefix("sha256:")[:32]
        image.tag(BUILT_IMAGE, tag)
    except (BuildError, APIError) as error:
        why = " ".join(str(error.msg if isinstance(error, BuildError) else error.explanation).split())
        hint = ""
        if "non-zero code" in why:
            hint = "; its steps have no network"
        elif re.search(r"registry|pull access|manifest|dial tcp", why):
            hint = "; where no registry can be reached, bring the image that it is FROM with `docker load`"
        raise SandboxUnavailable(f"{folder}/Dockerfile cannot be built: {why}{hint}") from error
    return f"{BUILT_IMAGE}:{tag}"
