"""A small repository, made here: a package of a few functions, its suite, and things that must not get into a task."""

from pathlib import Path

import pytest

from tests.folders import write

SHAPES = '''\
"""Things about sequences."""


def chunks(items, size):
    """Split `items` into lists of at most `size`.

    The last one may be shorter. A size below one is refused with a ValueError.
    """
    if size < 1:
        raise ValueError("size must be at least 1")
    found = []
    for start in range(0, len(items), size):
        found.append(list(items[start:start + size]))
    return found


def clamp(value, low=0, high=10):
    """The value, moved into the range from `low` to `high`."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def _largest(pairs):
    best = None
    for name, count in pairs:
        if best is None or count > best[1]:
            best = (name, count)
    return best


def most_common(words):
    """The word that occurs most often, None where there is none."""
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    best = _largest(counts.items())
    return best[0] if best else None


class Stack:
    """Last in, first out."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
        return self

    def pop(self):
        if not self.items:
            raise IndexError("an empty stack")
        return self.items.pop()

    @property
    def size(self):
        return len(self.items)
'''
TESTS = """\
import pytest
from shapes.core import Stack, chunks, clamp, most_common


def test_chunks():
    assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_chunks_refuses():
    with pytest.raises(ValueError):
        chunks([1], 0)


@pytest.mark.parametrize("value, wanted", [(-3, 0), (4, 4), (12, 10)])
def test_clamp(value, wanted):
    assert clamp(value) == wanted


def test_clamp_range():
    assert clamp(7, low=8, high=9) == 8


def test_most_common():
    assert most_common(["a", "b", "b"]) == "b"
    assert most_common([]) is None


class TestStack:
    def test_order(self):
        assert Stack().push(1).push(2).pop() == 2

    def test_size(self):
        assert Stack([1, 2]).size == 2

    def test_empty(self):
        with pytest.raises(IndexError):
            Stack().pop()
"""
ODD = """\
import time
from pathlib import Path

import pytest
from shapes.core import clamp


def test_flaky():
    assert list({"a", "b", "c", "d", "e", "f", "g"}).index("a") % 2 == 0


@pytest.mark.skip
def test_skipped():
    pass


def test_slow():
    time.sleep(1.2)
    assert clamp(1) == 1


def test_reads_itself():
    assert Path(__file__).read_text() is not None


def test_fine():
    assert clamp(5, high=3) == 3
"""
FILES = {
    **{"shapes/__init__.py": "", "shapes/core.py": SHAPES, "tests/test_core.py": TESTS, "tests/test_odd.py": ODD},
    **{"README.md": "# shapes\n", "setup.py": "raise SystemExit('nobody runs me')\n"},
}
LEAKS = {
    ".git/HEAD": "ref: refs/heads/main\n",
    "shapes/__pycache__/core.cpython-311.pyc": "x",
    "build/lib/shapes/core.py": SHAPES,
    "shapes.egg-info/SOURCES.txt": "shapes/core.py\n",
    ".mypy_cache/3.11/shapes.data.json": "{}",
    "shapes/core.py.orig": SHAPES,
}


@pytest.fixture(scope="session")
def files() -> dict[str, str]:
    return dict(FILES)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the repository in a folder, with history, caches and copies beside it."""
    root = write(tmp_path_factory.mktemp("making") / "shapes", FILES | LEAKS)
    (root / "shapes" / "link.py").symlink_to("/etc/passwd")
    (root / "logo.png").write_bytes(b"\x89PNG\x00\xff")
    return root
