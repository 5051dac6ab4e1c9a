#!/usr/bin/env python3
"""Measure how well search answers questions about repositories:

    scripts/bench/retrieval_bench.py DIR... [--questions 150] [--kind docstring] [--traces TASKS ROLLOUTS]...

Each DIR is an unpacked source distribution that the embedding has not seen. Its questions are mined
(`data/retrieval/questions.py`), and at most `--questions` of them are drawn with a fixed seed. With `--traces`, questions are
what agents on a repository's tasks said and came to need. Prints a Markdown table per repository, and one for all questions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.search.embedding import SHIPPED, load_embedding
from composer_nb.harness.search.index import CodeIndex
from scripts.data.retrieval.measure import ranks, table
from scripts.data.retrieval.questions import Mined, mine, read_repository
from scripts.data.retrieval.traces import read_traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", metavar="DIR")
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--kind", default="docstring", choices=["docstring", "bug"])
    parser.add_argument("--traces", type=Path, nargs=2, action="append", default=[], metavar=("TASKS", "ROLLOUTS"))
    parser.add_argument("--embedding", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    embedding = load_embedding(arguments.embedding)
    ranks_by_method: dict[str, list[NDArray[np.float64]]] = {}
    if not arguments.folders and not arguments.traces:
        parser.error("nothing to ask: name a DIR or --traces TASKS ROLLOUTS")
    asks = [(folder.name, mine(read_repository(folder)), arguments.kind) for folder in arguments.folders]
    for tasks, rollouts in arguments.traces:
        files, questions = read_traces(tasks, rollouts)
        asks.append((f"agents, {tasks.parent.name}", Mined(files=files, questions=tuple(questions)), "trace"))
    for name, mined, kind in asks:
        sample = [question for question in mined.questions if question.kind == kind]
        if not sample:
            parser.error(f"{name}: no question of the kind {kind} can be made of it")
        sample = Random(0).sample(sample, min(arguments.questions, len(sample)))
        index = CodeIndex.build(mined.files, embedding)
        index_ranks = ranks(index, sample)
        show(
            f"{name}: {len(sample)} questions, {len(index.table().paths)} files, {len(index.table().file)} chunks",
            index_ranks,
        )
        for method, rank in index_ranks.items():
            ranks_by_method.setdefault(method, []).append(rank)
    total = {method: np.concatenate(rank) for method, rank in ranks_by_method.items()}
    show(f"all {len(total['fused'])} questions", total)


def show(title: str, ranks_by_method: dict[str, NDArray[np.float64]]) -> None:
    print(f"\n**{title}**\n\n| | recall@5 | recall@10 | MRR |\n|---|---|---|---|")
    for method, scores in table(ranks_by_method).items():
        cells = (f"{score.mean:+.3f}" if " - " in method else f"{score.mean:.3f}" for score in scores.values())
        ranges = (f"[{score.low:.3f}, {score.high:.3f}]" for score in scores.values())
        print(f"| {method} | " + " | ".join(f"{cell} {span}" for cell, span in zip(cells, ranges, strict=True)) + " |")
    print(flush=True)


if __name__ == "__main__":
    main()
