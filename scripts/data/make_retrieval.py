#!/usr/bin/env python3
"""Make search's embedding: `scripts/data/make_retrieval.py [OUT] [--seed 0] [--traces TASKS ROLLOUTS]...`.

It learns from the standard library of the Python that runs this, and from rollouts on tasks of repositories (`tasks make`,
`eval`).

A fifth of the library's packages and modules, by hash of their names, is held out, and the recall on it is printed.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from platform import python_version

from retrieval.questions import Mined, is_test_file, mine, read_repository
from retrieval.storage import save_embedding
from retrieval.traces import read_traces
from retrieval.training import (
    RetrievalSettings,
    heldout,
    make_vocabulary,
    prepare,
    provenance,
    recall,
    train,
)

from composer_nb.harness.search.embedding import SHIPPED

NOT_OURS = {"site-packages", "ensurepip", "test", "tests", "idle_test", "pydoc_data", "encodings"}
"""Folders of the library that hold no code of its own, or tests, or tables."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, nargs=2, action="append", default=[], metavar=("TASKS", "ROLLOUTS"))
    arguments = parser.parse_args()
    began = time.monotonic()
    files = library(Path(sysconfig.get_paths()["stdlib"]))
    subsets = {False: {}, True: {}}
    for path, data in files.items():
        subsets[heldout(path.split("/")[0].removesuffix(".py"))][path] = data
    mined: dict[bool, Mined] = {out: mine(subset) for out, subset in subsets.items()}
    settings = RetrievalSettings(seed=arguments.seed)
    followed = [read_traces(*paths) for paths in arguments.traces]
    vocabulary = make_vocabulary([mined[False].files, *(files for files, _ in followed)], settings.vocabulary)
    learnt, measured = (prepare("stdlib", mined[out].files, mined[out].questions, vocabulary) for out in (False, True))
    print(f"{len(files)} files, {len(learnt.questions)} questions to train on, {len(vocabulary)} terms", flush=True)
    agents = [prepare(f"traces {n}", *trace, vocabulary) for n, trace in enumerate(followed)]
    vectors, losses = train([learnt, *agents], vocabulary, settings)
    question_count = sum(len(repository.questions) for repository in agents)
    source = f"standard library of Python {python_version()}, {len(files)} files"
    source += f"; {question_count} questions of agents in {len(agents)} repositories" * bool(agents)
    inputs = files | {
        f"traces {n}/{path}": data for n, (trace_files, _) in enumerate(followed) for path, data in trace_files.items()
    }
    save_embedding(arguments.out, list(vocabulary), vectors, provenance(settings, inputs, source))
    last = sum(losses[-50:]) / len(losses[-50:])
    print(f"loss {losses[0]:.3f} -> {last:.3f}; recall@10 on {len(measured.questions)} held-out questions: "
          f"{recall(measured, vectors):.3f}; {time.monotonic() - began:.0f} s; {arguments.out}")  # fmt: skip


def library(root: Path) -> dict[str, bytes]:
    """Return the library's Python files by path."""
    files = read_repository(root, lambda path: path.suffix == ".py" and not NOT_OURS & set(path.parts))
    return {path: data for path, data in files.items() if not is_test_file(path)}


if __name__ == "__main__":
    main()
