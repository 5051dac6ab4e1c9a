"""Draw other values than the expected one, which the same suite might have expected.

Whoever reads a changed expectation must not tell it from an original by its form. It keeps type, length, letter case, sign, and
number of digits and decimals. Among many proposals the one is chosen that resembles the original most in how common its letters
are in the suite (trigrams) and how often it occurs there. `scripts/studies/twin_classifier.py` measures how well that works.
"""

from __future__ import annotations

import ast
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from composer_nb.harness.grading.source import Value, values

Form = tuple[int, int, str] | tuple[()]
TRIES = 32  # Proposals that are compared with the original.
CASES: tuple[Callable[[str], bool], ...] = (str.islower, str.isupper, str.isdigit)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralContext:
    """The surroundings of a literal, which its replacement should suit.

    Attributes:
        inputs: Literals on the other side of the equation, or in the other cells of the row.
        apart: Least difference of two numbers, relative to the larger, at which no tolerance accepts both.
        apart_by: The same, absolute.
        signed: True if a minus stands before it.
    """

    inputs: tuple[Value, ...] = ()
    apart: float = 0.0
    apart_by: float = 0.0
    signed: bool = False


@dataclass(slots=True)
class Suite:
    """Statistics of the literals in some test modules.

    Attributes:
        repeats: Share of the expected literals that are also inputs.
        texts: By length.
        numbers: By type and number of digits.
    """

    counts: Counter[tuple[type, Value]] = field(default_factory=Counter)
    repeats: float = 0.0
    grams: Counter[str] = field(default_factory=Counter)
    texts: dict[int, list[str]] = field(default_factory=dict)
    numbers: dict[tuple[type, Form], Counter[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, trees: Iterable[ast.AST]) -> Suite:
        suite, same, equations = cls(), 0, 0
        for tree in trees:
            idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and id(node) not in idle:
                    suite._add(node.value)
                elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                    right = node.comparators[0]
                    expected = values(right) if isinstance(right, ast.Constant) else ()
                    if expected and (inputs := values(node.left)):
                        equations += 1
                        same += any(_same(value, expected[0]) for value in inputs)
        suite.repeats = same / equations if equations else 0.0
        return suite

    def _add(self, value: object) -> None:
        if not isinstance(value, str | bytes | int | float | complex | None):
            return
        self.counts[type(value), value] += 1
        if type(value) in (int, float):
            assert isinstance(value, int | float)
            self.numbers.setdefault((type(value), _number_form(value)), Counter())[value] += 1
        if isinstance(value, str):
            self.grams.update(_grams(value))
            self.texts.setdefault(len(value), []).append(value)

    def count(self, value: Value) -> int:
        return self.counts[type(value), value]

    def likelihood(self, text: str, without: Counter[str]) -> float:
        """Return the mean logarithm of a letter's probability after the two before it, in a suite without certain trigrams."""
        total = 0.0
        padded = f"\2\2{text}\3"
        for at in range(2, len(padded)):
            three, two = padded[at - 2 : at + 1], padded[at - 2 : at]
            total += math.log((self.grams[three] - without[three] + 0.05) / (self.grams[two] - without[two] + 3.0))
        return total / (len(padded) - 2)


def others(
    value: object, rng: Random, suite: Suite, context: LiteralContext = LiteralContext(), count: int = 1
) -> list[str]:
    """Return the texts of at most `count` other literals of the same form, the most fitting first."""
    match value:
        case bool():
            rare = 2 * suite.count(not value) < suite.count(value)  # in this one's place, it would show itself
            return [] if rare else [repr(not value)]
        case int() | float():
            literals: Sequence[Value] = _numbers(value, rng, suite, context, count)
        case complex():
            parts = _numbers(value.imag, rng, suite, context, count)
            literals = [complex(0, part) for part in parts if isinstance(part, int | float)]
        case str():
            literals = _texts(value, rng, suite, context, count)
        case bytes():
            inputs = tuple(literal.decode("latin-1") for literal in context.inputs if isinstance(literal, bytes))
            texts = _texts(value.decode("latin-1"), rng, suite, LiteralContext(inputs=inputs), count)
            literals = [text.encode("latin-1") for text in texts if isinstance(text, str) and text.isascii()]
        case _:
            return []
    return [repr(literal) for literal in literals]


def _best(
    value: Value,
    proposals: Iterable[Value],
    away: Callable[[Value], float],
    rng: Random,
    suite: Suite,
    context: LiteralContext,
    count: int,
) -> list[Value]:
    """Return the proposals that differ least from the original; sometimes, as often as in the suite, the input itself."""
    often = suite.count(value) > 1
    times = Counter(new for new in proposals if not _same(new, value))

    def distance(new: Value) -> float:
        unlike = often != (suite.count(new) > 0)
        return away(new) + 2 * unlike + rng.expovariate(4 * times[new])  # of equals the one proposed most often

    ranked = sorted((distance(new), repr(new), new) for new in times)
    chosen = [new for _, _, new in ranked[:count]]
    alike = [
        literal
        for literal in context.inputs
        if type(literal) is type(value) and literal != value and literal not in chosen
    ]
    if alike and not any(_same(literal, value) for literal in context.inputs):
        for number in range(len(chosen)):
            if alike and rng.random() * (1 - suite.repeats) < suite.repeats:
                chosen[number] = alike.pop(rng.randrange(len(alike)))
    rng.shuffle(chosen)
    return chosen


def _same(first: Value, two: Value) -> bool:
    return type(first) is type(two) and first == two


# Numbers.


def _numbers(value: float, rng: Random, suite: Suite, context: LiteralContext, count: int) -> list[Value]:
    form = _number_form(value)
    if not form:
        return []
    suite_numbers = suite.numbers.get((type(value), form))
    # Squares, since what is most common is never drawn in its own place.
    proposed: list[float] = (
        rng.choices([*suite_numbers], [n * n for n in suite_numbers.values()], k=TRIES) if suite_numbers else []
    )
    if isinstance(value, int):
        proposed += [value + step for step in (-3, -2, -1, 1, 2, 3) if value + step >= 0]
    proposed += [type(value)(_other_digit(repr(value), rng)) for _ in range(TRIES // 2)]
    alike = [new for new in proposed if _number_form(new) == form and (new or not context.signed)]
    least = {new: max(context.apart * max(abs(new), abs(value)), context.apart_by) for new in alike}
    far = [new for new in alike if abs(new - value) > least[new]]
    zeros = _zeros(value)
    return _best(value, far, lambda new: float(_zeros(new) != zeros), rng, suite, context, count)


def _number_form(value: float) -> Form:
    """Return the digits before and after the point, and the exponent's text; nothing for what is not finite."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?(e.*)?", repr(value))
    return (len(match[1]), len(match[2] or ""), match[3] or "") if match else ()


def _zeros(value: Value) -> int:
    digits = repr(value).partition("e")[0]
    return len(digits) - len(digits.rstrip("0.")) if value else 0


def _other_digit(text: str, rng: Random) -> str:
    """Return a number with its first digit other than 0 changed, so that it differs by more than any usual tolerance."""
    places = [index for index, digit in enumerate(text.partition("e")[0]) if digit.isdigit()]
    index = next((index for index in places if text[index] != "0"), rng.choice(places))
    return text[:index] + rng.choice("123456789") + text[index + 1 :]


# Texts.


def _texts(text: str, rng: Random, suite: Suite, context: LiteralContext, count: int) -> list[Value]:
    inputs = [candidate for candidate in context.inputs if isinstance(candidate, str)]
    own_grams = _grams(text) if suite.count(text) else Counter[str]()
    level = suite.likelihood(text, own_grams)

    def away(new: Value) -> float:
        assert isinstance(new, str)
        return 3 * abs(suite.likelihood(new, own_grams) - level) + abs(len(new) - len(text)) / 4

    proposed = [*_proposed_texts(text, rng, suite, inputs)]
    if not text or rng.random() * suite.counts.total() < suite.count(""):
        near = [candidate for size in range(1, 9) for candidate in suite.texts.get(size, ())]
        proposed += [""] if text else rng.sample(near, min(len(near), 8)) or ["a"]
    return _best(text, proposed, away, rng, suite, context, count)


def _proposed_texts(text: str, rng: Random, suite: Suite, inputs: Sequence[str]) -> Iterator[str]:
    near = [candidate for size in range(len(text) - 1, len(text) + 2) for candidate in suite.texts.get(size, ())]
    near = [n for n in rng.sample(near, min(len(near), 2 * TRIES)) if n and set(_cases(n)) == set(_cases(text))]
    yield from near[:TRIES]
    for source in inputs:  # another part of the input
        if text and text in source:
            yield from dict.fromkeys(source[at : at + len(text)] for at in range(len(source) - len(text) + 1))
    places = [index for index, letter in enumerate(text) if letter.isascii() and letter.isalnum()]
    for _ in range(TRIES if places else 0):
        index = rng.choice(places)
        yield text[:index] + _other_letter(text[index], rng) + text[index + 1 :]
        if index + 1 in places and _cases(text[index]) == _cases(text[index + 1]):
            yield text[:index] + text[index + 1] + text[index] + text[index + 2 :]


def _other_letter(letter: str, rng: Random) -> str:
    """Return another letter of the same kind; no number begins with 0 because of it."""
    kind = "123456789" if letter.isdigit() else string.ascii_lowercase if letter.islower() else string.ascii_uppercase
    return rng.choice(kind.replace(letter, ""))


def _grams(text: str) -> Counter[str]:
    padded = f"\2\2{text}\3"
    return Counter(padded[at : at + size] for size in (2, 3) for at in range(len(padded) - size + 1))


def _cases(text: str) -> str:
    """Return a text's form: a letter for the case of each character."""
    return "".join(
        next((mark for mark, holds in zip("aAd", CASES, strict=True) if holds(letter)), letter) for letter in text
    )
