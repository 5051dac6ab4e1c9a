"""Small correct programs with an English specification, drawn from six families.

Each is one function `f`. Families, maps, filters and weights follow a recipe that, as measured, a model of two million parameters
can learn within minutes (`docs/benchmarks.md`). The *structure* of a program is its source without the choice of names and
constants: programs that differ only in these share it, and held-out tasks have unseen structures.
"""

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from composer_nb.harness import syntax

# Structures whose hash begins with a byte below 51 are held out, one in five.
HELDOUT_SHARE = 51 / 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A correct function `f` with its specification.

    Attributes:
        source: Normalized text (`ast.unparse`) without a final newline.
        inputs: Kind of each parameter: `list`, `small` (1..9), `number` (1..9999) or `any` (-9..9).
    """

    family: str
    source: str
    spec: str
    inputs: tuple[str, ...]

    @property
    def structure(self) -> str:
        """Hexadecimal digest of the canonical source."""
        return hashlib.sha256(canonical(self.source).encode()).hexdigest()

    @property
    def heldout(self) -> bool:
        return int(self.structure[:2], 16) < HELDOUT_SHARE * 256


@lru_cache(maxsize=4096)
def canonical(source: str) -> str:
    """Return `source` with local names numbered by first use, and with every integer, and the parameter `k` in place of an
    integer, written as C."""
    tree = syntax.parse(source)
    builtin = {"sum", "max", "min", "len", "sorted", "abs", "range", "append", "default"}
    names: dict[str, str] = {}

    class Canonical(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            if node.id == "k":
                return ast.Name("C", node.ctx)
            if node.id not in builtin:
                node.id = names.setdefault(node.id, f"v{len(names)}")
            return node

        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            return ast.Name("C", ast.Load()) if isinstance(node.value, int) else node

        def visit_arguments(self, node: ast.arguments) -> ast.arguments:
            node.args = [ast.arg(names.setdefault(a.arg, f"v{len(names)}")) for a in node.args if a.arg != "k"]
            return node

    return ast.unparse(Canonical().visit(tree))


# What the placeholders of a template stand for.
Words = dict[str, str]
MAPS: dict[str, tuple[str, str]] = {
    "same": ("{x}", "items"),
    "square": ("{x} * {x}", "items squared"),
    "times": ("{x} * {c2}", "items times {c2}"),
    "plus": ("{x} + {c2}", "items plus {c2}"),
    "minus": ("{x} - {c2}", "items minus {c2}"),
    "abs": ("abs({x})", "abs of items"),
    "div": ("{x} // {c2}", "items div {c2}"),
    "mod": ("{x} % {c2}", "items mod {c2}"),
}
COMPARISONS = {
    ">": "more than", "<": "less than", ">=": "at least", "<=": "at most", "==": "equal to", "!=": "not equal to",
}  # fmt: skip
# How a loop collects: where it starts, and its step.
STEPS = {
    "sum": ("0", "{out} += {value}"),
    "count": ("0", "{out} += 1"),
    "product": ("1", "{out} *= {value}"),
    "list": ("[]", "{out}.append({value})"),
    "last": ("-1", "{out} = {value}"),
}
AGGREGATES = [
    ("sum({inner})", "sum of {words}"),
    ("max({inner}, default=0)", "largest of {words}"),
    ("min({inner}, default=0)", "smallest of {words}"),
    ("sorted({inner})", "sorted {words}"),
    ("len({inner})", "number of {words}"),
]
SLICES = [
    ("{n}:", "items after the first {n}"),
    (":{n}", "the first {n} items"),
    ("-{n}:", "the last {n} items"),
    (":-{n}", "items before the last {n}"),
    ("::{m}", "every {m} items"),
]
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}


def _words(rng: Random) -> Words:
    """Draw what all families share: names and constants. A constant `k` may be a second parameter."""
    words = {
        "xs": rng.choice(["xs", "nums", "a", "items", "vals"]),
        "x": rng.choice(["x", "v", "n", "e"]),
        "out": rng.choice(["out", "res", "t", "acc"]),
        "c": str(rng.randint(1, 9)),
        "c2": str(rng.randint(2, 9)),
    }
    has_k = rng.random() < 0.4
    return words | {"k": "k" if has_k else words["c"], "parameters": f"{words['xs']}, k" if has_k else words["xs"]}


def _filter(rng: Random, w: Words) -> tuple[str, str]:
    kind = rng.choice([*COMPARISONS, "divides", "not divides"])
    if kind in COMPARISONS:
        return f"{w['x']} {kind} {w['k']}", f"{COMPARISONS[kind]} {w['k']}"
    divisor = "2" if w["k"] == "1" else w["k"]
    sign, divisible = ("==", "divisible by") if kind == "divides" else ("!=", "not divisible by")
    return f"{w['x']} % {divisor} {sign} 0", f"{divisible} {divisor}"


def _map(rng: Random, w: Words) -> tuple[str, str]:
    code, words = MAPS[rng.choice(list(MAPS))]
    return code.format(**w), words.format(**w)


def _step(rng: Random, names: str, w: Words, value: str) -> tuple[str, Words]:
    name = rng.choice(names.split())
    start, step = STEPS[name]
    return name, {"start": start, "step": step.format(out=w["out"], value=value)}


def _aggregate(rng: Random, inner: str, words: str) -> tuple[str, str]:
    code, spec = rng.choice(AGGREGATES)
    return code.format(inner=inner), spec.format(words=words)


def _loop(rng: Random, w: Words) -> Words:
    value, words = _map(rng, w)
    test, where = _filter(rng, w)
    name, step = _step(rng, "sum count product list last", w, value)
    return step | {"test": test, "spec": f"{name} of {'items' if name == 'count' else words} for items {where}"}


def _comp(rng: Random, w: Words) -> Words:
    value, words = _map(rng, w)
    test, where = _filter(rng, w)
    result, spec = _aggregate(rng, w["out"], words)
    return {"value": value, "test": test, "result": result, "spec": f"{spec} for items {where}"}


def _pair(rng: Random, w: Words) -> Words:
    back, sign = rng.choice([1, 1, 2, 3]), rng.choice(list(COMPARISONS))
    item, before = f"{w['xs']}[i]", f"{w['xs']}[i - {back}]"
    value, words = rng.choice([(item, "items"), (f"{item} - {before}", "steps"), ("i", "indexes")])
    name, step = _step(rng, "count sum list", w, value)
    spec = (
        f"{name} of {'indexes' if name == 'count' else words} where item is {COMPARISONS[sign]} the item {back} before"
    )
    return step | {"back": str(back), "test": f"{item} {sign} {before}", "spec": spec}


def _fn2(rng: Random, w: Words) -> Words:
    a, b = rng.choice([("p", "q"), ("a", "b"), ("x", "y"), ("m", "n")])
    sign = rng.choice(list(COMPARISONS))
    first, second = rng.choice(list(OPERATORS)), rng.choice(list(OPERATORS))
    spec = (
        f"if {a} is {COMPARISONS[sign]} {b} then {a} {OPERATORS[first]} {w['c']} else {b} {OPERATORS[second]} {w['c2']}"
    )
    return {"a": a, "b": b, "sign": sign, "first": first, "second": second, "spec": spec}


def _digits(rng: Random, w: Words) -> Words:
    base = rng.choice([10, 10, 2, 8])
    bound, sign = min(int(w["c"]), base - 1), rng.choice(list(COMPARISONS))
    name, step = _step(rng, "sum count product", w, "d")
    spec = f"{name} of base {base} digits {COMPARISONS[sign]} {bound}"
    return step | {"base": str(base), "test": f"d {sign} {bound}", "spec": spec}


def _slice(rng: Random, w: Words) -> Words:
    n = rng.randint(1, 4)
    part, words = (text.format(n=n, m=max(2, n)) for text in rng.choice(SLICES))
    value, mapped = _map(rng, w)
    result, spec = _aggregate(rng, f"[{value} for {w['x']} in {w['out']}]", mapped)
    return {"part": part, "result": result, "spec": f"{spec} over {words}"}


# Weight, kinds of the parameters but for `k`, the draw of further words, and the program.
FAMILIES: dict[str, tuple[float, tuple[str, ...], Callable[[Random, Words], Words], str]] = {
    "loop": (5.0, ("list",), _loop, """\
