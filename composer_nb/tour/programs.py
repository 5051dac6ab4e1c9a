"""Small correct programs with an English specification, drawn from six families.

Each is one function `f`. Families, maps, filters and weights follow a recipe that, as measured, a model of two million parameters
can learn within minutes (`docs/benchmarks.md`). The *structure* of a program is its source without the choice of names and
constants: programs that differ only in these share it, and held-out tasks have unseen structures.
"""

from __future__ import annotations

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
    """A correct function `f` with its specification."""

    family: str
    source: str
    """Normalized text (`ast.unparse`) without a final newline."""
    spec: str
    inputs: tuple[str, ...]
    """Kind of each parameter: `list`, `small` (1..9), `number` (1..9999) or `any` (-9..9)."""

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


@dataclass(frozen=True, slots=True)
class _Parts:
    """The draws common to all families: names, constants, and whether the constant is a second parameter."""

    xs: str
    x: str
    out: str
    c: int
    c2: int
    has_k: bool

    @property
    def bound(self) -> str:
        return "k" if self.has_k else str(self.c)

    @property
    def head(self) -> str:
        return f"def f({self.xs}, k):" if self.has_k else f"def f({self.xs}):"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("list", "small") if self.has_k else ("list",)


def _parts(rng: Random) -> _Parts:
    return _Parts(
        xs=rng.choice(["xs", "nums", "a", "items", "vals"]),
        x=rng.choice(["x", "v", "n", "e"]),
        out=rng.choice(["out", "res", "t", "acc"]),
        c=rng.randint(1, 9),
        c2=rng.randint(2, 9),
        has_k=rng.random() < 0.4,
    )


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


def _filter(rng: Random, x: str, p: _Parts) -> tuple[str, str]:
    kind = rng.choice([*COMPARISONS, "divides", "not divides"])
    if kind in COMPARISONS:
        return f"{x} {kind} {p.bound}", f"{COMPARISONS[kind]} {p.bound}"
    divisor = p.bound if p.has_k else str(max(2, p.c))
    sign, words = ("==", "divisible by") if kind == "divides" else ("!=", "not divisible by")
    return f"{x} % {divisor} {sign} 0", f"{words} {divisor}"


def _map(rng: Random, x: str, c2: int) -> tuple[str, str]:
    code, words = MAPS[rng.choice(list(MAPS))]
    return code.format(x=x, c2=c2), words.format(c2=c2)


# Source, specification and kinds of the parameters.
Draw = tuple[str, str, tuple[str, ...]]


def _loop(rng: Random, p: _Parts) -> Draw:
    value, words = _map(rng, p.x, p.c2)
    test, where = _filter(rng, p.x, p)
    start, step, name = rng.choice(
        [
            ("0", f"{p.out} += {value}", f"sum of {words}"),
            ("0", f"{p.out} += 1", "count of items"),
            ("1", f"{p.out} *= {value}", f"product of {words}"),
            ("[]", f"{p.out}.append({value})", f"list of {words}"),
            ("-1", f"{p.out} = {value}", f"last of {words}"),
        ]
    )
    body = (
        f"{p.head}\n    {p.out} = {start}\n    for {p.x} in {p.xs}:\n"
        f"        if {test}:\n            {step}\n    return {p.out}"
    )
    return body, f"{name} for items {where}", p.kinds


def _aggregate(rng: Random, inner: str, words: str) -> tuple[str, str]:
    return rng.choice(
        [
            (f"sum({inner})", f"sum of {words}"),
            (f"max({inner}, default=0)", f"largest of {words}"),
            (f"min({inner}, default=0)", f"smallest of {words}"),
            (f"sorted({inner})", f"sorted {words}"),
            (f"len({inner})", f"number of {words}"),
        ]
    )


def _comp(rng: Random, p: _Parts) -> Draw:
    value, words = _map(rng, p.x, p.c2)
    test, where = _filter(rng, p.x, p)
    code, spec = _aggregate(rng, p.out, words)
    body = f"{p.head}\n    {p.out} = [{value} for {p.x} in {p.xs} if {test}]\n    return {code}"
    return body, f"{spec} for items {where}", p.kinds


