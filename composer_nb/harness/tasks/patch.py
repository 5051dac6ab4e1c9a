"""Apply unified diffs to texts with `git apply` in an empty folder.

New, deleted, renamed and changed text files are supported. Names are checked first, because git accepts absolute ones. Git
refuses paths that lead out of the folder or through a link, and reads no configuration. The resulting files are checked again.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from composer_nb.harness.untrusted import beneath, checked, visible

TIMEOUT_S = 60.0
_NAMES = re.compile(r"^--- (.*)\n\+\+\+ (.*)$", re.M)


def apply_patch(files: Mapping[str, str], patch: str) -> dict[str, str | None]:
    """Return the contents of the files that a patch changes; None for a deleted one.

    Raises ValueError if it is not such a patch or does not fit the files, and FileNotFoundError if git is missing.
    """
    for names in _NAMES.findall(patch):
        for name in names:
            plain = name.split("\t")[0].rstrip("\r")
            if plain != "/dev/null":
                checked(plain[2:] if plain.startswith(("a/", "b/")) else plain)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        before = {path: text for path, text in files.items() if path in patch}
        for path, text in before.items():
            target = beneath(root, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
        words = ["git", "-c", "core.quotePath=off", "apply", "--whitespace=nowarn", "-"]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "GIT_CEILING_DIRECTORIES": folder}
        environment |= {"GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
        result = subprocess.run(
            words, cwd=root, env=environment, input=patch.encode(), capture_output=True, timeout=TIMEOUT_S
        )
        if result.returncode:
            why = result.stderr.decode("utf-8", "replace").strip().splitlines()[0][:200]
            raise ValueError(f"the patch cannot be applied: {visible(why)}")
        entries = [path for path in root.rglob("*") if not path.is_dir() or path.is_symlink()]
        after = {path.relative_to(root).as_posix(): _read(path) for path in entries}
    changed: dict[str, str | None] = {checked(path): text for path, text in after.items() if before.get(path) != text}
    changed |= dict.fromkeys(set(before) - set(after))
    if not changed:
        raise ValueError("the patch changes nothing")
    for path in set(changed) - set(before):
        if path in files:
            raise ValueError(f"the patch makes {path!r}, which is there already")
    return changed


def _read(path: Path) -> str:
    if path.is_symlink():
        raise ValueError(f"the patch makes a link, {visible(path.name)!r}")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"the patch makes a file that is not UTF-8, {visible(path.name)!r}") from None