def f({parameters}):
    {out} = {start}
    for {x} in {xs}:
        if {test}:
            {step}
    return {out}"""),
    "comp": (3.0, ("list",), _comp, """\
def f({parameters}):
    {out} = [{value} for {x} in {xs} if {test}]
    return {result}"""),
    "pair": (2.0, ("list",), _pair, """\
def f({xs}):
    {out} = {start}
    for i in range({back}, len({xs})):
        if {test}:
            {step}
    return {out}"""),
    "fn2": (2.0, ("any", "any"), _fn2, """\
def f({a}, {b}):
    if {a} {sign} {b}:
        return {a} {first} {c}
    return {b} {second} {c2}"""),
    "digits": (1.5, ("number",), _digits, """\
def f(n):
    {out} = {start}
    while n > 0:
        d = n % {base}
        if {test}:
            {step}
        n //= {base}
    return {out}"""),
    "slice": (1.5, ("list",), _slice, """\
def f({xs}):
    {out} = {xs}[{part}]
    return {result}"""),
}  # fmt: skip


def draw_program(rng: Random) -> Program:
    """Draw one program. The same generator state gives the same program."""
    family = rng.choices(list(FAMILIES), [weight for weight, *_ in FAMILIES.values()])[0]
    _, kinds, draw, template = FAMILIES[family]
    words = _words(rng)
    words |= draw(rng, words)
    source = ast.unparse(syntax.parse(template.format(**words)))
    inputs = (*kinds, "small") if ", k):" in source else kinds
    return Program(family=family, source=source, spec=words["spec"], inputs=inputs)


def draw_arguments(rng: Random, program: Program) -> tuple[object, ...]:
    """Draw arguments that fit the program's parameters."""
    draws: dict[str, Callable[[], object]] = {
        "list": lambda: [rng.randint(-9, 15) for _ in range(rng.randint(2, 5))],
        "small": lambda: rng.randint(1, 9),
        "number": lambda: rng.randint(1, 9999),
        "any": lambda: rng.randint(-9, 9),
    }
    return tuple(draws[kind]() for kind in program.inputs)
