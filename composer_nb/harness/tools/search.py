"""Search tools: by ripgrep, and by meaning where the environment has such a search.

The workspace is indexed at the first question and updated at each later one: files that tools changed one by one; after a command
the whole workspace is compared, since a command may have changed anything."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Literal

from pydantic import Field

from composer_nb.harness.sandbox.contract import ExecResult
from composer_nb.harness.search.chunks import LONGEST_FILE
from composer_nb.harness.search.index import CodeIndex, Hit
from composer_nb.harness.tools.arguments import Count, Lines, Path, Text, tool
from composer_nb.harness.tools.session import Observation, Session, below, clean, shown
from composer_nb.harness.tools.tool_call import ErrorKind, ToolError

Pattern = Annotated[Text, Field(min_length=1, max_length=20_000)]
RIPGREP = ("rg", "--no-config", "--threads=2", "--color=never", "--hidden", "--no-require-git", "--glob=!.git")
# Runs ripgrep and sorts the files that it lists. Its own sort by time fails where its program has no path.
NEWEST_FIRST = """
import os, subprocess, sys
try:
    done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE)
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(127)
def age(path):
    try:
        return -os.lstat(path).st_mtime_ns
    except OSError:
        return 0
for path in sorted(filter(None, done.stdout.split(b"\\0")), key=lambda path: (age(path), path)):
    sys.stdout.buffer.write(path + b"\\n")
