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


def _alike(one: str, two: str) -> int:
    """Return the number of letters with which both texts begin."""
    pairs = zip(one, two, strict=False)
    return next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(two)))


def _relation(text: str, given: str) -> tuple[float, ...]:
    """Return measures, from 0 to 1, of how a text relates to an input."""
    one, two = text.casefold(), given.casefold()
    longest = max(len(one), len(two), 1)
    begin, end = _alike(one, two), _alike(one[::-1], two[::-1])
    shared = (Counter(one) & Counter(two)).total()
    return begin / longest, end / longest, shared / longest, float(one in two), float(two in one), float(text == given)


def facts(texts: Mapping[str, str]) -> Iterator[Fact]:
    """Equations between a call and a literal in the tests of some modules, and in their tables."""
    for test in tests_of(texts):
        for node in ast.walk(test.node):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                yield from _fact(node.left, [*values(node.left)], node.comparators[0])
            elif isinstance(node, ast.Call) and last_name(node.func) == "assertEqual" and len(node.args) > 1:
                yield from _fact(node.args[0], [*values(node.args[0])], node.args[1])
        asserts = [each.test for each in ast.walk(test.node) if isinstance(each, ast.Assert)]
        equations = [each for each in asserts if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.Eq)]
        used = {side.id for each in equations for side in (each.left, *each.comparators) if isinstance(side, ast.Name)}
        for row in test.rows:
            cells = dict(zip(test.columns, cells_of(test.columns, row), strict=False))
            for name in used & set(cells):
                inputs = [value for other, cell in cells.items() if other != name for value in values(cell)]
                yield from _fact(ast.parse("f()", mode="eval").body, inputs, cells[name])


def _fact(answer: ast.expr, inputs: Sequence[Any], wanted: ast.expr) -> Iterator[Fact]:
    calls = [each for each in ast.walk(answer) if isinstance(each, ast.Call)]
    try:
        expected = repr(ast.literal_eval(wanted))
    except (ValueError, TypeError, SyntaxError):
        return
    if calls and len(expected) < 120 and len(repr(inputs)) < 200 and expected.isprintable():
        yield last_name(calls[-1].func) or "f", [repr(each) for each in inputs[:6]], expected


def collect(folder: Path) -> dict[str, list[Fact]]:
    found: dict[str, list[Fact]] = {}
    for suite in sorted(each for each in folder.iterdir() if each.is_dir()):
        texts = {}
        for path in sorted(suite.rglob("test_*.py")):
            try:
                ast.parse(texts.setdefault(str(path), path.read_text()))
            except (SyntaxError, UnicodeDecodeError):
                del texts[str(path)]
        held = list({json.dumps(fact): fact for fact in facts(texts)}.values())
        if len(held) >= 40:
            found[suite.name] = random.Random(suite.name).sample(held, min(MOST, len(held)))
    return found


def module(held: Sequence[Fact]) -> str:
    """A suite that says these facts."""
    return "".join(
        f"def test_{number}():\n    assert {name}({', '.join(inputs)}) == {expected}\n"
        for number, (name, inputs, expected) in enumerate(held)
    )


def displayed(text: str, lot: random.Random) -> tuple[str, dict[int, bool]]:
    """The module as one run has it, and for each test that has a twin whether it is the twin."""
    of_test: dict[int, list[TwinCandidate]] = {}
    for change in (change for test in tests_of({"test_a.py": text}) for change in test.proposals()):
        of_test.setdefault(int(change.base.rpartition("_")[2]), []).append(change)
    twins = {number: lot.choice(found) for number, found in of_test.items() if lot.random() < 0.5}
    return changed_text(text, [*twins.values()]), {number: number in twins for number in of_test}


