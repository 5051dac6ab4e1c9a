"""Source of others is parsed within limits, and in many threads at once without a fault of the interpreter."""

import ast
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from composer_nb.harness import syntax
from composer_nb.harness.sandbox.toolchain import host_programs

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


LARGE = "a\n" * (1 << 18)
HOSTILE = {
    "more tokens than the limit": LARGE,
    "brackets": "(" * 500,
    "signs": "-" * 100_000 + "1",
    "attributes": "a" + ".a" * 50_000,
    "blocks": "".join(" " * depth + "if a:\n" for depth in range(150)),
    "functions in functions": "a = " + "lambda: " * 1100 + "1",
    "a null byte": "a = 1\0",
    "half of a pair": "a = '\udc80'",
    "digits": "a = " + "9" * 5000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_source_ends_in_one_kind_of_error(name: str) -> None:
    text, began = HOSTILE[name], time.process_time()
    with pytest.raises((SyntaxError, ValueError)):
        syntax.parse(text)
    with pytest.raises((SyntaxError, ValueError)):
        syntax.literal_eval(text)
    assert syntax.nodes_of(text) == []
    assert syntax.lints(text)[0].startswith("not Python: ")
    assert time.process_time() - began < 2


def test_a_large_text_is_refused_with_its_size_and_without_a_tree() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(syntax.TooLarge, match=r"not parsed: 524288 characters with more than 200000 tokens"):
            syntax.parse(LARGE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert syntax.parse("x = '" + "long " * 30_000 + "'\n" * 1), "150,000 characters of one string are no reason"


def test_a_byte_order_mark_is_no_part_of_the_source() -> None:
    assert ast.dump(syntax.parse("\ufeff" + TEXT)) == ast.dump(ast.parse(TEXT))
    assert syntax.lints("\ufeffimport os\n") == ["unused os"]
    assert len(syntax.nodes_of("\ufeffa = 1\n")) == len(syntax.nodes_of("a = 1\n")) > 1


# What the linter finds, held against ruff.

SOURCES = {
    "import os\n": ["unused os"],
    "import os\n\n\ndef f(x):\n    import re\n    t = 0\n    return y + os.x\n": [
        "no name y in f", "unused re in f", "unused t in f",
    ],
    "def f(a):\n    out = [x * 2 for x in a if x > k]\n    return sum(out)\n": ["no name k in f"],
    "def f(n):\n    t = 0\n    while n:\n        t += 1\n        n //= 10\n    return t\n": [],
    "class A:\n    x = 1\n\n    def g(self):\n        return __class__\n": [],
    "def f():\n    x = 1\n\n    def g():\n        return x\n\n    return g\n": [],
    "def f():\n    global q\n    q = 1\n\n\ndef g():\n    return q\n": [],
    "from os import path as p\n\nprint(__name__, p)\n": [],
}  # fmt: skip


@pytest.mark.parametrize("text", SOURCES)
def test_the_linter_finds_as_much_as_ruff(text: str) -> None:
    assert sorted(syntax.lints(text)) == SOURCES[text]
    rules = "check --isolated --select F401,F841,F821 --output-format json -"
    command = [host_programs()["ruff"], *rules.split()]
    ran = subprocess.run(command, input=text, capture_output=True, text=True)
    assert len(json.loads(ran.stdout)) == len(SOURCES[text])
