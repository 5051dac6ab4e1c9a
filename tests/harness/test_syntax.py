"""Source is parsed in many threads at once without a fault of the interpreter."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from composer_nb.harness import syntax

TEXT = "x = [1, (2, {'a': 3})]\n" * 40


class Cycle:
    """Its finalizer lets another thread run while a tree is made: so `ast.parse` fails here before Python 3.13."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(200))


@pytest.fixture
def many_switches() -> Iterator[None]:
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_many_threads_parse_at_once(many_switches: None) -> None:
    def parse(number: int) -> str:
        for _ in range(20):
            Cycle()
            tree = syntax.parse(TEXT)
            assert syntax.literal_eval("[1, (2, {'a': 3})]") == [1, (2, {"a": 3})]
        return ast.dump(tree)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(parse, range(24))) == {ast.dump(ast.parse(TEXT))}
