"""Follow a Dockerfile's COPY lines without building an image, into the workspace.

The base image is this machine's Python with pytest, and the last WORKDIR is the workspace. `Copied.problems` names every other
instruction that would make a difference.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from posixpath import join, normpath, relpath

from composer_nb.harness.tasks.scope import in_scope
from composer_nb.harness.untrusted import is_plain, visible

NO_EFFECT = {"FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"}
"""Instructions that do not matter in a sandbox."""
_PYTEST = re.compile(r"(python3? -m )?pip3? install( -[\w-]+)* pytest([=<>~!]=?[\w.]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The files that a Dockerfile copies into its working directory."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """By path in the workspace."""
    executable: frozenset[str] = frozenset()
    where: str = ""
    """The Dockerfile's working directory."""
    problems: tuple[str, ...] = ()
    """Instructions that need an image, each with its name."""


def copied(context: Mapping[str, bytes], executable: Set[str], usual: str) -> Copied:
    """Return what the Dockerfile among the files of `context` copies. `usual` is the working directory if it names none."""
    lines = _instructions(context["Dockerfile"].decode("utf-8", "replace"))
    where = "/"
    copies: list[tuple[list[str], str]] = []
    problems: list[str] = []
    named = False
    for word, rest in lines:
        if word == "WORKDIR":
            where, named = normpath(join(where, rest.strip("\"'"))), True
        elif word == "COPY" and (found := _copy(rest)):
            copies.append((found[:-1], join(where if named else usual, found[-1])))
        elif word == "RUN" and _PYTEST.fullmatch(rest):
            continue
        elif word not in NO_EFFECT or (word == "FROM" and [each for each, _ in lines].count("FROM") > 1):
            problems.append(
                f"environment/Dockerfile: {word} {rest[:60]}".rstrip() + ": needs an image, which docker builds"
            )
    if ".dockerignore" in context:
        problems.append("environment/.dockerignore: needs an image, which docker builds")
    top = where if named else usual
    files: dict[str, bytes] = {}
    runnable: set[str] = set()
    for sources, target in copies:
        inside = relpath(normpath(target), top)
        if inside == ".." or inside.startswith("../"):
            problems.append(f"environment/Dockerfile: COPY to {target}: outside of the working directory {top}")
            continue
        for source in sources:
            laid = _laid(context, source, target, inside, files, many=len(sources) > 1)
            if odd := [path for path in laid if not is_plain(path)]:
                problems.append(f"environment/Dockerfile: COPY {source}: {visible(odd[0][:60])!r} is no plain path")
                continue
            if not laid:
                problems.append(f"environment/Dockerfile: COPY {source}: environment/ holds no such file")
            files |= {path: context[origin] for path, origin in laid.items()}
            runnable |= {path for path, origin in laid.items() if origin in executable}
    return Copied(files=files, executable=frozenset(runnable), where=top, problems=tuple(problems))


def _instructions(text: str) -> list[tuple[str, str]]:
    """Return instructions and their arguments, with continued lines joined."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = [line.strip() for line in re.sub(r"\\[ \t]*\n", " ", plain).split("\n") if line.strip()]
    return [(line.split(None, 1)[0].upper(), " ".join(line.split()[1:])) for line in lines]


def _copy(rest: str) -> list[str]:
    """Return the sources and target of a COPY; nothing if it has flags or an unknown form."""
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except (ValueError, RecursionError):
        return []
    known = all(isinstance(word, str) and "$" not in word and not word.startswith("--") for word in words)
    return list(words) if known and len(words) > 1 else []


def _laid(
    context: Mapping[str, bytes], source: str, target: str, inside: str, files: Mapping[str, bytes], many: bool
) -> dict[str, str]:
    """Return path in the workspace -> path in the context, for one source."""
    source = normpath(source.lstrip("/"))
    below = "" if source == "." else f"{source}/"
    if within := [path for path in context if path.startswith(below)]:
        return {normpath(join(inside, path.removeprefix(below))): path for path in within}
    matched = [path for path in context if in_scope(path, [source])]
    folder = many or len(matched) > 1 or inside == "." or target.endswith("/")
    folder = folder or any(path.startswith(f"{inside}/") for path in files)
    return {normpath(join(inside, PurePosixPath(path).name)) if folder else inside: path for path in matched}
