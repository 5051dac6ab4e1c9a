"""Apply unified diffs to texts with `git apply` in an empty folder.

New, deleted, renamed and changed text files are supported. Names are checked first, because git accepts absolute ones. Git
refuses paths that lead out of the folder or through a link, and reads no configuration. The resulting files are checked again.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from composer_nb.harness.untrusted import beneath, checked, visible

TIMEOUT_S = 60.0
_NAMES = re.compile(r"^--- (.*)\n\+\+\+ (.*)$", re.M)


def apply_patch(files: Mapping[str, str], patch: str, *options: str) -> dict[str, str | None]:
    """Return the contents of the files that a patch changes; None for a deleted one. `options` are those of `git apply`.

    Raises ValueError if it is not such a patch or does not fit the files, and FileNotFoundError if git is missing.
    """
    for header in _NAMES.findall(patch):
        for name in header:
            header_path = name.split("\t")[0].rstrip("\r")
            if header_path != "/dev/null":
                checked(header_path[2:] if header_path.startswith(("a/", "b/")) else header_path)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        texts_before = {path: text for path, text in files.items() if path in patch}
        for path, text in texts_before.items():
            target = beneath(root, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
        command = ["git", "-c", "core.quotePath=off", "apply", "--whitespace=nowarn", *options, "-"]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "GIT_CEILING_DIRECTORIES": folder}
        environment |= {"GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
        result = subprocess.run(
            command, cwd=root, env=environment, input=patch.encode(), capture_output=True, timeout=TIMEOUT_S
        )
        if result.returncode:
            why = result.stderr.decode("utf-8", "replace").strip().splitlines()[0][:200]
            raise ValueError(f"the patch cannot be applied: {visible(why)}")
        paths = [path for path in root.rglob("*") if not path.is_dir() or path.is_symlink()]
        texts_after = {path.relative_to(root).as_posix(): _read(path) for path in paths}
    changed: dict[str, str | None] = {
        checked(path): text for path, text in texts_after.items() if texts_before.get(path) != text
    }
    changed |= dict.fromkeys(set(texts_before) - set(texts_after))
    if not changed:
        raise ValueError("the patch changes nothing")
    for path in set(changed) - set(texts_before):
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
