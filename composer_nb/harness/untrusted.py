"""Names, texts and JSON from outside: checked before they become a path, escaped before a person sees them.

Every name that comes from a file, an archive, a manifest, a store or a sandbox goes through `checked` or `beneath` before it is
joined to a path; a test walks the package and finds joins that skip them.
"""

import difflib
import html
import json
import os
import re
import sqlite3
import stat
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
MAX_TOML = 1 << 20
# Lines of two texts together that are compared line by line.
MAX_DIFF_LINES = 2000
_LONG_KEY = re.compile(r"""(?:\.[ \t]*(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+){100}""")
# Folders of version control.
HISTORY = frozenset({".git", ".hg", ".svn", ".bzr", ".jj"})
# Names that only the user may write: files there run as the user, or hold keys.
PROTECTED = HISTORY | {".env"}
_HFS_IGNORES = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])
# Protected names in the 8.3 form of NTFS.
_SHORT = re.compile(
    "|".join(rf"(?:{name[1:7]}|{name[1:3]}[0-9a-f]{{4}})~[0-9]+" for name in sorted(PROTECTED)), re.ASCII
)
# Unicode's categories of controls, formats (bidirectional marks, tags, soft hyphens), halves of pairs, ends of lines.
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Letters and marks that are invisible too.
_BLANKS = {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0}


_COLUMN = r"\w+(?: (?:TEXT|INTEGER|REAL|BLOB))?(?: NOT NULL| PRIMARY KEY| CHECK \(id = 0\))*"
# A table that computes nothing: without views, triggers, generated columns and checks, a query ends when the file does.
_PLAIN_TABLE = re.compile(
    rf"CREATE TABLE \w+ \( ?{_COLUMN}(?:, {_COLUMN})*(?:, PRIMARY KEY \(\w+(?:, \w+)*\))? ?\)", re.IGNORECASE | re.ASCII
)


class UnsafeName(ValueError):
    """A name that must not become part of a path."""


def checked(name: str) -> str:
    """Return `name` if it is a plain relative POSIX path. Raises UnsafeName for anything that a join could take elsewhere."""
    if why := _wrong(name):
        raise UnsafeName(f"{visible(name[:200])!r} is not a plain relative path: {why}")
    return name


def is_plain(name: str) -> bool:
    """Return whether `checked` accepts a name."""
    return not _wrong(name)


def single(name: str) -> str:
    """Return `name` if it names one file in a folder. Raises UnsafeName."""
    if "/" in checked(name):
        raise UnsafeName(f"{visible(name[:200])!r} is no file name: it holds a folder")
    return name


def _wrong(name: str) -> str:
    try:
        parts = name.encode("utf-8", "surrogateescape").split(b"/")
    except UnicodeEncodeError:
        return "it is not Unicode"
    if not parts[0]:
        return "it is absolute or empty"
    if {b"", b".", b".."} & set(parts):
        return "it has '.', '..' or nothing between two slashes"
    if b"\0" in name.encode("utf-8", "surrogateescape") or "\\" in name:
        return "it has a NUL or a backslash"
    if re.match("[A-Za-z]:", name):
        return "it names a drive"
    if max(map(len, parts)) > MAX_NAME_BYTES or sum(map(len, parts)) + len(parts) - 1 > MAX_PATH_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes a name or {MAX_PATH_BYTES} in all"
    return ""


def beneath(folder: Path, name: str) -> Path:
    """Join `name` to a folder. Raises UnsafeName where the path, or a link on its way, leads out of it."""
    path = folder / checked(name)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle
        inside = False
    if not inside:
        raise UnsafeName(f"{visible(name)!r} leads out of {folder} through a link")
    return path


def protected(path: str) -> bool:
    """Return whether a path is, or lies in, a protected place on any file system. This folds case, drops code points that HFS+
    ignores, and resolves NTFS's short names, trailing dots and spaces, and alternate streams (git's `verify_path`,
    `is_hfs_dotgit` and `is_ntfs_dotgit`)."""
    parts = re.split(r"[/\\]", path)
    names = [part.translate(_HFS_IGNORES).casefold().partition(":")[0].rstrip(". ") for part in parts]
    return any(name in PROTECTED or _SHORT.fullmatch(name) for name in names)


