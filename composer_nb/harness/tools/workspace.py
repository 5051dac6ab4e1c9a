"""Code search in the workspace of a session: indexed at the first question and updated at each later one.

Files that tools changed are updated one by one. After a command the whole workspace is compared, since a command may have changed
anything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from composer_nb.harness.search.chunks import LONGEST_FILE
from composer_nb.harness.search.index import CodeIndex, Hit
from composer_nb.harness.tools.session import Session


class Indexes:
    """Makes the search of a session: `ToolSet.cursor(search=Indexes())`. Thread-safe.

    Workspaces that begin with the same files, such as those of one task's rollouts, share an index until they change. The `size`
    most recently used indexes are kept.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, CodeIndex] = OrderedDict()

    def __call__(self, session: Session) -> WorkspaceSearch:
        return WorkspaceSearch(session, self)

    def open(self, files: Mapping[str, bytes]) -> CodeIndex:
        """Return a new index of these files."""
        key = blake2b(digest_size=16)
        for path, data in sorted(files.items()):
            key.update(f"{path}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
        with self._lock:
            found = self._known.pop(key.digest(), None) or CodeIndex.build(files)
            self._known[key.digest()] = found
            while len(self._known) > self.size:
                self._known.popitem(last=False)
            return found.fork()


class WorkspaceSearch:
    """The search of one session."""

    def __init__(self, session: Session, indexes: Indexes) -> None:
        self.session, self.indexes = session, indexes
        self._index: CodeIndex | None = None
        self._lock = threading.Lock()

    def __call__(self, query: str, directories: Sequence[str], limit: int) -> list[Hit]:
        """Return the best hits. Raises OSError for a workspace that is too large."""
        with self._lock:
            return self._fresh().search(query, [folder for folder in directories if folder != "."], limit)

    def left_out(self, directories: Sequence[str]) -> dict[str, str]:
        """Return the files in these folders that the last search left out, with why."""
        with self._lock:
            reasons = self._index.left_out if self._index else {}
            folders = [folder.strip("/") for folder in directories if folder != "."]
            inside = {path for path in reasons for at in folders if path == at or path.startswith(f"{at}/")}
            return {path: why for path, why in reasons.items() if not folders or path in inside}

    def _fresh(self) -> CodeIndex:
        session = self.session
        if self._index is None or session.restless:
            session.touched.clear()
            session.restless = session.background
            files = session.sandbox.download()
            if self._index is None:
                self._index = self.indexes.open(files)
            else:
                self._index.sync(files)
        while session.touched:
            path = session.touched.pop()
            try:
                self._index.edit(path, session.sandbox.read(path, max_bytes=LONGEST_FILE + 1))
            except OSError:  # deleted, or no longer a file
                self._index.edit(path, None)
        return self._index
