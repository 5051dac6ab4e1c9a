"""A change set as a patch: what git makes of it, in both directions, and how much work it is."""

from __future__ import annotations

import difflib
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.product.diff import EXECUTABLE, LINK, PLAIN, SMALL, Blob, Lines, patch, patience
from composer_nb.harness.sandboxes.contract import Backend

Tree = dict[str, Blob]
NAMES = ["a", "a/b", "a/c d", "e", "e\tf", 'g"h', "ä", "i\\j/k", " l", "m\n"]
CONTENTS = [
    b"",
    b"x",
    b"x\n",
    b"x\ny\n",
    b"\r\n\x0c\x85",
    b"\xff\n",
    b"\0\1",
    bytes(range(256)) * 40,
    b"- x\n+ y\n@@ z\n",
]
BLOBS = st.builds(
    Blob, data=st.sampled_from(CONTENTS) | st.lists(st.sampled_from([b"p\n", b"q\n", b"\n", b"r"])).map(b"".join),
    mode=st.sampled_from([PLAIN, EXECUTABLE]),
) | st.just(Blob(data=b"nowhere", mode=LINK))  # fmt: skip
# Links in a circle are left out: git itself does not get past them when it takes a patch back.


def possible(tree: Tree) -> bool:
    return not any(other.startswith(path + "/") for path in tree for other in tree)


TREES = st.dictionaries(st.sampled_from(NAMES), BLOBS, max_size=6).filter(possible)


def lay(root: Path, tree: Tree) -> None:
    for path, blob in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if blob.mode == LINK:
            os.symlink(os.fsdecode(blob.data), target)
        else:
            target.write_bytes(blob.data)
            target.chmod(0o755 if blob.mode == EXECUTABLE else 0o644)


def held(root: Path) -> Tree:
    found: Tree = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = Blob(data=os.fsencode(os.readlink(path)), mode=LINK)
        elif path.is_file():
            found[name] = Blob(data=path.read_bytes(), mode=EXECUTABLE if os.access(path, os.X_OK) else PLAIN)
    return found


def apply(root: Path, text: bytes, *more: str) -> None:
    command = ["git", "apply", *more, "-"]
    done = subprocess.run(
        command, cwd=root, input=text, capture_output=True, env={"PATH": os.environ["PATH"]}, check=False
    )
    assert done.returncode == 0, (done.stderr.decode(), text.decode("utf-8", "replace"))


@settings(max_examples=40, deadline=None)
@given(TREES, TREES)
def test_git_makes_of_it_what_was_changed_and_takes_it_back(
    tmp_path_factory: pytest.TempPathFactory, before: Tree, after: Tree
) -> None:
    root = tmp_path_factory.mktemp("tree")
    lay(root, before)
    changes = {
        path: after.get(path) for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)
    }
    text = patch(before, changes)
    assert bool(text) == bool(changes)
    if text:
        apply(root, text)
        assert held(root) == after
        apply(root, text, "-R")
    assert held(root) == before


def test_for_eyes_binary_files_are_told_by_size() -> None:
    old, new = Blob(data=b"\0" * 9), Blob(data=b"\0" * 900)
    text = patch({"logo.png": old}, {"logo.png": new}, whole=False)
    assert b"Binary file: 9 bytes before, 900 after" in text and b"GIT binary" not in text


@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("abcdefgh")))
def test_equal_runs_are_equal_and_in_order(old: Sequence[str], new: Sequence[str]) -> None:
    first, second = ([f"{line}\n".encode() for line in lines] for lines in (old, new))
    for depth in (0, 1, 16):
        i = j = 0
        for a, b, size in patience(first, second, depth):
            assert a >= i and b >= j and size > 0 and first[a : a + size] == second[b : b + size]
            i, j = a + size, b + size
    made = [line for kind, _, _, j, end in Lines(first, second).get_opcodes() for line in second[j:end] if kind]
    assert made == second


class Counted(bytes):
    """A line that counts how often it is looked at."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return bytes.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.looks += 1
        return bytes.__hash__(self)


def hard(kind: str, count: int) -> tuple[list[bytes], list[bytes]]:
    lot = random.Random(0)
    old = [b"%d\n" % n for n in range(count)]
    if kind == "shuffled":
        return old, lot.sample(old, count)
    if kind == "reversed":
        return old, old[::-1]
    if kind == "few kinds":
        return [lot.choice(old[:3]) for _ in old], [lot.choice(old[:3]) for _ in old]
    if kind == "blank lines between":
        return [x for n in old for x in (n, b"\n")], [x for n in lot.sample(old, count) for x in (n, b"\n")]
    anchored = [b"%d\n" % lot.randrange(2) for _ in range(count)]  # runs that difflib is given, each at its limit
    other = [b"%d\n" % lot.randrange(2) for _ in range(count)]
    step = SMALL // 2 - 1
    for at in range(0, count, step):
        anchored[at] = other[at] = b"anchor %d\n" % at
    return anchored, other


@pytest.mark.parametrize("kind", ["shuffled", "reversed", "few kinds", "blank lines between", "anchored"])
def test_the_work_is_bounded_whatever_the_files_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    areas: list[int] = []
    longest = difflib.SequenceMatcher.find_longest_match

    def count(self: difflib.SequenceMatcher[bytes], alo: int, ahi: int, blo: int, bhi: int) -> difflib.Match:
        areas.append((ahi - alo) * (bhi - blo))
        return longest(self, alo, ahi, blo, bhi)

    monkeypatch.setattr(difflib.SequenceMatcher, "find_longest_match", count)
    old, new = ([Counted(line) for line in lines] for lines in hard(kind, 3000))
    Counted.looks = 0
    assert sum(size for _, _, size in patience(old, new)) < len(old)
    lines = len(old) + len(new)
    assert Counted.looks < 100 * lines and sum(areas) < SMALL * SMALL * lines
    assert bool(areas) == (kind in ("anchored", "shuffled", "blank lines between"))


def test_a_change_far_from_another_leaves_what_is_between() -> None:
    old = [b"line %d\n" % n for n in range(9000)]
    new = [*old[:10], b"new\n", *old[10:8000], *old[8005:]]
    assert [block for block in Lines(old, new).get_opcodes() if block[0] != "equal"] == [
        ("insert", 10, 10, 10, 11),
        ("delete", 8000, 8005, 8001, 8001),
    ]


def test_what_the_sandboxes_own_git_makes(backend: Backend) -> None:
    """The kept patch applied by a git in a sandbox, where a repository under test would be."""
    with backend.create() as box:
        box.write("a.txt", b"one\n")
        box.write(
            "p.diff", patch({"a.txt": Blob(data=b"one\n")}, {"a.txt": Blob(data=b"two\n"), "b.bin": Blob(data=b"\0b")})
        )
        done = box.exec(["git", "apply", "p.diff"])
        assert done.exit_code == 0, done.stderr
        assert box.read("a.txt") == b"two\n" and box.read("b.bin") == b"\0b"
