"""Ignore files: the rules of gitignore(5), for all the ignore files of a repository.

Rules may come from hostile repositories, so matching must not backtrack: each `*` becomes an atomic group that takes the first
place where what follows it fits (as in `fnmatch`), and the number of `**` in a rule is bounded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

NAMES = (".gitignore", ".ignore", ".cursorignore")
_MOST_RULES, _LONGEST_RULE, _MOST_DEEP = 2000, 256, 2
# Ignored unless the repository's own rules say otherwise.
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


_STAR = r"\[\^/\]\*"
_MORE = re.compile(rf"(?<={_STAR})(?:{_STAR})+")
# A star, and what follows it in the same name up to the next one. No character class but `[^/]` holds a slash.
_FOLLOWED = re.compile(rf"{_STAR}((?:\[\^/\](?!\*)|\\.|[^/])+?)(?={_STAR})")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A rule.

    Attributes:
        regex: As pathspec translates it, but for stars. A folder's mark is its only group.
        include: False for an exception.
    """

    regex: re.Pattern[str]
    include: bool

    def names(self, path: str, folder: bool) -> bool:
        """Return whether the rule matches a file or folder itself, not only a folder that contains it."""
        if (match := self.regex.search(path)) and not match.lastindex:
            return True
        marks = (match.end(match.lastindex) for match in self.regex.finditer(path + "/") if match.lastindex)
        return folder and len(path) + 1 in marks


@dataclass(slots=True)
class Ignore:
    """The rules of a repository.

    Attributes:
        rules: Folder of the ignore files -> rules, the last one first. The root folder is the empty string.
        under: Folder of the repository that paths are relative to. It is never ignored itself, because the user named it.
        steps: Steps that matching may still take, of about 10 ns.
    """

    rules: Mapping[str, Sequence[_Pattern]]
    under: str = ""
    steps: float = float("inf")
    _known: dict[str, bool] = field(default_factory=dict)

    def ignored(self, path: str) -> bool:
        """Return whether a file, or a folder that contains it, is ignored. Raises OSError beyond `steps`."""
        parts = [*filter(None, self.under.split("/")), *path.split("/")]
        first = len(parts) - path.count("/")
        folders = ("/".join(parts[:depth]) for depth in range(first, len(parts)))
        return any(map(self._folder, folders)) or self._matches("/".join(parts), folder=False)

    def _folder(self, path: str) -> bool:
        if path not in self._known:
            self._known[path] = self._matches(path, folder=True)
        return self._known[path]

    def _matches(self, path: str, folder: bool) -> bool:
        """Return whether the rules name this file or folder itself. The nearest ignore file decides, then its last rule."""
        at = path
        while at:
            at = at.rpartition("/")[0]
            name, rules = path[len(at) + 1 :] if at else path, self.rules.get(at, ())
            self.steps -= len(rules) * (100 + len(name) * name.count("/"))  # a rule may have two `**`
            if self.steps < 0:
                raise OSError("its ignore files have too many rules for so many and such deep paths")
            for rule in rules:
                if rule.names(name, folder):
                    return rule.include
        return False


def read_ignore(files: Mapping[str, bytes], default: bytes = DEFAULT) -> Ignore:
    """Read all ignore files among `files`. Their rules take precedence over the `default` ones."""
    texts = [("", default)]
    texts += [(path.rpartition("/")[0], files[path]) for path in sorted(files) if path.rpartition("/")[2] in NAMES]
    rules: dict[str, list[_Pattern]] = {}
    count = 0
    for folder, data in texts:
        for line in data[: _MOST_RULES * _LONGEST_RULE].decode(errors="replace").splitlines():
            if count < _MOST_RULES and line.strip() and not line.startswith("#"):
                count += 1
                if (pattern := _pattern(line)) is not None:
                    rules.setdefault(folder, []).insert(0, pattern)
    return Ignore(rules)


def _pattern(line: str) -> _Pattern | None:
    """Return a rule; None for one that exceeds a bound or is invalid, which does not apply."""
    line = re.sub(r"(?<![^/!])(?:\*\*/)+(?=\*\*)", "", line)
    line = re.sub(r"/\*\*/ *$", "/**/*/", line)  # folders below, not the folder itself
    if len(line) > _LONGEST_RULE or line.split("/").count("**") > _MOST_DEEP:
        return None
    try:
        regex, include = GitIgnoreSpecPattern.pattern_to_regex(line)
        linear = None if regex is None else _FOLLOWED.sub(r"(?>[^/]*?\1)", _MORE.sub("", regex))
        return None if linear is None else _Pattern(re.compile(linear), bool(include))
    except (ValueError, re.error):
        return None
