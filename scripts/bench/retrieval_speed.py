#!/usr/bin/env python3
"""Measure the speed of search on a large repository: `scripts/bench/retrieval_speed.py [--files 5000]`.

The repository consists of Python files of the standard library and of installed packages, drawn with a fixed seed. Prints the
times to index it, to answer queries (first sentences of docstrings), and to edit a file and answer the next query. Reports wall
time and this process's CPU time, since the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from composer_nb.harness.search.embedding import SHIPPED, load_embedding
from composer_nb.harness.search.index import CodeIndex
from scripts.data.retrieval.questions import mine, read_repository


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--embedding", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    embedding = load_embedding(arguments.embedding)
    paths = sysconfig.get_paths()
    files: dict[str, bytes] = {}
    for name in ("stdlib", "purelib"):
        package_files = read_repository(
            Path(paths[name]), lambda path: path.suffix == ".py" and "site-packages" not in path.parts
        )
        files |= {f"{name}/{path}": data for path, data in package_files.items() if data}
    if len(files) < arguments.files:
        parser.error(f"--files {arguments.files}: there are only {len(files)}")
    files = {path: files[path] for path in sorted(Random(0).sample(sorted(files), arguments.files))}
    size, lines = sum(map(len, files.values())) / 1e6, sum(data.count(b"\n") for data in files.values())
    print(f"{len(files)} files, {size:.0f} MB, {lines} lines", flush=True)
    with timed("indexed"):
        index = CodeIndex.build(files, embedding)
    print(f"{len(index.table().paths)} files, {len(index.table().file)} chunks")
    small = dict(Random(1).sample(sorted(files.items()), 200))
    questions = [question.text for question in mine(small).questions if question.kind == "docstring"][:200]
    series("query", [lambda text=text: index.search(text) for text in questions])
    edited = Random(2).sample(sorted(files.items()), 60)
    added = b"\n\ndef added():\n    return 1\n"
    series("edit and query", [lambda path=path, data=data: edit(index, path, data + added) for path, data in edited])


def edit(index: CodeIndex, path: str, data: bytes) -> None:
    index.edit(path, data)
    index.search("added function")


@contextmanager
def timed(label: str) -> Iterator[None]:
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    yield
    print(
        f"{label}: {time.perf_counter() - wall_start:.1f} s, {time.process_time() - cpu_start:.1f} s of its own",
        flush=True,
    )


def series(label: str, calls: list[Callable[[], object]]) -> None:
    calls[0]()
    times = []
    for call in calls:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        call()
        times.append((1e3 * (time.perf_counter() - wall_start), 1e3 * (time.process_time() - cpu_start)))
    wall, cpu = np.array(times).T
    figures = [
        f"p50 {np.median(milliseconds):.1f}, p95 {np.quantile(milliseconds, 0.95):.1f} ms"
        for milliseconds in (wall, cpu)
    ]
    print(f"{label}, {len(calls)} times: {figures[0]} on the clock; {figures[1]} of its own", flush=True)


if __name__ == "__main__":
    sys.exit(main())
