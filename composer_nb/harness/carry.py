"""Carry a repository into an agent's sandbox, and the agent's work out again."""

import errno
import hashlib
import re
import threading
from dataclasses import dataclass
from typing import Literal

from composer_nb.harness.sandbox.contract import Sandbox, Snapshot, members
from composer_nb.harness.tasks.history import LISTING
from composer_nb.harness.tools.session import FOLDER

Mode = Literal["100644", "100755"]
PLAIN: Mode = "100644"
EXECUTABLE: Mode = "100755"
HISTORY_S = 120.0
# Histories that are kept, and the most bytes of the files of one, which take up to four times that with names and history.
KEPT, KEPT_BYTES = 64, 1 << 20
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file of a repository."""

    data: bytes
    mode: Mode = PLAIN

    @property
    def unreadable(self) -> bool:
        """Whether the content is binary, with too little text for its lines to be readable."""
        text = self.data.decode("utf-8", "surrogateescape")
        return b"\0" in self.data[:8000] and _NO_TEXT.subn("", text)[1] > len(text) / 10


def add_history(box: Sandbox, commits: bytes = b"") -> None:
    """Make the workspace a git repository of one commit, if the sandbox has git and it does not take too long. All files get the
    time of that commit, so that tools which sort by time return the same, however fast the files were written. `commits`: others,
    for `git fast-import` (`tasks/history.py`).

    Git runs in the sandbox, without configuration of the system or the user, once for the same files: a later sandbox gets a copy
    of what it made. `changed` ignores this repository.
    """
    try:
        files = box.snapshot(max_bytes=KEPT_BYTES).digest
        kind = (box.backend.name, box.spec.image, f"{files} {hashlib.sha256(commits).hexdigest()}")
    except OSError:
        kind = None
    if kind and (snapshot := _histories.get(kind)):
        box.restore(snapshot)
        return
    who = {f"GIT_{role}_{part}": text for role in ("AUTHOR", "COMMITTER") for part, text in _WHO.items()}
    command = ["sh", "-c", _HISTORY, "sh", "import" if commits else ""]
    if box.exec(command, env=who | _ALONE, stdin=commits, timeout_s=HISTORY_S, granted=True).exit_code:
        box.exec(["rm", "-rf", ".git"])
    elif kind and len((new := box.snapshot()).archive) <= 4 * KEPT_BYTES:
        with _lock:
            while len(_histories) >= KEPT:
                del _histories[next(iter(_histories))]
            _histories[kind] = new


def commits_left(box: Sandbox, refs: str = "HEAD") -> str:
    """Return the list of commits and files that a task about git is graded by (`tasks/history.py`)."""
    listing = box.exec(["sh", "-c", LISTING.format(refs)], env=_ALONE, granted=True)
    return listing.stdout.decode("utf-8", "replace")


# By backend, image and digest of the files and commits: these files with their history.
_histories: dict[tuple[str, str, str], Snapshot] = {}
_lock = threading.Lock()
# Author of the commit, fixed so that the same files always give the same commit.
_WHO = {"NAME": "composer_nb", "EMAIL": "composer_nb@localhost", "DATE": "2000-01-01T00:00:00Z"}
_ALONE = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}  # no configuration but the repository's
_HISTORY = f"""
find . -type f -exec touch -d @946684800 {{}} +
command -v git >/dev/null && [ ! -e .git ] || exit 0
git -c init.defaultBranch=main init -q --template= &&
mkdir -p .git/info && echo '{FOLDER}*' >.git/info/exclude &&
git config user.name agent && git config user.email agent@localhost &&
if [ "$1" ]; then
    git fast-import --quiet && git reset -q && git rev-parse -q --verify topic >/dev/null || exit 0
    git reset -q --hard && git merge -q topic || true
else
    git -c core.compression=1 add -A && git commit -q --allow-empty -m 'the repository as the agent got it'
fi
"""


_FIND = """. -type d ! -perm -700 -exec chmod u+rwx -- {} ; -o -type f ! -perm -600 -exec chmod u+rwX -- {} +
-o ! -type f ! -type d -print0"""  # busybox too; a folder is opened after it was made readable


def carry_back(box: Sandbox) -> tuple[dict[str, Blob], set[str]]:
    """End all processes, and return an agent's files, and the paths of everything else except folders.

    Files that the agent made unreadable are read nevertheless. Raises OSError for more than can be carried.
    """
    box.end_all()
    listing = box.exec(["find", *_FIND.split()], output_bytes=4 << 20, granted=True)
    if listing.exit_code or listing.truncated:
        raise OSError(errno.EFBIG, "its folders cannot be listed")
    others = listing.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    entries = [(info, data) for info, data in members(box.snapshot().archive) if info.isreg()]
    files = {i.name: Blob(data=data, mode=EXECUTABLE if i.mode & 0o100 else PLAIN) for i, data in entries}
    return files, {path.removeprefix("./") for path in others}
