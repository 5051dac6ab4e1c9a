"""Find the licence that a repository states, and determine whether it may be used.

`identify` recognizes the text of a licence by comparison with those of choosealicense.com. If no text is recognized, the metadata
of the package (PEP 639, or the older classifiers and words) state the licence. If both state one, both must be allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from email.message import Message
from pathlib import Path

from composer_nb.harness.syntax import parse

# SPDX identifiers of licences that require attribution at most.
PERMISSIVE = tuple(
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 ISC MIT MIT-0 MIT-CMU PSF-2.0 Python-2.0 Unlicense Zlib".split()
)
_CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
# Classifiers that do not name a licence.
_SILENT = ("OSI Approved", "DFSG approved")
_WORDS = {
    r"(the )?mit( license)?": "MIT",
    r"apache( software)?( license)?,?( version)?[ -]?2(\.0)?": "Apache-2.0",
    r"(new |modified )?bsd( license)?|(bsd[ -])?3[ -]clause( bsd)?( license)?": "BSD-3-Clause",
    r"isc( license)?": "ISC",
}
_HEADER = re.compile(r"SPDX-License-Identifier:\s*([\w.+ ()-]*[\w)+])")


def stated(metadata: Message) -> str:
    """Return the licence in a package's metadata as an SPDX expression; empty if it is missing or unknown."""
    expression = (metadata.get("License-Expression") or "").strip()
    classified = [
        _CLASSIFIERS.get(name, "LicenseRef-" + re.sub(r"[^\w.]+", "-", name))
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License ::") and (name := line.rpartition(":: ")[2]) not in _SILENT
    ]
    words = (metadata.get("License") or "").strip()
    if expression or classified:
        return expression or " AND ".join(sorted(set(classified)))
    if re.fullmatch(r"[A-Za-z0-9.+-]+( (AND|OR) [A-Za-z0-9.+-]+)*", words) and re.search(r"\d|MIT|ISC|GPL", words):
        return words
    return next((name for form, name in _WORDS.items() if re.fullmatch(form, words.lower())), "")


def licence_of(texts: Iterable[Path], metadata: str) -> str:
    """Return the licence from the licence files of a repository and its metadata (`stated`) together."""
    from identify import identify

    recognized = set[str]()
    for path in texts:
        with suppress(UnicodeDecodeError, OSError):
            recognized.add(identify.license_id(str(path)) or metadata)
    named = sorted(name for name in recognized if name not in metadata)
    return " AND ".join([f"({metadata})", *named] if named and metadata else named or [metadata])


def of_file(text: str) -> str:
    """Return the licence in a file's head (`SPDX-License-Identifier`); empty if there is none."""
    match = _HEADER.search(text[:2000])
    return match[1] if match else ""


def is_allowed(expression: str, licences: Collection[str]) -> bool:
    """Return whether `licences` alone satisfy an SPDX expression: all sides of AND, one side of OR. A licence WITH an exception
    counts as another licence. An invalid expression is not allowed."""
    words = re.findall(r"[()]|[^\s()]+(?:\s+WITH\s+[^\s()]+)?", expression)
    named = [word.lower() if word in ("AND", "OR", "(", ")") else f"_{index}" for index, word in enumerate(words)]

    def holds(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            return (all if isinstance(node.op, ast.And) else any)([holds(value) for value in node.values])
        return isinstance(node, ast.Name) and words[int(node.id[1:])] in licences

    try:
        body = parse(" ".join(named)).body
        return len(body) == 1 and isinstance(body[0], ast.Expr) and holds(body[0].value)
    except (SyntaxError, ValueError):
        return False
