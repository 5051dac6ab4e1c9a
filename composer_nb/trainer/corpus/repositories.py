"""Find repositories in a folder, the licence that each states, and the texts of their files.

The contents of the folder are untrusted: links are not followed, and names are read through `untrusted`.

`identify` recognizes the text of a licence by comparison with those of choosealicense.com. If no text is recognized, the metadata
of the package (PEP 639, or the older classifiers and words) state the licence. If both state one, both must be allowed.
"""

import ast
import io
import os
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

from composer_nb.harness.syntax import parse
from composer_nb.harness.untrusted import UnsafeName, beneath, checked, is_plain, toml_of

# Folders with foreign code, which may have another licence; hidden folders are left out as well.
_FOREIGN = frozenset("node_modules __pycache__ site-packages vendor _vendor third_party thirdparty_files venv".split())
_LICENCE = ("LICENSE", "LICENCE", "COPYING", "UNLICENSE")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a repository.

    Attributes:
        path: Relative POSIX path in the repository.
        licence: Licence that the repository states, as an SPDX expression; empty if missing or unknown.
    """

    repository: str
    path: str
    licence: str
    text: str


def read_files(root: Path, suffixes: Iterable[str], most: int) -> Iterator[tuple[SourceFile, str]]:
    """Yield each file of the repositories in `root`, in order of repository and path, and why it cannot be used: not text in the
    encoding that it declares, empty, a link, or more than `most` bytes. The reason is empty for a usable file.

    A repository is a subfolder, a distribution if `root` is a site-packages folder, or `root` itself if it has a pyproject.toml,
    setup.py or .git. Raises ValueError if there is none."""
    endings = tuple(suffixes)
    for name, folder, paths, licence in _repositories(root):
        for path in sorted(path for path in paths if path.endswith(endings) and _own(path)):
            text, file = "", folder / checked(path)
            try:
                regular = not file.is_symlink() and file.is_file() and beneath(folder, path) == file
            except UnsafeName:
                regular = False
            if not regular:
                why = "a link, or missing"
            elif file.stat().st_size > most:
                why = f"more than {most} bytes"
            else:
                try:
                    text = _decoded(path, file.read_bytes()).replace("\r\n", "\n")
                    why = "" if text.strip() else "empty"
                except (ValueError, LookupError):  # LookupError: a codec that is none of text, as rot13
                    why = "not UTF-8"
            yield SourceFile(repository=name, path=path, licence=licence, text=text), why


def _decoded(path: str, data: bytes) -> str:
    """Return a file's text without a byte order mark; Python may declare its encoding. Raises ValueError and LookupError."""
    encoding = "utf-8-sig"
    if path.endswith(".py"):
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        except SyntaxError as error:
            raise ValueError(error.msg) from None
    return data.decode(encoding)


def _repositories(root: Path) -> Iterator[tuple[str, Path, list[str], str]]:
    """Yield (name, folder, paths of files, licence) of each repository in `root`, which may be one itself or a site-packages
    folder. Raises ValueError if there is none."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; give a folder of repositories")
    if any((root / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
        folders = [root]
    else:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink() and _own(path.name))
    if any(path.name.endswith(".dist-info") for path in folders):
        # pip leaves folders without metadata behind
        complete = (item for item in metadata.distributions(path=[str(root)]) if item.read_text("METADATA"))
        for distribution in sorted(complete, key=lambda item: item.name):
            names = [file.as_posix() for file in distribution.files or ()]
            plain = [name for name in names if is_plain(name)]
            texts = [root / name for name in plain if _names_licence(name) and ".dist-info/" in name]
            about = HeaderParser().parsestr(distribution.read_text("METADATA") or "")
            yield distribution.name, root, plain, licence_of(texts, stated(about))
        return
    if not folders:
        raise ValueError(f"{root}: holds no repository; give a folder with one subfolder for each")
    for folder in folders:
        texts = [path for path in folder.iterdir() if _names_licence(path.name) and path.is_file()]
        yield folder.resolve().name, folder, list(_walk(folder)), licence_of(texts, stated(_metadata(folder)))


def _walk(folder: Path) -> Iterator[str]:
    for at, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if _own(name)]
        names = ((Path(at) / file).relative_to(folder).as_posix() for file in files)
        yield from (name for name in names if is_plain(name))


def _own(path: str) -> bool:
    return not any(part in _FOREIGN or part.startswith(".") for part in path.split("/"))


def _names_licence(path: str) -> bool:
    name = path.rpartition("/")[2].upper()
    return name.startswith(_LICENCE) and not name.endswith(".PY")


def _metadata(folder: Path) -> Message:
    """Return the metadata in PKG-INFO, or else in pyproject.toml, in the form of PKG-INFO."""
    info, project = folder / "PKG-INFO", folder / "pyproject.toml"
    if info.is_file():
        return HeaderParser().parsestr(info.read_text("utf-8", "replace"))
    message = Message()
    try:
        text = project.read_text("utf-8", "replace") if project.is_file() else ""
        table: Any = toml_of(text).get("project", {})
        licence = table.get("license", "")
        message["License-Expression"] = licence if isinstance(licence, str) else ""
        message["License"] = str(licence.get("text", "")) if isinstance(licence, dict) else ""
        for classifier in table.get("classifiers", ()):
            message["Classifier"] = str(classifier)
    except (ValueError, AttributeError, TypeError):  # not TOML, or not of this form: no metadata
        return Message()
    return message


# Licences

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


def licence_of(texts: Iterable[Path], expression: str) -> str:
    """Return the licence from the licence files of a repository and its metadata (`stated`) together."""
    from identify import identify

    recognized = set[str]()
    for path in texts:
        with suppress(UnicodeDecodeError, OSError):
            recognized.add(identify.license_id(str(path)) or expression)
    named = sorted(name for name in recognized if name not in expression)
    return " AND ".join([f"({expression})", *named] if named and expression else named or [expression])


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
