"""Can code under test tell a changed expectation from an original? Train a classifier to do so, and see how often it is right.

    python scripts/studies/twin_classifier.py                     # accuracy on tests/harness/grading/expectations.json
    python scripts/studies/twin_classifier.py --collect FOLDER    # write that file anew, from unpacked source distributions

The file holds facts of foreign suites: what a function is called with, and what is expected. From them each suite is written anew
as one module, every expectation becomes, by lot, itself or a twin, and all that a reader of this module could measure becomes a
feature: type, length, digits, decimals, letters, trigrams, frequency in the module, relation to the inputs, order of a list. A
logistic model of binned features, one for each type, is trained on all suites but one and judged on that one.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from composer_nb.harness.grading.mutate import Suite, _cases, _grams
from composer_nb.harness.grading.plan import changed_text
from composer_nb.harness.grading.source import cells_of, last_name, values
from composer_nb.harness.grading.twins import TwinCandidate, tests_of

CORPUS = Path(__file__).parents[2] / "tests/harness/grading/expectations.json"
MOST = 80
"""Expectations of one suite."""
Fact = tuple[str, list[str], str]
"""Name of a function, its literal arguments, and what is expected, as Python writes them."""


def _alike(first: str, second: str) -> int:
    """Return the number of letters with which both texts begin."""
    pairs = zip(first, second, strict=False)
    return next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(first), len(second)))


def _relation(text: str, argument: str) -> tuple[float, ...]:
    """Return measures, from 0 to 1, of how a text relates to an input."""
    lower_text, lower_argument = text.casefold(), argument.casefold()
    longest = max(len(lower_text), len(lower_argument), 1)
    begin, end = _alike(lower_text, lower_argument), _alike(lower_text[::-1], lower_argument[::-1])
    shared = (Counter(lower_text) & Counter(lower_argument)).total()
    return (
        begin / longest,
        end / longest,
        shared / longest,
        float(lower_text in lower_argument),
        float(lower_argument in lower_text),
        float(text == argument),
    )


def facts(texts: Mapping[str, str]) -> Iterator[Fact]:
    """Yield equations between a call and a literal in the tests of some modules, and in their tables."""
    for test in tests_of(texts):
        for node in ast.walk(test.node):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                yield from _fact(node.left, [*values(node.left)], node.comparators[0])
            elif isinstance(node, ast.Call) and last_name(node.func) == "assertEqual" and len(node.args) > 1:
                yield from _fact(node.args[0], [*values(node.args[0])], node.args[1])
        asserts = [statement.test for statement in ast.walk(test.node) if isinstance(statement, ast.Assert)]
        equations = [
            comparison
            for comparison in asserts
            if isinstance(comparison, ast.Compare) and isinstance(comparison.ops[0], ast.Eq)
        ]
        used = {
            side.id
            for comparison in equations
            for side in (comparison.left, *comparison.comparators)
            if isinstance(side, ast.Name)
        }
        for row in test.rows:
            cells = dict(zip(test.columns, cells_of(test.columns, row), strict=False))
            for name in used & set(cells):
                inputs = [value for column, cell in cells.items() if column != name for value in values(cell)]
                yield from _fact(ast.parse("f()", mode="eval").body, inputs, cells[name])


def _fact(answer: ast.expr, inputs: Sequence[Any], literal: ast.expr) -> Iterator[Fact]:
    calls = [node for node in ast.walk(answer) if isinstance(node, ast.Call)]
    try:
        expected = repr(ast.literal_eval(literal))
    except (ValueError, TypeError, SyntaxError):
        return
    if calls and len(expected) < 120 and len(repr(inputs)) < 200 and expected.isprintable():
        yield last_name(calls[-1].func) or "f", [repr(value) for value in inputs[:6]], expected


def collect(folder: Path) -> dict[str, list[Fact]]:
    facts_by_suite: dict[str, list[Fact]] = {}
    for suite in sorted(child for child in folder.iterdir() if child.is_dir()):
        texts = {}
        for path in sorted(suite.rglob("test_*.py")):
            try:
                ast.parse(texts.setdefault(str(path), path.read_text()))
            except (SyntaxError, UnicodeDecodeError):
                del texts[str(path)]
        suite_facts = list({json.dumps(fact): fact for fact in facts(texts)}.values())
        if len(suite_facts) >= 40:
            facts_by_suite[suite.name] = random.Random(suite.name).sample(suite_facts, min(MOST, len(suite_facts)))
    return facts_by_suite


def module(suite_facts: Sequence[Fact]) -> str:
    """Return a suite that states these facts."""
    return "".join(
        f"def test_{number}():\n    assert {name}({', '.join(inputs)}) == {expected}\n"
        for number, (name, inputs, expected) in enumerate(suite_facts)
    )


def displayed(text: str, lot: random.Random) -> tuple[str, dict[int, bool]]:
    """Return the module as one run has it, and for each test that has a twin whether it is the twin."""
    of_test: dict[int, list[TwinCandidate]] = {}
    for change in (change for test in tests_of({"test_a.py": text}) for change in test.proposals()):
        of_test.setdefault(int(change.base.rpartition("_")[2]), []).append(change)
    twins = {number: lot.choice(candidates) for number, candidates in of_test.items() if lot.random() < 0.5}
    return changed_text(text, [*twins.values()]), {number: number in twins for number in of_test}


def features(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield, for each test of a module, the type of what is expected, and what can be measured of it."""
    tree = ast.parse(text)
    suite = Suite.of([tree])
    words = Counter(word for texts in suite.texts.values() for text in texts for word in text.lower().split())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            inputs, expected = values(node.left), ast.literal_eval(node.comparators[0])
            yield type(expected).__name__, dict(_features(expected, inputs, suite, words))


