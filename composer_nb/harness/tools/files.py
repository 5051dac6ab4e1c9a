"""Tools that read and change files, and list folders."""

from codecs import BOM_UTF8
from fnmatch import fnmatchcase
from io import BytesIO
from itertools import islice
from typing import Annotated

from pydantic import Field

from composer_nb.harness.tools import patch as patches
from composer_nb.harness.tools.arguments import CONTROLS, Content, Count, Path, Text, printable, tool
from composer_nb.harness.tools.edits import replace
from composer_nb.harness.tools.session import EDIT_BYTES, SHOWN, Observation, Session, shown
from composer_nb.harness.tools.tool_call import ToolError, invalid

# Maximum bytes that `read_file` reads, from the beginning of a file.
READ_BYTES = 16 << 20
# Characters shown of a line.
LINE = 2000
# Maximum characters of the files that one patch leaves: links can name a large file many times.
PATCHED = 4 * EDIT_BYTES


@tool()
def read_file(session: Session, target_file: Path, offset: Count | None = None, limit: Count | None = None) -> str:
    """Read a text file as LINE|CONTENT. A long file comes in parts: continue with offset.

    offset: First line to show, counted from 1.
    limit: Number of lines to show.
    """
    path = session.path(target_file)
    data = session.sandbox.read(path, max_bytes=READ_BYTES + 1)
    session.known_paths.add(path)
    if not data:
        return "(the file is empty)"
    if b"\0" in data[:8192]:
        raise ToolError("UnexpectedEnvironment", f"{path}: not a text file ({len(data)} bytes or more)")
    content = data[:READ_BYTES].removeprefix(BOM_UTF8) or b"\n"
    count = content.count(b"\n") + (not content.endswith(b"\n"))
    first_line = offset or 1
    if first_line > count:
        raise invalid(f"{path}: has {count} lines, so none is numbered {first_line}")
    shown_lines: list[str] = []
    room_chars = SHOWN
    # One at a time: all lines of a file that has little else take ten times its size and more.
    lines = islice(BytesIO(content), first_line - 1, first_line - 1 + limit if limit else None)
    for number, raw in enumerate(lines, first_line):
        line = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "replace").translate(CONTROLS)
        text = f"{line[:LINE]}[… {len(line) - LINE} more characters]" if len(line) > LINE else line
        room_chars -= len(text) + 8
        if room_chars < 0 and shown_lines:
            break
        shown_lines.append(f"{number}|{text}")
    last_line = first_line + len(shown_lines) - 1
    if first_line > 1 or last_line < count or len(data) > READ_BYTES:
        of_bytes = f" of the first {READ_BYTES} bytes" if len(data) > READ_BYTES else ""
        shown_lines.append(f"(lines {first_line} to {last_line} of {count}{of_bytes})")
    return "\n".join(shown_lines)


@tool(mutates=True)
def search_replace(
    session: Session, file_path: Path, old_string: Content, new_string: Content, replace_all: bool = False
) -> str:
    """Replace a text in a file. It must occur exactly once, unless replace_all is set.

    old_string: Exact text to replace; include enough context to make it unique.
    new_string: New text.
    replace_all: Replace every occurrence.
    """
    path = session.path(file_path)
    changed, numbers = replace(session.text(path), old_string, new_string, replace_all)
    session.store(path, changed)
    at = ", ".join(map(str, numbers[:20])) + (", …" if len(numbers) > 20 else "")
    return f"{path}: changed at line {at}"


@tool(mutates=True)
def write(session: Session, file_path: Path, contents: Content) -> str:
    """Write a whole file. Read an existing file first; to change one, prefer search_replace.

    contents: Whole content of the file.
    """
    path = session.path(file_path)
    there = session.exists(path)
    if there and path not in session.known_paths:
        raise invalid(f"{path}: exists already; read it before you overwrite it")
    session.store(path, contents)
    lines = contents.removesuffix("\n").count("\n") + bool(contents)
    return f"{path}: {'written' if there else 'made'}, {lines} lines"


@tool(mutates=True)
def delete_file(session: Session, target_file: Path, explanation: Text | None = None) -> str:
    """Delete a file.

    explanation: One sentence: why you make this call.
    """
    path = session.path(target_file)
    session.remove(path)
    return f"{path}: deleted"


@tool()
def list_dir(session: Session, target_directory: Path, ignore_globs: list[Text] | None = None) -> Observation:
    """List a folder without hidden names. Folders end with /, links with @.

    ignore_globs: Names to leave out, such as *.log.
    """
    path = session.path(target_directory)
    ignored = [glob.removeprefix("**/").removesuffix("/**").rstrip("/") for glob in ignore_globs or ()]
    marks = {"folder": "/", "link": "@", "other": "?", "file": ""}
    lines = [
        shown(entry.name) + marks[entry.kind]
        for entry in session.sandbox.entries(path)
        if not entry.name.startswith(".") and not any(fnmatchcase(entry.name, glob) for glob in ignored)
    ]
    return Observation(text="\n".join(lines) or "(nothing, but for names that begin with a dot)")


@tool(mutates=True)
def apply_patch(session: Session, patch: Annotated[Content, Field(min_length=1)]) -> str:
    """Change several files with one patch; if any part does not apply, nothing is changed.

    patch: *** Begin Patch … *** End Patch.
    """
    # All changes are worked out before the first is made.
    texts, before, lines, stored = dict[str, str | None](), dict[str, str](), list[str](), list[str]()
    for change in patches.parse(patch):
        path = session.path(change.path)
        to = session.path(change.to) if change.to else path
        if not texts.keys().isdisjoint((path, to)):  # by another spelling, `./a` for `a`
            raise invalid(f"{change.path}: appears twice: put all changes of a file into one part")
        there = session.exists(path)
        if change.kind == "add" and there:
            raise ToolError("UnexpectedEnvironment", printable(f"{path}: exists already"))
        if change.kind != "add" and not there:
            raise ToolError("UnexpectedEnvironment", printable(f"{path}: no such file"))
        if to != path and session.exists(to):
            raise ToolError("UnexpectedEnvironment", printable(f"{to}: exists already"))
        if change.kind == "add":
            texts[path] = patches.added(change)
        elif change.kind == "delete":
            texts[path] = None
        else:
            before[path] = session.text(path)
            texts |= {path: None} if to != path else {}
            texts[to] = patches.updated(change, before[path])
        if sum(len(text) for text in texts.values() if text) > PATCHED:
            raise invalid(f"its files have more than {PATCHED} characters: make several patches")
        lines.append({"add": "made", "delete": "deleted", "update": "changed"}[change.kind] + f" {to}")
    try:
        for path, text in sorted(texts.items(), key=lambda item: item[1] is None):  # what goes, goes last
            if text is None:
                session.remove(path)
            else:
                session.store(path, text)
                stored.append(path)
    except OSError:  # a file where a folder should be, a full disk: all is as it was
        for path in stored:
            session.store(path, "")  # makes room
        for path in stored:
            session.store(path, before[path]) if path in before else session.remove(path)
        raise
    return "\n".join(lines)
