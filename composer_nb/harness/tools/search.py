"""Tools that look for something: by ripgrep, and by the meaning of a question where the environment has such a search."""

from __future__ import annotations

from collections.abc import Sequence

from composer_nb.harness.sandbox.contract import ExecResult
from composer_nb.harness.tools.arguments import CodebaseSearch, GlobFileSearch, Grep
from composer_nb.harness.tools.session import Session, below, clean
from composer_nb.harness.tools.tool_call import ToolError

RIPGREP = ("rg", "--no-config", "--color=never", "--hidden", "--no-require-git", "--glob=!.git")
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
"""Runs ripgrep and sorts the files that it lists. Its own sort by time fails where its program has no path."""
LINES = 200
"""Shown of an answer unless the call says otherwise."""
HITS = 10
COLUMNS = 500
"""Shown of a line that matched."""


def grep(session: Session, arguments: Grep) -> str:
    path = session.place(arguments.path)
    command = [*RIPGREP, "--sort=path", "--no-heading", "--with-filename", "--line-number"]
    command += [f"--max-columns={COLUMNS}", "--max-columns-preview"]
    command += {"content": [], "files_with_matches": ["--files-with-matches"], "count": ["--count"]}[
        arguments.output_mode
    ]
    for option, value in (("-A", arguments.after), ("-B", arguments.before), ("-C", arguments.around)):
        command += [] if value is None or arguments.output_mode != "content" else [f"{option}{value}"]
    for option, text in (("glob", arguments.glob), ("type", arguments.type)):
        command += [] if text is None else [f"--{option}={text}"]
    command += ["--ignore-case"] * arguments.ignore_case + ["--multiline", "--multiline-dotall"] * arguments.multiline
    lines, cut = _lines(session.program([*command, f"--regexp={arguments.pattern}", "--", below(path)]))
    if not lines:
        return "(no matches)"
    return session.fit(_head(lines, arguments.head_limit or LINES, cut), "grep")


def glob_file_search(session: Session, arguments: GlobFileSearch) -> str:
    path = session.place(arguments.target_directory)
    glob = arguments.glob_pattern.removeprefix("./").lstrip("/")
    glob = glob if glob.startswith("**/") else f"**/{glob}"
    command = [*RIPGREP, "--files", "--null", f"--glob={glob}", "--", below(path)]
    lines, cut = _lines(session.program(["python3", "-I", "-S", "-c", NEWEST_FIRST, *command]))
    if not lines:
        return "(no files)"
    return session.fit(_head(lines, LINES, cut), "glob_file_search")


def _lines(done: ExecResult) -> tuple[list[str], bool]:
    """What ripgrep found, and whether there was more than was kept. Raises ToolError for what it can not look for."""
    if done.exit_code > 1 and not done.stdout:
        told = [line.strip() for line in clean(done.stderr).splitlines() if line.strip()]
        text = " ".join(told)[:500].removeprefix("rg: ")
        usage = any(
            word in text for word in ("regex", "file type", "glob", "PCRE", "literal", "unclosed", "size limit")
        )
        raise ToolError(
            "InvalidArguments" if usage else "UnexpectedEnvironment", text or f"ripgrep ended with {done.exit_code}"
        )
    data = done.stdout
    if done.truncated:
        data = data[: len(data) // 2]  # what is kept of a stream is a head and a tail
        data = data[: data.rfind(b"\n") + 1]
    return [line.removeprefix("./") for line in clean(data).removesuffix("\n").split("\n") if line], done.truncated


def _head(lines: Sequence[str], limit: int, cut: bool) -> str:
    if len(lines) <= limit and not cut:
        return "\n".join(lines)
    count = f"at least {len(lines)}" if cut else str(len(lines))
    return "\n".join([*lines[:limit], f"(the first {min(limit, len(lines))} of {count} lines)"])


def codebase_search(session: Session, arguments: CodebaseSearch) -> str:
    assert session.search is not None  # the tool is offered where there is one
    folders = [session.place(folder) for folder in arguments.target_directories]
    try:
        hits = session.search(arguments.query, folders, HITS)[:HITS]
    except OSError as error:
        raise ToolError("ProviderError", f"the search does not work now: {error}") from error
    blocks = [f"{hit.path}:{hit.first_line}-{hit.last_line}\n{hit.text.rstrip()}" for hit in hits]
    return session.fit("\n\n".join(blocks), "codebase_search") or "(nothing found)"
