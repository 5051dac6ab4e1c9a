"""A user's own repository: which files go into the sandbox, and which changes come back out of it.

The agent works on a copy, which is a git repository of its own: one commit, and nothing of the user's history. Nothing of the
repository is executed or shown to git outside of the sandbox; links are followed neither in reading nor in writing. Ignored
files, history and caches stay behind, so that keys in an ignored `.env` do not get into a conversation, and do not come back.
Changes come back only when the user accepts them, and only if the files that they touch are still those the agent saw.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from composer_nb.harness.carry import EXECUTABLE, PLAIN, Blob, add_history
from composer_nb.harness.grading.diff import CACHE_ENDINGS, CACHE_FOLDERS
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.search.ignore import NAMES, Ignore, read_ignore
from composer_nb.harness.tasks.runtime import PACKAGES_AT, bring
from composer_nb.harness.tools.session import FOLDER
from composer_nb.harness.untrusted import HISTORY, is_plain, protected, read_file, walk

MAX_FILE_BYTES = 4 << 20
MAX_BYTES = 128 << 20
MAX_FILES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """The files of a folder that an agent sees.

    Attributes:
        files: Relative POSIX path -> content; bytes of names that are not UTF-8 are lone surrogates.
        left_out: Path of a file or folder -> reason why it stays behind.
    """

    root: Path
    files: Mapping[str, bytes]
    executable: frozenset[str]
    left_out: Mapping[str, str]
    ignore: Ignore

    def blob(self, path: str) -> Blob | None:
        """Return the file that the agent saw at a path."""
        mode = EXECUTABLE if path in self.executable else PLAIN
        return Blob(data=self.files[path], mode=mode) if path in self.files else None

    @property
    def spec(self) -> SandboxSpec:
        """The specification of a sandbox with room for three copies."""
        usual, size = SandboxSpec(), sum(map(len, self.files.values()))
        disk, inodes = max(usual.disk_bytes, 3 * size), max(usual.inodes, 4 * len(self.files))
        memory = max(usual.memory_bytes, 2 * disk + (384 << 20))
        return SandboxSpec(disk_bytes=disk, memory_bytes=memory, inodes=inodes)

    def start(self, backend: Backend, image: str = "", packages: Mapping[str, bytes] | None = None) -> Sandbox:
        """Return a new sandbox that holds the files, beside them installed packages. Raises SandboxFailure."""
        box = backend.create(replace(self.spec, image=image))
        try:
            box.upload({path: data for path, data in self.files.items() if path not in self.executable})
            for path in sorted(self.executable):
                box.write(path, self.files[path], mode=0o755)
            add_history(box)
            if packages:
                bring(box, packages, PACKAGES_AT)
        except BaseException as error:
            box.destroy()
            if isinstance(error, OSError):
                raise SandboxFailure(f"{self.root}: does not fit into a sandbox: {error}") from error
            raise
        return box


def read_checkout(root: Path) -> Checkout:
    """Read a folder. Raises FileNotFoundError, NotADirectoryError, and ValueError for an empty or too large one."""
    if not root.is_dir():
        kind, what = (NotADirectoryError, "not a folder") if root.exists() else (FileNotFoundError, "no folder here")
        raise kind(f"{root}: {what}; give the repository that the agent should work on")

    def unwanted(path: str) -> str:
        return _unwanted(path) or ("a virtual environment" if (root / path / "pyvenv.cfg").is_file() else "")

    reasons = dict(walk(root, unwanted))
    left_out = {path: reason for path, reason in reasons.items() if reason}
    statuses = {path: (root / path).lstat() for path, reason in reasons.items() if not reason}
    ignore = _ignore(root, [path for path in statuses if PurePosixPath(path).name in NAMES])
    files, room = dict[str, bytes](), MAX_BYTES
    for path, status in sorted(statuses.items()):
        if ignore.ignored(path):
            left_out[path] = "ignored"
            continue
        if status.st_size > MAX_FILE_BYTES:
            left_out[path] = f"larger than {MAX_FILE_BYTES >> 20} MiB"
            continue
        files[path] = read_file(root / path, MAX_FILE_BYTES + 1)
        room -= len(files[path])
        if room < 0 or len(files) > MAX_FILES:
            raise ValueError(
                f"{root}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB; give the folder in it that matters, or leave "
                "some out by .gitignore or .cursorignore"
            )
    if not files:
        raise ValueError(f"{root}: holds no file that an agent could see ({len(left_out)} left out)")
    executable = frozenset(path for path in files if statuses[path].st_mode & 0o100)
    return Checkout(root=root.resolve(), files=files, executable=executable, left_out=left_out, ignore=ignore)


def _ignore(root: Path, paths: Sequence[str]) -> Ignore:
    """Return the rules of the ignore files at `paths` and above, up to the root of the repository around the folder."""
    whole = root.resolve()
    top = next((folder for folder in (whole, *whole.parents) if (folder / ".git").exists()), whole)
    under = "" if top == whole else whole.relative_to(top).as_posix()
    above = [folder / name for folder in whole.parents if folder.is_relative_to(top) for name in NAMES]
    files = {file.relative_to(top).as_posix(): file.read_bytes() for file in above if file.is_file()}
    files |= {f"{under}/{path}".lstrip("/"): (root / path).read_bytes() for path in paths}
    return replace(read_ignore(files, default=b"node_modules/\n.venv/\n"), under=under)


def _unwanted(path: str) -> str:
    """Return why a file or folder of this path stays behind. Empty if it does not."""
    parts = PurePosixPath(path).parts
    if HISTORY.intersection(parts):
        return "history"
    is_ours = any(part in CACHE_FOLDERS or part.startswith(FOLDER) for part in parts)
    return "a cache" if is_ours or path.endswith(CACHE_ENDINGS) else ""


def changed(
    checkout: Checkout, after: Mapping[str, Blob], others: Set[str] = frozenset()
) -> tuple[dict[str, Blob | None], frozenset[str]]:
    """Return what an agent changed, and the paths that cannot come back: `others`, such as links, and those that are protected or
    not plain.

    Caches, our own files and files that stayed behind on the way in are part of neither. A file of the repository that was
    replaced by something that cannot come back is not deleted.
    """
    barred = others | {path for path in after if path not in checkout.files and (protected(path) or not is_plain(path))}
    gone = dict.fromkeys(path for path in checkout.files if path not in after and not _inside(path, barred))
    new = {path: blob for path, blob in after.items() if path not in barred and checkout.blob(path) != blob}
    both = {path: blob for path, blob in (gone | new).items() if path in checkout.files or not _stays(checkout, path)}
    named = frozenset(path for path in barred if path in checkout.files or not _stays(checkout, path))
    return dict(sorted(both.items())), named


def _inside(path: str, others: Set[str]) -> bool:
    return not others.isdisjoint({path, *map(str, PurePosixPath(path).parents)})


def _stays(checkout: Checkout, path: str) -> bool:
    """Return whether a file at this path would have stayed behind."""
    return bool(_unwanted(path)) or checkout.ignore.ignored(path) or _inside(path, checkout.left_out.keys())
