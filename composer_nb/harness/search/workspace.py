"""Search by meaning in the workspace of a session: the index is made at the first question, and brought up to date at each other.

What tools changed is taken over file by file, in milliseconds. After a command the whole workspace is looked at again, since a
command may have changed anything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from composer_nb.harness.cursor.session import Session
from composer_nb.harness.search.chunks import LONGEST_FILE
from composer_nb.harness.search.index import CodeIndex, Hit


class Indexes:
    """Makes the search of a session: `ToolSet.cursor(search=Indexes())`. May be used from many threads.

    Workspaces that begin with the same files, as the rollouts of one task do, share all that is large. Of others the `size` that
    were used last are kept.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, CodeIndex] = OrderedDict()

    def __call__(self, session: Session) -> WorkspaceSearch:
        return WorkspaceSearch(session, self)

    def open(self, files: Mapping[str, bytes]) -> CodeIndex:
        """An index of these files that is the caller's own."""
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
        """Raises OSError for a workspace that is too large."""
        with self._lock:
            return self._fresh().search(query, [folder for folder in directories if folder != "."], limit)

    def _fresh(self) -> CodeIndex:
        session = self.session
        if self._index is None:
            session.touched.clear()
            session.restless = session.background
            self._index = self.indexes.open(session.sandbox.download())
        elif session.restless:
            session.touched.clear()
            session.restless = session.background
            self._index.sync(session.sandbox.download())
        while session.touched:
            path = session.touched.pop()
            try:
                self._index.edit(path, session.sandbox.read(path, max_bytes=LONGEST_FILE + 1))
            except OSError:  # gone since, or no file any more
                self._index.edit(path, None)
        return self._index