def _features(expected: Any, inputs: Sequence[Any], suite: Suite, words: Counter[str]) -> Iterator[tuple[str, float]]:
    if isinstance(expected, list | tuple | dict | set):
        elements = [*(expected.values() if isinstance(expected, dict) else expected)]
        yield "size", len(elements)
        yield "distinct", len({repr(element) for element in elements}) / max(1, len(elements))
        yield "of the inputs", sum(element in inputs for element in elements) / max(1, len(elements))
        yield "in order", sum(repr(a) <= repr(b) for a, b in pairwise(elements)) / max(1, len(elements) - 1)
        flat = values(ast.parse(repr(expected), mode="eval"))
        element_features = [dict(_features(element, inputs, suite, words)) for element in flat[:12]]
        for name in {name for measures in element_features for name in measures}:
            numbers = [measures[name] for measures in element_features if name in measures]
            yield f"least {name}", min(numbers)
            yield f"most {name}", max(numbers)
        return
    yield "again", min(suite.count(expected) - 1, 3)
    yield "is an input", float(any(type(value) is type(expected) and value == expected for value in inputs))
    if isinstance(expected, bytes):
        expected, inputs = expected.decode("latin-1"), [e.decode("latin-1") for e in inputs if isinstance(e, bytes)]
    if isinstance(expected, str):
        yield from _of_text(expected, [value for value in inputs if isinstance(value, str)], suite, words)
    elif isinstance(expected, int | float):
        digits = repr(expected).lstrip("-")
        yield "digits", len(digits)
        yield "decimals", len(digits.partition(".")[2])
        yield "first", float(digits[0]) if digits[0].isdigit() else -1
        yield "last", float(digits[-1]) if digits[-1].isdigit() else -1
        yield "zeros", len(digits) - len(digits.rstrip("0."))
        yield "repeated", max(Counter(digits).values()) / len(digits)
        numbers = [float(value) for value in inputs if isinstance(value, int | float)]
        yield "above", float(sum(expected > number for number in numbers))
        yield "below", float(sum(expected < number for number in numbers))
        yield "multiple", float(any(number and expected % number == 0 for number in numbers))
        yield "near", min([abs(expected - number) for number in numbers] or [99.0])
        lengths = [len(value) for value in inputs if isinstance(value, str)]
        yield "a length", float(expected in lengths)
        yield "in the text", float(any(digits in value for value in inputs if isinstance(value, str)))


