"""Terms about conduct: to-dos, reads before edits, reasoning in comments, habits of the terminal, and the final message."""

import json
import posixpath
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Kind, Rollout
from composer_nb.harness.terms.registry import CHANGES, EDITS, called, term

# Words of a final message that cost nothing.
LONG = 150
_CLAIM = re.compile(r"\A(?>.*?\b(tests?|suite|checks?)\b).*\b(pass(es|ed|ing)?|green|succeed(s|ed)?)\b", re.I)
_DENIAL = re.compile(r"\b(not|no|never|cannot|without|if|should|\w+n't|fail\w*|unable|untested)\b", re.I)
_PASSED, _FAILED = re.compile(r"\b[1-9]\d* passed\b"), re.compile(r"\b[1-9]\d* (failed|errors?)\b")
_DONE = re.compile(r"\b(fixed|changed|added|updated|implemented|removed|renamed|rewrote|refactored|edited)\b", re.I)
# Words of a block of comments from which on it is reasoning, and phrases that only reasoning has.
LONG_COMMENT = 60
_THINKING = re.compile(
    r"\b(hmm+|wait,|actually,|let me|let's (see|think|try|check)|on second thought|i (think|guess|wonder|need to|should|will|see"
    r"|am going)|i'(ll|m|d)|maybe (i|we)|we (need|have) to (figure|check|think|find))\b",
    re.I,
)
_COMMENT = re.compile(r"(?:^|\s)(?:#(?![!:]|include|define|if|end|pragma)|//|/\*|\*(?=\s))\s*(.*)")
_PROSE = (".md", ".rst", ".txt")
# Programs whose work a tool does: reading, searching and editing files.
_REPLACED = frozenset("cat head tail less more nl sed awk perl grep egrep rg ag find ls tree tee touch dd".split())
_PREFIX = re.compile(r"^[\s({]*((\w+=\S*|sudo|command|env|time|do|then|else)\s+)*")  # before the name of a program
_WRITES = re.compile(r"<<.*>|>.*<<|\becho\b(?:[^|;&>\"']|\"[^\"]*\"|'[^']*')*>>?(?![>&]|\s*/dev/)")
_FILES_IN_PYTHON = re.compile(r"python3?\b.*(<<|\s-c\s).*(\bopen\(|read_text|write_text|readlines)", re.S)
_TOOLS = EDITS | {"read_file", "grep", "glob_file_search", "codebase_search", "list_dir", "delete_file"}
_CODE = re.compile(r"```.*?(```|\Z)|`[^`\n]*`", re.S)


def _path(arguments: Mapping[str, Any]) -> str:
    path = next((arguments[name] for name in ("path", "target_file", "file_path") if name in arguments), "")
    return posixpath.normpath(str(path)) if path else ""


@term
def unfinished_todos(rollout: Rollout, grade: Grade) -> float:
    """Return the share of the to-dos that were left open at the end."""
    statuses: dict[str, str] = {}
    for name, arguments in (called(turn) for turn in rollout.turns if turn.error is None):
        if name == "todo_write" and isinstance(todos := arguments.get("todos"), list):
            fresh = {str(todo.get("id")): str(todo.get("status")) for todo in todos if isinstance(todo, dict)}
            statuses = statuses | fresh if arguments.get("merge") else fresh
    return sum(status in ("pending", "in_progress") for status in statuses.values()) / max(1, len(statuses))


@term
def unread_edits(rollout: Rollout, grade: Grade) -> float:
    """Return the share of changes of a part of a file that had not been read or written before."""
    read, blind, count = set[str](), 0, 0
    for turn in rollout.turns:
        name, arguments = called(turn)
        if (path := _path(arguments)) and name in EDITS - {"write"}:
            count, blind = count + 1, blind + (path not in read)
        if turn.error is None and name in EDITS | {"read_file"}:
            read.add(path)
    return blind / max(1, count)


