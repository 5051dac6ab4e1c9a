"""Requests behind commits: what a user asked the agent whose accepted change a commit holds.

A commit is traced back by the lines that the agent added, as Cursor traces committed code to requests for CursorBench ("Cursor
Blame"). The logs are the folders in which `composer-nb agent` keeps its results.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_nb.harness.tasks.harbor import decoded
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.production.work import CHANGES, accepted

# A commit is a request's if it adds this share of the lines that the agent added, and they are this share of what it adds.
SHARE = 0.5
Lines = Counter[tuple[str, str]]  # Paths and lines, without indentation.


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """A request, with the source lines that the agent added for it.

    Attributes:
        time: When the change was accepted.
    """

    time: str
    request: str
    lines: Lines


def accepted_requests(paths: Sequence[Path]) -> list[AcceptedRequest]:
    """Return the requests whose changes were accepted, the earliest first. Each path is the folder of a result, or holds such
    folders. Raises FileNotFoundError where no result is kept, and ValueError for a damaged one."""
    requests = []
    for path in paths:
        folders = [path] if (path / CHANGES).is_file() else sorted(file.parent for file in path.glob(f"*/{CHANGES}"))
        if not folders:
            raise FileNotFoundError(f"{path}: no agent's work is kept here; give one that `composer-nb agent` named")
        for time, request, *states in filter(None, map(accepted, folders)):
            blobs = [[(path, blob) for path, blob in files.items() if blob] for files in states]
            before, after = ({path: decoded(blob.data) or "" for path, blob in files} for files in blobs)
            requests.append(AcceptedRequest(time=time, request=request, lines=added(before, after)))
    return sorted((request for request in requests if request.lines), key=lambda request: request.time)


def added(before: dict[str, str], after: dict[str, str]) -> Lines:
    """Return the lines that source files gain. A line that moves inside a file is none, nor is one without a letter or digit."""
    lines = Lines()
    for path in Repository(name="", files=after).sources:
        if after[path] != before.get(path):
            old, new = (Counter(map(str.strip, files.get(path, "").split("\n"))) for files in (before, after))
            lines.update({(path, line): count for line, count in (new - old).items() if re.search(r"\w", line)})
    return lines


def request_behind(log: Sequence[AcceptedRequest], before: dict[str, str], after: dict[str, str]) -> str:
    """Return what the user asked for in the conversations that a commit holds; empty if they do not explain it."""
    new = added(before, after) if log else Lines()
    behind = [request for request in log if (request.lines & new).total() >= SHARE * request.lines.total()]
    explained = sum((request.lines for request in behind), Lines()) & new
    enough = behind and explained.total() >= SHARE * new.total()
    return "\n\n".join(dict.fromkeys(request.request for request in behind)) if enough else ""