def features(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each test of a module: the type of what is expected, and what can be measured of it."""
    tree = ast.parse(text)
    suite = Suite.of([tree])
    words = Counter(word for each in suite.texts.values() for text in each for word in text.lower().split())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            inputs, wanted = values(node.left), ast.literal_eval(node.comparators[0])
            yield type(wanted).__name__, dict(_features(wanted, inputs, suite, words))


def _features(wanted: Any, inputs: Sequence[Any], suite: Suite, words: Counter[str]) -> Iterator[tuple[str, float]]:
    if isinstance(wanted, list | tuple | dict | set):
        held = [*(wanted.values() if isinstance(wanted, dict) else wanted)]
        yield "size", len(held)
        yield "distinct", len({repr(each) for each in held}) / max(1, len(held))
        yield "of the inputs", sum(each in inputs for each in held) / max(1, len(held))
        yield "in order", sum(repr(a) <= repr(b) for a, b in pairwise(held)) / max(1, len(held) - 1)
        flat = values(ast.parse(repr(wanted), mode="eval"))
        each_one = [dict(_features(each, inputs, suite, words)) for each in flat[:12]]
        for name in {name for one in each_one for name in one}:
            numbers = [one[name] for one in each_one if name in one]
            yield f"least {name}", min(numbers)
            yield f"most {name}", max(numbers)
        return
    yield "again", min(suite.count(wanted) - 1, 3)
    yield "is an input", float(any(type(each) is type(wanted) and each == wanted for each in inputs))
    if isinstance(wanted, bytes):
        wanted, inputs = wanted.decode("latin-1"), [e.decode("latin-1") for e in inputs if isinstance(e, bytes)]
    if isinstance(wanted, str):
        yield from _of_text(wanted, [each for each in inputs if isinstance(each, str)], suite, words)
    elif isinstance(wanted, int | float):
        digits = repr(wanted).lstrip("-")
        yield "digits", len(digits)
        yield "decimals", len(digits.partition(".")[2])
        yield "first", float(digits[0]) if digits[0].isdigit() else -1
        yield "last", float(digits[-1]) if digits[-1].isdigit() else -1
        yield "zeros", len(digits) - len(digits.rstrip("0."))
        yield "repeated", max(Counter(digits).values()) / len(digits)
        numbers = [float(each) for each in inputs if isinstance(each, int | float)]
        yield "above", float(sum(wanted > each for each in numbers))
        yield "below", float(sum(wanted < each for each in numbers))
        yield "multiple", float(any(each and wanted % each == 0 for each in numbers))
        yield "near", min([abs(wanted - each) for each in numbers] or [99.0])
        lengths = [len(each) for each in inputs if isinstance(each, str)]
        yield "a length", float(wanted in lengths)
        yield "in the text", float(any(digits in each for each in inputs if isinstance(each, str)))


def _of_text(text: str, inputs: Sequence[str], suite: Suite, words: Counter[str]) -> Iterator[tuple[str, float]]:
    own, size = _grams(text) if suite.count(text) else Counter[str](), max(1, len(text))
    yield "length", len(text)
    yield "likelihood", suite.likelihood(text, own)
    grams = [suite.grams[gram] - own[gram] for gram in _grams(text) if len(gram) == 3]
    yield "rarest", min(grams)
    yield "new", sum(not each for each in grams) / len(grams)
    pairs = [suite.grams[gram] - own[gram] for gram in _grams(text) if len(gram) == 2]
    yield "rarest pair", min(pairs)
    for mark in "aAd":
        yield f"share of {mark}", _cases(text).count(mark) / size
    yield "vowels", sum(letter in "aeiou" for letter in text.lower()) / size
    yield "rare letters", sum(letter in "jqxzkvw" for letter in text.lower()) / size
    yield "doubled", sum(a == b for a, b in pairwise(text)) / size
    inside = Counter(text.lower().split())
    yield "known words", sum(words[word] > inside[word] for word in inside) / max(1, len(inside))
    best = max((_relation(text, each) for each in inputs), default=(-1.0,) * 6)
    yield from zip(("begins", "ends", "shared", "inside", "around", "equal"), best, strict=True)
    nearest = max(inputs, key=lambda each: _relation(text, each), default="")
    yield "longer by", len(text) - len(nearest)


def examples(corpus: Mapping[str, Sequence[Fact]], seed: int) -> list[tuple[str, str, dict[str, float], bool]]:
    """(suite, type, features, whether it is a twin) of all expectations that have a twin."""
    found = []
    for suite, held in sorted(corpus.items()):
        text, is_twin = displayed(module(held), random.Random(f"{seed} {suite}"))
        for number, (kind, measured) in enumerate(features(text)):
            if number in is_twin:
                found.append((suite, kind, measured, is_twin[number]))
    return found


def accuracy(found: Sequence[tuple[str, str, dict[str, float], bool]]) -> tuple[float, dict[str, float]]:
    """Share of right answers on suites that the model was not trained on, and of each type alone."""
    right: dict[str, list[bool]] = {}
    for suite in sorted({each[0] for each in found}):
        for kind in sorted({each[1] for each in found}):
            known = [each for each in found if each[0] != suite and each[1] == kind]
            asked = [each for each in found if each[0] == suite and each[1] == kind]
            if asked and len({each[3] for each in known}) == 2:
                said = _told([each[2] for each in known], [each[3] for each in known], [each[2] for each in asked])
                truth = [each[3] for each in asked]
                right.setdefault(kind, []).extend(s == t for s, t in zip(said, truth, strict=True))
    every = [each for kind in right.values() for each in kind]
    return float(np.mean(every)), {kind: float(np.mean(each)) for kind, each in right.items() if len(each) > 30}


def _told(known: Sequence[dict[str, float]], truth: Sequence[bool], asked: Sequence[dict[str, float]]) -> list[bool]:
    """What a logistic model says of the asked: weights for each bin of each feature, shrunk towards 0."""
    names = sorted({name for each in known for name in each})
    table = np.array([[each.get(name, np.nan) for name in names] for each in [*known, *asked]])
    columns = []
    for column in table.T:
        edges = np.unique(np.nanquantile(column[: len(known)], [0.1, 0.25, 0.4, 0.6, 0.75, 0.9]))
        bins = np.where(np.isnan(column), -1, np.digitize(column, edges))
        columns += [bins == number for number in range(-1, len(edges) + 1)]
    x = np.array(columns, float).T
    mean = x[: len(known)].mean(0)
    x, y = x - mean, np.array(truth, float)
    weights, bias, train = np.zeros(x.shape[1]), 0.0, x[: len(known)]
    for _ in range(400):
        slope = 1 / (1 + np.exp(-(train @ weights + bias))) - y
        weights -= 0.5 * (train.T @ slope / len(y) + 0.02 * weights)
        bias -= 0.5 * slope.mean()
    return [bool(each > 0) for each in x[len(known) :] @ weights + bias]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--collect", type=Path, metavar="FOLDER")
    arguments.add_argument("--seeds", type=int, default=5)
    given = arguments.parse_args()
    if given.collect:
        lines = [f"{json.dumps(suite)}: {json.dumps(held)}" for suite, held in collect(given.collect).items()]
        CORPUS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    corpus = json.loads(CORPUS.read_text())
    print({suite: len(held) for suite, held in corpus.items()})
    for seed in range(given.seeds):
        found = examples(corpus, seed)
        share, kinds = accuracy(found)
        print(f"{len(found)} expectations: {share:.3f} right", {kind: round(each, 3) for kind, each in kinds.items()})


if __name__ == "__main__":
    main()