def _of_text(text: str, inputs: Sequence[str], suite: Suite, words: Counter[str]) -> Iterator[tuple[str, float]]:
    text_grams, size = _grams(text) if suite.count(text) else Counter[str](), max(1, len(text))
    yield "length", len(text)
    yield "likelihood", suite.likelihood(text, text_grams)
    grams = [suite.grams[gram] - text_grams[gram] for gram in _grams(text) if len(gram) == 3]
    yield "rarest", min(grams)
    yield "new", sum(not count for count in grams) / len(grams)
    pairs = [suite.grams[gram] - text_grams[gram] for gram in _grams(text) if len(gram) == 2]
    yield "rarest pair", min(pairs)
    for mark in "aAd":
        yield f"share of {mark}", _cases(text).count(mark) / size
    yield "vowels", sum(letter in "aeiou" for letter in text.lower()) / size
    yield "rare letters", sum(letter in "jqxzkvw" for letter in text.lower()) / size
    yield "doubled", sum(a == b for a, b in pairwise(text)) / size
    inside = Counter(text.lower().split())
    yield "known words", sum(words[word] > inside[word] for word in inside) / max(1, len(inside))
    best = max((_relation(text, value) for value in inputs), default=(-1.0,) * 6)
    yield from zip(("begins", "ends", "shared", "inside", "around", "equal"), best, strict=True)
    nearest = max(inputs, key=lambda value: _relation(text, value), default="")
    yield "longer by", len(text) - len(nearest)


def examples(corpus: Mapping[str, Sequence[Fact]], seed: int) -> list[tuple[str, str, dict[str, float], bool]]:
    """Return (suite, type, features, whether it is a twin) of all expectations that have a twin."""
    rows = []
    for suite, suite_facts in sorted(corpus.items()):
        text, is_twin = displayed(module(suite_facts), random.Random(f"{seed} {suite}"))
        for number, (kind, measured) in enumerate(features(text)):
            if number in is_twin:
                rows.append((suite, kind, measured, is_twin[number]))
    return rows


def accuracy(rows: Sequence[tuple[str, str, dict[str, float], bool]]) -> tuple[float, dict[str, float]]:
    """Return the share of right answers on suites that the model was not trained on, and of each type alone."""
    hits: dict[str, list[bool]] = {}
    for suite in sorted({row[0] for row in rows}):
        for kind in sorted({row[1] for row in rows}):
            train_rows = [row for row in rows if row[0] != suite and row[1] == kind]
            test_rows = [row for row in rows if row[0] == suite and row[1] == kind]
            if test_rows and len({row[3] for row in train_rows}) == 2:
                predictions = _predicted(
                    [row[2] for row in train_rows], [row[3] for row in train_rows], [row[2] for row in test_rows]
                )
                truth = [row[3] for row in test_rows]
                hits.setdefault(kind, []).extend(s == t for s, t in zip(predictions, truth, strict=True))
    all_hits = [hit for kind in hits.values() for hit in kind]
    return float(np.mean(all_hits)), {
        kind: float(np.mean(kind_hits)) for kind, kind_hits in hits.items() if len(kind_hits) > 30
    }


def _predicted(
    train_features: Sequence[dict[str, float]], truth: Sequence[bool], test_features: Sequence[dict[str, float]]
) -> list[bool]:
    """Return what a logistic model predicts for `test_features`: weights for each bin of each feature, shrunk towards 0."""
    names = sorted({name for measures in train_features for name in measures})
    table = np.array([[measures.get(name, np.nan) for name in names] for measures in [*train_features, *test_features]])
    columns = []
    for column in table.T:
        edges = np.unique(np.nanquantile(column[: len(train_features)], [0.1, 0.25, 0.4, 0.6, 0.75, 0.9]))
        bins = np.where(np.isnan(column), -1, np.digitize(column, edges))
        columns += [bins == number for number in range(-1, len(edges) + 1)]
    x = np.array(columns, float).T
    mean = x[: len(train_features)].mean(0)
    x, y = x - mean, np.array(truth, float)
    weights, bias, train = np.zeros(x.shape[1]), 0.0, x[: len(train_features)]
    for _ in range(400):
        slope = 1 / (1 + np.exp(-(train @ weights + bias))) - y
        weights -= 0.5 * (train.T @ slope / len(y) + 0.02 * weights)
        bias -= 0.5 * slope.mean()
    return [bool(score > 0) for score in x[len(train_features) :] @ weights + bias]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    if args.collect:
        lines = [
            f"{json.dumps(suite)}: {json.dumps(suite_facts)}" for suite, suite_facts in collect(args.collect).items()
        ]
        CORPUS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    corpus = json.loads(CORPUS.read_text())
    print({suite: len(suite_facts) for suite, suite_facts in corpus.items()})
    for seed in range(args.seeds):
        rows = examples(corpus, seed)
        share, kinds = accuracy(rows)
        print(
            f"{len(rows)} expectations: {share:.3f} right",
            {kind: round(kind_share, 3) for kind, kind_share in kinds.items()},
        )


if __name__ == "__main__":
    main()