def _pair(rng: Random, p: _Parts) -> Draw:
    d = rng.choice([1, 1, 2, 3])
    sign = rng.choice(list(COMPARISONS))
    value, words = rng.choice([(f"{p.xs}[i]", "items"), (f"{p.xs}[i] - {p.xs}[i - {d}]", "steps"), ("i", "indexes")])
    start, step, name = rng.choice(
        [
            ("0", f"{p.out} += 1", "count of indexes"),
            ("0", f"{p.out} += {value}", f"sum of {words}"),
            ("[]", f"{p.out}.append({value})", f"list of {words}"),
        ]
    )
    body = (
        f"def f({p.xs}):\n    {p.out} = {start}\n    for i in range({d}, len({p.xs})):\n"
        f"        if {p.xs}[i] {sign} {p.xs}[i - {d}]:\n            {step}\n    return {p.out}"
    )
    return body, f"{name} where item is {COMPARISONS[sign]} the item {d} before", ("list",)


def _fn2(rng: Random, p: _Parts) -> Draw:
    a, b = rng.choice([("p", "q"), ("a", "b"), ("x", "y"), ("m", "n")])
    sign = rng.choice(list(COMPARISONS))
    words = {"+": "plus", "-": "minus", "*": "times"}
    first, second = rng.choice(list(words)), rng.choice(list(words))
    body = f"def f({a}, {b}):\n    if {a} {sign} {b}:\n        return {a} {first} {p.c}\n    return {b} {second} {p.c2}"
    spec = f"if {a} is {COMPARISONS[sign]} {b} then {a} {words[first]} {p.c} else {b} {words[second]} {p.c2}"
    return body, spec, ("any", "any")


def _digits(rng: Random, p: _Parts) -> Draw:
    base = rng.choice([10, 10, 2, 8])
    bound = min(p.c, base - 1)
    sign = rng.choice(list(COMPARISONS))
    start, step, name = rng.choice(
        [("0", f"{p.out} += d", "sum"), ("0", f"{p.out} += 1", "count"), ("1", f"{p.out} *= d", "product")]
    )
    body = (
        f"def f(n):\n    {p.out} = {start}\n    while n > 0:\n        d = n % {base}\n"
        f"        if d {sign} {bound}:\n            {step}\n        n //= {base}\n    return {p.out}"
    )
    return body, f"{name} of base {base} digits {COMPARISONS[sign]} {bound}", ("number",)


def _slice(rng: Random, p: _Parts) -> Draw:
    c = rng.randint(1, 4)
    part, words = rng.choice(
        [
            (f"{c}:", f"items after the first {c}"),
            (f":{c}", f"the first {c} items"),
            (f"-{c}:", f"the last {c} items"),
            (f":-{c}", f"items before the last {c}"),
            (f"::{max(2, c)}", f"every {max(2, c)} items"),
        ]
    )
    value, mapped = _map(rng, p.x, p.c2)
    code, spec = _aggregate(rng, f"[{value} for {p.x} in {p.out}]", mapped)
    body = f"def f({p.xs}):\n    {p.out} = {p.xs}[{part}]\n    return {code}"
    return body, f"{spec} over {words}", ("list",)


FAMILIES: dict[str, tuple[float, Callable[[Random, _Parts], Draw]]] = {
    "loop": (5.0, _loop),
    "comp": (3.0, _comp),
    "pair": (2.0, _pair),
    "fn2": (2.0, _fn2),
    "digits": (1.5, _digits),
    "slice": (1.5, _slice),
}


def draw_program(rng: Random) -> Program:
    """Draw one program. The same generator state gives the same program."""
    family = rng.choices(list(FAMILIES), [weight for weight, _ in FAMILIES.values()])[0]
    source, spec, inputs = FAMILIES[family][1](rng, _parts(rng))
    return Program(family=family, source=ast.unparse(syntax.parse(source)), spec=spec, inputs=inputs)


def draw_arguments(rng: Random, program: Program) -> tuple[object, ...]:
    """Draw arguments that fit the program's parameters."""
    draws: dict[str, Callable[[], object]] = {
        "list": lambda: [rng.randint(-9, 15) for _ in range(rng.randint(2, 5))],
        "small": lambda: rng.randint(1, 9),
        "number": lambda: rng.randint(1, 9999),
        "any": lambda: rng.randint(-9, 9),
    }
    return tuple(draws[kind]() for kind in program.inputs)
