"""Ignore files: which files of a repository an index leaves out, by the rules of gitignore(5).

Rules come from repositories that may be hostile, so a match never backtracks: a `*` is an atomic group that takes the first
place where what follows it fits (as in `fnmatch`), and `**` is a set of states over the folders of a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

NAMES = (".gitignore", ".ignore", ".cursorignore")
_MOST_RULES, _LONGEST_RULE = 2000, 256
DEFAULT = b"""
.git/
.hg/
.svn/
node_modules/
__pycache__/
.venv/
*.min.js
*.min.css
*.lock
package-lock.json
"""
"""Left out unless the repository says otherwise."""
_CLASS = re.compile(r"\[([!^]?)(\]?(?:\\.|\[:[a-z]+:\]|[^\]\\])*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of an ignore file."""

    parts: tuple[re.Pattern[str] | None, ...]
    """One a folder on the way; None stands for any number of them."""
    ignored: bool
    folders_only: bool


@dataclass(slots=True)
class Ignore:
    """The rules of a repository. `left_out` counts those beyond the bounds, which do not apply."""

    rules: dict[str, list[Rule]]
    """By the folder of the file that they are from; the root is empty."""
    left_out: int = 0
    under: str = ""
    """Folder of the repository that paths are below; itself it is not asked about, because somebody named it."""

    def ignored(self, path: str) -> bool:
        """Whether a file, or a folder around it, is ignored."""
        parts = [*filter(None, self.under.split("/")), *path.split("/")]
        first = len(parts) - path.count("/")
        return any(self._one(parts[:depth], depth < len(parts)) for depth in range(first, len(parts) + 1))

    def _one(self, parts: Sequence[str], folder: bool) -> bool:
        for depth in range(len(parts) - 1, -1, -1):  # the nearest ignore file speaks first, its last rule before others
            for rule in self.rules.get("/".join(parts[:depth]), ()):
                if (folder or not rule.folders_only) and _match(rule.parts, parts[depth:]):
                    return rule.ignored
        return False


def read_ignore(files: Mapping[str, bytes], default: bytes = DEFAULT) -> Ignore:
    """The rules of all ignore files among `files`, and default ones, which they may overrule."""
    found = Ignore({})
    texts = [("", default)]
    texts += [(path.rpartition("/")[0], files[path]) for path in sorted(files) if path.rpartition("/")[2] in NAMES]
    budget = _MOST_RULES
    for folder, data in texts:
        rules = found.rules.setdefault(folder, [])
        for line in data.decode(errors="replace").splitlines():
            rule = parse(line) if budget > 0 and len(line) <= _LONGEST_RULE else None
            found.left_out += rule is None and bool(line.strip()) and not line.startswith("#")
            if rule is not None:
                rules.insert(0, rule)
                budget -= 1
    return found


def parse(line: str) -> Rule | None:
    """The rule of a line, or None for an empty one, a comment, and one that can match nothing."""
    line = line if line.endswith("\\ ") else line.rstrip(" \r")
    if not line or line.startswith("#"):
        return None
    keep = line.startswith("!")
    line = line[keep:]
    folders_only = line.endswith("/")
    names = line.rstrip("/").removeprefix("/").split("/")
    anchored = "/" in line.rstrip("/")
    if names[-1] == "**":
        names[-1:] = ["*", "**"]
    if not anchored:
        names.insert(0, "**")
    try:
        parts = [None if name == "**" else re.compile(_translate(name), re.DOTALL) for name in names]
    except re.error:
        return None
    once = [
        part for part, before in zip(parts, [False, *parts], strict=False) if part is not None or before is not None
    ]
    return Rule(parts=tuple(once), ignored=not keep, folders_only=folders_only)


def _translate(glob: str) -> str:
    """A regular expression for one name: `*`, `?`, `[...]` and backslashes."""
    pieces: list[str] = [""]  # what stands between stars
    place = 0
    while place < len(glob):
        sign = glob[place]
        found = _CLASS.match(glob, place) if sign == "[" else None
        if found:
            inside = found[2].replace("[", r"\[") if "[:" not in found[2] else _posix(found[2])
            inside = "\\" + inside if inside.startswith("]") else inside
            pieces[-1] += f"[{'^' if found[1] else ''}{inside}]"
            place = found.end()
            continue
        if sign == "*":
            pieces.append("")
        elif sign == "?":
            pieces[-1] += "."
        else:
            if sign == "\\":
                place += 1
                sign = glob[place : place + 1] or r"\Z."  # a backslash at the end matches nothing
            pieces[-1] += re.escape(sign) if len(sign) == 1 else sign
        place += 1
    first, *others = pieces
    if not others:
        return first + r"\Z"
    middle = "".join(f"(?>.*?{piece})" for piece in others[:-1] if piece)
    return f"{first}{middle}.*{others[-1]}" + r"\Z"


def _posix(inside: str) -> str:
    for name, signs in (
        ("alpha", "a-zA-Z"),
        ("digit", "0-9"),
        ("alnum", "a-zA-Z0-9"),
        ("space", r"\s"),
        ("upper", "A-Z"),
    ):
        inside = inside.replace(f"[:{name}:]", signs)
    return inside.replace("[:lower:]", "a-z").replace("[", r"\[")


def _match(rule: Sequence[re.Pattern[str] | None], names: Iterable[str]) -> bool:
    states = _reach(rule, {0})
    for name in names:
        after: set[int] = set()
        for state in states:
            if state < len(rule):
                part = rule[state]
                if part is None:
                    after.add(state)
                elif part.match(name):
                    after.add(state + 1)
        if not after:
            return False
        states = _reach(rule, after)
    return len(rule) in states


def _reach(rule: Sequence[re.Pattern[str] | None], states: set[int]) -> set[int]:
    """With what follows a `**` that stands for no folder."""
    reached = set(states)
    for state in sorted(states):
        while state < len(rule) and rule[state] is None:
            state += 1
            reached.add(state)
    return reached
