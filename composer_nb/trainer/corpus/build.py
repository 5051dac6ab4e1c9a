"""Make a corpus from a folder of repositories: a sequence of filters, then documents in import order.

    read → licence → quality by rule → identical → near duplicates → contamination → held out | documents

All texts are in memory at once. The same seed and folder give the same bytes.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from composer_nb.harness.files import replacing, write_json
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.corpus import filters, licences
from composer_nb.trainer.corpus.filters import Run, contaminated, near_duplicates, secrets
from composer_nb.trainer.corpus.order import import_order
from composer_nb.trainer.corpus.repositories import SourceFile, read_files
from composer_nb.trainer.corpus.store import digest_of, write_rows

REPORT, DROPPED = "report.json", "dropped.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Conditions on files, and the division into documents."""

    seed: int = 0
    """Seed of the held-out split and of the permutations of MinHash."""
    licences: tuple[str, ...] = licences.PERMISSIVE
    """SPDX identifiers of the allowed licences."""
    suffixes: tuple[str, ...] = (".py",)
    bytes: int = 1_000_000
    """Maximum bytes of a file."""
    line: int = 1000
    """Maximum characters of a line."""
    mean_line: float = 100.0
    """Maximum mean characters of a line."""
    alphanumeric: float = 0.25
    """Minimum share of letters and digits."""
    similar: Annotated[float, Field(ge=0.05, le=1)] = 0.85
    """Jaccard similarity from which on a file is a near duplicate."""
    run: Annotated[int, Field(ge=1)] = 13
    """Length in tokens of a run shared with a task that makes a file contaminated."""
    common: int = 10
    """Maximum number of repositories that share a run before it counts as an idiom."""
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is held out: whole repositories, or files if there is only one repository."""
    document: int = 131_072
    """Maximum characters of a document, unless one file has more. A larger repository becomes several documents."""


# Reasons to drop files, by place.
Places = Mapping[int, str]
Find = Callable[[list[SourceFile]], Places]


def make_corpus(root: Path, out: Path, settings: CorpusSettings, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """Filter the repositories in `root` and write the remaining files to the folder `out`, for `data.code`: files.parquet,
    dropped.csv (each dropped file, its filter and the reason) and report.json, which is returned. Its `yields` has a row for each
    filter, with the dropped and the remaining files. Raises ValueError if fewer than two files are left, or without a library."""
    if any(find_spec(name) is None for name in ("datasketch", "identify", "ukkonen")):
        raise ValueError("a corpus needs datasketch and identify: pip install 'composer_nb[corpus]'")
    read = list(read_files(root, settings.suffixes, settings.bytes))
    files, reasons = [file for file, _ in read], {index: why for index, (_, why) in enumerate(read) if why}
    secret = secrets(tasks, settings.run)
    yields, dropped = [_row("found", files, [])], list[tuple[SourceFile, str, str]]()
    for name, find in [("readable", lambda _: reasons), *_filters_of(settings, secret)]:
        wrong = find(files)
        gone = [file for index, file in enumerate(files) if index in wrong]
        dropped += [(files[index], name, why) for index, why in sorted(wrong.items())]
        files = [file for index, file in enumerate(files) if index not in wrong]
        yields.append(_row(name, files, gone))
    if len(files) < 2:
        raise ValueError(
            f"{root}: {len(files)} files are left, and two are needed; dropped.csv of a laxer run says why"
        )
    out.mkdir(parents=True, exist_ok=True)
    rows = list(_documents(files, _heldout(files, settings), settings.document))
    write_rows(rows, out)
    with replacing(out / DROPPED) as part, part.open("w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows(
            [("repository", "path", "filter", "why"), *((f.repository, f.path, name, why) for f, name, why in dropped)]
        )
    report = {
        "settings": dataclasses.asdict(settings),
        "yields": yields,
        "documents": rows[-1]["document"] + 1,
        "heldout": _row("heldout", [file for file, row in zip(files, rows, strict=True) if row["heldout"]], []),
        "tasks": len(tasks),
        "tasks_too_short": len({task.id for task in tasks} - set(secret.values())),
        "digest": digest_of(rows),
    }
    write_json(out / REPORT, report)
    return report


def _filters_of(s: CorpusSettings, secret: Mapping[Run, str]) -> list[tuple[str, Find]]:
    def each(why: Callable[[SourceFile], str]) -> Find:
        return lambda files: {index: reason for index, file in enumerate(files) if (reason := why(file))}

    def over(value: float, most: float) -> str:
        return f"{value:.0f}" if value > most else ""

    def alphanumeric(file: SourceFile) -> str:
        return f"{share:.2f}" if (share := filters.alphanumeric(file.text)) < s.alphanumeric else ""

    def unparsed(file: SourceFile) -> str:
        return "no Python" if file.path.endswith(".py") and not filters.parsed(file.text) else ""

    return [
        ("licence", each(lambda file: _unlicensed(file, s.licences))),
        ("not generated", each(lambda file: "says so" if filters.is_generated(file.text) else "")),
        ("longest line", each(lambda file: over(filters.longest_line(file.text), s.line))),
        ("mean line", each(lambda file: over(filters.mean_line(file.text), s.mean_line))),
        ("alphanumeric", each(alphanumeric)),
        ("parses", each(unparsed)),
        ("identical", _identical),
        ("near duplicate", lambda files: _near(files, s)),
        ("contaminated", lambda files: contaminated([(f.repository, f.text) for f in files], secret, s.run, s.common)),
    ]


def _unlicensed(file: SourceFile, allowed: Sequence[str]) -> str:
    for expression in (file.licence, licences.of_file(file.text) or file.licence):
        if not licences.is_allowed(expression, allowed):
            return expression or "none stated"
    return ""


def _identical(files: list[SourceFile]) -> Places:
    first: dict[str, SourceFile] = {}
    firsts = [first.setdefault(file.text, file) for file in files]
    return {
        index: _named(first_file)
        for index, (first_file, file) in enumerate(zip(firsts, files, strict=True))
        if first_file is not file
    }


def _near(files: list[SourceFile], s: CorpusSettings) -> Places:
    duplicates = near_duplicates([file.text for file in files], s.similar, s.seed)
    return {index: _named(files[other]) for index, other in duplicates.items()}


def _named(file: SourceFile) -> str:
    return f"{file.repository}: {file.path}"


def _row(name: str, files: Sequence[SourceFile], gone: Sequence[SourceFile]) -> dict[str, Any]:
    return {
        "filter": name,
        "dropped_files": len(gone),
        "dropped_bytes": sum(len(file.text.encode()) for file in gone),
        "files": len(files),
        "repositories": len({file.repository for file in files}),
        "bytes": sum(len(file.text.encode()) for file in files),
    }


def _heldout(files: Sequence[SourceFile], s: CorpusSettings) -> set[str]:
    """Return the held-out repositories, or paths if there is one repository: in an order drawn from the seed, as many as have at
    most the share of all characters, but at least the smallest."""
    sizes: dict[str, int] = {}
    for file in files:
        sizes[_unit(file, files)] = sizes.get(_unit(file, files), 0) + len(file.text)
    room = s.heldout * sum(sizes.values())
    chosen: set[str] = set()
    for unit in sorted(sizes, key=lambda unit: hashlib.sha256(f"{s.seed} {unit}".encode()).digest()):
        if sizes[unit] <= room:
            chosen.add(unit)
            room -= sizes[unit]
    return chosen or {min(sizes, key=lambda unit: (sizes[unit], unit))}


def _unit(file: SourceFile, files: Sequence[SourceFile]) -> str:
    return file.repository if files[0].repository != files[-1].repository else file.path


def _documents(files: Sequence[SourceFile], heldout: set[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield a row per file, by repository, with held-out files apart, in import order, and cut into documents."""
    number = -1
    side = {id(file): _unit(file, files) in heldout for file in files}
    for repository, together in groupby(files, key=lambda file: file.repository):
        for is_heldout, part in groupby(
            sorted(together, key=lambda file: side[id(file)]), key=lambda file: side[id(file)]
        ):
            by_path = {file.path: file for file in part}
            size = most + 1
            for path in import_order({path: file.text for path, file in by_path.items()}):
                file = by_path[path]
                size += len(file.text)
                if size > most:
                    number, size = number + 1, len(file.text)
                yield {
                    "repository": repository,
                    "path": path,
                    "licence": licences.of_file(file.text) or file.licence,
                    "text": file.text,
                    "heldout": is_heldout,
                    "document": number,
                }
