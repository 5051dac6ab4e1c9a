"""Tasks about git: the commits that a workspace begins with, and what an agent's history must hold in the end.

`metadata["git.commits"]` is a JSON list, oldest first, each `[branch, message, files]` (`Task.commits`). The first holds the
workspace with these files in its place. Each later one adds `files` to its branch, and branches begin at the first one. If there
is a branch `topic`, the agent finds it half merged into `main`. When the agent has ended, git lists the ancestors and the files
of HEAD in its sandbox (`LISTING`), and the list becomes the file GIT_REPORT of its answer.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

from composer_nb.harness.tasks.task import Task

GIT_REPORT = "git-history.txt"
IDENTITY = "composer_nb <composer_nb@localhost>"
FIRST_S = 946_684_800  # Time of the first commit, in seconds since 1970; the others follow hour by hour.
# Lists commits and files. Nothing that an agent can write changes what these are: replaced objects, grafts, a forged cache.
LISTING = """\
export GIT_NO_REPLACE_OBJECTS=1 GIT_GRAFT_FILE=/dev/null GIT_DIR=.git
git -c core.commitGraph=false rev-list --max-count=2000 {} && git -c core.quotePath=false ls-tree -r HEAD
"""


def import_stream(task: Task) -> bytes:
    """Return a task's commits for `git fast-import`; nothing if it has none."""
    parts: list[bytes] = []
    branches: set[str] = set()
    for number, (branch, message, changes) in enumerate(task.commits):
        files, parent = (changes, "") if number else ({**task.files, **changes}, "")
        if number and branch not in branches:
            parent = "from :1\n"
        branches.add(branch)
        who = f"{IDENTITY} {FIRST_S + 3600 * number} +0000"
        head = f"commit refs/heads/{branch}\nmark :{number + 1}\nauthor {who}\ncommitter {who}\n"
        parts += [head.encode(), _data(message), b"\n", parent.encode()]
        for path, text in sorted(files.items()):
            quoted = path.replace('"', '\\"').replace("\n", "\\n")
            parts += [f'M 100644 inline "{quoted}"\n'.encode(), _data(text), b"\n"]
    return b"".join(parts)


def _data(text: str) -> bytes:
    data = text.encode()
    return f"data {len(data)}\n".encode() + data


def report(commits: Iterable[str], files: Mapping[str, bytes]) -> str:
    """Return the list of a HEAD with these ancestors and files."""
    return "".join([*(f"{commit}\n" for commit in commits), *(f"{_entry(*file)}\n" for file in sorted(files.items()))])


def _entry(path: str, data: bytes) -> str:
    digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return f"100644 blob {digest}\t{path}"


def history(task: Task, files: Mapping[str, bytes | str]) -> dict[str, bool]:
    """Return whether HEAD has all commits of a task among its ancestors, and the files that the solution changes as they are
    graded. Nothing for a task without history."""
    if GIT_REPORT not in task.solution:
        return {}
    contents = {path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()}
    lines = {*contents.get(GIT_REPORT, b"").decode("utf-8", "replace").replace("100755", "100644").split("\n")}
    entries = {_entry(path, contents.get(path, b"")) for path in task.solution if path != GIT_REPORT}
    return {"HEAD keeps every commit": {*_hashes(task)} <= lines, "HEAD holds the files": entries <= lines}


def _hashes(task: Task) -> list[str]:
    return re.findall(r"^[0-9a-f]{40}$", task.solution[GIT_REPORT], re.M)


def committed(task: Task, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return an answer as if all of it were committed, if the task is about git and the answer has a history."""
    if GIT_REPORT not in files or GIT_REPORT not in task.solution:
        return files
    contents = {path: files[path] for path in task.solution if path in files and path != GIT_REPORT}
    return {**files, GIT_REPORT: report(_hashes(task), contents).encode()}
