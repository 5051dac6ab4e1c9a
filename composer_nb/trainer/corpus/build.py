"""Make a corpus from a folder of repositories: a sequence of filters, then documents in import order.

    read → licence → quality by rule → identical → near duplicates → contamination → held out | documents

All texts are in memory at once. The same seed and folder give the same bytes. Quality is filtered by rule, as in The Stack and
StarCoder (arXiv 2211.15533, 2305.06161).
"""

import ast
import csv
import dataclasses
import hashlib
import heapq
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from composer_nb.harness.files import replacing, write_json
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.corpus.repositories import PERMISSIVE, SourceFile, is_allowed, of_file, read_files
from composer_nb.trainer.corpus.store import digest_of, write_rows

REPORT, DROPPED = "report.json", "dropped.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Conditions on files, and the division into documents."""

    seed: int = 0
    """Seed of the held-out split and of the permutations of MinHash."""
    licences: tuple[str, ...] = PERMISSIVE
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


# Returns reasons to drop files, by position; an empty one is none.
Filter = Callable[[list[SourceFile]], Mapping[int, str]]
Run = tuple[str, ...]


def make_corpus(root: Path, out: Path, settings: CorpusSettings, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """Filter the repositories in `root` and write the remaining files to the folder `out`, for `data.code`: files.parquet,
    dropped.csv (each dropped file, its filter and the reason) and report.json, which is returned. Its `yields` has a row for each
    filter, with the dropped and the remaining files. Raises ValueError if fewer than two files are left, or without a library."""
    if any(find_spec(name) is None for name in ("datasketch", "identify", "ukkonen")):
        raise ValueError("a corpus needs datasketch and identify: pip install -e '.[corpus]'")
    readings = list(read_files(root, settings.suffixes, settings.bytes))
    files, secret = [file for file, _ in readings], secrets(tasks, settings.run)
    yields, dropped = [_row("found", files, [])], list[tuple[str, str, str, str]]()
    readable: Filter = lambda _: dict(enumerate(why for _, why in readings))  # noqa: E731
    for name, reasons in [("readable", readable), *_filters_of(settings, secret)]:
        reason_of = {index: why for index, why in sorted(reasons(files).items()) if why}
        unfit = [files[index] for index in reason_of]
        dropped += [(f.repository, f.path, name, why) for f, why in zip(unfit, reason_of.values(), strict=True)]
        files = [file for index, file in enumerate(files) if index not in reason_of]
        yields.append(_row(name, files, unfit))
    if len(files) < 2:
        raise ValueError(f"{root}: {len(files)} files are left, two are needed; dropped.csv of a laxer run says why")
    out.mkdir(parents=True, exist_ok=True)
    heldout = _heldout(files, settings)
    rows = list(_documents(files, heldout, settings.document))
    write_rows(rows, out)
    with replacing(out / DROPPED) as new_file, new_file.open("w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows([("repository", "path", "filter", "why"), *dropped])
    report = {
        "settings": dataclasses.asdict(settings),
        "yields": yields,
        "documents": rows[-1]["document"] + 1,
        "heldout": _row("heldout", list(compress(files, heldout)), []),
        "tasks": len(tasks),
        "tasks_too_short": len({task.id for task in tasks} - set(secret.values())),
        "digest": digest_of(rows),
    }
    write_json(out / REPORT, report)
    return report


def _filters_of(s: CorpusSettings, secret: Mapping[Run, str]) -> list[tuple[str, Filter]]:
    """Return the filters by name, in order: those of one file, then those that compare files."""

    def unlicensed(file: SourceFile) -> str:
        expressions = (file.licence, of_file(file.text) or file.licence)
        refused = [expression for expression in expressions if not is_allowed(expression, s.licences)]
        return refused[0] or "none stated" if refused else ""

    def long_line(file: SourceFile) -> str:
        longest = max(map(len, file.text.split("\n")))
        return str(longest) if longest > s.line else ""

    def long_lines(file: SourceFile) -> str:
        lines = [len(line) for line in file.text.split("\n") if line.strip()]
        mean = sum(lines) / max(1, len(lines))
        return f"{mean:.0f}" if mean > s.mean_line else ""

    def signs(file: SourceFile) -> str:
        share = sum(map(str.isalnum, file.text)) / max(1, sum(map(len, file.text.split())))
        return f"{share:.2f}" if share < s.alphanumeric else ""

    def unparsed(file: SourceFile) -> str:
        return "no Python" if file.path.endswith(".py") and not parsed(file.text) else ""

    def near(files: list[SourceFile]) -> Mapping[int, str]:
        duplicates = near_duplicates([file.text for file in files], s.similar, s.seed)
        return {index: f"{files[first].repository}: {files[first].path}" for index, first in duplicates.items()}

    alone: dict[str, Callable[[SourceFile], str]] = {
        "licence": unlicensed,
        "not generated": lambda file: "says so" if is_generated(file.text) else "",
        "longest line": long_line,
        "mean line": long_lines,
        "alphanumeric": signs,
        "parses": unparsed,
    }
    return [
        *((name, lambda files, why=why: dict(enumerate(map(why, files)))) for name, why in alone.items()),
        ("identical", _identical),
        ("near duplicate", near),
        ("contaminated", lambda files: contaminated([(f.repository, f.text) for f in files], secret, s.run, s.common)),
    ]


def _identical(files: list[SourceFile]) -> Mapping[int, str]:
    first: dict[str, SourceFile] = {}
    originals = enumerate(first.setdefault(file.text, file) for file in files)
    return {index: f"{file.repository}: {file.path}" for index, file in originals if file is not files[index]}


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of Python source; None if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            return parse(text)
    except (SyntaxError, ValueError):
        return None


_GENERATED = re.compile(
    r"\b(auto-?\s?generated|automatically generated|generated by|generated from|@generated|do not (edit|modify))\b",
    re.IGNORECASE,
)


def is_generated(text: str) -> bool:
    """Return whether a comment or string in the first ten lines says that a program wrote the file."""
    return any(_GENERATED.search(line) for line in text.split("\n", 10)[:10])


def _row(name: str, files: Sequence[SourceFile], gone: Sequence[SourceFile]) -> dict[str, Any]:
    return {
        "filter": name,
        "dropped_files": len(gone),
        "dropped_bytes": sum(len(file.text.encode()) for file in gone),
        "files": len(files),
        "repositories": len({file.repository for file in files}),
        "bytes": sum(len(file.text.encode()) for file in files),
    }


def _heldout(files: Sequence[SourceFile], s: CorpusSettings) -> list[bool]:
    """Return whether each file is held out: whole repositories, or paths if there is one repository, in an order drawn from the
    seed, as many as have at most the share of all characters, but at least the smallest."""
    has_several = files[0].repository != files[-1].repository
    units = [file.repository if has_several else file.path for file in files]
    sizes = Counter[str]()
    for unit, file in zip(units, files, strict=True):
        sizes[unit] += len(file.text)
    room = s.heldout * sizes.total()
    heldout_units: set[str] = set()
    for unit in sorted(sizes, key=lambda unit: hashlib.sha256(f"{s.seed} {unit}".encode()).digest()):
        if sizes[unit] <= room:
            heldout_units.add(unit)
            room -= sizes[unit]
    heldout_units = heldout_units or {min(sizes, key=lambda unit: (sizes[unit], unit))}
    return [unit in heldout_units for unit in units]


def _documents(files: Sequence[SourceFile], heldout: Sequence[bool], max_characters: int) -> Iterator[dict[str, Any]]:
    """Yield a row per file, by repository, with held-out files apart, in import order, and cut into documents."""
    sides_of: dict[str, tuple[dict[str, SourceFile], dict[str, SourceFile]]] = {}
    for file, side in zip(files, heldout, strict=True):
        sides_of.setdefault(file.repository, ({}, {}))[side][file.path] = file
    document = -1
    for sides in sides_of.values():
        for is_heldout, by_path in zip((False, True), sides, strict=True):
            characters = max_characters + 1
            for path in import_order({path: file.text for path, file in by_path.items()}):
                file = by_path[path]
                characters += len(file.text)
                if characters > max_characters:
                    document, characters = document + 1, len(file.text)
                row = dataclasses.asdict(file) | {"licence": of_file(file.text) or file.licence}
                yield row | {"heldout": is_heldout, "document": document}


# Near duplicates: texts whose sets of five-token shingles overlap, found by MinHash (Broder 1997) in the library `datasketch`.
# The index only proposes pairs. Each pair is compared before a text is dropped, so the threshold applies to the exact Jaccard
# similarity. A pair above it is missed with a probability of at most 1 %.

SHINGLE = 5
_PERMUTATIONS = 128
# Maximum probability that no band of the index finds a pair at the threshold.
_MISSED = 0.01
_TOKEN = re.compile(r"\w+|[^\w\s]")


def tokens(text: str) -> list[str]:
    """Return the words and signs of a text without white space, so that layout does not count."""
    return _TOKEN.findall(text)


def shingles(text: str) -> NDArray[np.uint32]:
    """Return the sorted hashes of all runs of `SHINGLE` tokens; for a shorter text, the hash of all its tokens."""
    words = tokens(text)
    runs = zip(*(words[at:] for at in range(SHINGLE)), strict=False) if len(words) > SHINGLE else [tuple(words)]
    return np.unique(np.array([crc32(" ".join(run).encode()) for run in runs], np.uint32))


def jaccard(first: NDArray[np.uint32], other: NDArray[np.uint32]) -> float:
    """Return the Jaccard similarity of two sets, given as sorted arrays without repeats."""
    common = len(np.intersect1d(first, other, assume_unique=True))
    return common / (len(first) + len(other) - common)


def near_duplicates(texts: Sequence[str], similar: float, seed: int) -> dict[int, int]:
    """Return the places of texts to drop, each with the place of an earlier, kept text whose Jaccard similarity is at least
    `similar` (0.05 to 1). `seed` draws the permutations."""
    from datasketch import MinHash, MinHashLSH

    rows = max(r for r in range(1, _PERMUTATIONS) if (1 - similar**r) ** (_PERMUTATIONS // r) < _MISSED)
    index = MinHashLSH(params=(_PERMUTATIONS // rows, rows), num_perm=_PERMUTATIONS)
    empty = MinHash(num_perm=_PERMUTATIONS, seed=seed + 1, hashfunc=int, scheme="affine32")
    retained: dict[int, NDArray[np.uint32]] = {}
    dropped: dict[int, int] = {}
    for position, text in enumerate(texts):
        own_shingles, sketch = shingles(text), empty.copy()
        sketch.update_batch(own_shingles)
        matches = (other for other in sorted(index.query(sketch)) if jaccard(own_shingles, retained[other]) >= similar)
        if (duplicate := next(matches, None)) is not None:
            dropped[position] = duplicate
        else:
            retained[position] = own_shingles
            index.insert(position, sketch)
    return dropped


# Contamination: files that contain parts of the tasks that will score a model, their requests, gold patches and hidden tests. A
# file is contaminated if it shares a run of `n` tokens with one of them (as in arXiv 2005.14165, appendix C, on tokens of code).
# The workspace of a task is not secret: only those runs of a solution count that are not in it.


def runs(words: Sequence[str], n: int) -> Iterator[Run]:
    """Yield every run of `n` neighbouring tokens."""
    return zip(*(words[at:] for at in range(n)), strict=False)


def secrets(tasks: Iterable[Task], n: int) -> dict[Run, str]:
    """Return the runs of `n` tokens that reveal a task, each with a task's id. A part with fewer tokens gives none."""
    revealing: dict[Run, str] = {}
    for task in tasks:
        visible = {run for text in task.files.values() for run in runs(tokens(text), n)}
        for text in (task.instruction, *task.tests.values(), *task.solution.values()):
            revealing |= {run: task.id for run in runs(tokens(text), n) if run not in visible}
    return revealing


def contaminated(texts: Sequence[tuple[str, str]], secret: Mapping[Run, str], n: int, common: int) -> dict[int, str]:
    """Return the places of those (repository, text) that share a run of `n` tokens with a task, and the task's id. Runs in more
    than `common` repositories are idioms and do not count."""
    repositories_of: dict[Run, set[str]] = defaultdict(set)
    hits_by_index: dict[int, set[Run]] = {}
    for index, (repository, text) in enumerate(texts if secret else ()):
        if hits := {run for run in runs(tokens(text), n) if run in secret}:
            hits_by_index[index] = hits
            for run in hits:
                repositories_of[run].add(repository)
    return {
        index: min(secret[run] for run in specific)
        for index, hits in hits_by_index.items()
        if (specific := [run for run in hits if len(repositories_of[run]) <= common])
    }


# The order of a repository's files: the imports of a file come before it (arXiv 2401.14196, §2.2).


def import_order(texts: Mapping[str, str]) -> list[str]:
    """Return the paths of a repository's files, each after the files that it imports when it is loaded. In a cycle, the file with
    the fewest missing imports comes first; ties are in order of path."""
    names = {_module(path, texts): path for path in sorted(texts, reverse=True) if path.endswith(".py")}
    imports = {path: {names[n] for n in _imports(path, texts, names)} - {path} for path in texts}
    users: dict[str, list[str]] = {path: [] for path in texts}
    for path, needed in imports.items():
        for dependency in needed:
            users[dependency].append(path)
    missing = {path: len(needed) for path, needed in imports.items()}
    heap = [(count, path) for path, count in missing.items()]
    heapq.heapify(heap)
    order: dict[str, None] = {}
    while heap:
        count, path = heapq.heappop(heap)
        if path in order or count != missing[path]:
            continue  # an older entry
        order[path] = None
        for user in users[path]:
            missing[user] -= 1
            heapq.heappush(heap, (missing[user], user))
    return list(order)


def _module(path: str, texts: Mapping[str, str]) -> str:
    """Return the dotted name under which `path` is imported: from the folder above its outermost package, or from its own."""
    location = PurePosixPath(path)
    parts = [] if location.name == "__init__.py" else [location.stem]
    folder = location.parent
    while (folder / "__init__.py").as_posix() in texts and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _imports(path: str, texts: Mapping[str, str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules of the repository that a file imports outside functions."""
    tree = parsed(texts[path]) if path.endswith(".py") else None
    package = _module(path, texts).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    pending: list[ast.AST] = [tree] if tree else []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            modules = (f"{source}.{alias.name}" for alias in node.names)
            yield from (imported for name in modules if (imported := name if name in names else source) in names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
