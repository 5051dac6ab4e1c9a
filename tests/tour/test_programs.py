"""Generated programs: they are what their specification says, and structures put aside names and constants alone."""

import ast
import copy
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.tour.programs import Program, canonical, draw_arguments, draw_program

SEEDS = st.integers(0, 10**9)
KEPT = {"sum", "max", "min", "len", "sorted", "abs", "range", "k"}


def program_of(seed: int) -> Program:
    return draw_program(Random(seed))


class Renamed(ast.NodeTransformer):
    """Maps every local name through `names` and every integer through `constant`."""

    def __init__(self, names: dict[str, str], constant: Random | None = None) -> None:
        self.names, self.constant = names, constant

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if self.constant is not None:
            node.value = self.constant.randint(0, 99)
        return node


def locals_of(source: str) -> list[str]:
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg)}
    return sorted(names - KEPT)


@settings(max_examples=80)
@given(seed=SEEDS, data=st.data())
def test_a_structure_knows_no_names_and_no_constants(seed: int, data: st.DataObject) -> None:
    program = program_of(seed)
    names = locals_of(program.source)
    fresh = data.draw(st.permutations(["C", "v0", "v1", "v2", "alpha", "beta", "gamma", "out", "xs", "x"]))
    changed = Renamed(dict(zip(names, fresh, strict=False)), Random(seed)).visit(ast.parse(program.source))
    assert canonical(ast.unparse(changed)) == canonical(program.source)


@settings(max_examples=80)
@given(seed=SEEDS, data=st.data())
def test_a_structure_knows_every_operator_and_aggregate(seed: int, data: st.DataObject) -> None:
    program = program_of(seed)
    tree = ast.parse(program.source)
    aggregates = ["sum", "max", "min", "len", "sorted"]
    sites = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.BinOp | ast.AugAssign)
        or (isinstance(node, ast.Name) and node.id in aggregates)
    ]
    if not sites:
        assert ":" in program.source.split("[")[1]  # a bare slice
        return
    site: Any = data.draw(st.sampled_from(sites))
    if isinstance(site, ast.Compare):
        signs = [ast.Gt, ast.Lt, ast.GtE, ast.LtE, ast.Eq, ast.NotEq]
        site.ops = [data.draw(st.sampled_from([s for s in signs if not isinstance(site.ops[0], s)]))()]
    elif isinstance(site, ast.Name):
        site.id = data.draw(st.sampled_from([name for name in aggregates if name != site.id]))
    else:
        signs = [ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod]
        site.op = data.draw(st.sampled_from([s for s in signs if not isinstance(site.op, s)]))()
    assert canonical(ast.unparse(tree)) != canonical(program.source)


def test_the_parameter_k_stands_where_an_integer_could() -> None:
    with_k = "def f(xs, k):\n    out = [x for x in xs if x > k]\n    return sum(out)"
    without = "def f(a):\n    t = [e for e in a if e > 7]\n    return sum(t)"
    assert canonical(with_k) == canonical(without)
    assert canonical(with_k) != canonical(without.replace("e > 7", "e > e"))
    assert canonical(without) != canonical(without.replace("sum(t)", "sum(a)"))
    assert canonical("def f(a):\n    return a[1:]") != canonical("def f(a):\n    return a[:1]")


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    rng = Random("many")
    return [draw_program(rng) for _ in range(1500)]


def results(program: Program, seed: int) -> list[str]:
    scope: dict[str, Any] = {}
    exec(compile(program.source, "f.py", "exec"), scope)
    rng = Random(seed)
    inputs = [draw_arguments(rng, program) for _ in range(8)]
    return [repr(scope["f"](*copy.deepcopy(arguments))) for arguments in inputs]


def test_a_specification_means_one_thing(programs: list[Program]) -> None:
    """Programs of the same words do the same, so a task can be solved from its instruction."""
    alike: dict[tuple[str, tuple[str, ...]], list[Program]] = defaultdict(list)
    for program in programs:
        alike[program.spec, program.inputs].append(program)
    several = [group for group in alike.values() if len(group) > 1]
    assert len(several) > 50
    for group in several:
        assert len({tuple(results(program, 1)) for program in group}) == 1, group[0].spec


def test_one_structure_in_five_is_held_out(programs: list[Program]) -> None:
    structures = {program.structure: program.heldout for program in programs}
    assert len(structures) > 300
    assert 0.1 < sum(structures.values()) / len(structures) < 0.3
