#!/usr/bin/env python3
"""How well search answers questions about repositories: `scripts/retrieval_bench.py DIR... [--questions 150] [--kind docstring]`.

Each DIR is an unpacked source distribution that the embedding has not seen. Its questions are mined (`search/questions.py`), at
most `--questions` drawn with a fixed seed. Prints Markdown: a table for each repository, and one for all questions together.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.search.embedding import SHIPPED, load_embedding
from composer_nb.harness.search.index import CodeIndex
from composer_nb.harness.search.measure import ranks, table
from composer_nb.harness.search.questions import mine, read_repository


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--kind", default="docstring", choices=["docstring", "bug"])
    parser.add_argument("--embedding", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    embedding = load_embedding(arguments.embedding)
    found: dict[str, list[NDArray[np.float64]]] = {}
    for folder in arguments.folders:
        mined = mine(read_repository(folder))
        asked = [question for question in mined.questions if question.kind == arguments.kind]
        if not asked:
            parser.error(f"{folder}: no question of the kind {arguments.kind} can be made of it")
        asked = Random(0).sample(asked, min(arguments.questions, len(asked)))
        index = CodeIndex.build(mined.files, embedding)
        each = ranks(index, asked)
        show(f"{folder.name}: {len(asked)} questions, {index.report.files} files, {index.report.chunks} chunks", each)
        for way, rank in each.items():
            found.setdefault(way, []).append(rank)
    total = {way: np.concatenate(rank) for way, rank in found.items()}
    show(f"all {len(total['fused'])} questions", total)


def show(title: str, found: dict[str, NDArray[np.float64]]) -> None:
    print(f"\n**{title}**\n\n| | recall@5 | recall@10 | MRR |\n|---|---|---|---|")
    for way, scores in table(found).items():
        cells = (f"{each.mean:+.3f}" if " - " in way else f"{each.mean:.3f}" for each in scores.values())
        ranges = (f"[{each.low:.3f}, {each.high:.3f}]" for each in scores.values())
        print(f"| {way} | " + " | ".join(f"{cell} {span}" for cell, span in zip(cells, ranges, strict=True)) + " |")
    print(flush=True)


if __name__ == "__main__":
    main()