def walk(root: Path, unwanted: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yield the relative path of each file below `root`, with an empty text, and of each file and folder that is left out, with
    the reason: it is a link or a device, or what `unwanted` says of its path."""
    for at, folders, names in os.walk(root):
        here = Path(at).relative_to(root)
        for name in list(folders):
            path = (here / name).as_posix()
            if reason := "a link" if (root / path).is_symlink() else unwanted(path):
                folders.remove(name)
                yield path, reason
        for path in ((here / name).as_posix() for name in names):
            is_file = stat.S_ISREG((root / path).lstat().st_mode)
            yield path, unwanted(path) or ("" if is_file else "a link or device")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the beginning of a file. Raises OSError for a link."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(max_bytes)


class _Visible(dict[int, str]):
    """Maps a code point to its visible form, computed at its first use."""

    def __missing__(self, code: int) -> str:
        hidden = unicodedata.category(chr(code)) in _INVISIBLE or code in _BLANKS
        escape = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        self[code] = escape if hidden else chr(code)
        return self[code]


_LINE, _TEXT = _Visible(), _Visible({9: "\t", 10: "\n"})


def visible(text: str) -> str:
    """Return `text` on one line, with everything escaped that a terminal or a page would obey, turn around or hide."""
    return text.translate(_LINE)


def visible_lines(text: str) -> str:
    """Return `text` escaped like `visible`, with its tabs and line feeds as they are."""
    return text.translate(_TEXT)


def as_html(text: str) -> str:
    """Return `text` escaped like `visible_lines`, for a place in a page."""
    return html.escape(visible_lines(text))


def toml_of(text: str) -> dict[str, Any]:
    """Read TOML. Raises ValueError for whatever is wrong with it. A name of n parts takes the standard library n² steps: 20,000
    parts take 11 s and 1.5 GB."""
    if len(text) > MAX_TOML or _LONG_KEY.search(text):
        raise ValueError(f"TOML of more than {MAX_TOML} characters, or with a name of more than 100 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("TOML that is nested too deeply") from None


def opcodes(old: Sequence[str], new: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """Return how lines differ, as difflib does, whose time can grow with the cube of their number. Texts of more than
    MAX_DIFF_LINES are compared between their first and their last difference, which count as one if that is as long."""
    if len(old) + len(new) <= MAX_DIFF_LINES:
        return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    head = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    rest = zip(reversed(old[head:]), reversed(new[head:]), strict=False)
    tail = next((at for at, (a, b) in enumerate(rest) if a != b), min(len(old), len(new)) - head)
    ends = len(old) - tail, len(new) - tail
    inner: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, ends[0] - head, 0, ends[1] - head)]
    if sum(ends) - 2 * head <= MAX_DIFF_LINES:
        inner = opcodes(old[head : ends[0]], new[head : ends[1]])
    blocks = [(kind, a + head, b + head, c + head, d + head) for kind, a, b, c, d in inner]
    blocks = [("equal", 0, head, 0, head), *blocks, ("equal", ends[0], len(old), ends[1], len(new))]
    return [block for block in blocks if block[1] < block[2] or block[3] < block[4]]


def changed_lines(old: str, new: str) -> int:
    """Return the number of lines removed and added; of long texts without those that only moved."""
    old_lines, new_lines = old.split("\n"), new.split("\n")
    if len(old_lines) + len(new_lines) > MAX_DIFF_LINES:
        return sum(((Counter(old_lines) - Counter(new_lines)) + (Counter(new_lines) - Counter(old_lines))).values())
    blocks = [block for block in opcodes(old_lines, new_lines) if block[0] != "equal"]
    return sum(end - start + stop - begin for _, start, end, begin, stop in blocks)


def json_of(text: str | bytes) -> Any:
    """Read JSON. Raises ValueError for whatever is wrong with it, however deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


# Largest size of a Parquet file's columns, relative to the file: texts shrink to a hundredth.
MOST_EXPANSION = 1000


def parquet(file: Path) -> Path:
    """Return `file` if it may be read as Parquet: a few hundred bytes can announce rows that fill the memory. Raises ValueError,
    and OSError or pyarrow's errors for a file that is missing or damaged."""
    import pyarrow.parquet as pq

    size, about = file.stat().st_size, pq.read_metadata(file)
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(about.num_columns)]
    largest = max([about.num_rows, *(max(c.num_values, c.total_uncompressed_size) for c in columns)])
    if about.num_rows > size or largest > MOST_EXPANSION * size:
        raise ValueError(f"it announces {about.num_rows:,} rows and columns of {largest:,}, in {size:,} bytes")
    return file


def check_database(db: sqlite3.Connection, file: Path, *, whole: bool = True) -> None:
    """Check that a database, just opened, holds nothing but plain tables; with `whole` also that each of its pages is used once,
    which reads them all. The work is bounded by the size of the file. Raises ValueError, and sqlite3.Error as SQLite does."""
    size = 0
    for name in (file.name, f"{file.name}-wal"):
        with suppress(FileNotFoundError):
            size += file.with_name(name).stat().st_size
    ticks = iter(range(100 + size // 1000))
    db.set_progress_handler(lambda: next(ticks, None) is None, 100_000)  # 100 steps a byte: pages may name one another
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE type != 'index' OR sql NOT NULL"):
            if not isinstance(sql, str) or not _PLAIN_TABLE.fullmatch(" ".join(sql.split())):
                raise ValueError(f"{visible(str(name))} is no plain table")
        if whole and (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ValueError(" ".join(str(problem).split()))
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            raise ValueError("its pages do not end") from None
        raise
    finally:
        db.set_progress_handler(None, 0)
