"""Tools that read and change files, and list folders."""

from __future__ import annotations

from fnmatch import fnmatchcase

from composer_nb.harness.tools import patch as patches
from composer_nb.harness.tools.arguments import (
    CONTROLS,
    ApplyPatch,
    DeleteFile,
    ListDir,
    ReadFile,
    SearchReplace,
    Write,
    printable,
)
from composer_nb.harness.tools.edits import replace
from composer_nb.harness.tools.session import SHOWN, Session, shown
from composer_nb.harness.tools.tool_call import ToolError

READ_BYTES = 16 << 20
"""Of a file, from its beginning, that `read_file` looks at."""
LINE = 2000
"""Characters shown of a line."""


def read_file(session: Session, arguments: ReadFile) -> str:
    path = session.path(arguments.target_file)
    data = session.sandbox.read(path, max_bytes=READ_BYTES + 1)
    session.seen.add(path)
    if not data:
        return "(the file is empty)"
    if b"\0" in data[:8192]:
        raise ToolError("UnexpectedEnvironment", f"{path}: not a text ({len(data)} bytes or more)")
    lines = data[:READ_BYTES].decode("utf-8", "replace").removesuffix("\n").split("\n")
    first = arguments.offset or 1
    if first > len(lines):
        raise ToolError("InvalidArguments", f"{path}: has {len(lines)} lines, so none is numbered {first}")
    parts: list[str] = []
    room = SHOWN
    for number, line in enumerate(lines[first - 1 :][: arguments.limit], first):
        line = line.removesuffix("\r").translate(CONTROLS)
        cut = f"{line[:LINE]}[… {len(line) - LINE} more characters]" if len(line) > LINE else line
        room -= len(cut) + 8
        if room < 0 and parts:
            break
        parts.append(f"{number}|{cut}")
    last = first + len(parts) - 1
    if first > 1 or last < len(lines) or len(data) > READ_BYTES:
        more = f" of the first {READ_BYTES} bytes" if len(data) > READ_BYTES else ""
        parts.append(f"(lines {first} to {last} of {len(lines)}{more})")
    return "\n".join(parts)


def search_replace(session: Session, arguments: SearchReplace) -> str:
    path = session.path(arguments.file_path)
    changed, numbers = replace(
        session.text(path), arguments.old_string, arguments.new_string, arguments.replace_all, session.strict
    )
    session.store(path, changed)
    at = ", ".join(map(str, numbers[:20])) + (", …" if len(numbers) > 20 else "")
    return f"{path}: changed at line {at}"


def write(session: Session, arguments: Write) -> str:
    path = session.path(arguments.file_path)
    there = session.exists(path)
    if there and path not in session.seen:
        raise ToolError("InvalidArguments", f"{path}: is there already; read it before you write over it")
    session.store(path, arguments.contents)
    return f"{path}: {'written' if there else 'made'}, {arguments.contents.count(chr(10))} lines"


def delete_file(session: Session, arguments: DeleteFile) -> str:
    path = session.path(arguments.target_file)
    session.remove(path)
    return f"{path}: deleted"


def list_dir(session: Session, arguments: ListDir) -> str:
    path = session.path(arguments.target_directory)
    ignored = [glob.removeprefix("**/").removesuffix("/**").rstrip("/") for glob in arguments.ignore_globs or ()]
    marks = {"folder": "/", "link": "@", "other": "?", "file": ""}
    lines = [
        shown(entry.name) + marks[entry.kind]
        for entry in session.sandbox.entries(path)
        if not entry.name.startswith(".") and not any(fnmatchcase(entry.name, glob) for glob in ignored)
    ]
    return session.fit("\n".join(lines), "list_dir") or "(nothing, but for names that begin with a dot)"


def apply_patch(session: Session, arguments: ApplyPatch) -> str:
    """All changes are worked out before the first is made."""
    texts: dict[str, str | None] = {}
    told: list[str] = []
    for change in patches.parse(arguments.patch, session.strict):
        path = session.path(change.path)
        to = session.path(change.to) if change.to else path
        if not texts.keys().isdisjoint((path, to)):  # by another spelling, `./a` for `a`
            raise ToolError(
                "InvalidArguments", f"{change.path}: is there twice: put all changes of a file into one part"
            )
        there = session.exists(path)
        if change.kind == "add" and there:
            raise ToolError("UnexpectedEnvironment", printable(f"{path}: is there already"))
        if change.kind != "add" and not there:
            raise ToolError("UnexpectedEnvironment", printable(f"{path}: no such file"))
        if to != path and session.exists(to):
            raise ToolError("UnexpectedEnvironment", printable(f"{to}: is there already"))
        if change.kind == "add":
            texts[path] = patches.added(change)
        elif change.kind == "delete":
            texts[path] = None
        else:
            changed = patches.updated(change, session.text(path), session.strict)
            texts |= {path: None} if to != path else {}
            texts[to] = changed
        told.append({"add": "made", "delete": "deleted", "update": "changed"}[change.kind] + f" {to}")
    for path, text in sorted(texts.items(), key=lambda item: item[1] is None):  # what goes, goes last
        if text is None:
            session.remove(path)
        else:
            session.store(path, text)
    return "\n".join(told)