@term
def repeated_reads(rollout: Rollout, grade: Grade) -> float:
    """Return the share of reads of a part of a file that was read in this segment and has not changed since."""
    parts, again, count, message = set[str](), 0, 0, -1
    begins = set(accumulate(sum(s.kind[p[-1]] != Kind.SUMMARY for p in s.messages) for s in rollout.segments[:-1]))
    for turn in rollout.turns:
        message += not turn.beside
        name, arguments = called(turn)
        if name in CHANGES or (message in begins and not turn.beside):  # a summary leaves out what files hold
            parts.clear()
        if name == "read_file" and turn.error is None:
            part = json.dumps({**arguments, "path": _path(arguments)}, sort_keys=True)
            again, count = again + (part in parts), count + 1
            parts.add(part)
    return again / max(1, count)


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text that a call writes into files, or runs in the terminal."""
    if name == "apply_patch":
        lines = str(arguments.get("patch", "")).splitlines()
        return "\n".join(line[1:] for line in lines if line.startswith("+"))
    if _path(arguments).endswith(_PROSE):
        return ""
    old = {line.strip() for line in str(arguments.get("old_string", arguments.get("old", ""))).splitlines()}
    keys = ("new_string", "contents", "new", "text", "command")
    lines = "\n".join(str(arguments[key]) for key in keys if key in arguments).splitlines()
    return "\n".join(line for line in lines if line.strip() not in old)


@term
def reasoning_in_comments(rollout: Rollout, grade: Grade) -> float:
    """Return the share of the words written into files and the terminal that are comments which reason: blocks of more than
    LONG_COMMENT words, and comments in the first person or with second thoughts. Comments that a later edit removes count."""
    reasoning = count = 0
    for name, arguments in (called(turn) for turn in rollout.turns):
        block: list[str] = []
        for line in (*_written(name, arguments).splitlines(), ""):
            count += len(line.split())
            if comment := _COMMENT.search(line):
                block.append(comment[1])
            elif block:
                text, block = " ".join(block), []
                words = len(text.split())
                reasoning += words if words > LONG_COMMENT or _THINKING.search(text) else 0
    return reasoning / max(1, count)


@term
def terminal_only(rollout: Rollout, grade: Grade) -> float:
    """Return the share of reads, searches and edits of files that went through the terminal. Programs behind a pipe, which read
    what another wrote, do not count. Use it where tools for these are offered."""
    by_terminal = by_tool = 0
    for name, arguments in (called(turn) for turn in rollout.turns):
        by_tool += name in _TOOLS
        if name == "run_terminal_cmd":
            command = str(arguments.get("command", ""))
            parts = (_PREFIX.sub("", part).split() for part in re.split(r"&&|\|\||[;\n]", command))
            programs = {posixpath.basename(words[0]) for words in parts if words}
            by_terminal += bool(programs & _REPLACED or _WRITES.search(command) or _FILES_IN_PYTHON.search(command))
    return by_terminal / max(1, by_terminal + by_tool)


def final_message(rollout: Rollout) -> str:
    """Return what the agent said last; nothing if it ended with a call."""
    return "" if not rollout.turns or rollout.turns[-1].call else rollout.turns[-1].said


def _says(text: str, what: re.Pattern[str]) -> bool:
    """Return whether a sentence says it without a word of denial or doubt."""
    return any(what.search(part) and not _DENIAL.search(part) for part in re.split(r"[;!\n]|\.(?!\w)", text))


@term
def unfounded_claims(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the final message says that tests pass, and nothing observed since the last edit shows it."""
    if not _says(final_message(rollout), _CLAIM):
        return 0.0
    edits = [n for n, turn in enumerate(rollout.turns) if called(turn)[0] in EDITS and turn.error is None]
    after = rollout.turns[max(edits, default=-1) + 1 :]
    results = [
        turn.tests_passed == turn.tests_run if turn.tests_run else not _FAILED.search(turn.observation)
        for turn in after
        if turn.tests_run or _PASSED.search(turn.observation) or _FAILED.search(turn.observation)
    ]
    return float(results[-1:] != [True])


@term
def vague_claims(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the final message says that something was changed, and names none of the files that differ."""
    message, before, after = final_message(rollout), rollout.before, rollout.files
    changed = [path for path in {*before, *after} if before.get(path) != after.get(path)]
    named = any(re.search(rf"(?<![\w.]){re.escape(posixpath.basename(path))}(?!\w)", message) for path in changed)
    return float(_says(message, _DONE) and not named)


@term
def long_message(rollout: Rollout, grade: Grade) -> float:
    """Return the share of the final message's words beyond the first `LONG`."""
    return max(0.0, 1 - LONG / max(1, len(final_message(rollout).split())))


@term
def asked_back(rollout: Rollout, grade: Grade) -> float:
    """Return 1 if the final message asks the user something; question marks in code do not count."""
    return float(asks(final_message(rollout)))


def asks(text: str) -> bool:
    """Return whether a message asks something; question marks in code do not count."""
    return bool(re.search(r"\w[\"')\]]*\?(?=\W|\Z)", _CODE.sub(" ", text)))
