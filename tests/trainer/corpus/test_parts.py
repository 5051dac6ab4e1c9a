"""The filters of a corpus, each against a table of cases or a slower reference."""

import itertools
from email.parser import HeaderParser
from functools import cache
from importlib import metadata
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.corpus.build import contaminated, import_order, near_duplicates, secrets, tokens
from composer_nb.trainer.corpus.repositories import PERMISSIVE, is_allowed, licence_of, read_files, stated

# Licences


def test_an_expression_is_allowed_if_the_licences_satisfy_it():
    allowed = ["MIT", "GPL-3.0-only OR MIT", "(GPL-3.0-only OR MIT) AND Apache-2.0"]
    refused = ["GPL-3.0-only AND MIT", "Apache-2.0 WITH LLVM-exception", "", "__import__('os')", "(" * 5000 + "MIT"]
    for expression in (*allowed, *refused):
        assert is_allowed(expression, PERMISSIVE) is (expression in allowed), expression[:80]


@pytest.mark.parametrize(
    ("head", "licence"),
    [
        ("License-Expression: MIT OR ISC\nClassifier: License :: OSI Approved :: BSD License", "MIT OR ISC"),
        ("Classifier: License :: OSI Approved :: MIT License\nLicense: GPL", "MIT"),
        ("Classifier: License :: OSI Approved\nLicense: New BSD License", "BSD-3-Clause"),
        ("License: LGPL-2.1 AND MIT", "LGPL-2.1 AND MIT"),
        ("License: see the web site", ""),
    ],
)
def test_metadata_state_a_licence(head: str, licence: str):
    assert stated(HeaderParser().parsestr(head)) == licence


def test_texts_of_licences_are_recognised_and_a_second_one_must_be_allowed_too(tmp_path: Path):
    [mit] = [file for file in metadata.distribution("pluggy").files or () if file.name == "LICENSE"]
    mit_file, other_file = Path(str(mit.locate())), tmp_path / "LICENSE"
    other_file.write_text("You may not.")
    assert licence_of([mit_file], "") == licence_of([mit_file, other_file], "MIT") == "MIT"
    assert licence_of([mit_file], "GPL-3.0-only OR BSD-2-Clause") == "(GPL-3.0-only OR BSD-2-Clause) AND MIT"
    assert licence_of([other_file], "") == "" and licence_of([], "ISC") == licence_of([other_file], "ISC") == "ISC"
    (tmp_path / "COPYING").write_bytes(b"\xff\xfe")
    assert licence_of([tmp_path / "COPYING"], "") == ""


def test_what_a_broken_installation_left_is_no_distribution(tmp_path: Path):
    (tmp_path / "~b-1.dist-info").mkdir()
    (tmp_path / "a-1.dist-info").mkdir()
    for name, text in {"METADATA": "Name: a\nLicense-Expression: MIT\n", "RECORD": "a.py,,\n"}.items():
        (tmp_path / "a-1.dist-info" / name).write_text(text)
    (tmp_path / "a.py").write_text("x = 1\n")
    files = [(file.repository, file.path, file.licence, why) for file, why in read_files(tmp_path, (".py",), 100)]
    assert files == [("a", "a.py", "MIT", "")]


# Near duplicates


@cache
def neighbours(text: str) -> set[tuple[str, ...]]:
    words = tokens(text)
    return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}


def jaccard(first: str, second: str) -> float:
    return len(neighbours(first) & neighbours(second)) / len(neighbours(first) | neighbours(second))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), similar=st.sampled_from([0.5, 0.7, 0.85]))
def test_near_duplicates_are_those_that_every_pair_compared_would_give(seed: int, similar: float):
    """Pairs near the threshold are exempt: the index may overlook one."""
    random = Random(seed)
    texts: list[str] = []
    for number in range(12):
        words = [f"word{random.randrange(400)}" for _ in range(120)]
        texts.append(" ".join(words))
        for _ in range(random.randrange(3)):
            changed = list(words)
            for position in random.sample(range(120), random.choice([0, 1, 30])):
                changed[position] = f"other{number}"
            texts.append("\n".join(changed))
    random.shuffle(texts)
    dropped = near_duplicates(texts, similar, seed)
    survivors = [position for position in range(len(texts)) if position not in dropped]
    for position, original in dropped.items():
        assert original < position and original in survivors and jaccard(texts[position], texts[original]) >= similar
    for first, second in itertools.combinations(survivors, 2):
        assert jaccard(texts[first], texts[second]) < similar + 0.1
    assert dropped == near_duplicates(texts, similar, seed)


# Contamination

CODE = "def total(items):\n    found = 0\n    for each in items:\n        found += each.price * each.count\n    return found\n"
FIXED = CODE.replace("each.count", "(each.count - each.returned)")
TEST = "from shop import total\n\n\ndef test_returned():\n    assert total([{'price': 3, 'count': 4, 'returned': 1}]) == 9\n"
TASK = Task(
    id="shop-1",
    instruction="The sum over a basket ignores what customers have sent back; see the report of last Tuesday about it.",
    files={"shop.py": CODE},
    tests={"test_shop.py": TEST},
    solution={"shop.py": FIXED},
    source_scope=("shop.py",),
)


def test_a_file_with_a_part_of_a_task_is_contaminated():
    """Layout does not matter, and what the agent may see is no secret."""
    words = "# The sum over a basket ignores what customers have sent back"
    leaks = [f"# a mirror\n{FIXED}", FIXED.replace("    ", "\t").replace(" * ", "*"), f"import x\n{TEST}"]
    leaks.append(f"{words}; see the report\n")
    texts = ["x = 1", CODE, f"{words}\n", "", *leaks]
    matches = contaminated([("r", text) for text in texts], secrets([TASK], 13), 13, 10)
    assert matches == dict.fromkeys(range(4, 8), "shop-1")


# Order


def test_imports_come_before_what_imports_them():
    texts = {
        "src/a/__init__.py": "from .top import run\n",
        "src/a/top.py": "import os\nimport a.deep.low as low\nif os:\n    from a import side\n",
        "src/a/side.py": "def f():\n    from a import top\n",
        "src/a/deep/__init__.py": "",
        "src/a/deep/low.py": "from ..util import x\nfrom . import lower\n",
        "src/a/deep/lower.py": "",
        "src/a/util.py": "x = 1",
        "run.py": "import a\n",
        "notes.md": "import a",
        "broken.py": "def (",
    }
    needs = {
        "run.py": ["src/a/__init__.py"],
        "src/a/__init__.py": ["src/a/top.py"],
        "src/a/top.py": ["src/a/deep/low.py", "src/a/side.py"],
        "src/a/deep/low.py": ["src/a/util.py", "src/a/deep/lower.py"],
    }
    order = import_order(texts)
    assert sorted(order) == sorted(texts) and order == import_order(dict(reversed(texts.items())))
    for path, dependencies in needs.items():
        assert all(order.index(dependency) < order.index(path) for dependency in dependencies), path
