#!/usr/bin/env python3
"""Which base do the three evaluations of a base choose? `scripts/studies/compare_bases.py [--seeds N …] [--steps N]`.

Composer 2 (arXiv 2603.24477, appendix B) chose its base by fresh knowledge, state tracking and the likelihood of a codebase.
These did not rank the same candidate first. Here bases differ by what they have read, from one random start a seed: other code
(Python's standard library) for a third of the steps, or for all; the codebase that is asked about in half of the rows; or
histories of files of other code in half of them. Prints the evaluations of `labs/bases.py`, medians over seeds with the least and
the most, and the base that each ranks first. One thread.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer_nb.labs.bases import END, BaseCandidate, Measures, compare_bases, make_histories
from composer_nb.trainer.learning.data import TokenRow, code_rows, read_corpus
from scripts.studies.compare_behaviour import TOKENIZER, table, taught

SIZES = Measures(bytes=20_000, lines=3, edits=2, histories=32)
OTHER_FILES, HISTORIES = 60, 1200
"""Files of other code, and histories of them to learn."""
BETTER: Mapping[str, Callable[..., Any]] = {"fresh_knowledge": max, "state_distance": min, "bits_per_byte": min}


def history_rows(base: BaseCandidate, texts: Sequence[str], seed: int) -> list[TokenRow]:
    """Return histories with what their files are after them, which counts ten times as much."""
    rows = []
    for history in make_histories(texts, HISTORIES, SIZES.lines, SIZES.edits, seed):
        spans = [[base.first, *base.ids(history.prompt)], base.ids(history.end + END)]
        weights = np.repeat(np.array([0.1, 1.0], np.float32), [len(span) for span in spans])
        rows.append(TokenRow(np.concatenate(spans).astype(np.int32), weights))
    return [row for row in rows if len(row.weight) <= base.model.config.max_position_embeddings]


def evenly(*sources: list[TokenRow]) -> list[TokenRow]:
    """Return the rows of all sources, each repeated to as many as the largest has."""
    most = max(map(len, sources))
    return [rows[n % len(rows)] for rows in sources for n in range(most)]


def bases_of(seed: int, steps: int, codebase: Sequence[str], other: Sequence[str]) -> list[BaseCandidate]:
    """Return the random start of a seed, and the bases that it becomes."""
    code, asked = (code_rows(texts, TOKENIZER, 1.0) for texts in (other, codebase))
    bases = list[BaseCandidate]()

    def add(name: str, steps: int, *sources: list[TokenRow]) -> None:
        model = taught(seed, steps, lambda _: evenly(*sources))
        bases.append(BaseCandidate(name=name, model=model, tokenizer=TOKENIZER))
        print(f"seed {seed}: {name}", flush=True)

    add("random", 0, code)
    add("other code, a third", steps // 3, code)
    add("other code", steps, code)
    add("and the codebase", steps, code, asked)
    add("and histories", steps, code, history_rows(bases[0], other, seed))
    return bases


def first_ranked(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the base that each evaluation ranks first, of those with weights."""
    candidates = [row for row in rows if row["weights"]]
    return {name: best(candidates, key=itemgetter(name))["base"] for name, best in BETTER.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--code", type=Path, default=Path("composer_nb/kernels/moe"), help="the codebase asked about")
    args = parser.parse_args()
    torch.set_num_threads(1)
    codebase = [path.read_text(encoding="utf-8") for path in sorted(args.code.rglob("*.py"))]
    other = read_corpus("stdlib").train[:OTHER_FILES]
    by_base: dict[str, list[dict[str, float]]] = {}
    chosen = {name: Counter[str]() for name in BETTER}
    for seed in args.seeds:
        rows = compare_bases(bases_of(seed, args.steps, codebase, other), codebase, SIZES)
        for row in rows:
            by_base.setdefault(row["base"], []).append({name: row[name] for name in BETTER})
        for name, base in first_ranked(rows).items():
            chosen[name][base] += 1
    print(table(by_base, BETTER))
    for name, counts in chosen.items():
        print(f"{name} ranks first: {', '.join(f'{base} ({n} of {len(args.seeds)})' for base, n in counts.items())}")


if __name__ == "__main__":
    main()