sys.exit(done.returncode)
"""
# Words in ripgrep's complaints about an invalid search.
USAGE = ("regex", "file type", "glob", "PCRE", "literal", "unclosed", "size limit")
# Lines shown of an answer, unless the call sets a limit.
SHOWN_LINES = 200
HITS = 10
# Characters shown of a line that matched.
COLUMNS = 500


@tool(needs="rg")
def grep(
    session: Session,
    pattern: Pattern,
    path: Path | None = None,
    glob: Annotated[Text | None, Field(max_length=4096)] = None,
    type: Annotated[Text | None, Field(max_length=100)] = None,
    output_mode: Literal["content", "files_with_matches", "count"] = "content",
    after: Annotated[Lines | None, Field(alias="-A")] = None,
    before: Annotated[Lines | None, Field(alias="-B")] = None,
    around: Annotated[Lines | None, Field(alias="-C")] = None,
    ignore_case: Annotated[bool, Field(alias="-i")] = False,
    head_limit: Count | None = None,
    multiline: bool = False,
) -> Observation:
    """Search the contents of files with ripgrep. Files that git ignores are left out.

    pattern: Regular expression in ripgrep's syntax.
    path: File or folder to search (default: everywhere).
    glob: Only files that match, such as *.{ts,tsx}.
    type: Only files of this ripgrep type, such as py.
    output_mode: Matching lines (default), paths alone, or the number of lines per file.
    after: Lines to show after each match.
    before: Lines to show before each match.
    around: Lines to show around each match.
    ignore_case: Ignore case.
    head_limit: Maximum lines of output.
    multiline: Allow matches across lines; . matches a newline.
    """
    target = session.place(path)
    command = [*RIPGREP, "--sort=path", "--no-heading", "--with-filename", "--line-number"]
    command += [f"--max-columns={COLUMNS}", "--max-columns-preview"]
    command += [] if output_mode == "content" else [f"--{output_mode.replace('_', '-')}"]
    for option, value in (("-A", after), ("-B", before), ("-C", around)):
        command += [] if value is None or output_mode != "content" else [f"{option}{value}"]
    for option, text in (("glob", glob), ("type", type)):
        command += [] if text is None else [f"--{option}={text}"]
    command += ["--ignore-case"] * ignore_case + ["--multiline", "--multiline-dotall"] * multiline
    lines, cut = _lines(session.program([*command, f"--regexp={pattern}", "--", below(target)]))
    if not lines:
        return Observation(text="(no matches)")
    return Observation(text=_head(lines, head_limit or SHOWN_LINES, cut))


@tool(needs="rg")
def glob_file_search(session: Session, glob_pattern: Path, target_directory: Path | None = None) -> Observation:
    """Find files by name, newest first. Files that git ignores are left out.

    glob_pattern: Such as *.py or src/**/test_*.py; matches at any depth.
    target_directory: Folder to search (default: everywhere).
    """
    path = session.place(target_directory)
    glob = glob_pattern.removeprefix("./").lstrip("/")
    glob = glob if glob.startswith("**/") else f"**/{glob}"
    command = [*RIPGREP, "--files", "--null", f"--glob={glob}", "--", below(path)]
    lines, cut = _lines(session.program(["python3", "-I", "-S", "-c", NEWEST_FIRST, *command]))
    if not lines:
        return Observation(text="(no files)")
    return Observation(text=_head(lines, SHOWN_LINES, cut))


def _lines(result: ExecResult) -> tuple[list[str], bool]:
    """Return the lines that ripgrep found, and whether there were more than were kept. Raises ToolError for an invalid search."""
    if result.exit_code > 1 and not result.stdout:
        message = [line.strip() for line in clean(result.stderr).splitlines() if line.strip()]
        text = " ".join(message)[:500].removeprefix("rg: ")
        kind: ErrorKind = "InvalidArguments" if any(word in text for word in USAGE) else "UnexpectedEnvironment"
        raise ToolError(kind, text or f"ripgrep ended with {result.exit_code}")
    data = result.stdout
    if result.truncated:
        data = data[: len(data) // 2]  # what is kept of a stream is a head and a tail
        data = data[: data.rfind(b"\n") + 1]
    return [line.removeprefix("./") for line in clean(data).removesuffix("\n").split("\n") if line], result.truncated


def _head(lines: Sequence[str], limit: int, cut: bool) -> str:
    if len(lines) <= limit and not cut:
        return "\n".join(lines)
    count = f"at least {len(lines)}" if cut else str(len(lines))
    return "\n".join([*lines[:limit], f"(the first {min(limit, len(lines))} of {count} lines)"])


@tool()
def codebase_search(
    session: Session,
    query: Pattern,
    target_directories: Annotated[list[Path], Field(max_length=1)],
    explanation: Text | None = None,
) -> Observation:
    """Find code by its meaning: ask a question in plain words.

    query: A question in plain words.
    target_directories: One folder to search, or none for everywhere; no globs.
    explanation: One sentence: why you make this call.
    """
    assert session.search is not None  # the tool is offered only where there is one
    folders = [session.place(folder) for folder in target_directories]
    try:
        hits = session.search(query, folders, HITS)[:HITS]
    except OSError as error:
        raise ToolError("ProviderError", f"the search does not work now: {error}") from error
    blocks = [f"{hit.path}:{hit.first_line}-{hit.last_line}\n{hit.text.rstrip()}" for hit in hits]
    blocks = blocks or ["(nothing found)"]
    if left_out := session.search.left_out(folders):
        named = ", ".join(f"{shown(path)}: {why}" for path, why in list(left_out.items())[:3])
        blocks.append(f"(not searched: {named}{f', and {len(left_out) - 3} more' if len(left_out) > 3 else ''})")
    return Observation(text="\n\n".join(blocks))


class Indexes:
    """Makes the search of a session: `ToolSet.cursor(search=Indexes())`. Thread-safe.

    Workspaces that begin with the same files, such as those of one task's rollouts, share an index until they change. The `size`
    most recently used indexes are kept.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._indexes: OrderedDict[bytes, CodeIndex] = OrderedDict()

    def __call__(self, session: Session) -> WorkspaceSearch:
        return WorkspaceSearch(session, self)

    def open(self, files: Mapping[str, bytes]) -> CodeIndex:
        """Return a new index of these files."""
        key = blake2b(digest_size=16)
        for path, data in sorted(files.items()):
            key.update(f"{path}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
        with self._lock:
            index = self._indexes.pop(key.digest(), None) or CodeIndex.build(files)
            self._indexes[key.digest()] = index
            while len(self._indexes) > self.size:
                self._indexes.popitem(last=False)
            return index.fork()


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
            folders = tuple(f"{folder.strip('/')}/" for folder in directories if folder != ".")
            return {path: why for path, why in reasons.items() if not folders or f"{path}/".startswith(folders)}

    def _fresh(self) -> CodeIndex:
        session = self.session
        if self._index is None or session.restless:
            session.touched.clear()
            files = session.sandbox.download()
            if self._index is None:
                self._index = self.indexes.open(files)
            else:
                self._index.sync(files)
            session.restless = session.background
        while session.touched:
            path = session.touched.pop()
            try:
                self._index.edit(path, session.sandbox.read(path, max_bytes=LONGEST_FILE + 1))
            except OSError:  # deleted, or no longer a file
                self._index.edit(path, None)
        return self._index
