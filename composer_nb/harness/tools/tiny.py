"""The tools of tiny models: search, read, edit a line or a part of a file, undo, run the visible tests, finish.

They work in any session, in a sandbox or in memory (`workspace.Workspace`).
"""

from itertools import groupby

from composer_nb.harness.syntax import lints
from composer_nb.harness.tools.arguments import CONTROLS, tool
from composer_nb.harness.tools.session import Observation, Session, file_lines
from composer_nb.harness.tools.tool_call import invalid

# Lines that a search shows.
FOUND = 8


def _text(session: Session, path: str) -> str:
    try:
        return session.text(path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise invalid(f"no file {path}") from None


@tool()
def read_file(session: Session, path: str) -> Observation:
    """Read a file.

    path: relative path
    """
    lines = enumerate(file_lines(_text(session, path).translate(CONTROLS)), 1)
    return Observation(text="\n".join(f"{number}{line}" for number, line in lines))


@tool(mutates=True)
def edit_line(session: Session, path: str, line: int, text: str) -> Observation:
    """Replace one line of a file by another; its indentation is kept.

    path: relative path
    """
    text = text.strip()
    if "\n" in text or "\r" in text:
        raise invalid("one line")
    before = _text(session, path)
    lines = file_lines(before)
    if not 1 <= line <= len(lines):
        raise invalid("no line")
    old = lines[line - 1]
    lines[line - 1] = old[: len(old) - len(old.lstrip("\ufeff").lstrip())] + text + "\r" * old.endswith("\r")
    return _change(session, path, before, "\n".join(lines) + "\n" * before.endswith("\n"))


@tool(mutates=True)
def substitute(session: Session, path: str, old: str, new: str) -> Observation:
    """Replace a text that occurs once in a file.

    path: relative path
    """
    before = _text(session, path)
    if not old or (count := before.count(old)) != 1:
        raise invalid(f"{count if old else 0} matches")
    return _change(session, path, before, before.replace(old, new))


def _change(session: Session, path: str, before: str, after: str) -> Observation:
    if before == after:
        return Observation(text="same")  # tells the agent at once that this edit changed nothing
    edits = session.edits
    if frozenset((edits.now | {path: after}).items()) in edits.refused:
        return Observation(text="tried")
    session.store(path, after)
    edits.before.setdefault(path, before)
    edits.now[path] = after
    return Observation(text="ok")


@tool(mutates=True)
def undo(session: Session) -> Observation:
    """Undo all edits."""
    edits = session.edits
    for path, text in edits.before.items():
        session.store(path, text)
    answer = "ok" if edits.now else "same"
    edits.now.clear()
    return Observation(text=answer)


@tool()
def grep(session: Session, pattern: str) -> Observation:
    """Find the lines that hold a text, tests left out.

    pattern: plain text
    """
    if not pattern or any(character in pattern for character in "\0\n\r"):
        raise invalid("one line")
    matches = session.find(pattern)[:FOUND]
    return Observation(text="\n".join(f"{path}:{number}{line}" for path, number, line in matches) or "none")


@tool()
def read_lints(session: Session) -> Observation:
    """Find names that are unused or do not exist, tests left out."""
    files = groupby(session.find(""), lambda match: match[0])
    texts = {path: "\n".join(match[2] for match in matches) for path, matches in files if path.endswith(".py")}
    findings = [f"{path}: {finding}" for path, text in texts.items() for finding in lints(text)][:FOUND]
    return Observation(text="\n".join(findings) or "none")


@tool(mutates=True)  # tests may write files
def run_tests(session: Session) -> Observation:
    """Run the visible tests."""
    observation = session.run_visible_tests()
    if session.edits.now and observation.tests_passed != observation.tests_run:
        session.edits.refused.add(frozenset(session.edits.now.items()))
    return observation


@tool(ends=True)
def finish(session: Session) -> Observation:
    """Finish; the files are graded."""
    return Observation(text="")


TINY = (grep, read_file, read_lints, edit_line, substitute, undo, run_tests, finish)
